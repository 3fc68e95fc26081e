"""Whether the event loop may wait a moment for a commit that another thread makes.

To hear of a commit through the loop takes as long as a quick disk needs for it; to wait for it
takes less, and holds the loop up. Never touches a disk, a thread or a clock. Invariants: the loop
waits only while commits are quick; a wait that ran out ends that until quick ones were seen again;
waiting takes half of the loop's time at the most, so that a burst shares one sync.
"""

from __future__ import annotations

__all__ = ["WAIT_S", "WaitPolicy"]

WAIT_S = 0.002  # at the most: a loop is held up as long by many another callback
QUICK_S = 0.001  # on average; of a slower disk the way through the loop is a small part
LATEST = 8  # commits that the average is about
LATEST_QUICK = 2  # of those that were quicker than the average: a commit also waits for Python's
# lock, which a busy loop is slow to return, and that says nothing about the disk


class WaitPolicy:
    """How long the latest commits took. Times are of one clock that never goes back."""

    def __init__(self) -> None:
        self._average_s = WAIT_S  # nothing is known yet
        self._next_at = float("-inf")

    def allows(self, now: float) -> bool:
        """Whether the loop may wait for a commit now."""
        return self._average_s < QUICK_S and now >= self._next_at

    def committed(self, took_s: float) -> None:
        """A commit was made, and took so long in its thread."""
        latest = LATEST_QUICK if took_s < self._average_s else LATEST
        self._average_s += (min(took_s, WAIT_S) - self._average_s) / latest

    def waited(self, began: float, ended: float, *, ran_out: bool) -> None:
        """The loop has waited, in vain when that `ran_out`."""
        self._next_at = ended + (ended - began)
        if ran_out:
            self._average_s = 2 * WAIT_S
