"""One download: its state, how far it has come, and which peers may have the blob.

Never sends or writes anything. Invariants: written ≤ arrived ≤ upto ≤ chunks; the chunks between
`written` and `upto` are this download's part of the window; the state changes only as
`NEXT_STATES` allows.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum

from meshagent.core.model.peers import AgentId
from meshagent.core.transfer.chunks import bytes_in, chunk_count

__all__ = [
    "ABSENT",
    "NEXT_STATES",
    "NOT_ALLOWED",
    "WRONG",
    "BlobOffer",
    "BlobSource",
    "Download",
    "DownloadState",
]

NOBODY = AgentId("")
WRONG, ABSENT, NOT_ALLOWED = "wrong contents", "absent", "not allowed"  # BlobSource.verdict
SOURCES_MAX = 64  # of one blob: as many as could ever help
GRANTS_MAX = 32  # of one blob: one message each
RIVALS_MAX = 8  # offers of one blob with another size; an honest mesh has none


class DownloadState(Enum):
    """Where a download stands. From OPENING to CLOSING it has a slot."""

    QUEUED = "queued"
    WAITING_FOR_SOURCE = "waiting for a peer that has it"
    WAITING_FOR_DISK = "waiting for the disk"
    OPENING = "opening the partial file"
    RECEIVING = "receiving chunks"
    FINISHING = "being verified"
    CLOSING = "closing the partial file"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_WAITING = {DownloadState.WAITING_FOR_SOURCE, DownloadState.WAITING_FOR_DISK}
_ENDED = {DownloadState.FAILED, DownloadState.CANCELLED}

NEXT_STATES: dict[DownloadState, set[DownloadState]] = {
    DownloadState.QUEUED: {DownloadState.OPENING, DownloadState.CANCELLED},
    DownloadState.WAITING_FOR_SOURCE: {DownloadState.QUEUED, DownloadState.CANCELLED},
    DownloadState.WAITING_FOR_DISK: {DownloadState.QUEUED, DownloadState.CANCELLED},
    DownloadState.OPENING: {
        DownloadState.RECEIVING, DownloadState.DONE, DownloadState.WAITING_FOR_DISK, *_ENDED,
    },
    DownloadState.RECEIVING: {DownloadState.FINISHING, DownloadState.CLOSING},
    DownloadState.FINISHING: {DownloadState.DONE, DownloadState.CLOSING, *_ENDED},
    DownloadState.CLOSING: {DownloadState.CLOSING, DownloadState.QUEUED, *_WAITING, *_ENDED},
}  # fmt: skip
"""The states that may follow each state. Anything else is a bug of ours or of the driver."""


@dataclass(slots=True)
class BlobSource:
    """A peer that may have the blob."""

    verdict: str = ""
    """Why it is not asked any more: `wrong contents`, `absent` or `not allowed`."""
    reason: str = ""
    answered: bool = False
    failures: int = 0
    paused_until: float = 0.0
    refused_grants: set[AgentId] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class BlobOffer:
    """What a message says about a blob."""

    size: int
    sources: tuple[AgentId, ...]
    granter: AgentId
    grant: bytes


@dataclass(slots=True, eq=False)
class Download:
    """One blob that this agent wants."""

    sha256: bytes
    size: int
    order: int
    """Smaller is older."""
    chunks: int = field(init=False)
    grants: dict[AgentId, bytes] = field(default_factory=dict)
    sources: dict[AgentId, BlobSource] = field(default_factory=dict)
    rivals: list[BlobOffer] = field(default_factory=list)
    """Offers with another size. One of the two is wrong; these are tried when ours fails."""
    state: DownloadState = DownloadState.QUEUED
    after_slot: DownloadState = DownloadState.QUEUED
    """The state that follows when the download leaves its slot."""
    ticket: int = 0
    """Entries in queues with another ticket are void."""
    reason: str = ""
    """What it waits for, for people; or why it failed."""
    failures: int = 0
    wait_until: float = 0.0
    is_eldest: bool = False
    discard: bool = False
    """Whether closing deletes the partial file."""

    number: int = 0
    """The number under which the source was asked; 0 when nobody is asked."""
    source: AgentId = NOBODY
    asked_as: AgentId = NOBODY
    """The granter in whose name the source was asked."""
    heard_at: float = 0.0
    written: int = 0
    arrived: int = 0
    upto: int = 0
    window: int = 0
    """Chunks that this source may have under way; it begins low and grows."""
    writes: int = 0
    """Writes without an answer yet."""
    reported_percent: int = -1
    contributors: set[AgentId] = field(default_factory=set)
    has_foreign_chunks: bool = False
    """Some chunks came in an earlier run or through another agent."""
    single_source: bool = False
    """Chunks of several sources made wrong contents, so one source at a time is used now."""

    def __post_init__(self) -> None:
        self.chunks = chunk_count(self.size)

    def enter(self, state: DownloadState) -> None:
        """Change the state; entries in queues become void."""
        assert state in NEXT_STATES.get(self.state, ()), (self.state, state)
        self.state = state
        self.ticket += 1

    def leave_for(self, state: DownloadState) -> None:
        """Decide where it goes from its slot. A cancelled download stays cancelled."""
        if not self.is_cancelled:
            self.after_slot = state

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody wants it any more, though it still has a slot."""
        return self.after_slot is DownloadState.CANCELLED

    @property
    def on_behalf_of(self) -> AgentId:
        """The sender of the first message that named it. Slots are shared among senders."""
        return next(iter(self.grants), NOBODY)

    @property
    def held(self) -> int:
        """Its part of the window, in chunks."""
        return self.upto - self.written

    @property
    def remaining(self) -> int:
        """Chunks that are not written yet."""
        return self.chunks - self.written

    @property
    def received_bytes(self) -> int:
        """Bytes that are written."""
        return bytes_in(self.written, self.size)

    def is_owed(self) -> bool:
        """Whether the source has credit that it has not used yet."""
        return bool(self.number) and self.upto > self.arrived

    def merge(self, offer: BlobOffer) -> list[AgentId]:
        """Add what another message says about the blob; returns the sources that are new."""
        if self.after_slot is DownloadState.FAILED:
            self.after_slot = DownloadState.QUEUED
        news = self.grants.get(offer.granter) != offer.grant
        if offer.granter in self.grants or len(self.grants) < GRANTS_MAX:
            self.grants[offer.granter] = offer.grant
        added = []
        for peer in (offer.granter, *offer.sources):
            if peer not in self.sources and len(self.sources) < SOURCES_MAX:
                self.sources[peer] = BlobSource()
                added.append(peer)
        for source in self.sources.values() if news else ():
            source.refused_grants.discard(offer.granter)
            if source.verdict == NOT_ALLOWED:
                source.verdict = ""
        granter = self.sources.get(offer.granter)
        if granter is not None and granter.verdict == ABSENT:
            granter.verdict = ""  # it has just sent it again
        return added

    def add_rival(self, offer: BlobOffer) -> None:
        """Remember an offer with another size."""
        if offer not in self.rivals and len(self.rivals) < RIVALS_MAX:
            self.rivals.append(offer)

    def choose_source(self, linked: Container[AgentId], now: float) -> AgentId | None:
        """The source to ask: the one that failed least; with `single_source` the same as before."""
        usable = [
            (self.single_source and peer not in self.contributors, source.failures, at, peer)
            for at, (peer, source) in enumerate(self.sources.items())
            if peer in linked and not source.verdict and source.paused_until <= now
        ]
        return min(usable)[3] if usable else None

    def next_source(self, linked: Container[AgentId]) -> BlobSource | None:
        """The linked source that can be asked again first, if any ever can."""
        usable = [e for peer, e in self.sources.items() if peer in linked and not e.verdict]
        return min(usable, key=lambda each: each.paused_until, default=None)

    def is_hopeless(self, linked: Container[AgentId]) -> bool:
        """Whether every granter, and everyone else that is here or ever answered, said no."""
        return not any(
            not source.verdict and (peer in self.grants or peer in linked or source.answered)
            for peer, source in self.sources.items()
        )

    def verdicts(self) -> str:
        """What the granters answered."""
        said = [self.sources[each].verdict for each in self.grants if each in self.sources]
        return ", ".join(dict.fromkeys(said))

    def granter_for(self, source: AgentId) -> AgentId:
        """In whose name to ask this source: its own if possible, else the first not refused."""
        refused = self.sources[source].refused_grants
        if source in self.grants and source not in refused:
            return source
        return next((each for each in self.grants if each not in refused), next(iter(self.grants)))
