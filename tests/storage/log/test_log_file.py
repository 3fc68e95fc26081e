"""The file of commits: what it gives back is what was appended, whatever a crash or decay did."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from meshagent.storage.log import log_file as file_module
from meshagent.storage.log.log_file import HEADER_BYTES, MAGIC, TAG_BYTES, Commit, LogFile

TAG, OTHER = b"t" * TAG_BYTES, b"o" * TAG_BYTES
CONTENTS = [b"first", b"", b"the third, with " + MAGIC + b" in it", b"\0" * 40, b"last"]


@pytest.fixture(params=["directly", "by the cache"])
def path(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == "by the cache":
        monkeypatch.setattr(file_module, "open_direct", lambda path: None)
    return tmp_path / "commits"


def written(path: Path, contents: list[bytes], first: int = 1, tag: bytes = TAG) -> list[int]:
    """Where each commit ends, in a file that was begun anew."""
    file = LogFile(path)
    file.open()
    ends = []
    for position, content in enumerate(contents, first):
        file.append(tag, position, content)
        ends.append(file.used)
    file.close()
    return ends


def found(path: Path, tag: bytes | None = TAG) -> list[Commit]:
    file = LogFile(path)
    file.open()
    commits = file.read(tag)
    file.close()
    return commits


def as_appended(count: int, first: int = 1) -> list[Commit]:
    return [Commit(first + at, content) for at, content in enumerate(CONTENTS[:count])]


def test_what_was_appended_is_found_and_more_goes_behind_it(path: Path) -> None:
    ends = written(path, CONTENTS[:3])
    file = LogFile(path)
    file.open()
    assert file.read(TAG) == as_appended(3)
    assert file.used == ends[-1]
    for position in (4, 5):
        file.append(TAG, position, CONTENTS[position - 1])
    file.close()
    assert found(path) == as_appended(5)
    assert path.stat().st_mode & 0o777 == 0o600


def test_wherever_it_was_cut_off_all_before_is_there_and_nothing_else(path: Path) -> None:
    ends = written(path, CONTENTS)
    whole = path.read_bytes()
    for cut in range(ends[-1] + 1):
        path.write_bytes(whole[:cut] + bytes(len(whole) - cut))
        kept = sum(end <= cut for end in ends)
        # Zeros at the end of a commit are there, whether or not they were written.
        kept += kept == 3 and not whole[cut : ends[3]].strip(b"\0")
        missing = whole[cut : ends[min(kept, 4)]]
        if sum(byte.bit_count() for byte in missing) == 1:
            assert found(path)[:-1] == as_appended(kept), "it looks like one flipped bit"
        else:
            assert found(path) == as_appended(kept), cut
        path.write_bytes(whole[:cut])
        assert len(found(path)) <= kept


def test_whichever_byte_has_decayed_no_other_commit_is_lost_or_changed(path: Path) -> None:
    ends = written(path, CONTENTS)
    whole = path.read_bytes()
    for at in range(ends[-1]):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        hit = sum(end <= at for end in ends)
        commits = found(path)
        sound = [each for each in commits if each.is_sound]
        assert sound == [each for each in as_appended(5) if each.position != hit + 1], at
        named = [each.position for each in commits if not each.is_sound]
        assert named == [hit + 1], at


@pytest.mark.parametrize("is_new", [True, False])
def test_name_and_blocks_are_on_the_disk_before_anything_rests_on_them(
    path: Path, is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever made the file may have been killed before they were."""
    if not is_new:
        written(path, CONTENTS)
    seen: list[str] = []
    monkeypatch.setattr(file_module, "sync_data", lambda file: seen.append("file"))
    monkeypatch.setattr(file_module, "sync_folder", lambda folder: seen.append(folder.name))
    file = LogFile(path)
    assert file.open() is not is_new
    assert seen == ["file", path.parent.name]
    assert file.read(TAG) == ([] if is_new else as_appended(5))
    file.close()


def test_a_file_that_cannot_be_synced_is_not_opened(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise OSError(errno.EIO, "broken")

    written(path, CONTENTS)
    for name in ("sync_data", "sync_folder"):
        with monkeypatch.context() as patch:
            patch.setattr(file_module, name, broken)
            file = LogFile(path)
            with pytest.raises(OSError, match="broken"):
                file.open()
            file.close()
    assert found(path) == as_appended(5)


def test_one_commit_that_is_longer_than_the_file_may_be_has_it_to_itself(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_module, "FILE_BYTES_MAX", 1_000)
    monkeypatch.setattr(file_module, "STEP_BYTES", 500)
    file = LogFile(path)
    file.open()
    file.append(TAG, 1, b"x" * 5_000)
    assert found(path) == [Commit(1, b"x" * 5_000)]
    file.rewind()
    assert path.stat().st_size == 1_000
    file.append(TAG, 2, b"y")
    file.close()
    assert found(path) == [Commit(2, b"y")]


def test_what_was_left_from_before_it_was_begun_anew_is_not_taken_for_news(path: Path) -> None:
    written(path, CONTENTS)
    file = LogFile(path)
    file.open()
    file.read(TAG)
    file.rewind()
    for count in range(1, 6):
        file.append(TAG, 5 + count, CONTENTS[count - 1])
        assert found(path) == as_appended(count, first=6)
    file.close()


def test_the_commits_of_another_database_are_not_ours(path: Path) -> None:
    written(path, CONTENTS, tag=OTHER)
    assert found(path) == []
    assert found(path, None) == as_appended(5), "whosever they are"


@pytest.mark.parametrize("call", ["pwrite", "partly", "sync_data"])
def test_one_that_failed_is_not_there(
    path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = LogFile(path)
    file.open()
    file.append(TAG, 1, CONTENTS[0])
    real, calls = os.pwrite, 0

    def partly(descriptor: int, data: bytes, at: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            return real(descriptor, data[: HEADER_BYTES + 2], at)
        if calls == 2:
            raise OSError(errno.ENOSPC, "full")
        return real(descriptor, data, at)

    def done_and_failed(descriptor: int, data: bytes = b"", at: int = 0) -> int:
        nonlocal calls
        calls += 1
        if data:
            real(descriptor, data, at)
        if calls == 1:
            raise OSError(errno.EIO, "broken")
        return len(data)

    with monkeypatch.context() as patch:
        if call == "sync_data":
            patch.setattr(file_module, "open_direct", lambda path: None)
            file.close()
            file.open()
            assert file.read(TAG) == as_appended(1)
            patch.setattr(file_module, call, done_and_failed)
        else:
            patch.setattr(os, "pwrite", partly if call == "partly" else done_and_failed)
        with pytest.raises(OSError, match=r"full|broken"):
            file.append(TAG, 2, b"not there")
    assert found(path) == as_appended(1)
    file.append(TAG, 2, CONTENTS[1])
    file.close()
    assert found(path) == as_appended(2)


def test_a_write_that_was_taken_in_parts_is_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: real(file, data[:7], at))
    monkeypatch.setattr(file_module, "STEP_BYTES", 50)
    written(path, CONTENTS)
    assert found(path) == as_appended(5)


def test_it_grows_by_steps_and_on_a_disk_with_little_room_by_no_more_than_it_needs(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_module, "STEP_BYTES", 100)
    file = LogFile(path)
    file.open()
    assert path.stat().st_size == 100
    file.append(TAG, 1, b"x" * 80)
    assert path.stat().st_size == file.used + 100
    monkeypatch.setattr(file_module, "ROOM_BYTES", 1 << 60)
    file.append(TAG, 2, b"x" * 200)
    assert path.stat().st_size == file.used
    file.append(TAG, 3, b"x" * 200)
    assert path.stat().st_size == file.used
    file.close()
    assert [each.position for each in found(path)] == [1, 2, 3]
