"""Attachments by SHA-256, shared by all agents of a mesh on this machine.

    blobs/ab/cdef…       a blob; private to this user
    blobs/tmp/           what is being imported, or swept
    blobs/partial/       what is being received
    blobs/damaged/       what was found not to fit its name
    agents/<id>/blobs/   hard links: what that agent's messages need

Synchronous; callers use threads. Any number of processes and threads may work on it at once, and
each may be killed at any point. Decides nothing about who may have a blob. Invariant: what stands
under a blob's name was complete, hashed and synced before it got that name, and is never written
again; a name is only taken away when no link needs the blob.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from meshagent.errors import CorruptFile, LimitReached
from meshagent.storage.blobs.errors import Held, NotHeld, mapped_to_disk_full
from meshagent.storage.blobs.garbage import DAMAGED, GRACE_S, TEMPORARY, Swept, release, sweep
from meshagent.storage.blobs.image_sizes import dimensions
from meshagent.storage.blobs.importing import (
    ByteSource,
    Copied,
    Progress,
    copy_into,
    hash_of,
    opened_source,
)
from meshagent.storage.blobs.mime_types import HEAD_BYTES, mime_type
from meshagent.storage.blobs.partials import CHUNK_BYTES, Partial
from meshagent.storage.blobs.quota import Room
from meshagent.storage.blobs.safe_folders import SafeFolder, open_shelf, temporary_name, try_lock
from meshagent.storage.folders.files import mapped_errors

__all__ = ["CHUNK_BYTES", "BlobStore", "Reader", "Stored"]

READ_BYTES = 1024 * 1024
_AT_ONCE: int = getattr(os, "RWF_NOWAIT", 0)  # Linux gives what it has in memory, or nothing


@dataclass(frozen=True)
class Stored:
    """A blob in the store, and what its first bytes say; 0 by 0 when it is no picture."""

    sha256: bytes
    size: int
    mime: str
    width: int
    height: int


class BlobStore:
    """What is stored under `root`; nothing is, and no folder made, before the first use."""

    def __init__(self, root: Path, quota_bytes: int | None = None) -> None:
        self.root = root
        self._room = Room(root, quota_bytes)

    def __repr__(self) -> str:
        return f"BlobStore({str(self.root)!r})"

    def path(self, sha256: bytes) -> Path:
        """Where this blob is, if it is here. Its bytes must never be changed."""
        folder, name = _names(sha256)
        return self.root / folder / name

    def holds(self, sha256: bytes, size: int | None = None) -> bool:
        """Whether the blob is here, with that size; a link in its place never counts."""
        folder, name = _names(sha256)
        with mapped_errors(self.path(sha256), "look at"), self._shelf(folder) as shelf:
            return shelf is not None and _fits(shelf, name, size)

    def usage(self) -> int:
        """Bytes of all blobs and of all that is being received; a few seconds old at most."""
        with mapped_errors(self.root, "look at"):
            return self._room.used()

    def put(self, source: Path | BinaryIO, progress: Progress | None = None) -> Stored:
        """Copy a file or a stream into the store, as it is now.

        Raises UsageError when it can't be attached as it is, LimitReached when it does not fit.
        """
        report = progress or _no_report
        with opened_source(source) as opened:
            try:
                copied = self._import(opened, report)
            except LimitReached:
                found = self._find(opened, report)
                if found is None:
                    raise
                copied = found
        return _described(copied.sha256, copied.size, copied.head)

    def open(self, sha256: bytes) -> Reader:
        """The blob for reading, which no sweep can take away any more; raises NotHeld."""
        folder, name = _names(sha256)
        with mapped_errors(self.path(sha256), "read"), self._shelf(folder) as shelf:
            if shelf is None or shelf.find(name) is None:
                raise NotHeld(sha256)
            try:
                return Reader(self.path(sha256), shelf.open(name, os.O_RDONLY))
            except FileNotFoundError:
                raise NotHeld(sha256) from None

    def describe(self, sha256: bytes) -> Stored:
        """What is stored under this hash; raises NotHeld."""
        with self.open(sha256) as reader:
            head = reader.head(HEAD_BYTES)
        return _described(sha256, reader.size, head)

    def begin(self, sha256: bytes, size: int) -> Partial:
        """Receive a blob, from the start or from where it was left.

        Raises Held when there is nothing to receive, Busy when somebody else does, and QuotaReached
        or DiskFull (both LimitReached) when it does not fit; nothing is left behind then.
        """
        assert len(sha256) == 32, "not a SHA-256"
        assert size >= 0, "less than nothing"
        self._refuse_if_held(sha256, size)
        partial = Partial(self.root, sha256, size, self._room, self._placer(sha256, size))
        try:
            # It may have been finished by another one just before we got the lock.
            self._refuse_if_held(sha256, size)
        except Held:
            partial.discard()
            raise
        return partial

    def keep(self, sha256: bytes, holder: Path) -> None:
        """Note by a hard link in the agent's folder `holder` that it needs the blob.

        Raises NotHeld. When a sweep took the store's name between, it is put back from the link.
        """
        folder, name = _names(sha256)
        path = holder / sha256.hex()
        with (
            mapped_to_disk_full(path, "write"),
            open_shelf(holder, create=True) as links,
            self._shelf(folder) as shelf,
        ):
            linked = shelf is not None and _link(shelf, name, links, path.name)
            if not (linked or self._revive(links, sha256)):
                raise NotHeld(sha256)
            links.sync()

    def release(
        self,
        holder: Path,
        needed: Callable[[bytes], bool] | Container[bytes],
        now: float | None = None,
        grace_s: float = GRACE_S,
    ) -> int:
        """Drop the links of an agent that none of its messages needs; how many were dropped.

        Young ones stay: their message may be on its way into the database.
        """
        is_needed = needed if callable(needed) else needed.__contains__
        with mapped_errors(holder, "clean up"):
            return release(holder, is_needed, now, grace_s)

    def sweep(self, now: float | None = None, grace_s: float = GRACE_S) -> Swept:
        """Remove what nobody needs: blobs without a link, what was left half-done long ago."""
        with mapped_errors(self.root, "clean up"):
            swept = sweep(self.root, now, grace_s)
        self._room.forget()
        return swept

    def verify(self, sha256: bytes, progress: Progress | None = None) -> bool:
        """Hash the blob again; a damaged one is moved to `damaged`, so that it is fetched anew."""
        folder, name = _names(sha256)
        with self.open(sha256) as reader:
            if reader.digest(progress) == sha256:
                return True
            damaged = reader.identity()
        with (
            mapped_errors(self.path(sha256), "move"),
            open_shelf(self.root) as root,
            root.folder(folder) as shelf,
            root.folder(DAMAGED, create=True) as aside,
        ):
            found = shelf.find(name)
            if found is not None and os.path.samestat(found, damaged):
                shelf.touch(name)
                shelf.rename(name, aside, sha256.hex())
                aside.sync()
                shelf.sync()
        self._room.forget()
        return False

    def _import(self, source: ByteSource, report: Progress) -> Copied:
        name = temporary_name("import")
        path = self.root / TEMPORARY / name
        with (
            mapped_to_disk_full(path, "write", source.size or 0),
            open_shelf(self.root, create=True) as root,
            root.folder(TEMPORARY, create=True) as shelf,
            _temporary(shelf, name) as file,
        ):
            copied = copy_into(file, path, source, self._room, report)
            os.fsync(file)
            self._placer(copied.sha256, copied.size)(shelf, name)
        return copied

    def _find(self, source: ByteSource, report: Progress) -> Copied | None:
        """What does not fit may be here already: then it needs no room."""
        if source.descriptor is None:
            return None  # a stream can't be read again
        copied = hash_of(source, report)
        try:
            self._refuse_if_held(copied.sha256, copied.size)
        except Held:
            return copied
        return None

    def _refuse_if_held(self, sha256: bytes, size: int) -> None:
        folder, name = _names(sha256)
        with mapped_errors(self.path(sha256), "look at"), self._shelf(folder) as shelf:
            if shelf is not None and _fits(shelf, name, size) and shelf.touch(name):
                raise Held(sha256)

    def _placer(self, sha256: bytes, size: int) -> Callable[[SafeFolder, str], Path]:
        """What gives a complete, synced file the blob's name, unless the blob is here already."""
        folder, name = _names(sha256)

        def place(source: SafeFolder, temporary: str) -> Path:
            with self._shelf(folder, create=True) as shelf:
                assert shelf is not None
                if not (_fits(shelf, name, size) and shelf.touch(name)):
                    _place(source, temporary, shelf, name, size)
                    self._room.note(size)
                shelf.sync()
            return self.path(sha256)

        return place

    def _revive(self, links: SafeFolder, sha256: bytes) -> bool:
        """Give the store the blob back from the agent's own link, if that is sound."""
        name = sha256.hex()
        folder, stored_name = _names(sha256)
        if links.find(name) is None:
            return False
        with Reader(links.path / name, links.open(name, os.O_RDONLY)) as reader:
            sound = reader.digest() == sha256
        if not sound:
            links.remove(name)
            return False
        links.touch(name)
        with self._shelf(folder, create=True) as shelf:
            assert shelf is not None
            with contextlib.suppress(FileExistsError):
                links.link(name, shelf, stored_name)
            shelf.sync()
        return True

    @contextlib.contextmanager
    def _shelf(self, name: str, create: bool = False) -> Iterator[SafeFolder | None]:
        """A folder of the store; None when it is not there."""
        with contextlib.ExitStack() as stack:
            try:
                root = stack.enter_context(open_shelf(self.root, create))
                shelf = stack.enter_context(root.folder(name, create))
            except FileNotFoundError:
                if create:
                    raise
                yield None
                return
            yield shelf


class Reader:
    """A blob, opened: it can be read to the end whatever happens to its name."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, index: int, into: memoryview | None = None) -> memoryview:
        """Chunk `index`: CHUNK_BYTES long, or less at the end, or empty beyond it.

        It is read `into` memory of that length, from its start, or else into new memory.
        """
        chunk = self._room_for(index, into)
        with mapped_errors(self._path, "read"):
            found = os.preadv(self._descriptor, [chunk], index * CHUNK_BYTES) if chunk else 0
        if found != len(chunk):
            raise CorruptFile(
                f"Can't read {self._path}: it became shorter.",
                hint="Attach or fetch the file again.",
                path=str(self._path),
            )
        return chunk

    def read_at_once(self, index: int, into: memoryview) -> memoryview | None:
        """As `read`, but None when the disk would have to be waited for, and for any trouble."""
        chunk = self._room_for(index, into)
        if not _AT_ONCE:
            return None
        try:
            found = os.preadv(self._descriptor, [chunk], index * CHUNK_BYTES, _AT_ONCE)
        except OSError:  # not in memory, or not to be had so on this filesystem
            return None
        return chunk if found == len(chunk) else None

    def _room_for(self, index: int, into: memoryview | None) -> memoryview:
        assert index >= 0, "before the beginning"
        length = max(0, min(CHUNK_BYTES, self.size - index * CHUNK_BYTES))
        return memoryview(bytearray(length)) if into is None else into[:length]

    def head(self, length: int) -> bytes:
        """The first bytes."""
        with mapped_errors(self._path, "read"):
            return os.pread(self._descriptor, length, 0)

    def digest(self, progress: Progress | None = None) -> bytes:
        """The SHA-256 of all of it, as the disk has it now; empty when the disk can't read it."""
        found, at, report = hashlib.sha256(), 0, progress or _no_report
        with mapped_errors(self._path, "read"):
            _forget_cached(self._descriptor)
            while True:
                try:
                    block = os.pread(self._descriptor, READ_BYTES, at)
                except OSError as error:
                    if error.errno == errno.EIO:
                        return b""
                    raise
                if not block:
                    return found.digest()
                found.update(block)
                at += len(block)
                report(at, self.size)

    def identity(self) -> os.stat_result:
        """Which file this is, whatever it is called now."""
        return os.fstat(self._descriptor)

    def close(self) -> None:
        """Twice does no harm."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _names(sha256: bytes) -> tuple[str, str]:
    """The folder and the file of a blob."""
    assert len(sha256) == 32, "not a SHA-256"
    text = sha256.hex()
    return text[:2], text[2:]


def _fits(shelf: SafeFolder, name: str, size: int | None) -> bool:
    found = shelf.find(name)
    return found is not None and (size is None or found.st_size == size)


def _place(source: SafeFolder, temporary: str, shelf: SafeFolder, name: str, size: int) -> None:
    """Name the file without taking the place of one that fits: agents may have links to that."""
    try:
        source.link(temporary, shelf, name)
    except FileExistsError:
        if not _fits(shelf, name, size):  # cut short, or a link: never what was put there
            source.link_over(temporary, shelf, name)


def _link(shelf: SafeFolder, name: str, links: SafeFolder, link: str) -> bool:
    """Whether the agent has a link to the blob that is in the store now."""
    stored = shelf.find(name)
    if stored is None:
        return False
    found = links.find(link)
    try:
        if found is not None and os.path.samestat(stored, found):
            return links.touch(link) or _link(shelf, name, links, link)
        # A link to another file is one to a damaged blob that has been received anew since.
        shelf.link_over(name, links, link)
    except FileNotFoundError:  # a sweep was faster
        return False
    with contextlib.suppress(FileExistsError):
        links.link(link, shelf, name)
    return True


@contextlib.contextmanager
def _temporary(shelf: SafeFolder, name: str) -> Iterator[int]:
    """A new file that a sweep leaves alone while we live, and that is gone afterwards."""
    descriptor = shelf.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        try_lock(descriptor)
        yield descriptor
    finally:
        os.close(descriptor)
        shelf.remove(name)


def _described(sha256: bytes, size: int, head: bytes) -> Stored:
    width, height = dimensions(head)
    mime = mime_type(head, whole=size <= len(head))
    return Stored(sha256, size, mime, width, height)


def _forget_cached(descriptor: int) -> None:
    """What is read next comes from the disk; memory may still hold what the disk has lost."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # a filesystem that can't need not
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _no_report(done: int, total: int | None) -> None:
    """Nobody wants to know."""
