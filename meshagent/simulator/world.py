"""Virtual time and one source of randomness. Same seed, same run, to the last event.

Never waits. Invariant: events happen in the order of their time, ties in the order of planning.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["World"]

TRANSCRIPT_LINES_MAX = 400  # what a failing test prints


class World:
    """A clock, a heap of planned events, and a transcript."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0.0
        self.rng = random.Random(seed)
        self.events = 0
        self._planned: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._lines: deque[str] = deque(maxlen=TRANSCRIPT_LINES_MAX)
        self._count = 0

    def plan(self, delay_s: float, what: Callable[..., None], *args: Any) -> None:
        """Call `what(*args)` after `delay_s` of virtual time."""
        self._count += 1
        heapq.heappush(self._planned, (self.now + delay_s, self._count, what, args))

    def run(self, for_s: float) -> None:
        """Let virtual time pass."""
        until = self.now + for_s
        planned = self._planned
        while planned and planned[0][0] <= until:
            self.now, _, what, args = heapq.heappop(planned)
            self.events += 1
            what(*args)
        self.now = until

    def run_until(self, holds: Callable[[], bool], limit_s: float, step_s: float = 0.1) -> float:
        """Let time pass until `holds()`; how long that took. Fails with the transcript."""
        started = self.now
        while not holds():
            if self.now - started >= limit_s:
                raise AssertionError(f"not within {limit_s} s of virtual time\n{self.transcript()}")
            self.run(step_s)
        return self.now - started

    def say(self, line: str) -> None:
        """Add to the transcript."""
        self._lines.append(f"{self.now:10.3f}  {line}")

    def transcript(self) -> str:
        """The last lines, under the seed that makes them again."""
        return "\n".join([f"seed {self.seed}", *self._lines])
