"""Appends to a file past the page cache: what is written is durable when the one call returns.

A write and a sync take the disk's time and, on a quick disk, a tenth of it again for the cache's
pages and their way out; this takes the disk's time alone. Decides nothing about what the bytes are.
Only whole blocks can be written so: the one at the end is written again, with what stood in it
before and zeros behind. Invariant: `append` never changes a byte before the place it is given.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

__all__ = ["BLOCK_BYTES", "BUFFER_BYTES", "DirectWriter", "open_direct"]

BLOCK_BYTES = 4096  # what no disk and no filesystem of today finds too small
BUFFER_BYTES = 2 * 1024 * 1024  # 256 messages of 4 KiB, and more: what is longer goes otherwise.
# The system gives the memory when it is first used, so that short commits take little of it.
_ZEROS = bytes(BLOCK_BYTES)
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)


def open_direct(path: Path) -> DirectWriter | None:
    """For a file that exists; None where the system or the filesystem knows no such way."""
    flags = getattr(os, "O_DIRECT", 0)
    if not flags:
        return None
    try:
        return DirectWriter(os.open(path, os.O_RDWR | os.O_DSYNC | os.O_CLOEXEC | flags))
    except OSError:
        return None


class DirectWriter:
    """Writes to one open file, which it closes, and only where that has blocks already."""

    def __init__(self, descriptor: int) -> None:
        self._file = descriptor
        self._buffer = memoryview(mmap.mmap(-1, BUFFER_BYTES))  # which begins where a page does
        self._end = 0
        """The buffer begins with what stands before this in its block; less than nothing when that
        is not known, since somebody else may have written there."""

    def append(self, data: bytes, at: int, room: int) -> bool:
        """Write this at a place in a file of `room` bytes; False when that is not possible so, and
        has to be done otherwise. Who writes otherwise has asked here before, in vain.

        Raises OSError when the disk fails: then it may be there all the same.
        """
        known, self._end = self._end, -1
        before = at % BLOCK_BYTES
        end = before + len(data)
        size = end + -end % BLOCK_BYTES
        if at - before + size > room or size > BUFFER_BYTES:
            return False
        buffer = self._buffer
        try:
            if before and at != known:
                os.preadv(self._file, [buffer[:BLOCK_BYTES]], at - before)
            buffer[before:end] = data
            buffer[end:size] = _ZEROS[: size - end]
            if os.pwrite(self._file, buffer[:size], at - before) != size:
                return False
        except OSError as error:
            if error.errno in _REFUSALS:
                return False
            raise
        if last := end - end % BLOCK_BYTES:
            buffer[: end - last] = buffer[last:end]
        self._end = at + len(data)
        return True

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)
