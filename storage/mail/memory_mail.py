"""Outbox, inbox, streams and watermarks in memory: the rules of mail.py, said in plain Python.

Decides nothing that the real store does not. Invariant: `write` takes all rows or none.
"""

from __future__ import annotations

import copy
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

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
from meshagent.storage.mail.retention import RETAIN_ROWS_MAX
from meshagent.storage.mail.row_checksums import OUT_RANKS, accepted, opening
from meshagent.storage.mail.search import SEARCH_WORDS_MAX, log_entry
from meshagent.storage.mail.table_reader import FOUND_MAX
from meshagent.storage.mail.tables import WATERMARKS_PER_SENDER_MAX, misnumbered

__all__ = ["MemoryMail"]

Found = TypeVar("Found", OutEntry, InEntry)

_WAITING = frozenset({"queued", "sent"})
_WITHDRAWN = frozenset({"expired", "cancelled"})
_ENDS = frozenset({"delivered", "refused", "seen", "done"})
_NOT_HAD = frozenset({"expired", "cancelled", "refused"})
_DEALT_WITH = frozenset({"done", "parked"})
_OPEN = frozenset({"unread", "seen"})


@dataclass(slots=True)
class MemoryMail:
    """The messages of one agent, both ways."""

    epoch: bytes
    out: dict[str, OutEntry] = field(default_factory=dict)
    came: dict[tuple[str, str], InEntry] = field(default_factory=dict)
    next_seq: dict[str, int] = field(default_factory=dict)
    marks: dict[tuple[str, bytes], Watermark] = field(default_factory=dict)
    named: dict[tuple[str, str, str], tuple[bytes, ...]] = field(default_factory=dict)
    positions: int = 0

    # -- writing ------------------------------------------------------------------------------

    def write(self, rows: Sequence[Row]) -> None:
        """All rows, or none when one of them can't be."""
        before = {name: copy.copy(getattr(self, name)) for name in self.__slots__}
        try:
            for row in singly(rows):
                self._write_one(row)
        except StorageError:
            for name, value in before.items():
                setattr(self, name, value)
            raise

    def _write_one(self, row: Row) -> None:
        match row:
            case OutRow():
                self._accept(row)
            case OutState():
                self._advance(row)
            case Delivered(peer, first, last, at_ms):
                for each in self.pending(peer, first, last + 1 - first):
                    if each.seq <= last:
                        self._advance(OutState(peer, each.seq, each.id, "delivered", "", at_ms))
            case ReceiptRow(peer, ident, state, at_ms, reason):
                known = self.out.get(ident)
                if known is not None and known.peer == peer and _further(known, state):
                    self.out[ident] = known._replace(state=state, reason=reason, changed_ms=at_ms)
            case InRow() if (row.sender, row.id) not in self.came:
                self._put_in(row, "receiving" if row.blobs else "unread")
                self.named["in", row.sender, row.id] = row.blobs
            case Arrived(sender, ident) | TurnedAway(sender, ident):
                held = self.came.get((sender, ident))
                if held is not None and held.state == "receiving":
                    del self.came[sender, ident]
                    if isinstance(row, Arrived):
                        self._put_in(held, "unread")
            case InState(sender, ident, state, failures, at_ms):
                entry = self.came.get((sender, ident))
                if entry is not None and entry.state not in ("done", "receiving"):
                    self.came[sender, ident] = entry._replace(
                        state=state, failures=failures, changed_ms=at_ms
                    )
            case Watermark():
                self._mark(row)
            case NewEpoch(epoch):
                self._renumber(epoch)

    def _put_in(self, row: InRow | InEntry, state: str) -> None:
        self.positions += 1
        self.came[row.sender, row.id] = InEntry(
            self.positions, row.sender, row.id, row.body, row.received_ms, state, 0,
            row.received_ms,
        )  # fmt: skip

    def _accept(self, row: OutRow) -> None:
        expected = self.next_seq.get(row.peer, 1)
        if row.seq != expected:
            raise misnumbered(row.peer, row.id, row.seq, expected)
        if row.id in self.out:
            raise StorageError(f"The message {row.id} is in the outbox already.")
        self.next_seq[row.peer] = expected + 1
        self.named["out", row.peer, row.id] = row.blobs
        self.out[row.id] = accepted(row)

    def _advance(self, row: OutState) -> None:
        known = self.out.get(row.id)
        if known is None or known.peer != row.peer:
            return
        if _further(known, row.state):
            self.out[row.id] = known._replace(
                state=row.state, reason=row.reason, changed_ms=row.at_ms,
                settled=row.taken or row.state in _ENDS,
            )  # fmt: skip
        elif row.taken or row.state in _ENDS or row.state in _WITHDRAWN:
            self.out[row.id] = known._replace(settled=True)

    def _mark(self, row: Watermark) -> None:
        self.marks.pop((row.sender, row.epoch), None)
        self.marks[row.sender, row.epoch] = row
        of_sender = [key for key in self.marks if key[0] == row.sender]
        for key in of_sender[:-WATERMARKS_PER_SENDER_MAX]:
            del self.marks[key]

    def _renumber(self, epoch: bytes) -> None:
        self.epoch = epoch
        self.next_seq = dict.fromkeys(self.next_seq, 1)
        for entry in sorted(self._unsettled(), key=lambda entry: entry.seq):
            self.out[entry.id] = entry._replace(seq=self.next_seq[entry.peer])
            self.next_seq[entry.peer] += 1

    def retain(self, now_ms: int, keep_ms: int, keep_bytes: int) -> int:
        """Drop what is too old, then the oldest of what is too much; how many."""
        sent = [e for e in self.out.values() if e.settled and e.state not in _WAITING]
        came = [entry for entry in self.came.values() if entry.state in _DEALT_WITH]
        ended: list[OutEntry | InEntry] = [*sent, *came]
        ended.sort(key=lambda entry: (entry.changed_ms, len(entry.body)))
        excess = sum(len(entry.body) for entry in ended) - keep_bytes
        dropped = 0
        for entry in ended[:RETAIN_ROWS_MAX]:
            if entry.changed_ms >= now_ms - keep_ms and excess <= 0:
                break
            excess -= len(entry.body)
            dropped += 1
            if isinstance(entry, OutEntry):
                del self.out[entry.id]
            else:
                del self.came[entry.sender, entry.id]
        return dropped

    # -- asking -------------------------------------------------------------------------------

    def start(self) -> MailStart:
        """Where delivery stands."""
        floors = dict(self.next_seq)
        for entry in self._unsettled():
            floors[entry.peer] = min(floors[entry.peer], entry.seq)
        streams = [StreamStart(peer, floors[peer], top) for peer, top in self.next_seq.items()]
        unread = sum(entry.state in _OPEN for entry in self.came.values())
        taken = tuple(
            (e.peer, e.id) for e in self.out.values() if e.settled and e.state in _WAITING
        )
        return MailStart(self.epoch, tuple(streams), tuple(self.marks.values()), unread, taken)

    def pending(self, peer: str, first: int, limit: int) -> list[OutEntry]:
        """Not settled, from a number on."""
        found = [each for each in self._unsettled() if each.peer == peer and each.seq >= first]
        return sorted(found, key=lambda entry: entry.seq)[:limit]

    def due(self, now_ms: int, limit: int) -> list[OutEntry]:
        """Their time is up, and no answer has come."""
        found = [each for each in self._expiring() if each.expires_ms <= now_ms]
        return sorted(found, key=lambda entry: entry.expires_ms)[:limit]

    def next_expiry(self) -> int | None:
        """The earliest time at which `due` has something."""
        return min((each.expires_ms for each in self._expiring()), default=None)

    def outbox(self, limit: int, ended: bool) -> list[OutEntry]:
        """By age."""
        found = [each for each in self.out.values() if ended or each.state in _WAITING]
        return found[:limit]

    def withdrawn(self) -> int:
        """Those that ended here, and whose numbers are not settled."""
        return sum(entry.state in _WITHDRAWN for entry in self._unsettled())

    def outgoing(self, prefix: str) -> list[OutEntry]:
        """Those whose id begins so."""
        return _beginning(self.out.values(), prefix)

    def inbox(self, after: int, limit: int, unread: bool) -> list[InEntry]:
        """Beyond a position."""
        found = [each for each in self._visible() if each.position > after]
        return [each for each in found if not unread or each.state in _OPEN][:limit]

    def recent(self, limit: int, upto: int | None, unseen: bool) -> list[InEntry]:
        """The newest up to a position, oldest of them first."""
        found = [each for each in self._visible() if upto is None or each.position <= upto]
        found = [each for each in found if not unseen or each.state == "unread"]
        return found[-limit:] if limit > 0 else []

    def newest(self) -> int:
        """The largest position in the inbox."""
        return max((each.position for each in self.came.values()), default=0)

    def receiving(self) -> list[InEntry]:
        """Those that are held, oldest first."""
        return [each for each in self.came.values() if each.state == "receiving"]

    def names_blob(self, sha256: bytes, peer: str, direction: str) -> bool:
        """Whether a message to or from this peer names the blob, and was not taken back."""
        return any(
            sha256 in blobs and key[:2] == (direction, peer)
            for key, blobs in self._named()
            if key[0] == "in" or self.out[key[2]].state not in _NOT_HAD
        )

    def blobs(self) -> set[bytes]:
        """Every blob that a message names."""
        return {sha256 for _, blobs in self._named() for sha256 in blobs}

    def _named(self) -> Iterator[tuple[tuple[str, str, str], tuple[bytes, ...]]]:
        for key, blobs in self.named.items():
            direction, peer, ident = key
            if ident in self.out if direction == "out" else (peer, ident) in self.came:
                yield key, blobs

    def _visible(self) -> list[InEntry]:
        return [each for each in self.came.values() if each.state != "receiving"]

    def incoming(self, prefix: str) -> list[InEntry]:
        """Those whose id begins so."""
        return _beginning(self.came.values(), prefix)

    def log(self, limit: int, search: str, peer: str, kind: str, without: str) -> list[LogEntry]:
        """The newest that match, oldest of them first."""
        found: list[LogEntry] = []
        for entries in (self.out.values(), self.came.values()):
            for entry in map(log_entry, entries):
                opened_kind, text, *_ = opening(entry.body)
                wanted = (not peer or entry.peer == peer) and (not kind or opened_kind == kind)
                wanted = wanted and (not without or opened_kind != without)
                if wanted and (not search.strip() or _matches(text, search)):
                    found.append(entry)
        found.sort(key=lambda entry: entry.at_ms)
        return found[-limit:] if limit > 0 else []

    def _unsettled(self) -> Iterator[OutEntry]:
        return (entry for entry in self.out.values() if not entry.settled)

    def _expiring(self) -> Iterator[OutEntry]:
        return (e for e in self._unsettled() if e.expires_ms > 0 and e.state in _WAITING)


def _further(known: OutEntry, state: str) -> bool:
    return OUT_RANKS[known.state] < OUT_RANKS[state]


def _beginning(entries: Iterable[Found], prefix: str) -> list[Found]:
    return sorted((e for e in entries if e.id.startswith(prefix)), key=lambda e: e.id)[:FOUND_MAX]


def _tokens(text: str) -> list[str]:
    """As FTS5's unicode61: runs of letters and digits, without case and diacritics."""
    plain = unicodedata.normalize("NFKD", text)
    bare = "".join(each for each in plain if not unicodedata.combining(each))
    return re.findall(r"[^\W_]+", bare.lower())


def _matches(text: str, search: str) -> bool:
    """All words are there, each as a phrase of its tokens; the last may be unfinished."""
    words = [_tokens(word) for word in search.split()[:SEARCH_WORDS_MAX]]
    phrases = [word for word in words if word]
    if not phrases:
        return False
    tokens = _tokens(text)
    return all(_has(tokens, phrase, phrase is phrases[-1]) for phrase in phrases)


def _has(tokens: Sequence[str], phrase: Sequence[str], unfinished: bool) -> bool:
    *first, last = phrase
    for at in range(len(tokens) - len(phrase) + 1):
        end = tokens[at + len(first)]
        whole = end.startswith(last) if unfinished else end == last
        if whole and list(tokens[at : at + len(first)]) == first:
            return True
    return False
