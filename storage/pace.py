"""Whether a commit may be made in the event loop's own thread: how quick the disk is, and how busy.

Never touches a disk or a clock. To hand a commit to the store's thread and to hear of it takes as
long as a quick disk needs for a sync; but a slow one must not stop the program around us.
Invariants: after a slow commit none is made in the loop before a quick one was seen elsewhere; the
loop spends at most half of its time in commits.
"""

from __future__ import annotations

__all__ = ["Pace"]

QUICK_S = 0.001  # on average: beyond it there is nothing to be gained, and the loop to be held up
SLOW_S = 0.003  # once: a loop is held up as long by many another callback
RESTS = 20  # times as long as a slow commit took: so these take 5% of the loop's time at the most
LATEST = 8  # commits that the average is about


class Pace:
    """How long the latest commits took. Times are of the loop's clock."""

    def __init__(self) -> None:
        self._average: float | None = None
        self._slow = False
        self._rests_until = 0.0
        self._next_at = float("-inf")

    def allows(self, now: float) -> bool:
        """Whether the loop may wait for a commit now.

        One that follows close upon another is of a crowd: it goes where the crowd shares a sync.
        """
        quick = self._average is not None and self._average <= QUICK_S
        return quick and not self._slow and now >= self._next_at

    def took(self, began: float, ended: float) -> None:
        """A commit that the loop may make was made, wherever."""
        took = ended - began
        before = took if self._average is None else self._average
        self._average = before + (took - before) / LATEST
        self._next_at = ended + took
        if took > SLOW_S:
            self._slow, self._rests_until = True, ended + RESTS * took
        elif ended >= self._rests_until:
            self._slow = False
