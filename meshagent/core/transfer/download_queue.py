"""What is held of each wanted blob and of who may have it, and who is next. Never decides more.

Invariant: written ≤ arrived ≤ upto ≤ chunks; what lies between `written` and `upto` is the blob's
part of the window.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from enum import Enum

from meshagent.core.model.peers import AgentId

__all__ = ["ABSENT", "NOT_ALLOWED", "WRONG", "Line", "Lines", "Offer", "Source", "Stage", "Want"]

NOBODY = AgentId("")
WRONG, ABSENT, NOT_ALLOWED = "wrong contents", "absent", "not allowed"  # a source's verdict
SOURCES_MAX = 64  # of one blob: as many as could ever help
GRANTS_MAX = 32  # of one blob: one message each
RIVALS_MAX = 8  # offers of one blob with another size; an honest mesh has none
STALE_MIN = 64  # a line this short is not worth cleaning


class Stage(Enum):
    """Where a wanted blob stands. All but the first two have a place among the active."""

    READY = "ready"
    PAUSED = "paused"
    OPENING = "opening"
    PULLING = "pulling"
    CLOSING = "closing"
    FINISHING = "finishing"


@dataclass(slots=True)
class Source:
    """A peer that may have the blob."""

    verdict: str = ""
    """Why it is not asked (again): `wrong contents`, `absent` or `not allowed`."""
    reason: str = ""
    answered: bool = False
    failures: int = 0
    paused_until: float = 0.0
    refused_grants: set[AgentId] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Offer:
    """A message's word about a blob."""

    size: int
    sources: tuple[AgentId, ...]
    granter: AgentId
    grant: bytes


@dataclass(slots=True, eq=False)
class Want:
    """One wanted blob."""

    sha256: bytes
    size: int
    chunks: int
    order: int
    grants: dict[AgentId, bytes] = field(default_factory=dict)
    sources: dict[AgentId, Source] = field(default_factory=dict)
    rivals: list[Offer] = field(default_factory=list)
    """Offers of another size: one of the two is a lie, and this one is tried when ours ends."""
    stage: Stage = Stage.READY
    ticket: int = 0
    """Entries in lines with another ticket are void."""
    reason: str = ""
    failures: int = 0
    for_source: bool = False
    """Paused until a source comes back, rather than for the disk."""
    is_eldest: bool = False
    dropped: bool = False
    failed: str = ""
    discard: bool = False
    pause_until: float = 0.0
    """Where it goes after closing: to a pause, or with 0 to the ready ones."""

    pull: int = 0
    """The number of the pull under way; 0 for none."""
    source: AgentId = NOBODY
    asked_as: AgentId = NOBODY
    """The granter in whose name the source was asked."""
    heard_at: float = 0.0
    written: int = 0
    arrived: int = 0
    upto: int = 0
    pace: int = 0
    """What the pull under way may hold of the window: it begins low and grows."""
    writes: int = 0
    told: int = -1
    contributors: set[AgentId] = field(default_factory=set)
    foreign: bool = False
    """Some of what is written came in an earlier run or through another agent."""
    alone: bool = False
    """Mixed contents were wrong: from now on all of it from one source, so that it shows whose."""

    @property
    def on_behalf_of(self) -> AgentId:
        """Whose message named it first: the places are shared among those."""
        return next(iter(self.grants), NOBODY)

    @property
    def held(self) -> int:
        """Its part of the window."""
        return self.upto - self.written

    @property
    def remaining(self) -> int:
        """Chunks still to come."""
        return self.chunks - self.written

    def merge(self, offer: Offer) -> list[AgentId]:
        """Add what another message says about the blob; the sources that are new."""
        self.failed = ""
        news = self.grants.get(offer.granter) != offer.grant
        if offer.granter in self.grants or len(self.grants) < GRANTS_MAX:
            self.grants[offer.granter] = offer.grant
        added = []
        for peer in (offer.granter, *offer.sources):
            if peer not in self.sources and len(self.sources) < SOURCES_MAX:
                self.sources[peer] = Source()
                added.append(peer)
        for source in self.sources.values() if news else ():
            source.refused_grants.discard(offer.granter)
            if source.verdict == NOT_ALLOWED:
                source.verdict = ""
        granter = self.sources.get(offer.granter)
        if granter is not None and granter.verdict == ABSENT:
            granter.verdict = ""  # it has just sent it again
        return added

    def add_rival(self, offer: Offer) -> None:
        """Remember an offer of another size."""
        if offer not in self.rivals and len(self.rivals) < RIVALS_MAX:
            self.rivals.append(offer)

    def choose(self, linked: Container[AgentId], now: float) -> AgentId | None:
        """The source to ask: the one that failed least; while alone, the same as before."""
        usable = [
            (self.alone and peer not in self.contributors, source.failures, at, peer)
            for at, (peer, source) in enumerate(self.sources.items())
            if peer in linked and not source.verdict and source.paused_until <= now
        ]
        return min(usable)[3] if usable else None

    def soonest(self, linked: Container[AgentId]) -> Source | None:
        """The linked source that can be asked again first, if any ever can."""
        hopeful = [e for peer, e in self.sources.items() if peer in linked and not e.verdict]
        return min(hopeful, key=lambda each: each.paused_until, default=None)

    def is_hopeless(self, linked: Container[AgentId]) -> bool:
        """Whether every granter, and everyone else that is here or ever answered, said no."""
        return not any(
            not source.verdict and (peer in self.grants or peer in linked or source.answered)
            for peer, source in self.sources.items()
        )

    def verdicts(self) -> str:
        """What the granters said."""
        said = [self.sources[each].verdict for each in self.grants if each in self.sources]
        return ", ".join(dict.fromkeys(said))

    def granter_for(self, source: AgentId) -> AgentId:
        """In whose name to ask this source: its own when it may, else the first not refused."""
        refused = self.sources[source].refused_grants
        if source in self.grants and source not in refused:
            return source
        return next((each for each in self.grants if each not in refused), next(iter(self.grants)))


class Lines:
    """Who is first, of those whose sender may have one more? A line for each sender."""

    def __init__(self) -> None:
        self._lines: dict[AgentId, Line] = {}

    def add(self, key: float, want: Want) -> None:
        """Stand in its sender's line."""
        self._lines.setdefault(want.on_behalf_of, Line()).add(key, want)

    def first(self, but: Container[AgentId]) -> Want | None:
        """The one with the smallest key, the eldest of several, of no sender in `but`."""
        best: tuple[float, int, Want] | None = None
        for sender in [each for each in self._lines if each not in but]:
            found = self._lines[sender].first()
            if found is None:
                del self._lines[sender]
            elif best is None or (found[0], found[1].order) < best[:2]:
                best = (found[0], found[1].order, found[1])
        return None if best is None else best[2]


class Line:
    """Who is first? By a key, with entries that a new ticket makes void."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Want]] = []
        self._clean_at = STALE_MIN

    def add(self, key: float, want: Want) -> None:
        """Stand in line with the present ticket."""
        heapq.heappush(self._heap, (key, want.order, want.ticket, want))
        if len(self._heap) > self._clean_at:
            self._heap = [each for each in self._heap if each[2] == each[3].ticket]
            heapq.heapify(self._heap)
            self._clean_at = 2 * len(self._heap) + STALE_MIN

    def first(self) -> tuple[float, Want] | None:
        """The one with the smallest key, and that key."""
        heap = self._heap
        while heap and heap[0][2] != heap[0][3].ticket:
            heapq.heappop(heap)
        return (heap[0][0], heap[0][3]) if heap else None

    def due(self, now: float) -> Iterator[Want]:
        """All whose key is reached; each must get a new ticket before the next is taken."""
        while (first := self.first()) is not None and first[0] <= now:
            heapq.heappop(self._heap)
            yield first[1]
