"""Lets libzmq's thread go first once it has a frame to send.

On one processor, in a small container or where the kernel packs what is little work, that thread
waits until ours sleeps; where it has a processor of its own, to give way takes nothing. Never
touches a socket. Invariant: who has lost more than `SLOW_S` by it does not give way again for a
while, since another program has taken that time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import monotonic

__all__ = ["CpuYield"]

SLOW_S = 0.001  # libzmq's thread, and all that its frame sets off on this processor, take less
PAUSE_S = 1.0  # after a slow one: so a busy machine costs a few ms in a second at the most
PAUSE_S_MAX = 64.0  # after many in a row
_YIELD: Callable[[], None] | None = getattr(os, "sched_yield", None)


class CpuYield:
    """When it is called, the processor is given up, if that was cheap before."""

    def __init__(
        self,
        give_way: Callable[[], None] | None = _YIELD,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._give_way, self._clock = give_way, clock
        self._pause_s = PAUSE_S
        self._rests_until = float("-inf")

    def __call__(self) -> None:
        """Somebody else was given work."""
        began = self._clock()
        if self._give_way is None or began < self._rests_until:
            return
        self._give_way()
        ended = self._clock()
        if ended - began <= SLOW_S:
            self._pause_s = PAUSE_S
        else:
            self._rests_until = ended + self._pause_s
            self._pause_s = min(PAUSE_S_MAX, 2 * self._pause_s)
