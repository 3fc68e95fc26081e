"""The whole store, read again."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from storage.blobs.blob_files import noise, sha

from meshagent.storage.blobs.store import BlobStore
from meshagent.storage.blobs.verification import audit, held_in


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def flip(store: BlobStore, sha256: bytes, at: int) -> None:
    path = store.path(sha256)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def unheard(done: int, total: int | None) -> None:
    """Nobody listens."""


def test_a_store_that_was_never_used_is_sound_and_stays_unmade(store: BlobStore) -> None:
    found = audit(store, unheard)
    assert (found.sound, found.damaged, found.lost, found.unread) == (0, (), (), ())
    assert not store.root.exists()


def test_every_blob_is_read_and_a_flipped_bit_is_found_and_set_aside(store: BlobStore) -> None:
    sizes = (0, 1, 3 * 1024 * 1024 + 7)
    hashes = [store.put(io.BytesIO(noise(size))).sha256 for size in sizes]
    heard: list[tuple[int, int | None]] = []
    found = audit(store, lambda done, total: heard.append((done, total)))
    assert (found.sound, found.sound_bytes, found.damaged) == (3, sum(sizes), ())
    assert heard == sorted(heard)
    assert heard[-1] == (sum(sizes), sum(sizes))
    flip(store, hashes[2], sizes[2] - 1)
    found = audit(store, unheard)
    assert (found.sound, found.damaged, found.lost) == (2, (hashes[2],), ())
    assert not store.holds(hashes[2])
    assert (store.root / "damaged" / hashes[2].hex()).exists()


def test_what_was_set_aside_is_missed_until_it_is_here_again(store: BlobStore) -> None:
    data = noise(1000)
    store.put(io.BytesIO(data))
    flip(store, sha(data), 5)
    assert audit(store, unheard).damaged == (sha(data),)
    found = audit(store, unheard)
    assert (found.damaged, found.lost) == ((), (sha(data),))
    store.put(io.BytesIO(data))
    found = audit(store, unheard)
    assert (found.sound, found.damaged, found.lost) == (1, (), ())


def test_what_is_no_blob_is_left_alone(store: BlobStore) -> None:
    sha256 = store.put(io.BytesIO(b"x")).sha256
    folder = store.path(sha256).parent
    (folder / "notes.txt").write_text("mine")
    (folder / ("0" * 62)).symlink_to("/etc/hostname")
    (store.root / "ff").mkdir(exist_ok=True)
    found = audit(store, unheard)
    assert (found.sound, found.damaged, found.unread) == (1, (), ())
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_folder_in_whose_place_a_link_stands_is_told_and_the_rest_is_read(
    store: BlobStore, tmp_path: Path
) -> None:
    first = store.put(io.BytesIO(b"x")).sha256
    name = "00" if first[0] else "01"
    (store.root / name).symlink_to(tmp_path)
    found = audit(store, unheard)
    assert found.sound == 1
    assert len(found.unread) == 1
    assert "symbolic link" in found.unread[0]


def test_who_needs_a_blob_is_known_by_the_links(store: BlobStore, tmp_path: Path) -> None:
    sha256 = store.put(io.BytesIO(b"x")).sha256
    holders = [tmp_path / "a" / "blobs", tmp_path / "b" / "blobs"]
    for each in holders:
        each.parent.mkdir()
    store.keep(sha256, holders[1])
    assert held_in(holders, sha256) == [holders[1]]
