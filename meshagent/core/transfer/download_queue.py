"""Queues of downloads: which one is first. Never changes a download.

Invariant: an entry counts only while the download has the ticket that it had when it was added.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator

from meshagent.core.model.peers import AgentId
from meshagent.core.transfer.download import Download

__all__ = ["DownloadQueue", "SenderQueues"]

STALE_MIN = 64  # a queue this short is not worth cleaning


class DownloadQueue:
    """Downloads ordered by a key; the older first where keys are equal."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Download]] = []
        self._clean_at = STALE_MIN

    def add(self, key: float, download: Download) -> None:
        """Add it with its present ticket."""
        heapq.heappush(self._heap, (key, download.order, download.ticket, download))
        if len(self._heap) > self._clean_at:
            self._heap = [each for each in self._heap if each[2] == each[3].ticket]
            heapq.heapify(self._heap)
            self._clean_at = 2 * len(self._heap) + STALE_MIN

    def first(self) -> tuple[float, Download] | None:
        """The one with the smallest key, and that key."""
        heap = self._heap
        while heap and heap[0][2] != heap[0][3].ticket:
            heapq.heappop(heap)
        return (heap[0][0], heap[0][3]) if heap else None

    def due(self, now: float) -> Iterator[Download]:
        """All whose key is reached; each must get a new ticket before the next is taken."""
        while (first := self.first()) is not None and first[0] <= now:
            heapq.heappop(self._heap)
            yield first[1]


class SenderQueues:
    """One queue per sender, so that the downloads of one sender can be passed over."""

    def __init__(self) -> None:
        self._queues: dict[AgentId, DownloadQueue] = {}

    def add(self, key: float, download: Download) -> None:
        """Add it to its sender's queue."""
        self._queues.setdefault(download.on_behalf_of, DownloadQueue()).add(key, download)

    def first(self, but: Container[AgentId]) -> Download | None:
        """The one with the smallest key, the oldest of several, of no sender in `but`."""
        best: tuple[float, int, Download] | None = None
        for sender in [each for each in self._queues if each not in but]:
            found = self._queues[sender].first()
            if found is None:
                del self._queues[sender]
            elif best is None or (found[0], found[1].order) < best[:2]:
                best = (found[0], found[1].order, found[1])
        return None if best is None else best[2]
