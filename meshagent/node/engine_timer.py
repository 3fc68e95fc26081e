"""Wakes the engine when it wants to be woken. Decides nothing about what it does then.

Invariant: many turns share one look at the deadline, and an early wake-up is preferred to a new
timer for every frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from meshagent.core.mesh import Mesh
from meshagent.core.turns import Turn

__all__ = ["EngineTimer"]

SLACK_S = 0.005  # the engine may be woken so much late: its shortest time is 10 ms


class EngineTimer:
    """The timer of one node's engine."""

    def __init__(self, engine: Callable[[], Mesh | None], perform: Callable[[Turn], None]) -> None:
        self._engine, self._perform = engine, perform
        self._look: asyncio.TimerHandle | None = None
        self._wake: asyncio.TimerHandle | None = None

    def look_soon(self) -> None:
        """Something happened: the engine may want to be woken at another time."""
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(SLACK_S, self._look_at_deadline)

    def close(self) -> None:
        """Wake nobody any more."""
        for timer in (self._look, self._wake):
            if timer is not None:
                timer.cancel()

    def _look_at_deadline(self) -> None:
        self._look = None
        if (engine := self._engine()) is None:
            return
        at = engine.deadline()
        if self._wake is not None:
            if at is not None and self._wake.when() <= at and not self._wake.cancelled():
                return
            self._wake.cancel()
        self._wake = (
            None if at is None else asyncio.get_running_loop().call_at(at, self._wake_engine)
        )

    def _wake_engine(self) -> None:
        self._wake = None
        if (engine := self._engine()) is not None:
            self._perform(engine.on_timer(asyncio.get_running_loop().time()))
