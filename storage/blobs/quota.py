"""Whether more bytes may come: the mesh's quota, and the space on the disk.

Decides before anything is written. Invariant: nobody is refused by an old count; a refusal counts
anew first. Several processes that ask within the same seconds may together exceed the quota by
what each was granted; what is reserved by one is seen by the next count of all.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

from meshagent.errors import StorageError
from meshagent.storage.blobs.errors import DiskFull, QuotaReached, free_bytes
from meshagent.storage.blobs.safe_folders import SafeFolder, is_hash_name, open_shelf

__all__ = ["MARGIN_BYTES", "PARTIAL", "Room"]

MARGIN_BYTES = 32 * 1024 * 1024  # stays free: the databases and their journals must go on
COUNT_FRESH_S = 10.0  # counting 10,000 blobs takes some 50 ms
PARTIAL = "partial"


class Room:
    """How much the store uses, and whether more fits."""

    def __init__(self, root: Path, quota_bytes: int | None) -> None:
        self._root = root
        self._quota = quota_bytes
        self._lock = threading.Lock()
        self._used = 0
        self._counted_at: float | None = None

    def used(self, fresh: bool = False) -> int:
        """Bytes of blobs and of partials, as reserved; counted at most every few seconds."""
        with self._lock:
            now = time.monotonic()
            if fresh or self._counted_at is None or now - self._counted_at > COUNT_FRESH_S:
                self._used = _count(self._root)
                self._counted_at = now
            return self._used

    def note(self, more: int) -> None:
        """We ourselves added (or removed) so much."""
        with self._lock:
            self._used = max(0, self._used + more)

    def forget(self) -> None:
        """Count anew when it is asked next."""
        with self._lock:
            self._counted_at = None

    def require(self, wanted: int, on_disk: int | None = None) -> None:
        """Raise unless `wanted` bytes fit into the quota, and `on_disk` of them onto the disk."""
        if self._quota is not None and self.used() + wanted > self._quota:
            used = self.used(fresh=True)
            if used + wanted > self._quota:
                raise QuotaReached(self._quota, used, wanted)
        needed = wanted if on_disk is None else on_disk
        free = free_bytes(self._root)
        if needed > 0 and needed > free - MARGIN_BYTES:
            raise DiskFull(self._root, needed, free, MARGIN_BYTES)


def _count(root: Path) -> int:
    total = 0
    with contextlib.suppress(FileNotFoundError), open_shelf(root) as shelf:
        for name in shelf.names():
            if name == PARTIAL or is_hash_name(name, 2):
                total += _count_shelf(shelf, name)
    return total


def _count_shelf(root: SafeFolder, name: str) -> int:
    # A link in a folder's place is refused by whoever needs that folder, and counts as nothing.
    with contextlib.suppress(FileNotFoundError, StorageError), root.folder(name) as shelf:
        return sum(found.st_size for _, found in shelf.entries())
    return 0
