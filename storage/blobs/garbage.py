"""What goes from the blob store when nobody needs it any more.

Decides by hard links and age alone: a blob to which no agent has a link, an import whose process
died, a partial that nobody touched for days. Never reads what a blob holds. Invariant: whoever
linked or touched a blob before it was taken gets it back; what is locked is left alone.

Age is that of the last change to the file's names (`st_ctime`): a new link, a dropped one and a
touch all make it young, and no program can set it back.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshagent.errors import StorageError
from meshagent.storage.blobs.partials import PARTIALS_MAX, lock_journal, parse_partial, stem_of
from meshagent.storage.blobs.quota import PARTIAL
from meshagent.storage.blobs.safe_folders import (
    SWEPT,
    SafeFolder,
    is_hash_name,
    open_shelf,
    put_back,
    remove_if_untouched,
    try_lock,
)

__all__ = ["DAMAGED", "GRACE_S", "TEMPORARY", "Swept", "release", "sweep"]

TEMPORARY = "tmp"
DAMAGED = "damaged"

DAY_S = 86_400.0
GRACE_S = 3_600.0  # from a blob's arrival to the commit of the message that names it
TEMPORARY_GRACE_S = 60.0  # from a file's making to its locking: microseconds
PARTIAL_DAYS = 14  # a sender who is back after two weeks of holidays sends from the beginning
PARTIAL_BYTES_MAX = 64 * 1024**3  # kept for those who may come back; the oldest go first
DAMAGED_DAYS = 30  # for a person to look at


@dataclass(frozen=True)
class Swept:
    """How many files went, and how many bytes that freed."""

    count: int = 0
    bytes: int = 0

    def __add__(self, other: Swept) -> Swept:
        return Swept(self.count + other.count, self.bytes + other.bytes)


def sweep(root: Path, now: float | None, grace_s: float) -> Swept:
    """Go through the whole store once; raises OSError."""
    moment = time.time() if now is None else now
    total = Swept()
    try:
        with open_shelf(root) as top:
            with top.folder(TEMPORARY, create=True) as aside:
                total += _sweep_temporary(top, aside, moment)
                for name in top.names():
                    if is_hash_name(name, 2):
                        total += _sweep_blobs(top, name, aside, moment, grace_s)
            total += _sweep_partials(top, moment)
            total += _sweep_damaged(top, moment)
    except FileNotFoundError:  # nothing was ever stored
        return total
    return total


def release(
    holder: Path, needed: Callable[[bytes], bool], now: float | None, grace_s: float
) -> int:
    """Drop the links in an agent's folder that it does not need; raises OSError."""
    moment = time.time() if now is None else now
    dropped = 0
    try:
        with open_shelf(holder) as links:
            for name, found in links.entries():
                wanted = is_hash_name(name[:64]) and needed(bytes.fromhex(name[:64]))
                if name.endswith(SWEPT):
                    if moment - found.st_ctime > TEMPORARY_GRACE_S:
                        _settle(links, name, links, name[:64], wanted)
                elif not wanted and _is_old(links, name, found, moment, grace_s):
                    dropped += remove_if_untouched(links, name, found, links, alone=False)
    except FileNotFoundError:  # the agent never had an attachment
        return dropped
    return dropped


def _is_old(
    shelf: SafeFolder, name: str, found: os.stat_result, now: float, grace_s: float
) -> bool:
    if found.st_ctime > now + grace_s:
        shelf.touch(name)  # from a clock that ran ahead: its age begins now
    return now - found.st_ctime > grace_s


def _sweep_blobs(
    top: SafeFolder, folder: str, aside: SafeFolder, now: float, grace_s: float
) -> Swept:
    total = Swept()
    # A link in the folder's place is refused by whoever stores a blob there, with an explanation.
    with contextlib.suppress(FileNotFoundError, StorageError), top.folder(folder) as shelf:
        for name, found in shelf.entries():
            if found.st_nlink != 1 or not _is_old(shelf, name, found, now, grace_s):
                continue
            hidden_as = folder + name
            if remove_if_untouched(shelf, name, found, aside, alone=True, hidden_as=hidden_as):
                total += Swept(1, found.st_size)
    return total


def _sweep_temporary(top: SafeFolder, aside: SafeFolder, now: float) -> Swept:
    """Imports whose process is gone, and what a sweep that was killed had in its hands."""
    total = Swept()
    for name, found in aside.entries():
        if now - found.st_ctime <= TEMPORARY_GRACE_S:
            continue
        if name.endswith(SWEPT) and is_hash_name(name[:64]):
            with top.folder(name[:2], create=True) as shelf:
                _settle(aside, name, shelf, name[2:64], found.st_nlink > 1)
        elif _is_abandoned(aside, name) and aside.remove(name):
            total += Swept(1, found.st_size if found.st_nlink == 1 else 0)
    return total


def _settle(aside: SafeFolder, hidden: str, shelf: SafeFolder, name: str, wanted: bool) -> None:
    """End what a killed sweep began."""
    if wanted:
        put_back(aside, hidden, shelf, name)
    else:
        aside.remove(hidden)


def _is_abandoned(shelf: SafeFolder, name: str) -> bool:
    try:
        descriptor = shelf.open(name, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return try_lock(descriptor)
    finally:
        os.close(descriptor)


def _sweep_partials(top: SafeFolder, now: float) -> Swept:
    """The forgotten, then the oldest ones beyond what is kept at all."""
    total = Swept()
    with contextlib.suppress(FileNotFoundError), top.folder(PARTIAL) as shelf:
        partials = _partials(shelf)
        count, kept_bytes = len(partials), sum(each.bytes for each in partials)
        for each in sorted(partials, key=lambda partial: partial.touched):
            crowded = count > PARTIALS_MAX or kept_bytes > PARTIAL_BYTES_MAX
            if not (crowded or each.is_over or now - each.touched > PARTIAL_DAYS * DAY_S):
                continue
            if _remove_partial(shelf, each.stem):
                total += Swept(1, each.bytes)
                count -= 1
                kept_bytes -= each.bytes
    return total


@dataclass
class _PartialFiles:
    """A partial's two files together."""

    stem: str
    touched: float = 0.0
    bytes: int = 0
    is_over: bool = True  # no data any more, or the blob's name on it: its process died at the end


def _partials(shelf: SafeFolder) -> list[_PartialFiles]:
    partials: dict[str, _PartialFiles] = {}
    for name, found in shelf.entries():
        parsed = parse_partial(name)
        if parsed is not None:
            stem = stem_of(*parsed)
            partial = partials.setdefault(stem, _PartialFiles(stem))
            partial.touched = max(partial.touched, found.st_mtime)
            partial.bytes += found.st_size
            if name.endswith(".data") and found.st_nlink == 1:
                partial.is_over = False
    return list(partials.values())


def _remove_partial(shelf: SafeFolder, stem: str) -> bool:
    """Unless somebody is at work on it."""
    journal = lock_journal(shelf, stem)
    if journal is None:
        return False
    try:
        shelf.remove(f"{stem}.data")
        return shelf.remove(f"{stem}.journal")
    finally:
        os.close(journal)


def _sweep_damaged(top: SafeFolder, now: float) -> Swept:
    total = Swept()
    with contextlib.suppress(FileNotFoundError), top.folder(DAMAGED) as shelf:
        for name, found in shelf.entries():
            if now - found.st_ctime > DAMAGED_DAYS * DAY_S and shelf.remove(name):
                total += Swept(1, found.st_size if found.st_nlink == 1 else 0)
    return total
