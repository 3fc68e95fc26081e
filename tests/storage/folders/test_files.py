"""Files are replaced whole or not at all, and a failure is explained."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from meshagent.errors import CorruptFile, LimitReached, MeshError, StorageError
from meshagent.storage.folders import files
from meshagent.storage.folders.files import (
    link_new,
    make_private_folder,
    place_folder,
    read_bounded,
    storage_error,
    write_private,
)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_written_file_is_private_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "mesh.key"
    write_private(path, b"one")
    write_private(path, b"two")
    assert path.read_bytes() == b"two"
    assert mode(path) == 0o600
    assert os.listdir(tmp_path) == ["mesh.key"]


def test_a_failed_write_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mesh.key"
    write_private(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(LimitReached, match=r"mesh\.key: the disk is full"):
        write_private(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["mesh.key"]


def test_a_write_is_synced_before_its_name_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    sync, replace = os.fsync, os.replace

    def spied_sync(descriptor: int) -> None:
        steps.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        sync(descriptor)

    def spied_replace(source: Path, target: Path) -> None:
        steps.append("rename")
        replace(source, target)

    monkeypatch.setattr(files.os, "fsync", spied_sync)
    monkeypatch.setattr(files.os, "replace", spied_replace)
    write_private(tmp_path / "x", b"data")
    assert steps == ["file", "rename", "folder"]


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.ENOSPC, LimitReached, "disk is full"),
        (errno.EDQUOT, LimitReached, "quota"),
        (errno.EROFS, StorageError, "read-only"),
        (errno.EACCES, StorageError, "permission"),
        (errno.EIO, StorageError, "disk failed"),
        (errno.EXDEV, StorageError, "cross-device"),
    ],
)
def test_an_error_names_the_path_the_reason_and_the_next_step(
    number: int, kind: type[MeshError], words: str
) -> None:
    error = storage_error(OSError(number, os.strerror(number)), Path("/x/mesh.key"), "write")
    assert type(error) is kind
    assert error.message.startswith("Can't write /x/mesh.key: ")
    assert words in error.message
    assert error.hint
    assert error.exit_code == (6 if kind is LimitReached else 1)


def test_reading_stops_at_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "big"
    path.write_bytes(b"x" * 101)
    assert read_bounded(path, 101) == b"x" * 101
    with pytest.raises(CorruptFile, match="more than 100 bytes"):
        read_bounded(path, 100)


def test_a_pipe_in_the_place_of_a_file_does_not_hang_the_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CorruptFile, match="not a regular file"):
        read_bounded(tmp_path / "pipe", 10)
    with pytest.raises(StorageError, match="it is a folder"):
        read_bounded(tmp_path, 10)


def test_a_link_is_followed_only_where_that_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"data")
    (tmp_path / "link").symlink_to("real")
    assert read_bounded(tmp_path / "link", 10) == b"data"
    with pytest.raises(StorageError, match="symbolic link"):
        read_bounded(tmp_path / "link", 10, follow_links=False)


def test_a_path_below_a_file_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for act in (make_private_folder, lambda path: write_private(path, b"")):
        with pytest.raises(StorageError, match="not a folder"):
            act(tmp_path / "file" / "below")


def test_a_private_folder_is_closed_even_if_it_was_open(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    make_private_folder(folder)
    assert mode(folder) == 0o700
    folder.chmod(0o755)
    make_private_folder(folder)
    assert mode(folder) == 0o700


def test_the_first_to_link_wins(tmp_path: Path) -> None:
    assert link_new(tmp_path / "x", b"first")
    assert not link_new(tmp_path / "x", b"second")
    assert (tmp_path / "x").read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["x"]


def test_a_folder_is_placed_whole_and_never_over_another(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    assert place_folder(target, lambda folder: files.write_new(folder / "a", b"1"))
    assert not place_folder(target, lambda folder: files.write_new(folder / "b", b"2"))
    assert os.listdir(target) == ["a"]
    assert os.listdir(tmp_path) == ["folder"]


def test_a_folder_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        files.write_new(folder / "a", b"1")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(LimitReached, match="disk is full"):
        place_folder(tmp_path / "folder", build)
    assert os.listdir(tmp_path) == []
