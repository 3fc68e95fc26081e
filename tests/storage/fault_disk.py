"""A disk under a database and its commit log that fails, tears or loses power where it is told to.

SQLite's files are written through a VFS of its own, the commit log's by way of `os` as its modules
see it; both count as operations of one disk. It knows what would be left after a power cut: a write
is there for all readers at once, and on the disk after a sync that succeeded. A sync that fails
forgets what it was to write, as Linux does: no later sync brings it back.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import apsw
import pytest

from meshagent.storage.log import commit_log, direct_io, log_file
from meshagent.storage.log.direct_io import DirectWriter
from meshagent.storage.mail import database, recovery

__all__ = ["ENDINGS", "Fault", "FaultDisk", "Files"]

SECTOR_BYTES = 512
ENDINGS = ("", "-wal", "-commits")
_SQLITE_CODES = {errno.EIO: apsw.SQLITE_IOERR_WRITE, errno.ENOSPC: apsw.SQLITE_FULL}
_numbers = count()

Files = dict[str, bytes]
"""What is on the disk, by the ending of the file's name."""


@dataclass(frozen=True)
class Fault:
    """What happens to an operation: `done` bytes of it are performed (all with -1), then it fails.

    `lasts`: every one after it fails too.
    """

    at: int
    number: int = errno.EIO
    done: int = 0
    lasts: bool = False


@dataclass
class _Image:
    """One file as a power cut would leave it."""

    content: bytearray = field(default_factory=bytearray)
    unsynced: list[tuple[int, bytes | None]] = field(default_factory=list)
    """Writes; without bytes, the file was cut to this length."""

    def sync(self) -> None:
        for at, data in self.unsynced:
            _put(self.content, at, data)
        self.unsynced.clear()


def _put(content: bytearray, at: int, data: bytes | None) -> None:
    if data is None:
        del content[at:]
        return
    content.extend(bytes(max(0, at + len(data) - len(content))))
    content[at : at + len(data)] = data


class FaultDisk:
    """The files of one database, `path` and those beside it."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, *, direct: bool) -> None:
        self.path, self.is_direct = path, direct
        self.is_sound = False
        """Whether it is a disk like others for now, of which nothing is noted."""
        self.operations = 0
        self.done: list[tuple[str, int]] = []
        """Of each operation its file, and how many bytes it writes; 0 for a sync and the like."""
        self.fault: Fault | None = None
        self.cut: Callable[[], None] = lambda: None
        """Called before each operation: here the power may be cut."""
        self.in_hand: tuple[str, int, bytes, bool] | None = None
        """The write that is under way: its file, place and bytes, and whether it syncs."""
        self._rng = random.Random(0)
        self._images: dict[str, _Image] = {}
        self._descriptors: dict[int, tuple[str, bool]] = {}
        self._patch_sqlite(monkeypatch)
        self._patch_log(monkeypatch, direct)

    def close(self) -> None:
        self._vfs.unregister()

    def forget(self) -> None:
        """Become a new disk. All that is random is the same again: so are the same lives."""
        self.load({})
        self.operations, self.fault = 0, None
        self.done.clear()
        self._rng.seed(0)
        apsw.randomness(0)

    def _random_bytes(self, size: int | None = None) -> bytes:
        return self._rng.randbytes(size or 32)

    # -- what is on it ------------------------------------------------------------------------

    def load(self, files: Files) -> None:
        """Begin with these, all of them synced."""
        self._images = {ending: _Image(bytearray(data)) for ending, data in files.items()}
        for ending in ENDINGS:
            self.beside(ending).unlink(missing_ok=True)
        for ending, data in files.items():
            self.beside(ending).write_bytes(data)

    def after_kill(self) -> Files:
        """What the end of the process leaves: every write, synced or not."""
        found = ((ending, self.beside(ending)) for ending in ENDINGS)
        return {ending: path.read_bytes() for ending, path in found if path.exists()}

    def after_power_cut(self) -> Files:
        """What a power cut leaves: only what was synced."""
        return {
            ending: bytes(self._images[ending].content)
            for ending in ENDINGS
            if ending in self._images and self.beside(ending).exists()
        }

    def torn(self) -> Iterator[Files]:
        """What a power cut leaves that comes in the midst of the write under way."""
        assert self.in_hand is not None
        ending, at, data, _ = self.in_hand
        for done in edges(at, len(data)):
            files = self.after_power_cut()
            content = bytearray(files.get(ending, b""))
            _put(content, at, data[:done])
            yield files | {ending: bytes(content)}

    def beside(self, ending: str) -> Path:
        return self.path.with_name(self.path.name + ending)

    # -- operations ---------------------------------------------------------------------------

    def operate(
        self, ending: str, perform: Callable[[int], Any], at: int = 0, data: bytes = b"",
        syncs: bool = False,
    ) -> Any:  # fmt: skip
        """Do it as the disk likes it; `perform` gets how many bytes are to be done."""
        if self.is_sound:
            return perform(len(data))
        self.in_hand = (ending, at, data, syncs)
        self.cut()
        number, fault = self.operations, self.fault
        self.operations += 1
        self.done.append((ending, len(data)))
        image = self._images.setdefault(ending, _Image())
        fails = fault is not None and (number == fault.at or (fault.lasts and number > fault.at))
        if not fails:
            result = perform(len(data))
            self._note(image, at, data, syncs)
            return result
        assert fault is not None
        done = len(data) if fault.done < 0 else min(fault.done, len(data))
        if done or fault.done < 0:
            perform(done)
            self._note(image, at, data[:done], syncs)
        elif syncs and not data:
            image.unsynced.clear()
        raise OSError(fault.number, "the disk failed")

    def _note(self, image: _Image, at: int, data: bytes, syncs: bool) -> None:
        if syncs and data:  # a write that is durable by itself says nothing of others
            _put(image.content, at, data)
            image.unsynced = [each for each in image.unsynced if not _covers(at, data, each)]
        elif syncs:
            image.sync()
        elif data:
            image.unsynced.append((at, data))

    def truncated(self, ending: str, size: int) -> None:
        if not self.is_sound:
            self._images.setdefault(ending, _Image()).unsynced.append((size, None))

    def removed(self, ending: str) -> None:
        if not self.is_sound:
            self._images.pop(ending, None)

    # -- under the commit log -----------------------------------------------------------------

    def _patch_log(self, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
        def opened(path: Path, flags: int, mode: int = 0o600) -> int:
            descriptor = os.open(path, flags, mode)
            self._descriptors[descriptor] = ("-commits", False)
            return descriptor

        def pwrite(descriptor: int, data: Any, at: int) -> int:
            ending, syncs = self._descriptors[descriptor]
            whole = bytes(data)
            written: int = self.operate(
                ending, lambda done: os.pwrite(descriptor, whole[:done], at), at, whole, syncs
            )
            return written

        def truncate(descriptor: int, size: int) -> None:
            self.operate("-commits", lambda _: os.ftruncate(descriptor, size))
            self.truncated("-commits", size)

        def open_direct(path: Path) -> DirectWriter:
            descriptor = os.open(path, os.O_RDWR)  # its disk is this one: no flag is needed
            self._descriptors[descriptor] = ("-commits", True)
            return DirectWriter(descriptor)

        fake = SimpleNamespace(**{
            **vars(os), "open": opened, "pwrite": pwrite, "ftruncate": truncate,
        })  # fmt: skip
        monkeypatch.setattr(log_file, "os", fake)
        monkeypatch.setattr(direct_io, "os", fake)
        monkeypatch.setattr(log_file, "open_direct", open_direct if direct else lambda path: None)

        def sync_data(_: int) -> None:
            self.operate("-commits", lambda _: None, syncs=True)

        def sync_folder(_: Path) -> None:
            self.operate("folder", lambda _: None, syncs=True)

        def remove(path: Path) -> None:
            path.unlink(missing_ok=True)
            self.removed("-commits")

        monkeypatch.setattr(log_file, "sync_data", sync_data)
        monkeypatch.setattr(log_file, "sync_folder", sync_folder)
        monkeypatch.setattr(commit_log, "remove_quietly", remove)
        # A short file: it is full, lengthened and begun anew within few commits.
        monkeypatch.setattr(log_file, "STEP_BYTES", 4 * 1024)
        monkeypatch.setattr(log_file, "FILE_BYTES_MAX", 8 * 1024)
        monkeypatch.setattr(database, "REWIND_BYTES", 4 * 1024)
        monkeypatch.setattr(database, "WAL_PAGES_MAX", 40)

    # -- under SQLite -------------------------------------------------------------------------

    def _patch_sqlite(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._vfs = _Vfs(self)
        monkeypatch.setattr(recovery.secrets, "token_bytes", self._random_bytes)
        real = apsw.Connection
        monkeypatch.setattr(apsw, "Connection", lambda *a, **k: real(*a, **k, vfs=self._vfs.name))


def _covers(at: int, data: bytes, other: tuple[int, bytes | None]) -> bool:
    start, content = other
    return content is not None and at <= start and start + len(content) <= at + len(data)


def edges(at: int, size: int) -> Iterator[int]:
    """How many bytes of a write there are at each end of a sector within it."""
    first = SECTOR_BYTES - at % SECTOR_BYTES
    yield from range(first, size, SECTOR_BYTES)


class _Vfs(apsw.VFS):
    def __init__(self, disk: FaultDisk) -> None:
        self.name = f"faults-{next(_numbers)}"
        super().__init__(self.name, "unix", makedefault=True)  # randomness comes from the default
        self._disk = disk

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        path = name.filename() if hasattr(name, "filename") else name
        ending = str(path)[len(str(self._disk.path)) :]
        return _File(self._disk, ending, name, flags)

    def xRandomness(self, size: int) -> bytes:
        return bytes(range(1, 200))[:size]

    def xDelete(self, name: str, sync: bool) -> None:
        super().xDelete(name, False)
        self._disk.removed(name[len(str(self._disk.path)) :])


class _File(apsw.VFSFile):
    def __init__(self, disk: FaultDisk, ending: str, name: Any, flags: list[int]) -> None:
        super().__init__("unix", name, flags)
        self._disk, self._ending = disk, ending

    def xWrite(self, data: bytes, offset: int) -> None:
        write = super().xWrite
        _as_sqlite(
            lambda: self._disk.operate(
                self._ending, lambda done: write(data[:done], offset), offset, bytes(data)
            )
        )

    def xSync(self, flags: int) -> None:
        _as_sqlite(lambda: self._disk.operate(self._ending, lambda _: None, syncs=True))

    def xTruncate(self, size: int) -> None:
        truncate = super().xTruncate
        _as_sqlite(lambda: self._disk.operate(self._ending, lambda _: truncate(size)))
        self._disk.truncated(self._ending, size)


def _as_sqlite(operate: Callable[[], Any]) -> None:
    try:
        operate()
    except OSError as error:
        raise apsw.exception_for(_SQLITE_CODES[error.errno or 0]) from error
