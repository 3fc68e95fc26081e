"""What the blob store answers when it does not do as asked.

StorageError
├── Held            the bytes are there already: nothing to pull
├── Busy            another process or thread pulls them at this moment
├── NotHeld         the store does not have them
└── WrongHash       all bytes came, and they are not those that were promised
LimitReached
├── QuotaReached    the mesh's own bound; waiting does not help (`permanent`)
├── DiskFull        too little space; the same call succeeds when space returns
└── TooManyPartials more unfinished transfers than are kept
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from meshagent.errors import LimitReached, StorageError
from meshagent.storage.folders.files import mapped_errors

__all__ = [
    "Busy",
    "DiskFull",
    "Held",
    "NotHeld",
    "QuotaReached",
    "TooManyPartials",
    "TypeNotAllowed",
    "WrongHash",
    "as_size",
    "free_bytes",
    "mapped_to_disk_full",
]


class Held(StorageError):
    """The store has this blob already."""

    def __init__(self, sha256: bytes) -> None:
        super().__init__(f"The blob {sha256.hex()} is here already.", sha256=sha256)


class Busy(StorageError):
    """Somebody else pulls this blob now."""

    def __init__(self, sha256: bytes) -> None:
        super().__init__(
            f"The blob {sha256.hex()} is being received by another agent of this machine.",
            hint="Look again when that is done.",
            sha256=sha256,
        )


class NotHeld(StorageError):
    """The store does not have this blob."""

    def __init__(self, sha256: bytes) -> None:
        super().__init__(
            f"The blob {sha256.hex()} is not here.",
            hint="Fetch the attachment again.",
            sha256=sha256,
        )


class WrongHash(StorageError):
    """All bytes came, and they are not those that were promised."""

    def __init__(self, expected: bytes, found: bytes) -> None:
        super().__init__(
            f"What was received has the SHA-256 {found.hex()}, not {expected.hex()}.",
            hint="It was thrown away; it must be fetched anew.",
            expected=expected,
            found=found,
        )


class QuotaReached(LimitReached):
    """The mesh's quota for attachments would be exceeded."""

    def __init__(self, quota: int, used: int, wanted: int) -> None:
        super().__init__(
            f"{as_size(wanted)} of attachments do not fit: {as_size(used)} of the quota of "
            f"{as_size(quota)} are used.",
            hint="Raise the quota, or delete messages with attachments.",
            quota=quota,
            used=used,
            wanted=wanted,
            permanent=True,
        )


class TypeNotAllowed(LimitReached):
    """Its contents are not of a type that is taken here, whatever its sender says."""

    def __init__(self, mime: str, allowed: Sequence[str]) -> None:
        super().__init__(f"Its contents are {mime}; allowed: {', '.join(allowed)}.", mime=mime)


class DiskFull(LimitReached):
    """The disk has too little space; it is worth trying again. `reason` says it in short."""

    def __init__(self, path: Path, wanted: int, free: int, margin: int) -> None:
        super().__init__(
            f"The disk is full: {as_size(wanted)} are needed at {path}, where {as_size(free)} are "
            f"free{_aside(margin)}.",
            hint="Free some space; it goes on by itself.",
            path=str(path),
            wanted=wanted,
            free=free,
            margin=margin,
            permanent=False,
        )
        self.reason = "the disk is full"
        if margin:  # it was asked for as a whole, so it is known how much is missing
            self.reason += f": {as_size(wanted + margin - free)} more are needed"


class TooManyPartials(LimitReached):
    """More unfinished transfers than the store keeps."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"{limit} attachments are half-received already, which is the limit.",
            hint="It goes on when some of them are complete or given up.",
            limit=limit,
            permanent=False,
        )


@contextlib.contextmanager
def mapped_to_disk_full(path: Path, doing: str, wanted: int = 0) -> Iterator[None]:
    """As `mapped_errors`, and a full disk is a `DiskFull` with its figures."""
    with mapped_errors(path, doing):
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DiskFull(path, wanted, _free_near(path), 0) from error


def free_bytes(path: Path) -> int:
    """What an ordinary user may still write on the disk of `path`; raises OSError."""
    if not hasattr(os, "statvfs"):
        return 2**63 - 1  # then only a failed write tells
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def _aside(margin: int) -> str:
    return f" and {as_size(margin)} stay free so that messages still flow" if margin else ""


def _free_near(path: Path) -> int:
    """As `free_bytes`, of a file that may be gone by now."""
    for each in (path, *path.parents):
        with contextlib.suppress(OSError):
            return free_bytes(each)
    return 0


def as_size(count: int) -> str:
    """Bytes for a person: 1,536 is `1.5 KiB`."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
