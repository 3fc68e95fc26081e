"""One node per agent: a file lock that the kernel drops when its process ends, however it ends.

Decides who runs; never waits for a holder. Invariant: of all processes, and all locks in this
one, at most one `AgentLock` on a path is held. The file stays when the lock is released: removing
it would let two processes lock two different files of the same name.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

from meshagent.storage.folders.files import mapped_errors

__all__ = ["AgentLock"]

PROBE_ATTEMPTS_MAX = 200  # `holder` locks for microseconds; 200 looks outlast any number of them
PROBE_PAUSE_S = 0.0005
PID_DIGITS_MAX = 20


class AgentLock:
    """Is this agent running, and where? `acquire` makes it ours."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def __repr__(self) -> str:
        return f"AgentLock({str(self.path)!r}, held={self.held})"

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._descriptor is not None

    def acquire(self) -> bool:
        """Take the lock and write our pid into it; False when another process or object has it."""
        assert self._descriptor is None, "acquired twice"
        with mapped_errors(self.path, "lock"):
            descriptor = self._open(os.O_RDWR | os.O_CREAT)
            try:
                if not (_lock(descriptor) and self._is_current(descriptor)):
                    return False
                os.ftruncate(descriptor, 0)
                os.lseek(descriptor, 0, os.SEEK_SET)
                os.write(descriptor, b"%d\n" % os.getpid())
                self._descriptor, descriptor = descriptor, -1
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
        return True

    def holder(self) -> int | None:
        """The holder's pid, 0 when it is held but has not said by whom, None when it is free."""
        if self._descriptor is not None:
            return os.getpid()
        with mapped_errors(self.path, "look at"):
            try:
                descriptor = self._open(os.O_RDWR)
            except FileNotFoundError:
                return None
            try:
                if _lock_is_free(descriptor):
                    return None
                os.lseek(descriptor, 0, os.SEEK_SET)
                return _parse_pid(os.read(descriptor, PID_DIGITS_MAX))
            finally:
                os.close(descriptor)

    def release(self) -> None:
        """Give it up; does nothing when it is not held."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
        os.close(descriptor)

    def _open(self, flags: int) -> int:
        # Not inheritable: a child that outlives us must not keep the agent locked.
        return os.open(self.path, flags | getattr(os, "O_CLOEXEC", 0), 0o600)

    def _is_current(self, descriptor: int) -> bool:
        """Whether the file that we locked is still the one that others will find."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False


def _parse_pid(data: bytes) -> int:
    text = data.strip()
    return int(text) if text.isdigit() else 0


if sys.platform == "win32":
    import msvcrt

    # Windows locks are mandatory: we lock a byte beyond the pid so that the pid can be read.
    _LOCKED_BYTE = 1 << 20

    def _lock(descriptor: int) -> bool:
        for _ in range(PROBE_ATTEMPTS_MAX):
            os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
            try:
                msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            except OSError:
                time.sleep(PROBE_PAUSE_S)
            else:
                return True
        return False

    def _lock_is_free(descriptor: int) -> bool:
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)
        return True

else:
    import fcntl

    def _lock(descriptor: int) -> bool:
        """An exclusive lock. Somebody's look (a shared lock, for an instant) is not a holder."""
        for _ in range(PROBE_ATTEMPTS_MAX):
            if _try(descriptor, fcntl.LOCK_EX):
                return True
            if not _lock_is_free(descriptor):
                return False
            time.sleep(PROBE_PAUSE_S)
        return False

    def _lock_is_free(descriptor: int) -> bool:
        if not _try(descriptor, fcntl.LOCK_SH):
            return False
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        return True

    def _try(descriptor: int, kind: int) -> bool:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
