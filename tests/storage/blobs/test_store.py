"""Files go into the store as they are at that moment, once, and nowhere else."""

from __future__ import annotations

import io
import os
import socket
import struct
from pathlib import Path

import pytest
from storage.blobs.blob_files import (
    SIZES,
    assert_private,
    blobs_in,
    files_in,
    noise,
    pieces,
    read_all,
    sha,
)

from meshagent.core.wire import frames
from meshagent.errors import LimitReached, StorageError, UsageError
from meshagent.storage.blobs import importing
from meshagent.storage.blobs import quota as room
from meshagent.storage.blobs.errors import DiskFull, NotHeld, QuotaReached
from meshagent.storage.blobs.store import CHUNK_BYTES, BlobStore


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(noise(700_000))
    return path


def test_nothing_is_on_disk_before_the_first_use(store: BlobStore, tmp_path: Path) -> None:
    assert not store.holds(bytes(32))
    assert store.usage() == 0
    assert store.sweep().count == 0
    assert store.release(tmp_path / "holder", set()) == 0
    with pytest.raises(NotHeld):
        store.open(bytes(32))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("size", SIZES)
def test_what_goes_in_comes_out(store: BlobStore, tmp_path: Path, size: int) -> None:
    data = noise(size)
    path = tmp_path / "file"
    path.write_bytes(data)
    stored = store.put(path)
    assert (stored.sha256, stored.size) == (sha(data), size)
    assert store.path(stored.sha256) == store.root / sha(data).hex()[:2] / sha(data).hex()[2:]
    assert store.path(stored.sha256).read_bytes() == data
    assert store.holds(stored.sha256)
    assert store.holds(stored.sha256, size)
    assert not store.holds(stored.sha256, size + 1)
    with store.open(stored.sha256) as reader:
        assert reader.size == size
        assert [reader.read(index) for index in range(len(pieces(data)))] == pieces(data)
        assert reader.read(len(pieces(data))) == b""
        assert reader.read(10**9) == b""
    assert files_in(store.root) == blobs_in(store)
    assert store.usage() == size
    assert_private(store.root)


@pytest.mark.parametrize("size", SIZES)
def test_a_stream_is_stored_to_its_end(store: BlobStore, size: int) -> None:
    data = noise(size)
    assert store.put(io.BytesIO(data)).sha256 == sha(data)
    assert read_all(store, sha(data)) == data


def test_a_pipe_may_give_a_little_at_a_time(store: BlobStore) -> None:
    class Trickle(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(min(size or 0, 1_000))

    data = noise(50_000)
    assert store.put(Trickle(data)).sha256 == sha(data)


def test_the_same_file_is_stored_once(store: BlobStore, file: Path) -> None:
    first = store.put(file)
    inode = store.path(first.sha256).stat().st_ino
    assert store.put(file) == first == store.put(io.BytesIO(file.read_bytes()))
    assert store.path(first.sha256).stat().st_ino == inode
    assert len(files_in(store.root)) == 1
    assert store.usage() == first.size


def test_a_link_of_the_owner_to_a_file_is_followed(store: BlobStore, file: Path) -> None:
    link = file.with_name("link")
    link.symlink_to(file)
    assert store.put(link).sha256 == sha(file.read_bytes())


def test_the_type_and_the_size_of_a_picture_are_found(store: BlobStore) -> None:
    head = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 640, 480)
    stored = store.put(io.BytesIO(head + noise(600_000)))
    assert (stored.mime, stored.width, stored.height) == ("image/png", 640, 480)
    assert store.describe(stored.sha256) == stored
    text = store.put(io.BytesIO(b"hello"))
    assert (text.mime, text.width, text.height) == ("text/plain", 0, 0)
    with pytest.raises(NotHeld):
        store.describe(bytes(32))


def test_a_file_that_changes_or_goes_later_stays_as_it_was(store: BlobStore, file: Path) -> None:
    data = file.read_bytes()
    stored = store.put(file)
    file.write_bytes(b"other")
    assert read_all(store, stored.sha256) == data
    file.unlink()
    assert read_all(store, stored.sha256) == data


@pytest.mark.parametrize("change", ["replace", "overwrite", "grow", "cut"])
def test_the_hash_is_that_of_what_was_stored_even_if_the_file_changes_meanwhile(
    store: BlobStore, tmp_path: Path, change: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(noise(4 * 1024 * 1024))

    def meddle(done: int, total: int | None) -> None:
        if done != 1024 * 1024:
            return
        if change == "replace":
            (tmp_path / "new").write_bytes(b"new")
            os.replace(tmp_path / "new", path)
        elif change == "cut":
            os.truncate(path, 2_000_000)
        else:
            with path.open("r+b") as file:
                file.seek(2_000_000 if change == "overwrite" else 5_000_000)
                file.write(b"changed")

    stored = store.put(path, meddle)
    assert sha(read_all(store, stored.sha256)) == stored.sha256
    assert store.holds(stored.sha256, stored.size)
    if change == "replace":
        assert stored.sha256 == sha(noise(4 * 1024 * 1024))


def test_a_clone_is_hashed_and_not_the_file_it_came_from(
    store: BlobStore, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk of the tests can't clone; a copy stands for the clone."""
    data = file.read_bytes()

    def clone(target: int, source: int) -> bool:
        os.write(target, os.pread(source, len(data), 0))
        file.write_bytes(b"changed since")
        return True

    monkeypatch.setattr(importing, "_clone", clone)
    stored = store.put(file)
    assert (stored.sha256, stored.size) == (sha(data), len(data))
    assert read_all(store, stored.sha256) == data


def test_progress_is_told_to_the_end(store: BlobStore, file: Path) -> None:
    told: list[tuple[int, int | None]] = []
    store.put(file, lambda done, total: told.append((done, total)))
    assert told[-1] == (700_000, 700_000)
    told.clear()
    store.put(io.BytesIO(b"x" * 2_000_000), lambda done, total: told.append((done, total)))
    assert told == [(1024 * 1024, None), (2_000_000, None)]


def test_a_put_that_is_interrupted_leaves_nothing(store: BlobStore, file: Path) -> None:
    def interrupt(done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.put(file, interrupt)
    assert files_in(store.root) == []


def test_a_put_takes_a_few_blocks_of_memory(store: BlobStore, tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(64 * 1024 * 1024)
    tracemalloc.start()
    try:
        store.put(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * importing.BLOCK_BYTES


# What can't be attached ---------------------------------------------------------------------------


def test_a_folder_is_refused_with_advice(store: BlobStore, tmp_path: Path) -> None:
    (tmp_path / "stuff").mkdir()
    with pytest.raises(UsageError, match=r"is a folder\. Pack it first.*tar czf stuff.tar.gz"):
        store.put(tmp_path / "stuff")
    assert files_in(tmp_path) == []


def test_what_is_not_a_file_is_refused_and_never_waited_for(
    store: BlobStore, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for path in (tmp_path / "pipe", tmp_path / "socket", Path("/dev/zero")):
            with pytest.raises(UsageError, match=f"Can't attach {path}: it is not a file"):
                store.put(path)


def test_what_can_not_be_read_is_named(store: BlobStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "loop").symlink_to("loop")
    cases = {
        tmp_path / "missing": "does not exist",
        tmp_path / "file/x": "not a folder",
        tmp_path / "loop": "circle",
        tmp_path / ("x" * 300): "too long",
        tmp_path / "a\0b": "null",
    }
    for path, reason in cases.items():
        with pytest.raises(UsageError, match=reason):
            store.put(path)
    with pytest.raises(UsageError, match="binary mode"):
        store.put(io.StringIO("text"))  # type: ignore[arg-type]
    closed = io.BytesIO(b"")
    closed.close()
    with pytest.raises(UsageError, match="closed"):
        store.put(closed)
    assert files_in(store.root) == []


def test_a_file_without_permission_is_named(store: BlobStore, file: Path) -> None:
    file.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may read everything
    try:
        with pytest.raises(UsageError, match="file: permission is denied"):
            store.put(file)
    finally:
        os.seteuid(user)


# Quota and space ----------------------------------------------------------------------------------


def test_a_quota_refuses_with_its_figures(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs", quota_bytes=1_000_000)
    store.put(io.BytesIO(noise(600_000)))
    path = tmp_path / "file"
    path.write_bytes(noise(500_000, seed=2))
    for source in (path, io.BytesIO(noise(500_000, seed=2))):
        with pytest.raises(QuotaReached, match="quota") as caught:
            store.put(source)
        assert isinstance(caught.value, LimitReached)
        assert caught.value.data == {
            "quota": 1_000_000, "used": 600_000, "wanted": 500_000, "permanent": True,
        }  # fmt: skip
    assert len(files_in(store.root)) == 1
    path.write_bytes(noise(400_000, seed=2))
    store.put(path)
    assert store.usage() == 1_000_000


def test_what_is_here_already_needs_no_quota(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(noise(600_000))
    store = BlobStore(tmp_path / "blobs", quota_bytes=1_000_000)
    assert store.put(path) == store.put(path)


def test_a_quota_is_kept_against_what_other_processes_stored(tmp_path: Path) -> None:
    ours = BlobStore(tmp_path / "blobs", quota_bytes=1_000_000)
    assert ours.usage() == 0
    theirs = BlobStore(tmp_path / "blobs")
    stored = theirs.put(io.BytesIO(noise(900_000)))
    ours._room.forget()
    with pytest.raises(QuotaReached):
        ours.put(io.BytesIO(noise(200_000, seed=2)))
    theirs.path(stored.sha256).unlink()
    ours.put(io.BytesIO(noise(200_000, seed=2)))  # no refusal by an old count


def test_too_little_space_is_another_refusal_and_leaves_a_margin(
    store: BlobStore, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = room.MARGIN_BYTES + 700_000 - 1
    monkeypatch.setattr(room, "free_bytes", lambda path: free)
    for source in (file, io.BytesIO(file.read_bytes())):
        with pytest.raises(DiskFull, match="disk is full") as caught:
            store.put(source)
        assert caught.value.data["permanent"] is False
        assert caught.value.data["free"] == free
        assert caught.value.data["wanted"] == 700_000
    with pytest.raises(DiskFull):
        store.begin(sha(file.read_bytes()), 700_000)
    assert files_in(store.root) == []
    free += 1
    store.put(file)


# A hostile layout ---------------------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "precious").write_bytes(b"precious")
    return folder


def test_a_linked_root_is_refused(tmp_path: Path, outside: Path, file: Path) -> None:
    store = BlobStore(tmp_path / "blobs")
    store.root.symlink_to(outside)
    for act in (
        lambda: store.put(file),
        lambda: store.begin(bytes(32), 5),
        lambda: store.sweep(),
        lambda: store.open(bytes(32)),
        lambda: store.keep(bytes(32), tmp_path / "holder"),
    ):
        with pytest.raises(StorageError, match="symbolic link"):
            act()
    assert files_in(outside) == ["precious"]


def test_linked_folders_in_the_store_are_refused(
    store: BlobStore, outside: Path, file: Path
) -> None:
    stored = store.put(file)
    folder = store.path(stored.sha256).parent
    for name in ("tmp", "partial", "damaged", folder.name):
        path = store.root / name
        if path.is_dir():
            path.rename(store.root.parent / f"was {name}")
        path.symlink_to(outside)
    for act in (
        lambda: store.put(io.BytesIO(b"x")),
        lambda: store.begin(bytes(32), 5),
        lambda: store.open(stored.sha256),
        lambda: store.holds(stored.sha256),
        lambda: store.sweep(),
    ):
        with pytest.raises(StorageError, match="symbolic link"):
            act()
    assert files_in(outside) == ["precious"]
    assert store.usage() == 0


def test_a_link_in_a_blobs_place_never_counts_and_is_replaced(
    store: BlobStore, outside: Path, file: Path, tmp_path: Path
) -> None:
    stored = store.put(file)
    path = store.path(stored.sha256)
    path.unlink()
    (outside / "same").write_bytes(file.read_bytes())
    path.symlink_to(outside / "same")
    assert not store.holds(stored.sha256)
    with pytest.raises(NotHeld):
        store.open(stored.sha256)
    with pytest.raises(NotHeld):
        store.keep(stored.sha256, tmp_path / "holder")
    store.put(file)
    assert not path.is_symlink()
    assert read_all(store, stored.sha256) == file.read_bytes()
    assert files_in(outside) == ["precious", "same"]


def test_a_pipe_or_folder_in_a_blobs_place_is_no_blob(store: BlobStore, file: Path) -> None:
    stored = store.put(file)
    path = store.path(stored.sha256)
    path.unlink()
    os.mkfifo(path)
    assert not store.holds(stored.sha256)
    with pytest.raises(NotHeld):
        store.open(stored.sha256)
    store.put(file)
    assert store.holds(stored.sha256, stored.size)
    path.unlink()
    path.mkdir()
    assert not store.holds(stored.sha256)
    with pytest.raises(StorageError):
        store.put(file)
    path.rmdir()
    store.put(file)
    assert files_in(store.root) == blobs_in(store)


def test_a_blob_that_was_cut_short_is_stored_anew(store: BlobStore, file: Path) -> None:
    stored = store.put(file)
    os.truncate(store.path(stored.sha256), 5)
    assert not store.holds(stored.sha256, stored.size)
    store.put(file)
    assert read_all(store, stored.sha256) == file.read_bytes()


def test_an_open_store_is_closed_to_others(store: BlobStore, file: Path) -> None:
    store.root.mkdir(0o755)
    (store.root / "tmp").mkdir(0o777)
    before = os.umask(0)
    try:
        store.put(file)
        store.begin(bytes(32), 5).close()
    finally:
        os.umask(before)
    assert_private(store.root)


def test_a_chunk_that_is_in_memory_is_read_at_once_and_only_whole(store: BlobStore) -> None:
    data = noise(CHUNK_BYTES + 100)
    sha256 = store.put(io.BytesIO(data)).sha256
    into = memoryview(bytearray(CHUNK_BYTES))
    with store.open(sha256) as reader:
        for index, chunk in enumerate(pieces(data)):
            found = reader.read_at_once(index, into)
            assert found in (chunk, None), "whether it is in memory is the system's to say"
            assert reader.read(index, into) == chunk
        with store.path(sha256).open("r+b") as file:
            file.truncate(CHUNK_BYTES + 1)
        assert reader.read_at_once(1, into) is None
        with pytest.raises(StorageError, match="shorter"):
            reader.read(1, into)
    assert reader.read_at_once(0, into) is None, "closed"


def test_a_chunk_is_what_its_peers_think_it_is() -> None:
    assert CHUNK_BYTES == frames.CHUNK_BYTES
