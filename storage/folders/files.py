"""How bytes reach the disk and come back: whole or not at all, private, bounded.

Decides what a failed file operation means to a person, in one table. Never knows what the bytes
are. Invariant: a reader of a name sees the old content or the new one, never a part of either.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from meshagent.errors import CorruptFile, LimitReached, MeshError, StorageError

__all__ = [
    "link_new",
    "make_private_folder",
    "mapped_errors",
    "place_folder",
    "read_bounded",
    "remove_quietly",
    "storage_error",
    "sync_data",
    "sync_file",
    "sync_folder",
    "temporary_beside",
    "write_new",
    "write_private",
]

_FREE_SPACE = "Free some space and try again; nothing was changed."
_CHOOSE_FOLDER = "Choose another folder with --dir, or make this one writable."

# What the system said -> which error it is here, the reason and the next step for a person.
_MEANINGS: dict[int, tuple[type[MeshError], str, str]] = {
    errno.ENOSPC: (LimitReached, "the disk is full", _FREE_SPACE),
    errno.EDQUOT: (LimitReached, "your disk quota is used up", _FREE_SPACE),
    errno.EMFILE: (LimitReached, "too many files are open", "Raise 'ulimit -n' and try again."),
    errno.ENFILE: (LimitReached, "the system has too many files open", "Close some programs."),
    errno.EROFS: (StorageError, "the filesystem is read-only", _CHOOSE_FOLDER),
    errno.EACCES: (StorageError, "permission is denied", _CHOOSE_FOLDER),
    errno.EPERM: (StorageError, "the system does not permit it", _CHOOSE_FOLDER),
    errno.ENOENT: (StorageError, "it does not exist", "Check the path, or run 'meshagent init'."),
    errno.ENOTDIR: (StorageError, "a part of the path is not a folder", "Check the path."),
    errno.EEXIST: (StorageError, "something else is in its place", "Move that away first."),
    errno.EISDIR: (StorageError, "it is a folder", "Move that folder away and try again."),
    errno.ELOOP: (StorageError, "it is a symbolic link", "Put the file itself in its place."),
    errno.ENAMETOOLONG: (StorageError, "the path is too long", "Choose a shorter path."),
    errno.EIO: (StorageError, "the disk failed", "Check the disk; the system log says more."),
}


def storage_error(error: OSError, path: Path, doing: str) -> MeshError:
    """What a failed file operation means: the one place where OSError becomes one of ours."""
    number = error.errno or 0
    fallback = (StorageError, error.strerror or "the system gave no reason", "Check the path.")
    kind, reason, hint = _MEANINGS.get(number, fallback)
    return kind(f"Can't {doing} {path}: {reason}.", hint=hint, path=str(path), errno=number)


@contextlib.contextmanager
def mapped_errors(path: Path, doing: str) -> Iterator[None]:
    """Turn any OSError of the block into one of ours, about `path`."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, path, doing) from error


def write_private(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace `path` by `data`, atomically and durably; the folder must exist."""
    temporary = temporary_beside(path)
    with mapped_errors(path, "write"):
        try:
            write_new(temporary, data, mode)
            os.replace(temporary, path)
        except BaseException:
            remove_quietly(temporary)
            raise
        sync_folder(path.parent)


def write_new(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Create `path` with `data` and sync it; raises OSError, FileExistsError if it is there.

    The caller syncs the folder, once for all the files it writes.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _flags("O_CLOEXEC", "O_NOFOLLOW", "O_BINARY")
    descriptor = os.open(path, flags, mode)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def link_new(path: Path, data: bytes, mode: int = 0o600) -> bool:
    """Give `path` this content unless it exists; False when somebody else was first.

    Unlike `write_new`, nobody ever sees the file half-written.
    """
    temporary = temporary_beside(path)
    with mapped_errors(path, "write"):
        try:
            write_new(temporary, data, mode)
            os.link(temporary, path)
        except FileExistsError:
            return False
        finally:
            remove_quietly(temporary)
        sync_folder(path.parent)
    return True


def place_folder(target: Path, build: Callable[[Path], None]) -> bool:
    """Let `build` fill a folder, then put it at `target` in one step.

    False when a folder that is not empty is there already: it stays as it is.
    """
    temporary = temporary_beside(target)
    with mapped_errors(target, "create"):
        try:
            os.mkdir(temporary, 0o700)
            build(temporary)
            sync_folder(temporary)
            placed = _rename_unless_taken(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        if placed:
            sync_folder(target.parent)
    return placed


def _rename_unless_taken(source: Path, target: Path) -> bool:
    try:
        os.rename(source, target)
    except OSError as error:
        taken = (errno.ENOTEMPTY, errno.EEXIST) if os.name == "posix" else (errno.EACCES,)
        if target.is_dir() and error.errno in taken:
            return False
        raise
    return True


def read_bounded(path: Path, limit: int, *, follow_links: bool = True) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    # Without O_NONBLOCK, opening a pipe that stands in the file's place would hang for ever.
    flags = os.O_RDONLY | _flags("O_CLOEXEC", "O_NONBLOCK", "O_BINARY")
    if not follow_links:
        flags |= _flags("O_NOFOLLOW")
    with mapped_errors(path, "read"), open(os.open(path, flags), "rb") as file:
        _require_regular(path, os.fstat(file.fileno()).st_mode)
        data = file.read(limit + 1)
    if len(data) > limit:
        raise CorruptFile(
            f"Can't read {path}: it holds more than {limit} bytes, which is the limit.",
            hint="Restore it from a backup.",
            path=str(path),
            limit=limit,
        )
    return data


def make_private_folder(path: Path) -> None:
    """Make `path` and its parents if needed, and close `path` to other users."""
    with mapped_errors(path, "create"):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.name == "posix" and stat.S_IMODE(path.stat().st_mode) & 0o077:
            path.chmod(0o700)


def sync_file(path: Path) -> None:
    """Make what another library wrote into a file durable; raises OSError."""
    descriptor = os.open(path, os.O_RDWR | _flags("O_CLOEXEC", "O_BINARY"))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


if sys.platform == "darwin":  # a plain fsync leaves the data in the drive's cache

    def sync_data(descriptor: int) -> None:
        """Make what was written to an open file durable; raises OSError."""
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
else:
    sync_data = os.fdatasync


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable; raises OSError. Windows has no such call."""
    if sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _require_regular(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))
    if not stat.S_ISREG(mode):
        raise CorruptFile(
            f"Can't read {path}: it is not a regular file.",
            hint="Remove it and restore the file from a backup.",
            path=str(path),
        )


def temporary_beside(path: Path) -> Path:
    """A name in the same folder that nobody uses."""
    # The leading dot and the ending keep lists of agents and globs from taking it for the real one.
    return path.with_name(f".{path.name.lstrip('.')}.{secrets.token_hex(8)}.tmp")


def remove_quietly(path: Path) -> None:
    """Remove a file of ours, if it is there and can be."""
    with contextlib.suppress(OSError):
        path.unlink()


def _flags(*names: str) -> int:
    """Those of the named open flags that this platform has."""
    return sum(getattr(os, name, 0) for name in names)
