"""What is held of each wanted blob and of who may have it, and who is next. Never decides more.

Invariant: written ≤ arrived ≤ upto ≤ chunks; what lies between `written` and `upto` is the blob's
part of the window.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from meshagent.core.types import AgentId

__all__ = ["Line", "Offer", "Source", "Stage", "Want"]

NOBODY = AgentId("")
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
    heard_at: float = 0.0
    written: int = 0
    arrived: int = 0
    upto: int = 0
    writes: int = 0
    told: int = -1
    contributors: set[AgentId] = field(default_factory=set)
    foreign: bool = False
    """Some of what is written came in an earlier run or through another agent."""
    alone: bool = False
    """Mixed contents were wrong: from now on all of it from one source, so that it shows whose."""

    @property
    def held(self) -> int:
        """Its part of the window."""
        return self.upto - self.written

    @property
    def remaining(self) -> int:
        """Chunks still to come."""
        return self.chunks - self.written


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
