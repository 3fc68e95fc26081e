"""A transfer goes on from the last chunk that is sound, and only the right bytes become a blob."""

from __future__ import annotations

import errno
import hashlib
import io
import itertools
import os
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from storage.blobs.blob_files import (
    LATER,
    SIZES,
    assert_private,
    blobs_in,
    files_in,
    noise,
    pieces,
    read_all,
    sha,
)

from meshagent.errors import LimitReached, LocalProtocolError, StorageError
from meshagent.storage.blobs import partials
from meshagent.storage.blobs.errors import (
    Busy,
    DiskFull,
    Held,
    QuotaReached,
    TooManyPartials,
    WrongHash,
)
from meshagent.storage.blobs.store import CHUNK_BYTES, BlobStore

DATA = noise(5 * CHUNK_BYTES + 100)
SHA = sha(DATA)
HEADER = 64
RECORD = 8


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def data_file(store: BlobStore) -> Path:
    return store.root / "partial" / f"{SHA.hex()}.{len(DATA)}.data"


def journal_file(store: BlobStore) -> Path:
    return data_file(store).with_suffix(".journal")


def begun(store: BlobStore, chunks: int) -> None:
    """Leave a partial with so many chunks."""
    with store.begin(SHA, len(DATA)) as partial:
        for chunk in pieces(DATA)[:chunks]:
            partial.write(chunk)


def resumed_at(store: BlobStore) -> int:
    """From which chunk it goes on, and whether it then ends well."""
    with store.begin(SHA, len(DATA)) as partial:
        first = partial.received
        chunk_count = len(pieces(DATA)) if first == len(DATA) else first // CHUNK_BYTES
        for chunk in pieces(DATA)[chunk_count:]:
            partial.write(chunk)
        partial.finish()
    assert read_all(store, SHA) == DATA
    assert files_in(store.root) == blobs_in(store)
    return chunk_count


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("size", SIZES)
def test_chunks_become_a_blob(store: BlobStore, size: int) -> None:
    data = noise(size)
    partial = store.begin(sha(data), size)
    assert partial.received == 0
    for chunk in pieces(data):
        partial.write(chunk)
    assert not store.holds(sha(data))
    assert_private(store.root)
    assert partial.finish() == store.path(sha(data))
    assert read_all(store, sha(data)) == data
    assert files_in(store.root) == blobs_in(store)
    assert store.usage() == size
    assert_private(store.root)
    partial.close()


def test_several_chunks_may_come_at_once(store: BlobStore) -> None:
    with store.begin(SHA, len(DATA)) as partial:
        partial.write(DATA[: 3 * CHUNK_BYTES])
        assert partial.received == 3 * CHUNK_BYTES
        partial.write(memoryview(DATA)[3 * CHUNK_BYTES :])
        partial.finish()
    assert read_all(store, SHA) == DATA


@pytest.mark.parametrize("chunks", [0, 1, 4, 6])
def test_it_resumes_after_the_last_chunk(store: BlobStore, chunks: int) -> None:
    begun(store, chunks)
    assert resumed_at(store) == chunks


def test_what_is_here_is_not_received_again(store: BlobStore) -> None:
    begun(store, 6)
    resumed_at(store)
    with pytest.raises(Held):
        store.begin(SHA, len(DATA))
    assert files_in(store.root) == blobs_in(store)


def test_it_is_received_by_one_at_a_time(store: BlobStore) -> None:
    partial = store.begin(SHA, len(DATA))
    partial.write(pieces(DATA)[0])
    with pytest.raises(Busy):
        store.begin(SHA, len(DATA))
    found: list[type[Exception]] = []

    def from_a_thread() -> None:
        try:
            BlobStore(store.root).begin(SHA, len(DATA))
        except Busy as error:
            found.append(type(error))

    thread = threading.Thread(target=from_a_thread)
    thread.start()
    thread.join()
    assert found == [Busy]
    partial.close()
    assert resumed_at(store) == 1


def test_an_offer_whose_size_lies_undoes_no_honest_transfer(store: BlobStore) -> None:
    begun(store, 4)
    with store.begin(SHA, 1) as liar:
        assert liar.received == 0
        liar.write(DATA[:1])
        with pytest.raises(WrongHash):
            liar.finish()
    assert resumed_at(store) == 4


def test_wrong_bytes_never_become_a_blob(store: BlobStore) -> None:
    wrong = bytearray(DATA)
    wrong[CHUNK_BYTES] ^= 1
    partial = store.begin(SHA, len(DATA))
    partial.write(bytes(wrong))
    with pytest.raises(WrongHash) as caught:
        partial.finish()
    assert caught.value.data == {"expected": SHA, "found": sha(bytes(wrong))}
    assert not store.holds(SHA)
    assert files_in(store.root) == []
    assert resumed_at(store) == 0


def test_bytes_that_were_not_announced_are_refused(store: BlobStore) -> None:
    with store.begin(SHA, len(DATA)) as partial:
        for wrong in (DATA + b"x", DATA[:-1], DATA[:5], bytes(CHUNK_BYTES - 1)):
            with pytest.raises(LocalProtocolError):
                partial.write(wrong)
        assert partial.received == 0
        with pytest.raises(LocalProtocolError, match="not complete"):
            partial.finish()
        partial.write(DATA)
        with pytest.raises(LocalProtocolError):
            partial.write(b"x")
    for act in (lambda: partial.write(b"x"), partial.finish, partial.discard):
        with pytest.raises(LocalProtocolError):
            act()


def test_a_discarded_one_is_gone(store: BlobStore) -> None:
    partial = store.begin(SHA, len(DATA))
    partial.write(pieces(DATA)[0])
    partial.discard()
    partial.close()
    assert files_in(store.root) == []
    assert store.usage() == 0
    assert resumed_at(store) == 0


def test_a_file_that_was_attached_here_meanwhile_is_kept(store: BlobStore, tmp_path: Path) -> None:
    with store.begin(SHA, len(DATA)) as partial:
        partial.write(DATA)
        (tmp_path / "file").write_bytes(DATA)
        store.put(tmp_path / "file")
        store.keep(SHA, tmp_path / "holder")
        partial.finish()
    assert store.path(SHA).samefile(tmp_path / "holder" / SHA.hex())
    assert files_in(store.root) == blobs_in(store)
    assert store.usage() == len(DATA)


def test_a_blob_that_came_while_we_took_the_lock_is_found(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = store._refuse_if_held, [0]

    def refuse(sha256: bytes, size: int) -> None:
        real(sha256, size)
        calls[0] += 1
        if calls[0] == 1:
            BlobStore(store.root).put(io.BytesIO(DATA))

    monkeypatch.setattr(store, "_refuse_if_held", refuse)
    with pytest.raises(Held):
        store.begin(SHA, len(DATA))
    assert files_in(store.root) == blobs_in(store)


def test_a_lock_on_a_journal_that_is_gone_is_no_lock(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, others = partials.try_lock, []

    def try_lock(descriptor: int) -> bool:
        if not others:  # between our opening and our locking, its holder ends and another begins
            others.append(None)
            journal_file(store).unlink()
            others.append(BlobStore(store.root).begin(SHA, len(DATA)))
        return real(descriptor)

    monkeypatch.setattr(partials, "try_lock", try_lock)
    with pytest.raises(Busy):
        store.begin(SHA, len(DATA))
    others[1].write(DATA)
    others[1].finish()
    assert read_all(store, SHA) == DATA


# What a power cut may leave -----------------------------------------------------------------------


@pytest.mark.parametrize("chunk", range(6))
def test_a_flipped_bit_in_the_data_is_found_on_opening(store: BlobStore, chunk: int) -> None:
    begun(store, 6)
    flip(data_file(store), chunk * CHUNK_BYTES + 50)
    assert resumed_at(store) == chunk


@pytest.mark.parametrize("chunk", range(6))
@pytest.mark.parametrize("byte", [0, 3, 4, 7])
def test_a_flipped_bit_in_the_journal_is_found_on_opening(
    store: BlobStore, chunk: int, byte: int
) -> None:
    begun(store, 6)
    flip(journal_file(store), HEADER + chunk * RECORD + byte)
    assert resumed_at(store) == chunk


def test_a_journal_of_another_blob_or_version_is_begun_anew(store: BlobStore) -> None:
    for at in (0, 30, 55, 63):
        begun(store, 4)
        flip(journal_file(store), at)
        with store.begin(SHA, len(DATA)) as partial:
            assert partial.received == 0


@pytest.mark.parametrize("length", range(0, HEADER + 6 * RECORD + 1, 4))
def test_a_journal_behind_its_data_costs_only_what_it_lacks(store: BlobStore, length: int) -> None:
    begun(store, 6)
    os.truncate(journal_file(store), length)
    assert resumed_at(store) == max(0, length - HEADER) // RECORD


@pytest.mark.parametrize("chunks", range(6))
def test_data_behind_the_journal_costs_only_what_it_lacks(store: BlobStore, chunks: int) -> None:
    begun(store, 6)
    with data_file(store).open("r+b") as file:  # reserved, never written: it reads as zeros
        file.seek(chunks * CHUNK_BYTES)
        file.write(bytes(len(DATA) - chunks * CHUNK_BYTES))
    assert resumed_at(store) == chunks


@pytest.mark.parametrize("tail", [bytes(RECORD), b"\xff" * 5, bytes(4096), b"x" * 100])
def test_a_journal_with_a_torn_end_is_cut(store: BlobStore, tail: bytes) -> None:
    begun(store, 3)
    with journal_file(store).open("ab") as file:
        file.write(tail)
    assert resumed_at(store) == 3


def test_a_hole_in_the_middle_ends_what_counts(store: BlobStore) -> None:
    begun(store, 2)
    with journal_file(store).open("ab") as file:
        upto = hashlib.sha256(b"".join(pieces(DATA)[:4])).digest()
        file.write(struct.pack(">I4s", 3, upto[:4]))
    with data_file(store).open("r+b") as file:
        file.seek(3 * CHUNK_BYTES)
        file.write(pieces(DATA)[3])
    assert resumed_at(store) == 2


@pytest.mark.parametrize("length", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_data_that_was_cut_short_is_begun_where_it_ends(store: BlobStore, length: int) -> None:
    begun(store, 6)
    os.truncate(data_file(store), length)
    assert resumed_at(store) == length // CHUNK_BYTES


def test_data_or_journal_may_be_lost(store: BlobStore) -> None:
    begun(store, 6)
    data_file(store).unlink()
    assert resumed_at(store) == 0
    store.path(SHA).unlink()
    begun(store, 6)
    journal_file(store).unlink()
    assert resumed_at(store) == 0


def test_a_blob_of_zeros_is_told_from_data_that_was_never_written(store: BlobStore) -> None:
    zeros = bytes(3 * CHUNK_BYTES)
    with store.begin(sha(zeros), len(zeros)) as partial:
        partial.write(zeros[:CHUNK_BYTES])
    with store.begin(sha(zeros), len(zeros)) as partial:
        assert partial.received == CHUNK_BYTES


def test_a_name_is_given_only_to_synced_bytes_and_is_synced_itself(
    store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    real_fsync, real_link = os.fsync, os.link

    def fsync(descriptor: int) -> None:
        calls.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        real_fsync(descriptor)

    def link(source: str, target: str, **named: Any) -> None:
        calls.append("link")
        real_link(source, target, **named)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    for data in (DATA, b""):
        folder = sha(data).hex()[:2]
        with store.begin(sha(data), len(data)) as partial:
            partial.write(data)
            calls.clear()
            partial.finish()
        file = f"sync {sha(data).hex()}.{len(data)}.data"
        assert calls == [file, "sync blobs", "link", f"sync {folder}"]
        store.sweep(time.time() + LATER)
        calls.clear()
        store.put(io.BytesIO(data))
        assert calls[0].startswith("sync .import.")
        assert calls[1:] == ["link", f"sync {folder}"]


# Space --------------------------------------------------------------------------------------------


def test_the_space_is_reserved_before_the_first_byte(store: BlobStore) -> None:
    with store.begin(SHA, len(DATA)):
        found = data_file(store).stat()
        assert found.st_size == len(DATA)
        assert found.st_blocks * 512 >= len(DATA)
        assert store.usage() >= len(DATA)


def test_a_quota_refuses_before_anything_is_accepted(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs", quota_bytes=2 * len(DATA) - 1)
    first = store.begin(SHA, len(DATA))
    with pytest.raises(QuotaReached) as caught:
        store.begin(bytes(32), len(DATA))
    assert caught.value.data["wanted"] == len(DATA)
    assert caught.value.data["quota"] == 2 * len(DATA) - 1
    assert len(files_in(store.root)) == 2
    first.close()
    assert resumed_at(store) == 0  # what is reserved already is not counted twice


def test_a_reservation_that_fails_leaves_nothing(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, at: int, size: int) -> None:
        os.truncate(descriptor, size // 2)
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(DiskFull) as caught:
            store.begin(SHA, len(DATA))
        assert isinstance(caught.value, LimitReached)
        assert caught.value.data["wanted"] == len(DATA)
        assert files_in(store.root) == []
    begun(store, 2)
    assert resumed_at(store) == 2


def test_a_system_that_reserves_nothing_still_receives(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(descriptor: int, at: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "unsupported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    begun(store, 2)
    monkeypatch.delattr(os, "posix_fallocate")
    assert resumed_at(store) == 2


def test_a_chunk_that_could_not_be_written_may_be_given_again(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.pwritev, [0]

    def fails_at(number: int):  # type: ignore[no-untyped-def]
        calls[0] = 0

        def pwritev(descriptor: int, data: list[memoryview], at: int) -> int:
            calls[0] += 1
            if calls[0] == number:
                real(descriptor, [data[0][:3]], at)
                raise OSError(errno.ENOSPC, "full")
            return real(descriptor, data, at)

        return pwritev

    with store.begin(SHA, len(DATA)) as partial:
        for chunk in pieces(DATA):
            for number in (1, 2):  # the data, then the journal
                with monkeypatch.context() as patch:
                    patch.setattr(os, "pwritev", fails_at(number))
                    with pytest.raises(DiskFull):
                        partial.write(chunk)
            partial.write(chunk)
        partial.finish()
    assert read_all(store, SHA) == DATA


def test_a_chunk_may_come_in_pieces_and_go_to_disk_in_others(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev

    def pwritev(descriptor: int, data: list[memoryview], at: int) -> int:
        """Takes what ends within a piece, as a system may."""
        first, *more = data
        return real(descriptor, [first, more[0][:7]] if more else [first[:100_000]], at)

    monkeypatch.setattr(os, "pwritev", pwritev)
    with store.begin(SHA, len(DATA)) as partial:
        for chunk in pieces(DATA):
            cuts = [0, 1, 1000, 1000, 70_000, len(chunk)]
            partial.write(*(chunk[at:to] for at, to in itertools.pairwise(cuts)))
        partial.finish()
    assert read_all(store, SHA) == DATA


def test_half_received_blobs_are_bounded(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partials, "PARTIALS_MAX", 3)
    begun(store, 1)
    for number in range(2):
        store.begin(bytes([number] * 32), 10).close()
    with pytest.raises(TooManyPartials):
        store.begin(bytes([9] * 32), 10)
    with store.begin(SHA, len(DATA)) as partial:  # those that are there may go on
        assert partial.received == CHUNK_BYTES


# A hostile layout ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".data", ".journal"])
@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "folder"])
def test_nothing_outside_is_written_through_a_partial(
    store: BlobStore, tmp_path: Path, ending: str, kind: str
) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    begun(store, 1)
    path = data_file(store).with_suffix(ending)
    path.unlink()
    if kind == "link":
        path.symlink_to(precious)
    elif kind == "hard link":
        path.hardlink_to(precious)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    try:
        with store.begin(SHA, len(DATA)) as partial:
            partial.write(DATA[partial.received :])
            partial.finish()
    except StorageError:
        assert not store.holds(SHA)
    else:
        assert kind == "hard link"
    assert precious.read_bytes() == b"precious"


def test_what_is_promised_and_never_sent_does_not_use_up_the_quota(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs", quota_bytes=20 * CHUNK_BYTES)
    for number in range(8):  # each says it has twelve chunks, and sends one
        with store.begin(bytes([number]) * 32, 12 * CHUNK_BYTES) as partial:
            partial.write(bytes(CHUNK_BYTES))
            with pytest.raises(QuotaReached):  # as long as it goes on, its space is its own
                store.begin(sha(DATA), 12 * CHUNK_BYTES)
    with store.begin(sha(DATA), len(DATA)) as partial:
        partial.write(DATA)
        partial.finish()
    assert read_all(store, sha(DATA)) == DATA
