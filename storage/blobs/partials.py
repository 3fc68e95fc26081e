"""A blob that is being received: its data, and a journal of the chunks that came whole.

    partial/<hex>.<size>.data      as long as the blob will be: the space is reserved
    partial/<hex>.<size>.journal   a header, then for each chunk its number and the hash up to it

The size is part of the name, so that an offer with a size that lies can't undo an honest transfer.
Decides from where a transfer resumes. Never syncs before the end: after a power cut the journal may
be ahead of the data or behind it, so on opening every journalled chunk is read and checked, and the
first that does not fit is where it goes on. Invariant: whoever holds the journal's lock is the only
one that writes; the blob's own name appears only over bytes with the right SHA-256, synced.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from meshagent.errors import LocalProtocolError
from meshagent.storage.blobs.errors import (
    Busy,
    TooManyPartials,
    WrongHash,
    mapped_to_disk_full,
)
from meshagent.storage.blobs.quota import PARTIAL, Room
from meshagent.storage.blobs.safe_folders import SafeFolder, is_hash_name, open_shelf, try_lock
from meshagent.storage.blobs.writeback import Writeback

__all__ = ["CHUNK_BYTES", "PARTIALS_MAX", "Partial", "lock_journal", "parse_partial", "stem_of"]

CHUNK_BYTES = 512 * 1024  # as on the wire, core/frames.py; a test compares them
PARTIALS_MAX = 1_000  # unfinished transfers of all agents of the mesh on this machine
LOCK_ATTEMPTS_MAX = 20  # each time, another one finished between our opening and our locking

_MAGIC = b"mesh blob partial 2\n"
_HEADER = struct.Struct(f">{len(_MAGIC)}s32sQI")  # magic, SHA-256, size, bytes of a chunk
_RECORD = struct.Struct(">I4s")  # number of a chunk, beginning of the SHA-256 of all up to its end

Place = Callable[[SafeFolder, str], Path]
"""Gives a complete, synced file its name in the store."""


class Partial:
    """What has come of one blob. `received` bytes are there, from the beginning, and checked."""

    def __init__(self, root: Path, sha256: bytes, size: int, room: Room, place: Place) -> None:
        """Reserves the space or finds what came before; raises Busy, LimitReached."""
        self.sha256 = sha256
        self.size = size
        self.received = 0
        self._stem = stem_of(sha256, size)
        self._shelf_path = root / PARTIAL
        self._path = self._shelf_path / f"{self._stem}.data"
        self._room = room
        self._place = place
        self._hash = hashlib.sha256()
        self._data: int | None = None
        self._journal: int | None = None
        self._writeback: Writeback | None = None
        with (
            mapped_to_disk_full(self._path, "write", size),
            open_shelf(root, create=True) as top,
            top.folder(PARTIAL, create=True) as shelf,
        ):
            self._open(shelf)

    def __repr__(self) -> str:
        return f"Partial({self._stem}, received={self.received})"

    def __enter__(self) -> Partial:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, *pieces: bytes | memoryview) -> None:
        """Append the next chunk, in as many pieces as it came, or several chunks.

        All are of full length but for the last one of the blob. When it raises, nothing of the
        failed chunk counts and it may be given again.
        """
        length = sum(map(len, pieces))
        if length > self.size - self.received:
            raise LocalProtocolError(f"{length} bytes are more than the rest of the blob.")
        ends_whole = length % CHUNK_BYTES == 0 or self.received + length == self.size
        if not ends_whole:
            raise LocalProtocolError(f"{length} bytes are not a whole number of chunks.")
        for chunk in _chunks(pieces):
            self._write_chunk(chunk)

    def finish(self) -> Path:
        """Check the whole, make it durable and give it its name in the store."""
        data, _ = self._descriptors()
        if self.received != self.size:
            missing = self.size - self.received
            raise LocalProtocolError(f"The blob is not complete: {missing} bytes are missing.")
        found = self._hash.digest()
        if found != self.sha256:
            self.discard()
            raise WrongHash(self.sha256, found)
        with mapped_to_disk_full(self._path, "write"):
            os.fsync(data)
            with open_shelf(self._shelf_path) as shelf:
                placed = self._place(shelf, f"{self._stem}.data")
                self._remove(shelf)
        self._room.note(-self.size)  # whoever placed it has counted it as a blob
        self._close()
        return placed

    def close(self) -> None:
        """Leave it for a later resume; does nothing after `finish` or `discard`.

        What is reserved and not used is given back: a sender that says much and sends little
        must not use up the quota. The resume reserves it again.
        """
        if self._data is not None and self._journal is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._data, self.received)
                self._room.note(self.received - self.size)
        self._close()

    def _close(self) -> None:
        for descriptor in (self._data, self._journal):
            if descriptor is not None:
                os.close(descriptor)
        self._data = self._journal = None

    def discard(self) -> None:
        """Forget what has come."""
        with mapped_to_disk_full(self._path, "remove"):
            self._descriptors()
            with open_shelf(self._shelf_path) as shelf:
                self._remove(shelf)
        self._room.note(-self.size)
        self._close()

    def _open(self, shelf: SafeFolder) -> None:
        found = shelf.find(f"{self._stem}.data")
        if found is None and len(shelf.names()) >= 2 * PARTIALS_MAX:
            raise TooManyPartials(PARTIALS_MAX)
        self._journal = lock_journal(shelf, self._stem)
        if self._journal is None:
            raise Busy(self.sha256)
        try:
            self._reserve(shelf)
            self._check()
        except BaseException:
            self._close()
            raise

    def _reserve(self, shelf: SafeFolder) -> None:
        """Open the data, with all the space it will need."""
        name = f"{self._stem}.data"
        found = shelf.find(name)
        if found is not None and found.st_nlink != 1:
            # It is (also) a finished blob, or another's file: writing into it would change that.
            shelf.remove(name)
            found = None
        had = min(found.st_size, self.size) if found else 0
        try:
            blocks = min(found.st_blocks * 512, self.size) if found else 0
            self._room.require(self.size - had, on_disk=self.size - blocks)
            self._data = shelf.open(name, os.O_RDWR | os.O_CREAT)
            _allocate(self._data, had, self.size)
            self._writeback = Writeback(self._data, drop=True)
        except BaseException:
            if found is None:
                self._remove(shelf)
            raise
        self._room.note(self.size - had)

    def _check(self) -> None:
        """Find out how much of the data is as the journal says, and forget the rest of both."""
        data, journal = self._descriptors()
        header = _HEADER.pack(_MAGIC, self.sha256, self.size, CHUNK_BYTES)
        if os.pread(journal, len(header), 0) != header:
            os.ftruncate(journal, 0)
            _write_all(journal, (header,), 0)
        while self.received < self.size:
            number = self.received // CHUNK_BYTES
            record = os.pread(journal, _RECORD.size, _record_at(number))
            length = min(CHUNK_BYTES, self.size - self.received)
            chunk = os.pread(data, length, self.received) if len(record) == _RECORD.size else b""
            upto = self._hash.copy()
            upto.update(chunk)
            if len(chunk) != length or record != _RECORD.pack(number, upto.digest()[:4]):
                break
            self._hash = upto
            self.received += length
        os.ftruncate(journal, _record_at(-(-self.received // CHUNK_BYTES)))

    def _write_chunk(self, pieces: Sequence[memoryview]) -> None:
        data, journal = self._descriptors()
        number, length = self.received // CHUNK_BYTES, sum(map(len, pieces))
        upto = self._hash.copy()
        for piece in pieces:
            upto.update(piece)
        with mapped_to_disk_full(self._path, "write", length):
            _write_all(data, pieces, self.received)
            record = _RECORD.pack(number, upto.digest()[:4])
            _write_all(journal, (record,), _record_at(number))
        self._hash = upto
        self.received += length
        if self._writeback is not None:
            self._writeback.wrote(self.received)

    def _remove(self, shelf: SafeFolder) -> None:
        # The journal goes last: it is the lock, and without it another one could begin anew.
        shelf.remove(f"{self._stem}.data")
        shelf.remove(f"{self._stem}.journal")

    def _descriptors(self) -> tuple[int, int]:
        if self._data is None or self._journal is None:
            raise LocalProtocolError("This partial is closed.")
        return self._data, self._journal


def stem_of(sha256: bytes, size: int) -> str:
    """What the names of a partial's two files begin with."""
    return f"{sha256.hex()}.{size}"


def parse_partial(name: str) -> tuple[bytes, int] | None:
    """The SHA-256 and the size, if a file of that name belongs to a partial."""
    parts = name.split(".")
    if len(parts) != 3 or not is_hash_name(parts[0]) or parts[2] not in ("data", "journal"):
        return None
    if not (parts[1].isdecimal() and parts[1].isascii() and len(parts[1]) <= 20):
        return None
    return bytes.fromhex(parts[0]), int(parts[1])


def lock_journal(shelf: SafeFolder, stem: str) -> int | None:
    """The journal's descriptor, locked; None when another one has it. Raises OSError."""
    name = f"{stem}.journal"
    for _ in range(LOCK_ATTEMPTS_MAX):
        descriptor = shelf.open(name, os.O_RDWR | os.O_CREAT)
        if not try_lock(descriptor):
            os.close(descriptor)
            return None
        found = shelf.find(name)
        if found is not None and os.path.samestat(found, os.fstat(descriptor)):
            if found.st_nlink == 1:
                return descriptor
            shelf.remove(name)  # another file's name on it: writing would change that file
        # Else its holder removed it between, and ours would be a lock on nothing.
        os.close(descriptor)
    return None


def _record_at(number: int) -> int:
    return _HEADER.size + number * _RECORD.size


def _allocate(descriptor: int, had: int, size: int) -> None:
    """Give the file its full length, with real blocks where the system can promise them."""
    try:
        if size > 0 and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):  # then only a failed write tells
            os.ftruncate(descriptor, size)
            return
        os.ftruncate(descriptor, had)  # a part of the blocks may have been taken
        raise
    os.ftruncate(descriptor, size)


def _chunks(pieces: Iterable[bytes | memoryview]) -> Iterator[list[memoryview]]:
    """The same bytes, as the pieces of each chunk."""
    chunk: list[memoryview] = []
    room = CHUNK_BYTES
    for piece in pieces:
        rest = memoryview(piece)
        while len(rest) >= room:
            yield [*chunk, rest[:room]]
            rest, chunk, room = rest[room:], [], CHUNK_BYTES
        if rest:
            chunk.append(rest)
            room -= len(rest)
    if chunk:
        yield chunk


def _write_all(descriptor: int, pieces: Sequence[bytes | memoryview], at: int) -> None:
    left = [memoryview(each) for each in pieces]
    while left:
        written = os.pwritev(descriptor, left, at)
        at += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]
