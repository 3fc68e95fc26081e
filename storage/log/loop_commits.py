"""Whether a commit may be made in the event loop's own thread: how quick the disk is, and how busy.

Never touches a disk or a clock. To hand a commit to the store's thread and to hear of it takes as
long as a quick disk needs for a sync; but a slow one must not stop the program around us.
Invariants: slow commits take a twentieth of the loop's time at the most, but for what it has saved
up; when that is used up, none is made in the loop before a quick one was seen elsewhere; all
commits together take half of its time at the most.

A commit elsewhere waits for Python's lock too, which a busy loop is slow to return: it took as long
as the disk, or longer. So what was quick there counts more than what was not; else a loop that has
once begun to hand its commits over would hear of slow ones only, and go on to.
"""

from __future__ import annotations

__all__ = ["Pace"]

QUICK_S = 0.001  # on average: beyond it there is nothing to be gained, and the loop to be held up
SLOW_S = 0.003  # once: a loop is held up as long by many another callback
SLOW_SHARE = 0.05  # of the loop's time is for slow commits
SAVED_S_MAX = 0.02  # of it: on a machine with neighbours a commit in a hundred takes some ms
LATEST = 8  # commits that the average is about
LATEST_QUICK = 2  # of those elsewhere that were quicker than the average


class Pace:
    """How long the latest commits took. Times are of one clock that never goes back."""

    def __init__(self) -> None:
        self._average: float | None = None
        self._slow = False
        self._saved_s = SAVED_S_MAX
        self._saved_at = 0.0
        self._rests_until = 0.0
        self._next_at = float("-inf")

    def allows(self, now: float) -> bool:
        """Whether the loop may wait for a commit now.

        One that follows close upon another is of a crowd: it goes where the crowd shares a sync.
        """
        quick = self._average is not None and self._average <= QUICK_S
        return quick and not self._slow and now >= self._next_at

    def took(self, began: float, ended: float) -> None:
        """A commit was made in the loop."""
        took = ended - began
        self._count(took, LATEST)
        self._next_at = ended + took
        if took > SLOW_S:
            saved_s = self._saved_s + SLOW_SHARE * (ended - self._saved_at)
            self._saved_s, self._saved_at = min(SAVED_S_MAX, saved_s) - took, ended
            if self._saved_s < 0:
                self._slow, self._rests_until = True, ended - self._saved_s / SLOW_SHARE

    def saw(self, began: float, ended: float) -> None:
        """A commit that the loop may make was made elsewhere."""
        took = ended - began
        quicker = self._average is not None and took < self._average
        self._count(took, LATEST_QUICK if quicker else LATEST)
        if took <= SLOW_S and ended >= self._rests_until:
            self._slow = False

    def _count(self, took: float, latest: int) -> None:
        before = took if self._average is None else self._average
        self._average = before + (min(took, SLOW_S) - before) / latest
