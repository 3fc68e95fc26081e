"""Which downloads are active, and which queued one is next. Never asks a source for anything.

There are few slots: for the oldest download, then for the smallest ones. Large downloads and the
downloads of one sender leave some slots free for others. Invariant: a download has a slot exactly
while its state is one of OPENING, RECEIVING, FINISHING and CLOSING.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Container

from meshagent.core.membership.lifeguard import backoff_s
from meshagent.core.model.peers import AgentId
from meshagent.core.transfer.download import Download, DownloadState
from meshagent.core.transfer.download_config import DownloadConfig
from meshagent.core.transfer.download_queue import SenderQueues

__all__ = ["DownloadSlots"]


class DownloadSlots:
    """The active downloads and the queued ones."""

    def __init__(
        self, config: DownloadConfig, linked: Container[AgentId], rng: random.Random
    ) -> None:
        self.active: dict[bytes, Download] = {}
        self._config, self._linked, self._rng = config, linked, rng
        self._small, self._large, self._by_age = SenderQueues(), SenderQueues(), SenderQueues()
        self._large_active = 0
        self._stalled: dict[AgentId, tuple[int, float]] = {}
        self._open_not_before = 0.0
        self._now = 0.0

    def enqueue(self, download: Download) -> None:
        """It waits for a slot from now on; its state is QUEUED."""
        queue = self._large if self._is_large(download) else self._small
        queue.add(download.remaining, download)
        self._by_age.add(download.order, download)

    def start_next(self, now: float) -> Download | None:
        """Give a free slot to the next download; None when there is no slot or no download."""
        self._now = now
        if len(self.active) >= self._config.active_max or now < self._open_not_before:
            return None
        download = self._next()
        if download is not None:
            download.is_eldest = not self._has_eldest()
            download.enter(DownloadState.OPENING)
            self.active[download.sha256] = download
            self._large_active += self._is_large(download)
        return download

    def free(self, download: Download) -> None:
        """It leaves its slot, if it has one."""
        if self.active.pop(download.sha256, None) is not None:
            self._large_active -= self._is_large(download)
            download.is_eldest = False

    def delay_opening(self, until: float) -> None:
        """The disk refused: open no other partial file before this time."""
        self._open_not_before = until

    def pause_sender(self, peer: AgentId, now: float) -> None:
        """The sender stalls: start none of its downloads for a while, then one at a time."""
        failures, until = self._stalled.get(peer, (0, 0.0))
        if now >= until:  # downloads that stall together count as one
            config = self._config
            pause_s = backoff_s(failures, config.pause_s, config.longest_pause_s, self._rng)
            self._stalled[peer] = (failures + 1, now + pause_s)

    def resume_sender(self, peer: AgentId) -> None:
        """The sender delivers, or has a new link."""
        self._stalled.pop(peer, None)

    def deadlines(self) -> list[float]:
        """When a slot may be given to somebody who has to wait now."""
        if len(self.active) >= self._config.active_max:
            return []
        times = [until for _, until in self._stalled.values() if until > self._now]
        if self._next() is not None:
            times.append(self._open_not_before)
        return times

    def _next(self) -> Download | None:
        """The oldest if no active one is there for its age, else the smallest that is allowed."""
        if self._by_age.first(()) is None:
            return None  # the usual case: all are active
        full = self._senders_with_enough()
        if not self._has_eldest():
            return self._by_age.first(full)
        first = self._small.first(full)
        if first is None and self._large_active < self._config.large_active_max:
            return self._large.first(full)
        return first

    def _senders_with_enough(self) -> set[AgentId]:
        """Senders that get no further slot now. One that is away, or has stalled, gets one slot."""
        active = Counter(each.on_behalf_of for each in self.active.values())
        full = {
            each
            for each, count in active.items()
            if count >= (self._config.per_sender_max if each in self._linked else 1)
        }
        return full | {
            each for each, (_, until) in self._stalled.items() if active[each] or until > self._now
        }

    def _has_eldest(self) -> bool:
        return any(each.is_eldest for each in self.active.values())

    def _is_large(self, download: Download) -> bool:
        return download.chunks > self._config.small_chunks
