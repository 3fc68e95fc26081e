"""The three ports that adapters fill in. Each has one conformance suite in tests/.

An adapter never decides anything about the protocol: it moves bytes, finds addresses or keeps
rows. It may import this package's types and `meshagent.errors`, and nothing else of ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from meshagent.core.types import Candidate, LinkId

__all__ = ["Announcement", "Discovery", "LinkEvents", "PeerRow", "Row", "Store", "Transport"]


class LinkEvents(Protocol):
    """What a transport tells its owner. Called in the event loop's thread, never re-entrantly."""

    def link_opened(self, link: LinkId, curve_key: bytes | None) -> None:
        """A connection is encrypted and admitted by the mesh secret.

        For an inbound link `curve_key` is the dialler's authenticated CURVE key (32 bytes); for
        a link that we dialled it is None, since the door's key says nothing about who is behind.
        """

    def link_received(self, link: LinkId, parts: Sequence[bytes]) -> None:
        """One frame: a header and its payload parts, as the other side sent them."""

    def link_closed(self, link: LinkId, reason: str) -> None:
        """The link is no more; `reason` is `refused`, `lost`, `handshake` or `closed`."""


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

    def send(self, link: LinkId, parts: Sequence[bytes]) -> bool:
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


@dataclass(frozen=True, slots=True)
class OutRow:
    """A message that was accepted for a peer: it is pending until an OutState settles it."""

    peer: str
    epoch: bytes
    seq: int
    id: str
    body: bytes
    expires_ms: int


@dataclass(frozen=True, slots=True)
class OutState:
    """How far a message to `peer` has come; `reason` says why when it was refused."""

    peer: str
    seq: int
    id: str
    state: str
    reason: str
    at_ms: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a recipient says about a message of ours: `seen` or `done`."""

    peer: str
    id: str
    state: str
    at_ms: int


@dataclass(frozen=True, slots=True)
class InRow:
    """A message that came; kept once, whatever number and epoch it comes under again."""

    sender: str
    epoch: bytes
    seq: int
    id: str
    body: bytes
    received_ms: int


@dataclass(frozen=True, slots=True)
class Watermark:
    """All up to `seq` of this sender's epoch have come, the last with hash `last`.

    `exceptions` are those of them that were refused (with the reason) or withdrawn (without), as
    long as the sender may still ask.
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


Row = PeerRow | OutRow | OutState | Receipt | InRow | Watermark | NewEpoch
"""What a Persist effect may carry."""


@dataclass(frozen=True, slots=True)
class StreamStart:
    """Where the stream to a peer stands after a restart: numbers `floor` to `next_seq` - 1 wait."""

    peer: str
    floor: int
    next_seq: int


class Store(Protocol):
    """Rows that survive a crash. `commit` returns only when they are synced to disk."""

    async def open(self) -> None:
        """Open or create, and migrate; raises CorruptFile or StorageError with the reason."""

    async def commit(self, rows: Sequence[Row]) -> None:
        """All rows in one transaction, durable on return."""

    async def next_run(self, at_least: int = 0) -> int:
        """A number larger than any returned before, and at least `at_least`; durable on return."""

    async def peers(self) -> Iterable[PeerRow]:
        """All remembered peers."""

    async def facts(self) -> Mapping[str, str]:
        """Journal mode, sync level, schema version: for `doctor`."""

    async def close(self) -> None:
        """Release the file and its thread."""
