"""A simulated disk: what is committed survives a crash, nothing else does.

Keeps what storage/ keeps, as plain tables. Can be put back to an earlier day, or lose everything.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshagent.core.delivery.send_stream import WITHDRAWN
from meshagent.core.model.messages import PROGRESS, MessageState
from meshagent.core.model.rows import (
    Delivered,
    InRow,
    NewEpoch,
    OutEntry,
    OutRow,
    OutState,
    ReceiptRow,
    Row,
    StreamStart,
    Watermark,
    singly,
)

__all__ = ["Disk"]

_PENDING = {MessageState.QUEUED, MessageState.SENT}


@dataclass(slots=True)
class _Out:
    row: OutRow
    seq: int
    settled: bool = False
    state: MessageState = MessageState.QUEUED

    def entry(self) -> OutEntry:
        """As a store returns it."""
        row = self.row
        return OutEntry(
            row.peer, self.seq, row.id, row.body, self.state, "", row.expires_ms, 0, 0,
            self.settled,
        )  # fmt: skip


@dataclass(slots=True)
class Disk:
    """Outbox, inbox and watermarks of one agent."""

    epoch: bytes
    outbox: dict[str, list[_Out]] = field(default_factory=dict)
    inbox: list[InRow] = field(default_factory=list)
    ids: set[tuple[str, str]] = field(default_factory=set)
    marks: dict[tuple[str, bytes], Watermark] = field(default_factory=dict)
    receipts: list[ReceiptRow] = field(default_factory=list)
    ended: dict[str, MessageState] = field(default_factory=dict)
    renumbered: set[str] = field(default_factory=set)
    dealt_with: int = 0

    @property
    def unread(self) -> int:
        """How many messages in the inbox nobody has dealt with."""
        return len(self.inbox) - self.dealt_with

    @property
    def withdrawn(self) -> int:
        """How many messages of ours only wait to tell that they were taken back."""
        rows = [each for rows in self.outbox.values() for each in rows]
        return sum(each.state in WITHDRAWN and not each.settled for each in rows)

    def commit(self, rows: Sequence[Row]) -> None:
        """All of them, durably."""
        for row in singly(rows):
            match row:
                case OutRow():
                    self.outbox.setdefault(row.peer, []).append(_Out(row, row.seq))
                case OutState():
                    self._note(row)
                case Delivered():
                    self._deliver(row)
                case InRow() if (row.sender, row.id) not in self.ids:
                    self.ids.add((row.sender, row.id))
                    self.inbox.append(row)
                case Watermark():
                    self.marks.pop((row.sender, row.epoch), None)
                    self.marks[row.sender, row.epoch] = row
                case ReceiptRow():
                    self.receipts.append(row)
                case NewEpoch(epoch):
                    self._renumber(epoch)

    def starts(self) -> list[StreamStart]:
        """Where each stream stands."""
        found = []
        for peer, rows in self.outbox.items():
            top = max((each.seq for each in rows), default=0)
            floor = min((each.seq for each in rows if not each.settled), default=top + 1)
            found.append(StreamStart(peer, floor, top + 1))
        return found

    def load(self, peer: str, first: int, limit: int) -> list[OutEntry]:
        """Messages that are not settled, from this number on."""
        known = self.outbox.get(peer, ())
        rows = [each for each in known if each.seq >= first and not each.settled]
        return [each.entry() for each in rows[:limit]]

    def due(self, now_ms: int) -> list[tuple[str, _Out]]:
        """Queued messages whose time is up, with their recipients."""
        return [
            (peer, each)
            for peer, rows in self.outbox.items()
            for each in rows
            if each.state in _PENDING and 0 < each.row.expires_ms <= now_ms
        ]

    def states(self) -> dict[str, MessageState]:
        """How far each message of ours has come."""
        here = {each.row.id: each.state for rows in self.outbox.values() for each in rows}
        return self.ended | here

    def copy(self) -> Disk:
        """A backup."""
        return copy.deepcopy(self)

    def _note(self, row: OutState) -> None:
        for each in self.outbox.get(row.peer, ()):
            if each.row.id == row.id:
                withdrawn = row.state in WITHDRAWN and each.state in _PENDING
                each.state = MessageState(row.state)
                # Withdrawn here is not settled yet: the recipient has to be told its number.
                each.settled = not withdrawn
                return

    def _deliver(self, row: Delivered) -> None:
        for each in self.outbox.get(row.peer, ()):
            if row.first <= each.seq <= row.last and not each.settled:
                each.settled = True
                if PROGRESS[each.state] < PROGRESS[MessageState.DELIVERED]:
                    each.state = MessageState.DELIVERED

    def _renumber(self, epoch: bytes) -> None:
        self.epoch = epoch
        for peer, rows in self.outbox.items():
            self.ended |= {each.row.id: each.state for each in rows if each.settled}
            rows = [each for each in rows if not each.settled]
            for number, each in enumerate(rows, 1):
                each.seq = number
                self.renumbered.add(each.row.id)
            self.outbox[peer] = rows
