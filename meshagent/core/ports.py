"""The three ports that adapters fill in. Each has one conformance suite in tests/.

An adapter never decides anything about the protocol: it moves bytes, finds addresses or keeps
rows. It may import this package's types and `meshagent.errors`, and nothing else of ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, repeat
from typing import NamedTuple, Protocol

from meshagent.core.types import Candidate, LinkId
from meshagent.errors import MeshError

__all__ = [
    "Announcement",
    "Arrived",
    "Delivered",
    "Discovery",
    "InEntry",
    "InRow",
    "InState",
    "InTexts",
    "LinkEvents",
    "LogEntry",
    "MailStart",
    "NewEpoch",
    "OutEntry",
    "OutRow",
    "OutState",
    "OutTexts",
    "PeerRow",
    "Receipt",
    "Row",
    "Store",
    "StreamStart",
    "Transport",
    "TurnedAway",
    "Watermark",
    "singly",
]


class LinkEvents(Protocol):
    """What a transport tells its owner. Called in the event loop's thread, never re-entrantly."""

    def link_opened(self, link: LinkId, curve_key: bytes | None) -> None:
        """A connection is encrypted and admitted by the mesh secret.

        For an inbound link `curve_key` is the dialler's authenticated CURVE key (32 bytes); for
        a link that we dialled it is None, since the door's key says nothing about who is behind.
        """

    def link_received(self, link: LinkId, parts: Sequence[bytes | memoryview]) -> None:
        """One frame: a header and its payload parts, as the other side sent them."""

    def link_closed(self, link: LinkId, reason: str) -> None:
        """The link is no more; `reason` is `refused`, `lost`, `handshake`, `closed` or `limit`."""


class Transport(Protocol):
    """Links: encrypted, ordered, two-way, closed only to those without the mesh secret."""

    refused: Counter[str]
    """How many were turned away at the door, by reason."""

    async def start(self, listen: str, port: int, events: LinkEvents) -> tuple[str, ...]:
        """Listen, and return the `host:port` addresses at which others may dial us."""

    def addresses(self) -> tuple[str, ...]:
        """Where others may dial us now: interfaces come and go."""

    def dial(self, address: str) -> LinkId:
        """Begin to connect; `link_opened` or `link_closed` follows, never neither."""

    def send(self, link: LinkId, parts: Sequence[bytes | memoryview]) -> bool:
        """Put one frame on the wire; False when the link is full or gone (nothing was sent)."""

    def close_link(self, link: LinkId) -> None:
        """Forget the link; no event follows for it."""

    async def close(self) -> None:
        """Close every link and socket; no event follows."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a node lets discovery say about it."""

    agent: str
    mesh_tag: str
    run: str
    addresses: tuple[str, ...]


class Discovery(Protocol):
    """A source of candidates. Candidates are hints: wrong, old and hostile ones are expected."""

    name: str
    ignored: Counter[str]
    """How many hints were not followed, by reason."""

    async def start(self, me: Announcement, found: Callable[[Candidate], None]) -> None:
        """Announce `me` and report candidates; returns at once, slow work goes on behind."""

    async def update(self, me: Announcement) -> None:
        """Our addresses changed."""

    def health(self) -> str:
        """One line for `status` and `doctor`: `ok`, or what is wrong."""

    async def close(self) -> None:
        """Withdraw the announcement and stop; no candidate is reported afterwards."""


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


class OutTexts(NamedTuple):
    """Messages that were accepted for a peer together, numbered from `first` on, as columns: a row
    for each takes five times as long to write. Nothing is attached to them, and none expires."""

    peer: str
    epoch: bytes
    first: int
    ids: Sequence[str]
    bodies: Sequence[bytes]

    def rows(self) -> list[OutRow]:
        """One for each."""
        return list(map(_out_row, zip(
            repeat(self.peer), repeat(self.epoch), count(self.first), self.ids, self.bodies,
            repeat(0), repeat(()), strict=False,
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


class Receipt(NamedTuple):
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


class InTexts(NamedTuple):
    """Messages that came together, numbered from `first` on, with nothing attached: as columns."""

    sender: str
    epoch: bytes
    first: int
    ids: Sequence[str]
    bodies: Sequence[bytes]
    received_ms: int

    def rows(self) -> list[InRow]:
        """One for each."""
        return list(map(_in_row, zip(
            repeat(self.sender), repeat(self.epoch), count(self.first), self.ids, self.bodies,
            repeat(self.received_ms), repeat(()), strict=False,
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
    | OutTexts
    | OutState
    | Delivered
    | Receipt
    | InRow
    | InTexts
    | Arrived
    | TurnedAway
    | InState
    | Watermark
    | NewEpoch
)
"""What a Persist effect may carry."""


def singly(rows: Iterable[Row]) -> Iterator[Row]:
    """The same, with a row for each message."""
    for row in rows:
        if type(row) is OutTexts or type(row) is InTexts:
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


class Store(Protocol):
    """Rows that survive a crash. `commit` returns only when they are synced to disk."""

    async def open(self) -> None:
        """Open or create, and migrate; raises CorruptFile or StorageError with the reason."""

    async def commit(self, rows: Sequence[Row]) -> None:
        """All rows in one transaction, durable on return."""

    def begin(self, rows: Sequence[Row], then: Callable[[MeshError | None], None]) -> None:
        """As `commit`, for who does not wait: `then` hears later, in the loop, why it failed or
        None."""

    def commit_at_once(self, rows: Sequence[Row]) -> bool:
        """As `commit`, before this returns, if that takes no longer than to begin one; else False,
        and nothing is done. Raises what `commit` raises."""

    async def next_run(self, at_least: int = 0) -> int:
        """A number larger than any returned before, and at least `at_least`; durable on return."""

    async def peers(self) -> Iterable[PeerRow]:
        """All remembered peers."""

    async def mail_start(self) -> MailStart:
        """Where delivery stands."""

    async def pending(self, peer: str, first: int, limit: int) -> Sequence[OutEntry]:
        """Messages for `peer` that are not settled, from number `first` on, in order."""

    async def due(self, now_ms: int, limit: int) -> Sequence[OutEntry]:
        """Queued messages whose time is up."""

    async def next_expiry(self) -> int | None:
        """When the next queued message's time is up, in ms since the epoch."""

    async def outbox(self, limit: int, *, ended: bool = False) -> Sequence[OutEntry]:
        """Messages of ours that have not ended (with `ended`, all), oldest first."""

    async def withdrawn(self) -> int:
        """How many messages of ours only wait to tell that they were taken back or expired."""

    async def outgoing(self, prefix: str) -> Sequence[OutEntry]:
        """Messages of ours whose id begins so; at most a few."""

    async def inbox(self, after: int, limit: int, *, unread: bool = False) -> Sequence[InEntry]:
        """Messages that came, beyond position `after`, in the order they became visible.

        With `unread`, only those that are neither done nor parked, seen or not.
        """

    async def recent(
        self, limit: int, *, upto: int | None = None, unseen: bool = False
    ) -> Sequence[InEntry]:
        """The newest messages that came, up to a position, oldest of them first.

        With `unseen`, only those that nobody has looked at yet.
        """

    async def newest(self) -> int:
        """The largest position in the inbox; 0 when it is empty."""

    async def incoming(self, prefix: str) -> Sequence[InEntry]:
        """Messages that came whose id begins so; at most a few."""

    async def log(
        self, limit: int, *, search: str = "", peer: str = "", kind: str = "", without: str = ""
    ) -> Sequence[LogEntry]:
        """The newest `limit` messages both ways that match, oldest first.

        Those of kind `without` are left out, and take no place.
        """

    async def receiving(self) -> Sequence[InEntry]:
        """Messages that are held until their attachments are here, oldest first."""

    async def names_blob(self, sha256: bytes, peer: str, direction: str) -> bool:
        """Whether a message to (`out`) or from (`in`) this peer names the blob."""

    async def blobs(self) -> Collection[bytes]:
        """Every blob that a message names."""

    async def retain(self, now_ms: int, keep_ms: int, keep_bytes: int) -> int:
        """Drop history that has ended and is old or too much; how many. Never what is pending."""

    async def backup(self, path: str) -> None:
        """A consistent copy, while everything goes on."""

    async def restore(self, path: str) -> None:
        """Become what that copy holds, under a new epoch; the store is open before and after."""

    async def facts(self) -> Mapping[str, str]:
        """Journal mode, sync level, schema version: for `doctor`."""

    async def close(self) -> None:
        """Release the file and its thread."""
