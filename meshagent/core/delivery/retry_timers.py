"""Who is due next, when each of many has at most one time. Never reads a clock.

Invariant: `earliest` is the smallest time that was set and neither changed nor reached since. A
time that was changed stays in the heap until it comes to the top, so a change costs no search.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from meshagent.core.model.peers import AgentId

__all__ = ["Timers"]

STALE_MAX = 64  # beyond twice as many as are waited for: then the heap is made anew


class Timers:
    """The time of each peer that waits for one."""

    def __init__(self) -> None:
        self._at: dict[AgentId, float] = {}
        self._heap: list[tuple[float, AgentId]] = []

    def set(self, peer: AgentId, at: float | None) -> None:
        """From now on this is its time; None when it waits for none."""
        if at is None:
            self._at.pop(peer, None)
        elif self._at.get(peer) != at:
            self._at[peer] = at
            heapq.heappush(self._heap, (at, peer))
            if len(self._heap) > 2 * len(self._at) + STALE_MAX:
                self._heap = sorted((time, each) for each, time in self._at.items())

    def earliest(self) -> float | None:
        """When somebody is due."""
        while self._heap:
            at, peer = self._heap[0]
            if self._at.get(peer) == at:
                return at
            heapq.heappop(self._heap)
        return None

    def reached(self, now: float) -> Iterator[AgentId]:
        """Everyone who is due, by time; each waits for none until a new one is set."""
        while (at := self.earliest()) is not None and at <= now:
            _, peer = heapq.heappop(self._heap)
            del self._at[peer]
            yield peer
