"""A file to which commits are appended: the least that a disk can make durable.

Decides where a commit stands and whether what is found is whole. Never knows what a commit holds.
Each has a position, one more than the one before; the file is written from its beginning again
once all that it holds is safe elsewhere. Invariants: a commit is durable when `append` returns, and
is not there when it raises; what `read` gives is in order, and names what is missing between.

The last commit may have been cut off by a crash, or have decayed. One flipped bit is no crash: then
it is named. Whatever else is wrong with the last one counts as cut off, and is no more.
docs/storage.md has the format and the crash argument.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from struct import Struct
from typing import NamedTuple
from zlib import crc32

from meshagent.storage.folders.files import sync_data, sync_folder
from meshagent.storage.log.bit_flips import without_flip
from meshagent.storage.log.direct_io import DirectWriter, open_direct

__all__ = ["TAG_BYTES", "Commit", "LogFile"]

MAGIC = b"mac1"
TAG_BYTES = 8
_HEADER = Struct(f">4s{TAG_BYTES}sQII")  # magic, tag, position, length and sum of the content
_SUM = Struct(">I")  # of the header
HEADER_BYTES = _HEADER.size + _SUM.size
STEP_BYTES = 2 * 1024 * 1024  # it grows by: a sync of a file that grows takes half as long again
FILE_BYTES_MAX = 32 * 1024 * 1024  # half of it may wait before any of it must be folded: 60,000
# short messages, 16 of the longest. One commit that is longer still has the file to itself.
ROOM_BYTES = 64 * 1024 * 1024  # with less on the disk it takes no more of that than it has to


class Commit(NamedTuple):
    """What was found under a position."""

    position: int
    content: bytes
    is_sound: bool = True


class LogFile:
    """The commits of one database, which are known by its tag."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.used = 0
        """Up to here it is written, from its beginning."""
        self._file = -1
        self._direct: DirectWriter | None = None
        self._size = 0

    def open(self) -> bool:
        """Open it or create it; whether it was there. Raises OSError.

        Its name, its blocks, and what a killed writer left in the cache are on the disk on return.
        """
        was_there = self.path.exists()
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        self._file = os.open(self.path, flags, 0o600)
        self._size = self.used = os.fstat(self._file).st_size  # until somebody has read it
        if not self._size:
            self._lengthen(STEP_BYTES)
        sync_data(self._file)
        sync_folder(self.path.parent)
        self._direct = open_direct(self.path)
        return was_there

    def close(self) -> None:
        """Let go of it; does nothing when not open."""
        file, self._file = self._file, -1
        if self._direct is not None:
            self._direct.close()
            self._direct = None
        if file >= 0:
            os.close(file)

    def has_room(self, size: int, waiting: int = 0) -> bool:
        """For a commit of this size, and for as much as waits to be folded once more."""
        return self.used + HEADER_BYTES + size + waiting <= FILE_BYTES_MAX

    def append(self, tag: bytes, position: int, content: bytes) -> None:
        """Durable on return; raises OSError, and then it is not there."""
        header = _HEADER.pack(MAGIC, tag, position, len(content), crc32(content))
        data = b"".join((header, _SUM.pack(crc32(header)), content))
        end = self.used + len(data)
        try:
            if end > self._size:
                self._lengthen(max(end, min(FILE_BYTES_MAX, end + STEP_BYTES)))
                sync_data(self._file)
            if self._direct is None or not self._direct.append(data, self.used, self._size):
                self._write(data, self.used)
                sync_data(self._file)
        except OSError:
            self._take_back()
            raise
        self.used = end
        if end > self._size:
            self._size = end

    def rewind(self) -> None:
        """All of it is safe elsewhere: its room is used again. Raises OSError."""
        self.used = 0
        if self._size > FILE_BYTES_MAX:
            os.ftruncate(self._file, FILE_BYTES_MAX)
            self._size = FILE_BYTES_MAX

    def read(self, tag: bytes | None) -> list[Commit]:
        """All that stands in it, in order; from now on it is written behind that.

        With no tag, whosever it is. One that is not sound stands for all that are missing there.
        """
        data = os.pread(self._file, self._size, 0)
        found: list[Commit] = []
        at, last = 0, None
        while (header := _next_header(data, at, tag, last)) is not None:
            begins, tag, position, length, checksum = header
            if begins > at:  # what is behind it was written later, so this was something too
                missing = position - 1 if last is None else last + 1
                found.append(Commit(missing, data[at:begins], False))
            ends = begins + HEADER_BYTES + length
            content = data[begins + HEADER_BYTES : ends]
            found.append(Commit(position, content, crc32(content) == checksum))
            at, last = ends, position
        if found and not found[-1].is_sound and without_flip(content, checksum) is None:  # cut off
            at -= HEADER_BYTES + len(found.pop().content)
        elif (decayed := _decayed_header(data, at, tag, last)) is not None:
            found.append(decayed)
            at += len(decayed.content)
        self.used = at
        return found

    def _lengthen(self, size: int) -> None:
        """With zeros, if there is room: commits are then written where the file is."""
        with contextlib.suppress(OSError):
            if shutil.disk_usage(self.path.parent).free >= ROOM_BYTES:
                self._write(bytes(size - self._size), self._size)
                self._size = size

    def _write(self, data: bytes, at: int) -> None:
        written = os.pwrite(self._file, data, at)
        while written < len(data):  # a full disk takes a part, and says so at the next one
            written += os.pwrite(self._file, data[written:], at + written)

    def _take_back(self) -> None:
        """It may be there all the same: it must not be found."""
        with contextlib.suppress(OSError):
            os.pwrite(self._file, bytes(HEADER_BYTES), self.used)
            sync_data(self._file)


def _next_header(
    data: bytes, at: int, tag: bytes | None, last: int | None
) -> tuple[int, bytes, int, int, int] | None:
    """Where the next commit begins, and its header; None when there is none.

    What was left from before the file was last rewound has smaller positions than its beginning.
    """
    while (at := data.find(MAGIC, at)) >= 0:
        if at + HEADER_BYTES <= len(data):
            _, whose, position, length, checksum = _HEADER.unpack_from(data, at)
            (seal,) = _SUM.unpack_from(data, at + _HEADER.size)
            if (
                seal == crc32(data[at : at + _HEADER.size])
                and tag in (None, whose)
                and (last is None or position > last)
                and at + HEADER_BYTES + length <= len(data)
            ):
                return at, whose, position, length, checksum
        at += 1
    return None


def _decayed_header(data: bytes, at: int, tag: bytes | None, last: int | None) -> Commit | None:
    """The commit that stands here, when all that keeps its header from being one is a bit."""
    header, seal = data[at : at + _HEADER.size], data[at + _HEADER.size : at + HEADER_BYTES]
    if len(seal) < _SUM.size or (mended := without_flip(header, *_SUM.unpack(seal))) is None:
        return None
    magic, whose, position, length, _ = _HEADER.unpack(mended)
    if magic != MAGIC or tag not in (None, whose) or (last is not None and position != last + 1):
        return None
    return Commit(position, data[at : at + HEADER_BYTES + length], False)
