"""The disk of a simulated agent: what is committed survives, and nothing else.

Decides nothing about rows: `core/delivery/mailbox.py` says what each of them means. Can be copied,
put back to an earlier day, replaced by an empty one, slow, full or failing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from meshagent.core.delivery.mailbox import MailboxModel
from meshagent.core.model.rows import InRow, NewEpoch, OutRow, PeerRow, Row, singly

__all__ = ["Disk", "DiskFaults"]


@dataclass(slots=True)
class DiskFaults:
    """How well a disk does. Shares are per commit, times in seconds."""

    commit_s: tuple[float, float] = (0.0005, 0.02)
    read_s: tuple[float, float] = (0.0001, 0.01)
    at_once: float = 0.3
    """A commit is done before whoever began it goes on."""
    crash: float = 0.0
    """The power goes: before the commit, after it, or between two of the effects behind it."""
    failing: float = 0.0
    """A commit is reported as failed; half of these have kept their rows all the same."""
    is_full: bool = False
    """No commit is taken."""


@dataclass(slots=True)
class Disk:
    """What outlives a crash of one agent, and three things that only a check wants to know."""

    mail: MailboxModel
    peers: dict[str, PeerRow] = field(default_factory=dict)
    came_under: dict[tuple[str, str], bytes] = field(default_factory=dict)
    """The epoch of its sender in which each message came."""
    renumbered: set[str] = field(default_factory=set)
    """The messages of ours that got a new number once."""
    bodies: set[bytes] = field(default_factory=set)
    """All messages of ours."""
    repeats: int = 0
    """How often a message came that was here."""

    def commit(self, rows: Sequence[Row]) -> None:
        """All of them, durably."""
        self.mail.write(self._noted(row) for row in singly(rows) if not self._is_peer(row))

    def _is_peer(self, row: Row) -> bool:
        if isinstance(row, PeerRow):
            self.peers[row.agent] = row
        return isinstance(row, PeerRow)

    def _noted(self, row: Row) -> Row:
        if isinstance(row, InRow):
            if (row.sender, row.id) in self.mail.came:
                self.repeats += 1
            else:
                self.came_under[row.sender, row.id] = row.epoch
        elif isinstance(row, OutRow):
            self.bodies.add(row.body)
        elif isinstance(row, NewEpoch):
            self.renumbered |= {entry.id for entry in self.mail.unsettled()}
        return row

    def copy(self) -> Disk:
        """A backup."""
        return Disk(
            self.mail.copy(), dict(self.peers), dict(self.came_under), set(self.renumbered),
            set(self.bodies), self.repeats,
        )  # fmt: skip
