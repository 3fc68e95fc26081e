"""What the tests of the blob store share: blobs to store, and the store as it lies on the disk."""

from __future__ import annotations

import hashlib
import os
import random
import stat
from pathlib import Path

from meshagent.storage.blobs.store import CHUNK_BYTES, BlobStore

SIZES = [0, 1, CHUNK_BYTES - 1024, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * 1024 * 1024 + 7]
LATER = 10**9  # seconds that no grace outlasts


def noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def pieces(data: bytes) -> list[bytes]:
    return [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]


def read_all(store: BlobStore, sha256: bytes) -> bytes:
    with store.open(sha256) as reader:
        return b"".join(reader.read(index) for index in range(-(-reader.size // CHUNK_BYTES)))


def files_in(folder: Path) -> list[str]:
    """Every file below, links included, as a path from there."""
    found = [
        os.path.relpath(os.path.join(base, name), folder)
        for base, _, names in os.walk(folder)
        for name in names
    ]
    return sorted(found)


def blobs_in(store: BlobStore) -> list[str]:
    return [each for each in files_in(store.root) if len(each.split("/")[0]) == 2]


def assert_private(folder: Path) -> None:
    for base, folders, names in os.walk(folder):
        for name in [".", *folders]:
            assert stat.S_IMODE(os.lstat(os.path.join(base, name)).st_mode) == 0o700
        for name in names:
            assert stat.S_IMODE(os.lstat(os.path.join(base, name)).st_mode) == 0o600


def assert_sound(store: BlobStore) -> None:
    """Whatever has a blob's name has that content."""
    for each in blobs_in(store):
        name = each.replace("/", "")
        assert sha((store.root / each).read_bytes()).hex() == name
