"""Yields the processor to the thread of libzmq after a frame was handed to it.

With one processor, or where the kernel keeps both threads on one, that thread would otherwise wait
until ours sleeps. Where it has its own processor, yielding costs nothing. Never touches a socket.
Invariant: after a yield that took longer than `SLOW_S` there is none for a while, since another
program used that time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import monotonic

__all__ = ["CpuYield"]

SLOW_S = 0.001  # libzmq's thread, and all that its frame causes on this processor, take less
PAUSE_S = 1.0  # after a slow yield: a busy machine loses at most a few ms per second
PAUSE_S_MAX = 64.0  # after many in a row
_YIELD: Callable[[], None] | None = getattr(os, "sched_yield", None)


class CpuYield:
    """Calling it yields the processor, unless that was slow a moment ago."""

    def __init__(
        self,
        yield_cpu: Callable[[], None] | None = _YIELD,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._yield_cpu, self._clock = yield_cpu, clock
        self._pause_s = PAUSE_S
        self._paused_until = float("-inf")

    def __call__(self) -> None:
        """Let the other thread run."""
        began = self._clock()
        if self._yield_cpu is None or began < self._paused_until:
            return
        self._yield_cpu()
        ended = self._clock()
        if ended - began <= SLOW_S:
            self._pause_s = PAUSE_S
        else:
            self._paused_until = ended + self._pause_s
            self._pause_s = min(PAUSE_S_MAX, 2 * self._pause_s)
