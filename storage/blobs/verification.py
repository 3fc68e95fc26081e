"""Reads every blob of a store again and says which are not what their names say.

Decides nothing about what a blob is for; whoever asks knows the messages. Invariant: what was found
damaged is set aside before it is told, so that it is served to nobody and can be fetched anew.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from meshagent.errors import StorageError
from meshagent.storage.blobs.errors import NotHeld
from meshagent.storage.blobs.garbage import DAMAGED
from meshagent.storage.blobs.importing import Progress
from meshagent.storage.blobs.safe_folders import is_hash_name, open_shelf
from meshagent.storage.blobs.store import BlobStore
from meshagent.storage.folders.files import mapped_errors

__all__ = ["Audit", "audit", "held_in"]


@dataclass(frozen=True)
class Audit:
    """What came of it."""

    sound: int
    sound_bytes: int
    damaged: tuple[bytes, ...]
    lost: tuple[bytes, ...]  # set aside at an earlier time, and not here again since
    unread: tuple[str, ...]  # why some could not be looked at


def audit(blobs: BlobStore, report: Progress) -> Audit:
    """Go through the whole store once; `report` hears how many bytes of how many are read."""
    damaged: list[bytes] = []
    unread: list[str] = []
    with mapped_errors(blobs.root, "look at"):
        found = _listed(blobs.root, unread)
        aside = _set_aside(blobs.root)
    total = sum(size for _, size in found)
    done = sound = sound_bytes = 0
    for sha256, size in found:
        try:
            whole = blobs.verify(sha256, partial(_add, report, done, total))
        except NotHeld:  # nobody needed it any more, and a sweep took it
            continue
        except StorageError as error:
            unread.append(error.message)
            continue
        finally:
            done += size
        if whole:
            sound, sound_bytes = sound + 1, sound_bytes + size
        else:
            damaged.append(sha256)
    lost = [each for each in aside if not blobs.holds(each)]
    return Audit(sound, sound_bytes, tuple(damaged), tuple(lost), tuple(unread))


def held_in(holders: Iterable[Path], sha256: bytes) -> list[Path]:
    """Those of the agents' folders in which a link says that the agent needs the blob."""
    return [each for each in holders if os.path.lexists(each / sha256.hex())]


def _add(report: Progress, before: int, total: int, read: int, size: int | None) -> None:
    report(before + read, total)


def _listed(root: Path, unread: list[str]) -> list[tuple[bytes, int]]:
    """Every blob and its size; `unread` is told which folders are none."""
    found: list[tuple[bytes, int]] = []
    with contextlib.suppress(FileNotFoundError), open_shelf(root) as top:
        for folder in sorted(name for name in top.names() if is_hash_name(name, 2)):
            try:
                with top.folder(folder) as shelf:
                    found += [
                        (bytes.fromhex(folder + name), status.st_size)
                        for name, status in shelf.entries()
                        if is_hash_name(name, 62)
                    ]
            except FileNotFoundError:
                continue
            except StorageError as error:
                unread.append(error.message)
    return found


def _set_aside(root: Path) -> list[bytes]:
    """What was found damaged before this time."""
    with (
        contextlib.suppress(FileNotFoundError),
        open_shelf(root) as top,
        top.folder(DAMAGED) as shelf,
    ):
        return [bytes.fromhex(name) for name, _ in shelf.entries() if is_hash_name(name)]
    return []
