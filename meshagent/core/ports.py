"""The ports that adapters fill in: transport, discovery and the store, which is four small ones.
Each has one conformance suite in tests/.

An adapter never decides anything about the protocol: it moves bytes, finds addresses or keeps
rows. It may import this package's types and `meshagent.errors`, and nothing else of ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from meshagent.core.model.peers import Candidate, LinkId
from meshagent.core.model.rows import InEntry, LogEntry, MailStart, OutEntry, PeerRow, Row
from meshagent.errors import MeshError

__all__ = [
    "Announcement",
    "CommitStore",
    "Damage",
    "DeliveryQueries",
    "Discovery",
    "LinkEvents",
    "MailQueries",
    "Store",
    "StoreUpkeep",
    "Transport",
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
class Damage:
    """Something that a store could not read as it was written, and has set aside.

    Texts that can't be known are empty.
    """

    number: int
    """Larger than that of all that was set aside before."""
    origin: str
    """The table, or `log` for a commit."""
    peer: str
    message_id: str
    reason: str
    found_at: str
    """When it was found, as an ISO 8601 time in UTC."""


class CommitStore(Protocol):
    """Rows that survive a crash: what was committed is synced to disk.

    Commits become durable in the order in which `begin` and `commit` were called.
    """

    async def open(self) -> None:
        """Open or create; raises CorruptFile or StorageError with the reason."""

    def begin(self, rows: Sequence[Row], then: Callable[[MeshError | None], None]) -> None:
        """Commit all rows or none. `then` is called once, in the loop's thread: with None when
        they are durable, else with the reason. That may happen before this returns. When a signal
        interrupts this, `then` is called all the same, later."""

    async def commit(self, rows: Sequence[Row]) -> None:
        """Commit all rows or none; durable on return."""

    async def next_run(self, at_least: int = 0) -> int:
        """A number larger than any returned before, and at least `at_least`; durable on return."""

    async def close(self) -> None:
        """Finish what waits, and release the file and its thread."""


class DeliveryQueries(Protocol):
    """What delivery asks when it starts and while it runs."""

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

    async def receiving(self) -> Sequence[InEntry]:
        """Messages that are held until their attachments are here, oldest first."""

    async def withdrawn(self) -> int:
        """How many messages of ours only wait to tell that they were taken back or expired."""


class MailQueries(Protocol):
    """What people and programs ask about messages."""

    async def outbox(self, limit: int, *, ended: bool = False) -> Sequence[OutEntry]:
        """Messages of ours that have not ended (with `ended`, all), oldest first."""

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

    async def names_blob(self, sha256: bytes, peer: str, direction: str) -> bool:
        """Whether a message to (`out`) or from (`in`) this peer names the blob."""

    async def blobs(self) -> Collection[bytes]:
        """Every blob that a message names."""


class StoreUpkeep(Protocol):
    """What keeps a store small, copied and honest about its state."""

    @property
    def damage_found(self) -> int:
        """Changes whenever `damage` may have become longer; costs nothing to look at."""

    async def retain(self, now_ms: int, keep_ms: int, keep_bytes: int) -> int:
        """Drop history that has ended and is old or too much; how many. Never what is pending."""

    async def backup(self, path: str) -> None:
        """A consistent copy, while everything goes on."""

    async def restore(self, path: str) -> str:
        """Become what that copy holds, under a new epoch; the store is open before and after.

        Returns where what it replaced is kept; empty when there was nothing.
        """

    async def facts(self) -> Mapping[str, str]:
        """Path, schema version, epoch, number of damaged rows: for `doctor`."""

    async def damage(self) -> Sequence[Damage]:
        """What was damaged and has been set aside, oldest first."""


class Store(CommitStore, DeliveryQueries, MailQueries, StoreUpkeep, Protocol):
    """Everything that a node keeps."""
