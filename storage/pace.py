"""Whether a commit may be made in the event loop's own thread: how quick the disk is, and how busy.

Never touches a disk or a clock. To hand a commit to the store's thread and to hear of it takes as
long as a quick disk needs for a sync; but a slow one must not stop the program around us.
Invariants: after a slow commit none is made in the loop before a quick one was seen elsewhere; the
loop spends at most half of its time in syncs.
"""

from __future__ import annotations

__all__ = ["Pace"]

QUICK_S = 0.003  # a loop is held up as long by many another callback
RESTS = 20  # times as long as a slow commit took: so these take 5% of the loop's time at the most


class Pace:
    """How long the latest commits took. Times are of the loop's clock."""

    def __init__(self) -> None:
        self._quick = False
        self._rests_until = 0.0
        self._ended = float("-inf")
        self._next_at = float("-inf")

    def allows(self, now: float) -> bool:
        """Whether the loop may wait for a commit now.

        One that follows close upon another is of a crowd: it goes where the crowd shares a sync.
        """
        return self._quick and now >= self._next_at

    def took(self, began: float, ended: float) -> None:
        """A commit that the loop may make was made, wherever."""
        self._ended, self._next_at = ended, ended + (ended - began)
        if ended - began > QUICK_S:
            self._quick, self._rests_until = False, ended + RESTS * (ended - began)
        elif ended >= self._rests_until:
            self._quick = True

    def is_quiet(self, now: float, quiet_s: float) -> bool:
        """Whether no commit was made for so long."""
        return now >= self._ended + quiet_s
