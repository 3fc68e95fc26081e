"""A line that tells how far something has come, for people who wait.

Shown on standard error, only to a terminal and only when it lasts; the line leaves nothing behind.
"""

from __future__ import annotations

import sys
import time
from math import ceil

from meshagent.cli.output import duration, size_text, terminal_width

__all__ = ["ProgressLine"]

PATIENCE_S = 0.7  # shorter than that, nobody asks
REDRAW_S = 0.1
BAR_CHARACTERS = 20


class ProgressLine:
    """How much of a whole is done, with speed and time left."""

    def __init__(self, label: str, quiet: bool = False) -> None:
        self._label = label
        self._quiet, self._shows = quiet, not quiet and sys.stderr.isatty()
        self._started = time.monotonic()
        self._next = self._started + PATIENCE_S
        self._before = 0
        self._drawn = False
        self._said = ""

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *ended: object) -> None:
        self._wipe()

    def update(self, done: int, total: int | None) -> None:
        """So many bytes, of so many if that is known."""
        now = time.monotonic()
        if done and not self._before:
            self._before, self._started = done, now  # what was there before took no time of ours
        if not self._shows or now < self._next:
            return
        self._next = now + REDRAW_S
        self._drawn = True
        moved, took_s = done - self._before, now - self._started
        line = progress_text(self._label, done, total, moved, took_s if self._before else 0.0)
        print(
            f"\r\x1b[K{line[: terminal_width(sys.stderr) - 1]}", end="", file=sys.stderr, flush=True
        )

    def say(self, text: str) -> None:
        """Something to know meanwhile, once, on a line of its own; in a pipe too."""
        if text == self._said or self._quiet:
            return
        self._wipe()
        self._said = text
        print(text, file=sys.stderr, flush=True)

    def _wipe(self) -> None:
        if self._drawn:
            self._drawn = False
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def progress_text(label: str, done: int, total: int | None, moved: int, seconds: float) -> str:
    """`shot.png  ████────  43%  4.3 of 10 MiB  120 MiB/s  2 s left`."""
    rate = moved / seconds if seconds > 0 else 0.0
    speed = f"{size_text(int(rate))}/s"
    if not total:
        return f"{label}  {size_text(done)}  {speed}"
    full = BAR_CHARACTERS * done // total
    bar = "█" * full + "─" * (BAR_CHARACTERS - full)
    left = f"  {duration(ceil((total - done) / rate))} left" if rate > 0 and done < total else ""
    share = f"{100 * done // total:3d}%"
    return f"{label}  {bar}  {share}  {size_text(done)} of {size_text(total)}  {speed}{left}"
