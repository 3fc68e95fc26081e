"""Drops for absent agents of this machine: files in the mesh folder, maildir style.

Written aside, synced, renamed; read in the order of their names; removed once they are taken.
Never looks into a drop. Invariant: a reader sees a whole file or none.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from meshagent.core.types import is_agent_id
from meshagent.errors import LimitReached, StorageError

__all__ = ["Spool"]

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

    def mine(self, bytes_max: int) -> Iterator[tuple[Path, bytes | None]]:
        """The files left for us, oldest numbers first; None for one that is no drop of any kind."""
        box = self._folder / self._me
        try:
            names = sorted(each.name for each in os.scandir(box) if each.name.endswith(_SUFFIX))
        except FileNotFoundError:
            return
        for name in names[:FILES_MAX]:
            yield box / name, _read(box / name, bytes_max)

    def settled(self, to: str, epoch: bytes, upto: int) -> None:
        """`to` has everything up to this number: our files that hold nothing else can go."""
        try:
            names = [each.name for each in os.scandir(self._folder / to)]
        except FileNotFoundError:
            return
        for name in names:
            agent, _, rest = name.removesuffix(_SUFFIX).rpartition(f".{epoch.hex()}.")
            if agent == self._me and rest.rpartition(".")[2].isdigit():
                if int(rest.rpartition(".")[2]) <= upto:
                    (self._folder / to / name).unlink(missing_ok=True)


def _read(path: Path, bytes_max: int) -> bytes | None:
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


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
