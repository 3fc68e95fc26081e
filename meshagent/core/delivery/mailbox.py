"""What each row does to a mailbox, and what can be asked of one: the reference, in plain Python.

A store keeps the same on a disk, and a test compares the two. Never touches a file or a clock, and
never decides what is sent. Invariants: `write` takes all rows or none; the numbers of a stream have
no gap, and none is given twice in one epoch; a state is replaced only by one of a larger rank; a
message that came is kept once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TypeVar

from meshagent.core.delivery.word_search import matches
from meshagent.core.model.body_summary import summarize
from meshagent.core.model.message_states import (
    PROGRESS,
    UNREAD_STATES,
    WAITING,
    WITHDRAWN,
    InboxState,
    MessageState,
)
from meshagent.core.model.rows import (
    Arrived,
    Delivered,
    InEntry,
    InRow,
    InState,
    LogEntry,
    MailStart,
    NewEpoch,
    OutEntry,
    OutRow,
    OutState,
    ReceiptRow,
    Row,
    StreamStart,
    TurnedAway,
    Watermark,
    singly,
)
from meshagent.errors import StorageError

__all__ = [
    "FOUND_MAX",
    "RETAIN_ROWS_MAX",
    "WATERMARKS_PER_SENDER_MAX",
    "MailboxModel",
    "log_entry",
    "misnumbered",
    "queued_entry",
]

FOUND_MAX = 8  # messages that an ambiguous prefix lists
RETAIN_ROWS_MAX = 2_000  # dropped per call: some tens of ms on a disk
WATERMARKS_PER_SENDER_MAX = 64  # as many databases of a sender as delivery remembers

Found = TypeVar("Found", OutEntry, InEntry)
InKey = tuple[str, str]
"""Sender and id: an id is the sender's own."""

_FINISHED = frozenset({InboxState.DONE, InboxState.PARKED})
_FINAL = frozenset({InboxState.DONE, InboxState.RECEIVING})
_NEVER_HAD = WITHDRAWN | {MessageState.REFUSED}


def queued_entry(row: OutRow) -> OutEntry:
    """A message as it is kept before anything has become of it."""
    at_ms = summarize(row.body).created_ms
    return OutEntry(
        row.peer, row.seq, row.id, row.body, "queued", "", row.expires_ms, at_ms, at_ms,
        settled=False, attached=row.attached,
    )  # fmt: skip


def log_entry(entry: OutEntry | InEntry) -> LogEntry:
    """A message as the audit trail shows it."""
    if isinstance(entry, OutEntry):
        peer, at_ms = entry.peer, entry.accepted_ms
        return LogEntry("out", peer, entry.id, entry.body, at_ms, entry.state, entry.reason)
    return LogEntry("in", entry.sender, entry.id, entry.body, entry.received_ms, entry.state, "")


def misnumbered(peer: str, ident: str, number: int, expected: int) -> StorageError:
    """A commit before this one failed, or a number was given twice."""
    return StorageError(
        f"The message {ident} for {peer} has number {number} where {expected} comes next.",
        hint="Nothing of it was kept; send it again.",
        expected=expected,
    )


@dataclass(slots=True)
class MailboxModel:
    """The messages of one agent, both ways. Its values never change, so a copy is cheap."""

    epoch: bytes
    out: dict[str, OutEntry] = field(default_factory=dict)
    """By id, oldest first."""
    came: dict[InKey, InEntry] = field(default_factory=dict)
    """By position."""
    next_seq: dict[str, int] = field(default_factory=dict)
    marks: dict[tuple[str, bytes], Watermark] = field(default_factory=dict)
    """By sender and epoch; the one that moved last is the last."""
    out_blobs: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    in_blobs: dict[InKey, tuple[bytes, ...]] = field(default_factory=dict)
    last_position: int = 0

    def copy(self) -> MailboxModel:
        """A backup: what is written to one of the two does not reach the other."""
        return MailboxModel(
            self.epoch, dict(self.out), dict(self.came), dict(self.next_seq), dict(self.marks),
            dict(self.out_blobs), dict(self.in_blobs), self.last_position,
        )  # fmt: skip

    # -- writing ------------------------------------------------------------------------------

    def write(self, rows: Iterable[Row]) -> None:
        """All rows in their order, or none when one of them can't be kept."""
        before = self.copy()
        try:
            for row in singly(rows):
                self._write_one(row)
        except StorageError:
            for each in fields(self):
                setattr(self, each.name, getattr(before, each.name))
            raise

    def _write_one(self, row: Row) -> None:
        match row:
            case OutRow():
                self._accept(row)
            case OutState():
                self._answer(row)
            case Delivered(peer, first, last, at_ms):
                for each in self.pending(peer, first, last + 1 - first):
                    if each.seq <= last:
                        self._answer(OutState(peer, each.seq, each.id, "delivered", "", at_ms))
            case ReceiptRow(peer, ident, state, at_ms, reason):
                known = self.out.get(ident)
                if known is not None and known.peer == peer and _is_news(known, state):
                    self.out[ident] = known._replace(state=state, reason=reason, changed_ms=at_ms)
            case InRow():
                self._receive(row)
            case Arrived(sender, ident) | TurnedAway(sender, ident):
                held = self.came.get((sender, ident))
                if held is not None and held.state == InboxState.RECEIVING:
                    self._release(held, complete=isinstance(row, Arrived))
            case InState(sender, ident, state, failures, at_ms):
                entry = self.came.get((sender, ident))
                if entry is not None and entry.state not in _FINAL:
                    self.came[sender, ident] = entry._replace(
                        state=state, failures=failures, changed_ms=at_ms
                    )
            case Watermark():
                self._move_watermark(row)
            case NewEpoch(epoch):
                self._renumber(epoch)

    def _accept(self, row: OutRow) -> None:
        expected = self.next_seq.get(row.peer, 1)
        if row.seq != expected:
            raise misnumbered(row.peer, row.id, row.seq, expected)
        if row.id in self.out:
            raise StorageError(f"The message {row.id} is in the outbox already.")
        self.next_seq[row.peer] = expected + 1
        self.out[row.id] = queued_entry(row)
        if row.blobs:
            self.out_blobs[row.id] = row.blobs

    def _answer(self, row: OutState) -> None:
        """A number is settled once its recipient has spoken. Of one that was withdrawn, the first
        word takes the message back, and the second says that the recipient knows."""
        known = self.out.get(row.id)
        if known is None or known.peer != row.peer:
            return
        spoken = row.taken or PROGRESS[MessageState(row.state)] > PROGRESS[MessageState.EXPIRED]
        if _is_news(known, row.state):
            self.out[row.id] = known._replace(
                state=row.state, reason=row.reason, changed_ms=row.at_ms, settled=spoken
            )
        elif spoken or row.state in WITHDRAWN:
            self.out[row.id] = known._replace(settled=True)

    def _receive(self, row: InRow) -> None:
        """Kept once; out of sight while its attachments are missing."""
        if (row.sender, row.id) in self.came:
            return
        if row.blobs:
            self.in_blobs[row.sender, row.id] = row.blobs
        state = InboxState.RECEIVING if row.blobs else InboxState.UNREAD
        self._show(row, state)

    def _release(self, held: InEntry, complete: bool) -> None:
        del self.came[held.sender, held.id]
        if complete:
            self._show(held, InboxState.UNREAD)
        else:
            del self.in_blobs[held.sender, held.id]

    def _show(self, row: InRow | InEntry, state: InboxState) -> None:
        self.last_position += 1
        self.came[row.sender, row.id] = InEntry(
            self.last_position, row.sender, row.id, row.body, row.received_ms, state.value, 0,
            row.received_ms,
        )  # fmt: skip

    def _move_watermark(self, row: Watermark) -> None:
        self.marks.pop((row.sender, row.epoch), None)
        self.marks[row.sender, row.epoch] = row
        of_sender = [key for key in self.marks if key[0] == row.sender]
        for key in of_sender[:-WATERMARKS_PER_SENDER_MAX]:
            del self.marks[key]

    def _renumber(self, epoch: bytes) -> None:
        self.epoch = epoch
        self.next_seq = dict.fromkeys(self.next_seq, 1)
        for entry in sorted(self.unsettled(), key=lambda entry: entry.seq):
            self.out[entry.id] = entry._replace(seq=self.next_seq[entry.peer])
            self.next_seq[entry.peer] += 1

    def retain(self, now_ms: int, keep_ms: int, keep_bytes: int) -> int:
        """Drop what is too old, then the oldest of what is too much; how many."""
        came = [entry for entry in self.came.values() if entry.state in _FINISHED]
        sent = [e for e in self.out.values() if e.settled and e.state not in WAITING]
        ended: list[OutEntry | InEntry] = [*came, *sent]
        ended.sort(key=lambda entry: (entry.changed_ms, len(entry.body)))
        excess = sum(len(entry.body) for entry in ended) - keep_bytes
        dropped = 0
        for entry in ended[:RETAIN_ROWS_MAX]:
            if entry.changed_ms >= now_ms - keep_ms and excess <= 0:
                break
            excess -= len(entry.body)
            dropped += 1
            self._drop(entry)
        return dropped

    def _drop(self, entry: OutEntry | InEntry) -> None:
        if isinstance(entry, OutEntry):
            del self.out[entry.id]
            self.out_blobs.pop(entry.id, None)
        else:
            del self.came[entry.sender, entry.id]
            self.in_blobs.pop((entry.sender, entry.id), None)

    # -- asking about what goes out -----------------------------------------------------------

    def start(self) -> MailStart:
        """Where delivery stands."""
        floors = dict(self.next_seq)
        for entry in self.unsettled():
            floors[entry.peer] = min(floors[entry.peer], entry.seq)
        streams = [StreamStart(peer, floors[peer], top) for peer, top in self.next_seq.items()]
        taken = [(e.peer, e.id) for e in self.out.values() if e.settled and e.state in WAITING]
        marks = tuple(self.marks.values())
        return MailStart(self.epoch, tuple(streams), marks, self.unread(), tuple(taken))

    def states(self) -> dict[str, MessageState]:
        """How far each message of ours has come, by id."""
        return {ident: MessageState(entry.state) for ident, entry in self.out.items()}

    def unsettled(self) -> Iterator[OutEntry]:
        """Those whose recipient still has to speak, oldest first."""
        return (entry for entry in self.out.values() if not entry.settled)

    def pending(self, peer: str, first: int, limit: int) -> list[OutEntry]:
        """Not settled, from a number on, in order."""
        found = [each for each in self.unsettled() if each.peer == peer and each.seq >= first]
        return sorted(found, key=lambda entry: entry.seq)[:limit]

    def due(self, now_ms: int, limit: int) -> list[OutEntry]:
        """Their time is up, and no answer has come."""
        found = [each for each in self._expiring() if each.expires_ms <= now_ms]
        return sorted(found, key=lambda entry: entry.expires_ms)[:limit]

    def next_expiry(self) -> int | None:
        """The earliest time at which `due` has something."""
        return min((each.expires_ms for each in self._expiring()), default=None)

    def _expiring(self) -> Iterator[OutEntry]:
        return (e for e in self.unsettled() if e.expires_ms > 0 and e.state in WAITING)

    def outbox(self, limit: int, ended: bool) -> list[OutEntry]:
        """Queued or sent, or with `ended` all, oldest first."""
        found = [each for each in self.out.values() if ended or each.state in WAITING]
        return found[:limit]

    def withdrawn(self) -> int:
        """How many ended here while their recipient still has to be told."""
        return sum(entry.state in WITHDRAWN for entry in self.unsettled())

    def outgoing(self, prefix: str) -> list[OutEntry]:
        """Those whose id begins so; at most a few."""
        return _first_few([e for e in self.out.values() if e.id.startswith(prefix)])

    # -- asking about what came ---------------------------------------------------------------

    def unread(self) -> int:
        """How many are visible that nobody has dealt with."""
        return sum(entry.state in UNREAD_STATES for entry in self.came.values())

    def inbox(self, after: int, limit: int, unread: bool) -> list[InEntry]:
        """Beyond a position."""
        found = [each for each in self._visible() if each.position > after]
        return [each for each in found if not unread or each.state in UNREAD_STATES][:limit]

    def recent(self, limit: int, upto: int | None, unseen: bool) -> list[InEntry]:
        """The newest up to a position, oldest of them first."""
        found = [each for each in self._visible() if upto is None or each.position <= upto]
        return _last([e for e in found if not unseen or e.state == InboxState.UNREAD], limit)

    def newest(self) -> int:
        """The largest position in the inbox; 0 when it is empty."""
        return max((each.position for each in self.came.values()), default=0)

    def receiving(self) -> list[InEntry]:
        """Those that are held until their attachments are here, oldest first."""
        return [each for each in self.came.values() if each.state == InboxState.RECEIVING]

    def incoming(self, prefix: str) -> list[InEntry]:
        """Those whose id begins so; at most a few."""
        by_sender = sorted(self.came.values(), key=lambda entry: entry.sender)
        return _first_few([e for e in by_sender if e.id.startswith(prefix)])

    def _visible(self) -> list[InEntry]:
        return [each for each in self.came.values() if each.state != InboxState.RECEIVING]

    # -- asking about both --------------------------------------------------------------------

    def log(self, limit: int, search: str, peer: str, kind: str, without: str) -> list[LogEntry]:
        """The newest each way that match, merged by time; the newest of those, oldest first."""

        def is_wanted(entry: LogEntry) -> bool:
            shown = summarize(entry.body)
            return (
                peer in ("", entry.peer)
                and kind in ("", shown.kind)
                and (not without or shown.kind != without)
                and (not search.strip() or matches(shown.text, search))
            )

        found: list[LogEntry] = []
        for entries in (self.out.values(), self.came.values()):
            found += _last(list(filter(is_wanted, map(log_entry, entries))), limit)
        return _last(sorted(found, key=lambda entry: entry.at_ms), limit)

    def names_blob(self, sha256: bytes, peer: str, direction: str) -> bool:
        """Whether a message to or from this peer names the blob; none that was taken back."""
        if direction == "in":
            return any(key[0] == peer and sha256 in had for key, had in self.in_blobs.items())
        named = [self.out[ident] for ident, had in self.out_blobs.items() if sha256 in had]
        return any(each.peer == peer and each.state not in _NEVER_HAD for each in named)

    def blobs(self) -> set[bytes]:
        """Every blob that a message names."""
        return {
            sha256
            for named in (self.out_blobs, self.in_blobs)
            for had in named.values()
            for sha256 in had
        }


def _is_news(known: OutEntry, state: str) -> bool:
    return PROGRESS[MessageState(known.state)] < PROGRESS[MessageState(state)]


def _first_few(entries: Sequence[Found]) -> list[Found]:
    return sorted(entries, key=lambda entry: entry.id)[:FOUND_MAX]


Each = TypeVar("Each")


def _last(entries: Sequence[Each], limit: int) -> list[Each]:
    return list(entries[-limit:]) if limit > 0 else []
