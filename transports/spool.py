"""Drops for absent agents of this machine: files in the mesh folder, maildir style.

Written aside, synced, renamed; read in the order of their names; removed once they are taken.
Never looks into a drop. Invariant: a reader sees a whole file or none.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from meshagent.core.model.peers import is_agent_id
from meshagent.errors import LimitReached, StorageError

__all__ = ["Spool", "read", "stream_of"]

FILES_MAX = 10_000  # per recipient; what does not fit stays in the sender's outbox
_SUFFIX = ".mail"


class Spool:
    """The drops of one mesh folder."""

    def __init__(self, folder: Path, me: str) -> None:
        self._folder, self._me = folder, me

    def drop(self, to: str, epoch: bytes, first: int, last: int, data: bytes) -> None:
        """Leave a file for `to`, durably. One that holds the same numbers is replaced."""
        assert is_agent_id(to), to
        box = self._folder / to
        try:
            box.mkdir(mode=0o700, parents=True, exist_ok=True)
            if sum(1 for _ in os.scandir(box)) >= FILES_MAX:
                raise LimitReached(f"{box} holds {FILES_MAX} drops, which is the limit.")
            name = f"{self._me}.{epoch.hex()}.{first:016d}.{last:016d}"
            temporary = box / f".{name}.{secrets.token_hex(4)}.tmp"
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, box / (name + _SUFFIX))
            _sync(box)
        except OSError as error:
            raise StorageError(f"{box} does not take a drop: {error.strerror}.") from error

    def dropped(self, to: str, epoch: bytes) -> list[tuple[int, int]]:
        """The first and last numbers in each of our files that `to` has not taken yet."""
        beginning = f"{self._me}.{epoch.hex()}."
        ranges = [
            each.removeprefix(beginning).removesuffix(_SUFFIX).split(".")
            for each in _names(self._folder / to)
            if each.startswith(beginning)
        ]
        return sorted(
            (int(each[0]), int(each[-1])) for each in ranges if all(map(str.isdigit, each))
        )

    def outdated(self, to: str, epoch: bytes) -> list[Path]:
        """Our files for `to` whose numbers are not of this epoch."""
        theirs, ours = f"{self._me}.", f"{self._me}.{epoch.hex()}."
        paths = self._files(to)
        return [p for p in paths if p.name.startswith(theirs) and not p.name.startswith(ours)]

    def mine(self) -> list[Path]:
        """The files left for us: of each sender and epoch the smallest numbers first."""
        return self._files(self._me)

    def _files(self, owner: str) -> list[Path]:
        box = self._folder / owner
        return [box / name for name in sorted(_names(box))[:FILES_MAX]]


def stream_of(path: Path) -> str:
    """What is the same for all files of one sender and epoch."""
    return path.name.rsplit(".", 3)[0]


def read(path: Path, bytes_max: int) -> bytes | None:
    """What is in a file; None when it is gone, or no drop of any kind."""
    flags = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > bytes_max:
            return None
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return file.read(bytes_max)
    finally:
        os.close(descriptor)


def _names(box: Path) -> list[str]:
    """Of the drops in a folder."""
    try:
        return [each.name for each in os.scandir(box) if each.name.endswith(_SUFFIX)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{box} can't be read: {error.strerror}.") from error


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
