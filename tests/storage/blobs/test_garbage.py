"""What a message needs stays; what nobody needs goes, but never while somebody reaches for it."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from storage.blobs.blob_files import LATER, assert_private, blobs_in, files_in, noise, read_all, sha

from meshagent.errors import StorageError
from meshagent.storage.blobs import garbage as sweeping
from meshagent.storage.blobs import safe_folders as shelves
from meshagent.storage.blobs.errors import NotHeld
from meshagent.storage.blobs.garbage import DAY_S, GRACE_S, PARTIAL_DAYS, Swept
from meshagent.storage.blobs.safe_folders import SafeFolder
from meshagent.storage.blobs.store import CHUNK_BYTES, BlobStore, Reader

DATA = noise(300_000)
SHA = sha(DATA)


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


@pytest.fixture
def holder(tmp_path: Path) -> Path:
    return tmp_path / "agent-blobs"


def put(store: BlobStore, data: bytes = DATA) -> bytes:
    return store.put(io.BytesIO(data)).sha256


def later() -> float:
    return time.time() + LATER


def soon(seconds: float) -> float:
    return time.time() + seconds


# Links --------------------------------------------------------------------------------------------


def test_a_blob_that_an_agent_keeps_is_never_swept(store: BlobStore, holder: Path) -> None:
    put(store)
    store.keep(SHA, holder)
    assert (holder / SHA.hex()).samefile(store.path(SHA))
    assert store.sweep(later()) == Swept(0, 0)
    assert read_all(store, SHA) == DATA
    assert_private(holder)


def test_a_blob_without_a_link_goes_after_the_grace(store: BlobStore) -> None:
    put(store)
    assert store.sweep(soon(GRACE_S - 10)) == Swept(0, 0)
    assert store.sweep(soon(GRACE_S + 10)) == Swept(1, len(DATA))
    assert not store.holds(SHA)
    assert files_in(store.root) == []
    assert store.usage() == 0


def test_a_blob_goes_when_the_last_of_its_agents_lets_go(store: BlobStore, tmp_path: Path) -> None:
    put(store)
    holders = [tmp_path / "one", tmp_path / "two"]
    for each in holders:
        store.keep(SHA, each)
    for each in holders:
        assert store.sweep(later()).count == 0
        assert store.release(each, set(), later()) == 1
    assert store.sweep(later()).count == 1


def test_a_link_stays_while_it_is_needed_or_young(store: BlobStore, holder: Path) -> None:
    put(store)
    store.keep(SHA, holder)
    assert store.release(holder, {SHA}, later()) == 0
    assert store.release(holder, lambda sha256: sha256 == SHA, later()) == 0
    assert store.release(holder, set(), soon(GRACE_S - 10)) == 0
    assert store.release(holder, lambda sha256: False, soon(GRACE_S + 10)) == 1
    assert files_in(holder) == []
    assert store.holds(SHA)


def test_keeping_twice_is_keeping(store: BlobStore, holder: Path) -> None:
    put(store)
    store.keep(SHA, holder)
    store.keep(SHA, holder)
    assert files_in(holder) == [SHA.hex()]
    assert store.path(SHA).stat().st_nlink == 2


def test_what_is_not_here_can_not_be_kept(store: BlobStore, holder: Path) -> None:
    with pytest.raises(NotHeld):
        store.keep(SHA, holder)
    assert files_in(holder) == []
    assert not store.root.exists()


def test_the_agents_link_gives_the_store_its_name_back(store: BlobStore, holder: Path) -> None:
    put(store)
    store.keep(SHA, holder)
    store.path(SHA).unlink()
    store.path(SHA).parent.rmdir()
    store.keep(SHA, holder)
    assert store.path(SHA).samefile(holder / SHA.hex())


def test_a_damaged_link_gives_nothing_back(store: BlobStore, holder: Path) -> None:
    put(store)
    store.keep(SHA, holder)
    store.path(SHA).unlink()
    (holder / SHA.hex()).write_bytes(b"damaged")
    with pytest.raises(NotHeld):
        store.keep(SHA, holder)
    assert not store.holds(SHA)
    put(store)
    store.keep(SHA, holder)
    assert (holder / SHA.hex()).read_bytes() == DATA


def test_links_in_the_holders_place_lead_nowhere(store: BlobStore, tmp_path: Path) -> None:
    put(store)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"precious")
    (tmp_path / "linked").symlink_to(outside)
    for act in (
        lambda: store.keep(SHA, tmp_path / "linked"),
        lambda: store.release(tmp_path / "linked", set(), later()),
    ):
        with pytest.raises(StorageError, match="symbolic link"):
            act()
    holder = tmp_path / "holder"
    holder.mkdir()
    (holder / SHA.hex()).symlink_to(outside / "precious")
    store.keep(SHA, holder)
    assert (holder / SHA.hex()).samefile(store.path(SHA))
    assert (outside / "precious").read_bytes() == b"precious"
    assert files_in(outside) == ["precious"]


# Races: the other one acts at the worst moment ----------------------------------------------------


def at_the_last_moment(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[], object], before: bool
) -> None:
    """Let `act` happen just before or after the sweep moves the file aside."""
    real = SafeFolder.rename

    def rename(self: SafeFolder, name: str, target: SafeFolder, new_name: str) -> None:
        if not new_name.endswith(shelves.SWEPT):
            real(self, name, target, new_name)
            return
        if before:
            act()
        real(self, name, target, new_name)
        if not before:
            act()

    monkeypatch.setattr(SafeFolder, "rename", rename)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("act", ["put", "begin", "keep"])
def test_whoever_finds_a_blob_while_it_is_swept_has_it_or_is_told(
    store: BlobStore, holder: Path, monkeypatch: pytest.MonkeyPatch, act: str, before: bool
) -> None:
    put(store)
    outcome: list[str] = []

    def reach() -> None:
        try:
            if act == "put":
                put(store)
            elif act == "keep":
                store.keep(SHA, holder)
            else:
                store.begin(SHA, len(DATA)).discard()
                outcome.append("begun")
                return
        except StorageError as error:
            outcome.append(type(error).__name__)
        else:
            outcome.append("had")

    at_the_last_moment(monkeypatch, reach, before)
    store.sweep(later())
    assert len(outcome) == 1
    expected = {"put": "had", "begin": "Held", "keep": "had"}
    if before or act == "put":
        assert outcome == [expected[act]]
        assert read_all(store, SHA) == DATA
    else:
        assert outcome == [{"begin": "begun", "keep": "NotHeld"}[act]]
    assert files_in(store.root) == blobs_in(store)


@pytest.mark.parametrize("before", [True, False])
def test_a_link_that_is_kept_anew_while_it_is_dropped_stays(
    store: BlobStore, holder: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    put(store)
    store.keep(SHA, holder)
    at_the_last_moment(monkeypatch, lambda: store.keep(SHA, holder), before)
    store.release(holder, set(), later())
    assert files_in(holder) == [SHA.hex()]
    assert (holder / SHA.hex()).samefile(store.path(SHA))


def test_a_name_that_a_dying_sweep_took_is_given_back_by_the_link(
    store: BlobStore, holder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store)
    real = SafeFolder.link_over

    def link_over(self: SafeFolder, name: str, target: SafeFolder, new_name: str) -> None:
        real(self, name, target, new_name)
        store.path(SHA).unlink()

    monkeypatch.setattr(SafeFolder, "link_over", link_over)
    store.keep(SHA, holder)
    assert store.path(SHA).samefile(holder / SHA.hex())


def test_a_blob_that_was_received_long_after_it_began_is_young(store: BlobStore) -> None:
    with store.begin(SHA, len(DATA)) as partial:
        partial.write(DATA)
        data = store.root / "partial" / f"{SHA.hex()}.{len(DATA)}.data"
        os.utime(data, (0, 0))
        partial.finish()
    assert store.sweep().count == 0
    assert store.holds(SHA)


def test_what_is_stored_again_is_young_again(store: BlobStore) -> None:
    put(store)
    found = store.path(SHA).stat()
    os.utime(store.path(SHA), (0, 0))
    put(store)
    assert store.path(SHA).stat().st_mtime >= found.st_mtime
    assert store.path(SHA).stat().st_ino == found.st_ino


def test_a_reader_reads_on_when_the_blob_is_swept(store: BlobStore) -> None:
    put(store)
    with store.open(SHA) as reader:
        store.sweep(later())
        assert not store.holds(SHA)
        assert b"".join((reader.read(0), reader.read(1))) == DATA


def test_a_clock_that_ran_ahead_keeps_nothing_for_ever(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store)
    touched: list[str] = []
    real = SafeFolder.touch
    monkeypatch.setattr(SafeFolder, "touch", lambda *each: touched.append(each[1]) or real(*each))
    store.sweep(time.time() - LATER)
    assert touched == [SHA.hex()[2:]]
    assert store.holds(SHA)


# What killed processes leave ----------------------------------------------------------------------


def test_a_dead_import_goes_and_a_living_one_stays(store: BlobStore) -> None:
    put(store)
    dead = store.root / "tmp/.import.0123.tmp"
    dead.write_bytes(b"half of a fi")
    assert store.sweep(soon(30)).count == 0

    def sweep_meanwhile(done: int, total: int | None) -> None:
        assert store.sweep(soon(600)).count == (1 if done == len(other) else 0)

    other = noise(1_000, seed=2)
    store.put(io.BytesIO(other), sweep_meanwhile)
    assert read_all(store, sha(other)) == other
    assert not dead.exists()


@pytest.mark.parametrize("linked", [True, False])
def test_a_sweep_that_was_killed_is_ended_by_the_next(
    store: BlobStore, holder: Path, linked: bool
) -> None:
    put(store)
    if linked:
        store.keep(SHA, holder)
    store.path(SHA).rename(store.root / "tmp" / f"{SHA.hex()}.0123{shelves.SWEPT}")
    store.sweep(soon(600))
    assert store.holds(SHA) is linked
    assert files_in(store.root) == blobs_in(store)


@pytest.mark.parametrize("needed", [True, False])
def test_a_release_that_was_killed_is_ended_by_the_next(
    store: BlobStore, holder: Path, needed: bool
) -> None:
    put(store)
    store.keep(SHA, holder)
    hidden = holder / f"{SHA.hex()}.0123{shelves.SWEPT}"
    (holder / SHA.hex()).rename(hidden)
    (holder / ".left.tmp").write_bytes(b"")
    store.release(holder, {SHA} if needed else set(), later())
    assert files_in(holder) == ([SHA.hex()] if needed else [])


# Partials -----------------------------------------------------------------------------------------


def begun(store: BlobStore, number: int, size: int = 10) -> bytes:
    sha256 = bytes([number] * 32)
    with store.begin(sha256, size) as partial:
        partial.write(bytes(size))
    return sha256


def age(store: BlobStore, sha256: bytes, size: int, seconds: float) -> None:
    for ending in ("data", "journal"):
        path = store.root / "partial" / f"{sha256.hex()}.{size}.{ending}"
        os.utime(path, (time.time() - seconds,) * 2)


def test_a_partial_goes_when_nobody_came_back_for_days(store: BlobStore) -> None:
    begun(store, 1)
    with store.begin(bytes([2] * 32), 10):
        assert store.sweep(soon(PARTIAL_DAYS * DAY_S - 60)).count == 0
        swept = store.sweep(soon(PARTIAL_DAYS * DAY_S + 60))
        assert swept.count == 1  # the other one is being received
        assert len(files_in(store.root)) == 2
    assert store.sweep(later()).count == 1
    assert files_in(store.root) == []


def test_partials_are_bounded_in_number_and_bytes_oldest_first(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = CHUNK_BYTES
    kept = [begun(store, number, size) for number in range(5)]
    for number, sha256 in enumerate(kept):
        age(store, sha256, size, seconds=1_000 - number)
    monkeypatch.setattr(sweeping, "PARTIALS_MAX", 4)
    assert store.sweep().count == 1
    monkeypatch.setattr(sweeping, "PARTIAL_BYTES_MAX", 3 * size)
    assert store.sweep().count == 2  # three and their journals are a little more than three
    left = {name.split("/")[1][:64] for name in files_in(store.root)}
    assert left == {sha256.hex() for sha256 in kept[3:]}


def test_what_is_left_of_a_finished_partial_goes_at_once(store: BlobStore) -> None:
    put(store)
    folder = store.root / "partial"
    folder.mkdir()
    data = folder / f"{SHA.hex()}.{len(DATA)}.data"
    data.hardlink_to(store.path(SHA))
    (folder / f"{bytes(32).hex()}.5.journal").write_bytes(b"")
    store.sweep()
    assert files_in(store.root) == blobs_in(store)
    assert read_all(store, SHA) == DATA


def test_strange_files_in_the_store_do_no_harm(store: BlobStore) -> None:
    put(store)
    store.begin(bytes(32), 5).close()
    (store.root / "partial/strange").write_bytes(b"")
    (store.root / "partial" / f"{'ab' * 32}.\u0661.data").write_bytes(b"")
    (store.root / "tmp/folder").mkdir()
    (store.root / "zz").mkdir()
    (store.root / "README").write_bytes(b"")
    (store.root / "tmp/link.swept").symlink_to("/etc/passwd")
    assert store.sweep(later()).count == 2
    assert (store.root / "README").exists()


# Damage -------------------------------------------------------------------------------------------


def test_a_sound_blob_is_verified(store: BlobStore) -> None:
    put(store)
    assert store.verify(SHA)
    assert store.holds(SHA)
    with pytest.raises(NotHeld):
        store.verify(bytes(32))


@pytest.mark.parametrize("damage", ["bit", "short", "long"])
def test_a_damaged_blob_is_moved_aside_and_received_anew(
    store: BlobStore, holder: Path, damage: str
) -> None:
    put(store)
    store.keep(SHA, holder)
    wrong = {"bit": DATA[:-1] + b"?", "short": DATA[:-1], "long": DATA + b"x"}[damage]
    store.path(SHA).write_bytes(wrong)
    assert not store.verify(SHA)
    assert not store.holds(SHA)
    assert (store.root / "damaged" / SHA.hex()).read_bytes() == wrong
    with store.begin(SHA, len(DATA)) as partial:
        partial.write(DATA)
        partial.finish()
    store.keep(SHA, holder)
    assert store.verify(SHA)
    assert (holder / SHA.hex()).samefile(store.path(SHA))
    store.sweep(later())
    assert files_in(store.root) == blobs_in(store)


def test_a_blob_that_was_replaced_while_it_was_verified_stays(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store)
    store.path(SHA).write_bytes(b"damaged")
    real = Reader.digest

    def digest(self: Reader, *watch: Any) -> bytes:
        found = real(self, *watch)
        put(store)
        return found

    monkeypatch.setattr(Reader, "digest", digest)
    assert not store.verify(SHA)
    assert read_all(store, SHA) == DATA


def test_a_blob_that_the_disk_can_not_read_is_damaged(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store)

    def fails(descriptor: int, length: int, at: int) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", fails)
        assert not store.verify(SHA)
    assert not store.holds(SHA)
