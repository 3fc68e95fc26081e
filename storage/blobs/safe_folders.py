"""The folders of the blob store, held open: every name is looked up in the folder that was checked.

Decides where a path of the store may lead: nowhere but into a real folder of its own. Never knows
what the files hold. Invariant: no symbolic link below the store's root is followed, the root
included; it could stand in a project that somebody else wrote. All raises OSError; callers map it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from meshagent.errors import StorageError

__all__ = [
    "SWEPT",
    "SafeFolder",
    "is_hash_name",
    "open_shelf",
    "put_back",
    "remove_if_untouched",
    "temporary_name",
    "try_lock",
]

SWEPT = ".swept"  # ends the name of a file that is being looked at for the last time
_HEX = frozenset("0123456789abcdef")


class SafeFolder:
    """One folder of the store."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @contextlib.contextmanager
    def folder(self, name: str, create: bool = False) -> Iterator[SafeFolder]:
        """A folder in this one; FileNotFoundError when it is not there and not to be made."""
        with _opened(self.path / name, name, self._descriptor, create) as shelf:
            yield shelf

    def open(self, name: str, flags: int) -> int:
        """A descriptor of a file here, private when it is made now. Links raise ELOOP."""
        # Without O_NONBLOCK, a pipe in the file's place would hang us.
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(name, flags, 0o600, dir_fd=self._descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EEXIST, "is not a regular file", str(self.path / name))
        return descriptor

    def find(self, name: str) -> os.stat_result | None:
        """What stands there, if it is a regular file."""
        try:
            found = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return found if stat.S_ISREG(found.st_mode) else None

    def entries(self) -> list[tuple[str, os.stat_result]]:
        """The regular files here."""
        found = []
        with os.scandir(self._descriptor) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False):
                        found.append((entry.name, entry.stat(follow_symlinks=False)))
        return found

    def names(self) -> list[str]:
        """All that is here, of whatever kind."""
        return os.listdir(self._descriptor)

    def link(self, name: str, target: SafeFolder, new_name: str) -> None:
        """Another name for the same file; FileExistsError when that is taken."""
        os.link(
            name,
            new_name,
            src_dir_fd=self._descriptor,
            dst_dir_fd=target._descriptor,
            follow_symlinks=False,
        )

    def rename(self, name: str, target: SafeFolder, new_name: str) -> None:
        """Move a file, in place of whatever file is there."""
        os.rename(name, new_name, src_dir_fd=self._descriptor, dst_dir_fd=target._descriptor)

    def link_over(self, name: str, target: SafeFolder, new_name: str) -> None:
        """Another name for the same file, in place of whatever file is there."""
        temporary = temporary_name(new_name)
        self.link(name, target, temporary)
        try:
            target.rename(temporary, target, new_name)
        finally:
            # Renaming a name onto another one of the same file does nothing, and leaves both.
            target.remove(temporary)

    def remove(self, name: str) -> bool:
        """Whether it was there."""
        try:
            os.unlink(name, dir_fd=self._descriptor)
        except FileNotFoundError:
            return False
        return True

    def touch(self, name: str) -> bool:
        """Make a file young again, so that no sweep takes it; False when it is not there."""
        try:
            os.utime(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def sync(self) -> None:
        """Make the names here durable."""
        os.fsync(self._descriptor)


@contextlib.contextmanager
def open_shelf(path: Path, create: bool = False) -> Iterator[SafeFolder]:
    """The folder at `path`, which must not be a link; FileNotFoundError as `SafeFolder.folder`."""
    with _opened(path, str(path), None, create) as shelf:
        yield shelf


@contextlib.contextmanager
def _opened(path: Path, name: str, parent: int | None, create: bool) -> Iterator[SafeFolder]:
    if create:
        _make(name, parent)
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=parent)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise StorageError(
            f"Can't use {path}: it is a symbolic link or a file, and must be a real folder.",
            hint="Move that away; the folder is made anew.",
            path=str(path),
        ) from error
    try:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o077:
            os.fchmod(descriptor, 0o700)
        yield SafeFolder(path, descriptor)
    finally:
        os.close(descriptor)


def _make(name: str, parent: int | None) -> None:
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:
        return
    # The files in it are only as durable as its own name.
    if parent is not None:
        os.fsync(parent)
        return
    descriptor = os.open(os.path.dirname(name) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_if_untouched(
    shelf: SafeFolder,
    name: str,
    seen: os.stat_result,
    aside: SafeFolder,
    *,
    alone: bool,
    hidden_as: str = "",
) -> bool:
    """Remove a file unless somebody touched it (or, with `alone`, linked it) since it was `seen`.

    No lock can be held by all who touch and link, so it is moved aside, where nobody can do so any
    more, looked at again, and put back if need be. A crash in between leaves it aside as `.swept`.
    """
    hidden = f"{hidden_as or name}.{secrets.token_hex(4)}{SWEPT}"
    try:
        shelf.rename(name, aside, hidden)
    except FileNotFoundError:
        return False
    now = aside.find(hidden)
    if now is None or now.st_mtime_ns != seen.st_mtime_ns or (alone and now.st_nlink > 1):
        put_back(aside, hidden, shelf, name)
        return False
    return aside.remove(hidden)


def put_back(aside: SafeFolder, hidden: str, shelf: SafeFolder, name: str) -> None:
    """Undo a removal, unless the name has been given anew."""
    with contextlib.suppress(FileExistsError, FileNotFoundError):
        aside.link(hidden, shelf, name)
    aside.remove(hidden)


def temporary_name(name: str) -> str:
    """A name that nobody uses, which no list takes for a blob."""
    return f".{name}.{secrets.token_hex(8)}.tmp"


def is_hash_name(name: str, length: int = 64) -> bool:
    """Whether the name can be a SHA-256 in our spelling, or the part of one."""
    return len(name) == length and _HEX.issuperset(name)


if sys.platform == "win32":

    def try_lock(descriptor: int) -> bool:
        """The store needs folders by descriptor, which Windows has not: nothing gets here."""
        return True

else:
    import fcntl

    def try_lock(descriptor: int) -> bool:
        """An exclusive lock that ends with the descriptor or its process; False when taken."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
