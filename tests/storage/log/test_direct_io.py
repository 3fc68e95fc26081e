"""Past the page cache: what is appended is there and durable, and nothing before it is changed."""

from __future__ import annotations

import errno
import os
import random
from fcntl import F_GETFL, fcntl
from pathlib import Path

import pytest

from meshagent.storage.log.direct_io import (
    BLOCK_BYTES,
    BUFFER_BYTES,
    DirectWriter,
    open_direct,
)

FILE_BYTES = 96 * BLOCK_BYTES
LONG_BYTES = 64 * 1024


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"?" * FILE_BYTES)
    return path


@pytest.fixture
def writer(path: Path) -> DirectWriter:
    writer = open_direct(path)
    if writer is None:
        pytest.skip(f"the filesystem of {path} has no way past the page cache")
    return writer


def write_otherwise(path: Path, data: bytes, at: int) -> None:
    """Through the cache."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def test_what_was_appended_is_there_and_all_before_it_is_as_it_was(
    path: Path, writer: DirectWriter
) -> None:
    rng = random.Random(7)
    for _ in range(20):
        at, model = rng.choice([0, 5, BLOCK_BYTES, 3 * BLOCK_BYTES - 1]), path.read_bytes()
        while at < FILE_BYTES - 2 * LONG_BYTES:
            size = rng.choice(
                [1, 400, BLOCK_BYTES - at % BLOCK_BYTES, BLOCK_BYTES, 9_000, LONG_BYTES]
            )
            data = rng.randbytes(size)
            if rng.random() < 0.2:
                assert not writer.append(data, at, room=at)
                write_otherwise(path, data, at)
            else:
                assert writer.append(data, at, FILE_BYTES)
                behind = path.read_bytes()[at + size : at + size + -(at + size) % BLOCK_BYTES]
                assert not any(behind), "and nothing of what was written before stands behind it"
            assert path.read_bytes()[: at + size] == model[:at] + data
            at, model = at + size, path.read_bytes()
    assert len(model) == FILE_BYTES, "and it has not grown"
    writer.close()


def test_what_others_wrote_meanwhile_stays_though_it_ends_where_we_had_ended(
    path: Path, writer: DirectWriter
) -> None:
    assert writer.append(b"first", 0, FILE_BYTES)
    assert not writer.append(b"other", 0, room=BLOCK_BYTES - 1), "only where there are blocks"
    write_otherwise(path, b"other", 0)
    assert writer.append(b" third", 5, FILE_BYTES)
    assert path.read_bytes()[:11] == b"other third"
    writer.close()


def test_it_is_durable_when_it_returns(
    writer: DirectWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, flags = os.pwrite, list[int]()

    def pwrite(file: int, data: bytes, at: int) -> int:
        flags.append(fcntl(file, F_GETFL))
        return real(file, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    assert writer.append(b"x", 0, FILE_BYTES)
    assert [bool(each & os.O_DSYNC) for each in flags] == [True]
    writer.close()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, 0])
def test_what_can_not_be_written_so_is_left_to_others(
    path: Path, writer: DirectWriter, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert writer.append(b"first", 0, FILE_BYTES)

    def pwrite(file: int, data: bytes, at: int) -> int:
        if number:
            raise OSError(number, "not so")
        return 512  # a part

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        assert not writer.append(b" second", 5, FILE_BYTES)
    assert writer.append(b" third", 5, FILE_BYTES)
    assert path.read_bytes()[:11] == b"first third"
    writer.close()


def test_what_would_take_too_much_memory_is_left_to_others(
    path: Path, writer: DirectWriter
) -> None:
    longest, room = bytes(BUFFER_BYTES - BLOCK_BYTES), 2 * BUFFER_BYTES
    path.write_bytes(bytes(room))
    assert writer.append(b"first", 0, room)
    assert writer.append(longest, 5, room)
    assert not writer.append(bytes(BUFFER_BYTES + 1), 5 + len(longest), room)
    assert path.read_bytes()[:6] == b"first\0"
    writer.close()


def test_a_disk_that_fails_is_heard_of(
    path: Path, writer: DirectWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwrite(file: int, data: bytes, at: int) -> int:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(OSError, match="broken"):
            writer.append(b"first", 0, FILE_BYTES)
    assert writer.append(b"first", 0, FILE_BYTES)
    assert path.read_bytes()[:5] == b"first"
    writer.close()


def test_where_there_is_no_such_way_nobody_insists(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    assert open_direct(path) is None
    monkeypatch.setattr(os, "O_DIRECT", 0o40000, raising=False)
    assert open_direct(path.with_name("missing")) is None
