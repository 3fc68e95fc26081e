"""Has a large file written out while it grows, so that the sync at its end has little left to do.

Decides how far the disk may be behind whoever writes, and what of the file stays in memory. Never
makes anything durable: that is fsync's. Where the system has no call for it, nothing happens.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache

__all__ = ["Writeback"]

STRIDE_BYTES = 2 * 1024 * 1024  # written out at once: large enough for a disk, small at the end

_BEGIN = 2  # SYNC_FILE_RANGE_WRITE: begin, and don't wait
_WAIT = 1 | 2 | 4  # and wait, before and after

_Range = Callable[[int, int, int, int], object]


class Writeback:
    """What of one file was handed to the disk.

    With `drop`, what the disk has is not kept in memory: a large file would otherwise push out what
    the machine works with, and memory that was just let go is used again, which is cheaper than
    asking for more. Whoever writes then waits for the disk when it is two strides ahead of it.
    """

    def __init__(self, descriptor: int, drop: bool = False) -> None:
        self._descriptor = descriptor
        self._drop = drop and hasattr(os, "posix_fadvise")  # macOS has none
        self._begun = 0

    def wrote(self, upto: int) -> None:
        """So many bytes of it are written: let those that are new go out."""
        begun = self._begun
        if upto - begun < STRIDE_BYTES:
            return
        call = _range()
        call(self._descriptor, begun, upto - begun, _BEGIN)
        if self._drop and begun >= STRIDE_BYTES:
            at = begun - STRIDE_BYTES
            call(self._descriptor, at, STRIDE_BYTES, _WAIT)
            os.posix_fadvise(self._descriptor, at, STRIDE_BYTES, os.POSIX_FADV_DONTNEED)
        self._begun = upto


@cache
def _range() -> _Range:
    if sys.platform != "linux":
        return _nothing
    try:
        call = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (AttributeError, OSError):
        return _nothing
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    found: _Range = call
    return found


def _nothing(descriptor: int, at: int, length: int, flags: int) -> None:
    """The sync at the end does it all."""
