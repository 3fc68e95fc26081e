"""How a person's file comes into the store: read once, hashed as it is written.

Decides what can be attached. Never reads a path twice: the file is opened once, and what counts is
the copy. Invariant: the SHA-256 is that of the bytes in the store, whatever its owner does to the
file in the meantime; the owner's file is never written.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from meshagent.errors import UsageError
from meshagent.storage.blobs.errors import mapped_to_disk_full
from meshagent.storage.blobs.mime_types import HEAD_BYTES
from meshagent.storage.blobs.quota import Room
from meshagent.storage.blobs.writeback import Writeback

__all__ = ["ByteSource", "Copied", "Progress", "copy_into", "hash_of", "opened_source"]

BLOCK_BYTES = 1024 * 1024  # read, hashed and written at a time: all the memory that it takes
SMALL_BYTES = 64 * 1024  # so much at least, should a small file grow while it is read

Progress = Callable[[int, int | None], None]
"""Told the bytes that are done, and how many there are if that is known."""


@dataclass(frozen=True)
class Copied:
    """What was written: `head` are its first bytes."""

    sha256: bytes
    size: int
    head: bytes


class ByteSource:
    """Bytes to come, from a descriptor of ours or from an object of the caller's."""

    def __init__(self, name: str, descriptor: int | None, stream: BinaryIO | None) -> None:
        self.name = name
        self.descriptor = descriptor
        self._stream = stream
        self.size = os.fstat(descriptor).st_size if descriptor is not None else None
        known = BLOCK_BYTES if self.size is None else max(self.size, SMALL_BYTES)
        self._memory = bytearray(min(BLOCK_BYTES, known))

    def blocks(self) -> Iterator[bytes | memoryview]:
        """All of it, from the beginning if it is a file of ours, else from where it stands.

        A block may be looked at until the next one is asked for, which may use its memory again.
        """
        at = 0
        while True:
            with _unreadable(self.name):
                block = self._read(at)
            if not block:
                return
            at += len(block)
            yield block

    def _read(self, at: int) -> bytes | memoryview:
        if self.descriptor is not None:
            return memoryview(self._memory)[: os.preadv(self.descriptor, [self._memory], at)]
        assert self._stream is not None
        block = self._stream.read(BLOCK_BYTES)
        if not isinstance(block, bytes | bytearray):
            raise UsageError(
                f"Can't attach {self.name}: it gives {type(block).__name__}, not bytes.",
                hint="Open the file in binary mode, as in open(path, 'rb').",
            )
        return bytes(block)


@contextlib.contextmanager
def opened_source(source: Path | BinaryIO) -> Iterator[ByteSource]:
    """The file at a path, opened once and found fit; or the caller's object as it is."""
    if not isinstance(source, Path):
        yield ByteSource(str(getattr(source, "name", "the given data")), None, source)
        return
    with _unreadable(str(source)):
        # Without O_NONBLOCK, opening a pipe would wait for somebody to write into it.
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
        descriptor = os.open(source, flags | getattr(os, "O_BINARY", 0))
    try:
        _require_file(source, os.fstat(descriptor).st_mode)
        yield ByteSource(str(source), descriptor, None)
    finally:
        os.close(descriptor)


def copy_into(
    descriptor: int, path: Path, source: ByteSource, room: Room, report: Progress
) -> Copied:
    """Write all of the source into an empty file of ours, and hash what was written."""
    if source.size is not None:
        room.require(source.size)
        if source.descriptor is not None and _clone(descriptor, source.descriptor):
            clone = ByteSource(source.name, descriptor, None)
            return hash_of(clone, report)
    digest, done, head = hashlib.sha256(), 0, bytearray()
    writeback = Writeback(descriptor)
    with _beside(digest) as update:
        for block in source.blocks():
            if source.size is None or done + len(block) > source.size:
                room.require(done + len(block), on_disk=len(block))  # it is longer than was known
            hashed = update(block)
            with mapped_to_disk_full(path, "write", len(block)):
                _write_all(descriptor, block)
            head += block[: HEAD_BYTES - len(head)]
            done += len(block)
            writeback.wrote(done)
            hashed()
            report(done, source.size)
    return Copied(digest.digest(), done, bytes(head))


@contextlib.contextmanager
def _beside(digest: Any) -> Iterator[Callable[[Any], Callable[[], None]]]:
    """Hash a large block while it is written; what is returned waits until that is done."""

    def update(block: bytes | memoryview) -> Callable[[], None]:
        if len(block) < BLOCK_BYTES:  # the last one, or all there is: not worth a thread
            digest.update(block)
            return lambda: None
        return threads.submit(digest.update, block).result

    threads = ThreadPoolExecutor(1, "meshagent-hash")  # begins one when it is first asked for
    try:
        yield update
    finally:
        threads.shutdown()


def hash_of(source: ByteSource, report: Progress) -> Copied:
    """Read all of it, and write nothing."""
    digest, done, head = hashlib.sha256(), 0, bytearray()
    for block in source.blocks():
        digest.update(block)
        head += block[: HEAD_BYTES - len(head)]
        done += len(block)
        report(done, source.size)
    return Copied(digest.digest(), done, bytes(head))


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _require_file(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise UsageError(
            f"Can't attach {path}: it is a folder.",
            hint=f"Pack it first, as in 'tar czf {path.name or 'folder'}.tar.gz {path}'.",
            path=str(path),
        )
    if not stat.S_ISREG(mode):
        raise UsageError(
            f"Can't attach {path}: it is not a file but a pipe, a device or a socket.",
            hint="Attach '-' to send what comes from standard input.",
            path=str(path),
        )


@contextlib.contextmanager
def _unreadable(name: str) -> Iterator[None]:
    """The person named this file: that it can't be read is about what was asked, not our disk."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENXIO:  # what opening a socket gives
            reason = "it is not a file but a socket or a device without a driver"
        else:
            reason = _REASONS.get(error.errno or 0, error.strerror or "the system gave no reason")
        denied = error.errno in (errno.EACCES, errno.EPERM)
        hint = "Make it readable, or attach a copy that is." if denied else "Check the path."
        raise UsageError(
            f"Can't attach {name}: {reason}.", hint=hint, path=name, errno=error.errno
        ) from error
    except ValueError as error:  # a NUL in the path, or a stream that was closed
        raise UsageError(f"Can't attach {name!r}: {error}.", hint="Check the path.") from error


_REASONS = {
    errno.ENOENT: "it does not exist",
    errno.EACCES: "permission is denied",
    errno.ENOTDIR: "a part of the path is not a folder",
    errno.ELOOP: "its symbolic links lead in a circle",
    errno.ENAMETOOLONG: "the path is too long",
    errno.EIO: "the disk failed",
}

if sys.platform == "linux":
    import fcntl

    _FICLONE = 0x40049409  # from linux/fs.h: let the two files share their blocks until one changes

    def _clone(target: int, source: int) -> bool:
        """Whether the filesystem made a copy that costs nothing."""
        try:
            fcntl.ioctl(target, _FICLONE, source)
        except OSError:
            return False
        return True

else:

    def _clone(target: int, source: int) -> bool:
        return False
