"""Has a large file written out while it grows, so that the sync at its end has little left to do.

Never makes anything durable: that is fsync's. Where the system has no call for it, nothing happens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache

__all__ = ["Writeback"]

STRIDE_BYTES = 8 * 1024 * 1024  # written out at once: large enough for a disk, small at the end

_Start = Callable[[int, int, int], object]


class Writeback:
    """What of one file was handed to the disk."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._begun = 0

    def wrote(self, upto: int) -> None:
        """So many bytes of it are written: let those that are new go out."""
        if upto - self._begun >= STRIDE_BYTES:
            _starter()(self._descriptor, self._begun, upto - self._begun)
            self._begun = upto


@cache
def _starter() -> _Start:
    if sys.platform == "linux":
        import ctypes

        write_only = 2  # SYNC_FILE_RANGE_WRITE: begin, and don't wait
        try:
            call = ctypes.CDLL(None, use_errno=True).sync_file_range
        except (AttributeError, OSError):
            return _nothing
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
        return lambda descriptor, at, length: call(descriptor, at, length, write_only)
    return _nothing


def _nothing(descriptor: int, at: int, length: int) -> None:
    """The sync at the end does it all."""
