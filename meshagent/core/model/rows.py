"""What is kept on disk, row by row: what a commit may hold, and what a store answers with.

Values only. What each row does to the mailbox is said once, in `core/delivery/mailbox.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, repeat
from typing import NamedTuple

__all__ = [
    "Arrived",
    "Delivered",
    "InBatch",
    "InEntry",
    "InRow",
    "InState",
    "LogEntry",
    "MailStart",
    "NewEpoch",
    "OutBatch",
    "OutEntry",
    "OutRow",
    "OutState",
    "PeerRow",
    "ReceiptRow",
    "Row",
    "StreamStart",
    "TurnedAway",
    "Watermark",
    "singly",
]


@dataclass(frozen=True, slots=True)
class PeerRow:
    """What is remembered of a peer across restarts: its pinned key and where it last answered."""

    agent: str
    key: bytes
    addresses: tuple[str, ...]


class OutRow(NamedTuple):
    """A message that was accepted for a peer: it is pending until an OutState settles it."""

    peer: str
    epoch: bytes
    seq: int
    id: str
    body: bytes
    expires_ms: int
    blobs: tuple[bytes, ...] = ()
    """The SHA-256 of each of its attachments."""

    @property
    def attached(self) -> bool:
        """Whether its recipient says that it was delivered when it has its attachments too."""
        return bool(self.blobs)


class OutBatch(NamedTuple):
    """Messages that were accepted for a peer together, numbered from `first` on, as columns: a row
    for each takes five times as long to write. A message alone is a batch of one.

    `expires` and `blobs` are empty when none of them expires or has attachments.
    """

    peer: str
    epoch: bytes
    first: int
    ids: Sequence[str]
    bodies: Sequence[bytes]
    expires: Sequence[int] = ()
    blobs: Sequence[tuple[bytes, ...]] = ()

    def rows(self) -> list[OutRow]:
        """One for each."""
        return list(map(_out_row, zip(
            repeat(self.peer), repeat(self.epoch), count(self.first), self.ids, self.bodies,
            self.expires or repeat(0), self.blobs or repeat(()), strict=False,
        )))  # fmt: skip


class OutState(NamedTuple):
    """How far a message to `peer` has come; `reason` says why when it was refused.

    `taken`: the recipient has it and fetches its attachments, so its number is settled, while how
    it ends is still to be said.
    """

    peer: str
    seq: int
    id: str
    state: str
    reason: str
    at_ms: int
    taken: bool = False


class Delivered(NamedTuple):
    """All messages to `peer` from number `first` to `last` that are not settled have arrived."""

    peer: str
    first: int
    last: int
    at_ms: int


class ReceiptRow(NamedTuple):
    """What a recipient says later about a message of ours.

    `seen` or `done`; of one that it had to complete first, `delivered`, `refused` or `expired`.
    """

    peer: str
    id: str
    state: str
    at_ms: int
    reason: str = ""


class InRow(NamedTuple):
    """A message that came; kept once, whatever number and epoch it comes under again."""

    sender: str
    epoch: bytes
    seq: int
    id: str
    body: bytes
    received_ms: int
    blobs: tuple[bytes, ...] = ()
    """The SHA-256 of each of its attachments; with any, it is held until it has `Arrived`."""


class InBatch(NamedTuple):
    """Messages that came together, numbered from `first` on, as columns."""

    sender: str
    epoch: bytes
    first: int
    ids: Sequence[str]
    bodies: Sequence[bytes]
    received_ms: int
    blobs: Sequence[tuple[bytes, ...]] = ()

    def rows(self) -> list[InRow]:
        """One for each."""
        return list(map(_in_row, zip(
            repeat(self.sender), repeat(self.epoch), count(self.first), self.ids, self.bodies,
            repeat(self.received_ms), self.blobs or repeat(()), strict=False,
        )))  # fmt: skip


_out_row, _in_row = partial(tuple.__new__, OutRow), partial(tuple.__new__, InRow)  # twice as quick


class Arrived(NamedTuple):
    """The attachments of a held message are here: from now on it is visible, behind all others."""

    sender: str
    id: str


class TurnedAway(NamedTuple):
    """A held message can't be completed: it is dropped, and its sender is told."""

    sender: str
    id: str


class InState(NamedTuple):
    """What became of a message in the inbox: `unread`, `seen`, `done` or `parked`.

    `failures` counts how often a handler failed on it.
    """

    sender: str
    id: str
    state: str
    failures: int
    at_ms: int


class Watermark(NamedTuple):
    """All up to `seq` of this sender's epoch have come, the last with hash `last`.

    `exceptions` are those of them that were refused (with the reason) or withdrawn (without), as
    long as the sender may still ask; of the others the last, to say that they were forgotten.
    """

    sender: str
    epoch: bytes
    seq: int
    last: bytes
    exceptions: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class NewEpoch:
    """Number all that is pending anew, from 1 for each peer, under this epoch."""

    epoch: bytes


Row = (
    PeerRow
    | OutRow
    | OutBatch
    | OutState
    | Delivered
    | ReceiptRow
    | InRow
    | InBatch
    | Arrived
    | TurnedAway
    | InState
    | Watermark
    | NewEpoch
)
"""What a turn may have made durable."""


def singly(rows: Iterable[Row]) -> Iterator[Row]:
    """The same, with a row for each message."""
    for row in rows:
        if type(row) is OutBatch or type(row) is InBatch:
            yield from row.rows()
        else:
            yield row


@dataclass(frozen=True, slots=True)
class StreamStart:
    """Where the stream to a peer stands after a restart: numbers `floor` to `next_seq` - 1 wait."""

    peer: str
    floor: int
    next_seq: int


@dataclass(frozen=True, slots=True)
class MailStart:
    """All that delivery needs to begin again where it was. Watermarks of one sender by age.

    `taken` are those whose recipients fetch their attachments: peer and id.
    """

    epoch: bytes
    streams: tuple[StreamStart, ...]
    watermarks: tuple[Watermark, ...]
    unread: int
    taken: tuple[tuple[str, str], ...] = ()
    withdrawn: int = 0
    """How many messages of ours only wait to tell that they were taken back or expired."""


class OutEntry(NamedTuple):
    """A message of ours as it is kept. `settled`: the recipient needs no word on it any more."""

    peer: str
    seq: int
    id: str
    body: bytes
    state: str
    reason: str
    expires_ms: int
    accepted_ms: int
    changed_ms: int
    settled: bool
    attached: bool = False


class InEntry(NamedTuple):
    """A message in the inbox. `position` grows with each one that becomes visible."""

    position: int
    sender: str
    id: str
    body: bytes
    received_ms: int
    state: str
    failures: int
    changed_ms: int


class LogEntry(NamedTuple):
    """One message in the audit trail; `direction` is `in` or `out`."""

    direction: str
    peer: str
    id: str
    body: bytes
    at_ms: int
    state: str
    reason: str
