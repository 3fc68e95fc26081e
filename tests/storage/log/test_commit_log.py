"""The commit log: appended and folded once, in order; begun anew only when that is safe."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from meshagent.errors import LimitReached, StorageError
from meshagent.storage.log import commit_log as log_module
from meshagent.storage.log import log_file as file_module
from meshagent.storage.log.commit_log import CommitLog
from meshagent.storage.log.log_file import HEADER_BYTES, LogFile

TAG = b"our tag!"
CONTENT = bytes(100)


class Folded:
    """Tables that only remember what they got, and can be full or broken."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.position = 0
        self.durable = 0
        self.fault: StorageError | LimitReached | None = None
        self.steps: list[int] = []

    def fold(self, rows: Sequence[Any], position: int) -> None:
        if self.fault is not None:
            raise self.fault
        self.rows += rows
        self.position = position
        self.steps.append(len(rows))

    def make_durable(self) -> None:
        if self.fault is not None:
            raise self.fault
        self.durable = self.position


@pytest.fixture
def tables() -> Folded:
    return Folded()


@pytest.fixture
def log(tmp_path: Path, tables: Folded) -> Iterator[CommitLog]:
    log = CommitLog(tmp_path / "commits", tables)
    log.open()
    log.begin(TAG, 0)
    log.read(TAG)
    yield log
    log.close(remove=False)


def test_a_commit_waits_until_it_is_folded_once_and_in_order(
    log: CommitLog, tables: Folded
) -> None:
    for row in "abc":
        log.append(CONTENT, [row])
    assert (tables.rows, log.rows_waiting(), log.size) == ([], ["a", "b", "c"], 300)
    log.fold_all()
    log.fold_all()
    assert (tables.rows, tables.position) == (["a", "b", "c"], 3)
    assert (log.rows_waiting(), log.size) == ([], 0)


def test_a_step_folds_a_bounded_amount_and_lets_others_in_between(
    log: CommitLog, tables: Folded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "FOLD_BYTES", 150)
    for row in range(6):
        log.append(CONTENT, [row])
    came: list[int] = []

    def between() -> None:
        came.append(100 + len(came))
        log.append(CONTENT, [came[-1]])

    log.between = between
    log.fold_all()
    assert tables.steps == [2, 2, 2]
    assert (tables.rows, log.rows_waiting()) == ([*range(6)], came)
    log.fold_all(alone=True)
    assert tables.rows == [*range(6), *came]


def test_a_full_file_makes_room_by_folding_and_refuses_nothing(
    log: CommitLog, tables: Folded, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 40 * (HEADER_BYTES + len(CONTENT))
    monkeypatch.setattr(file_module, "FILE_BYTES_MAX", room)
    monkeypatch.setattr(log_module, "FOLD_BYTES", 1)
    longest, rewound = 0, 0
    for row in range(1_000):
        steps, used = len(tables.steps), log.used
        log.append(CONTENT, [row])
        longest = max(longest, len(tables.steps) - steps)
        assert log.used <= room
        if log.used < used:
            rewound += 1
            assert tables.durable == row, "all that the file held is safe elsewhere"
    assert rewound == 1_000 // 40 - 1
    assert longest <= 3, "the work is shared by all commits, and no one has to wait for all of it"
    log.fold_all()
    assert tables.rows == [*range(1_000)]


def test_a_commit_that_is_longer_than_the_file_is_taken(
    log: CommitLog, tables: Folded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_module, "FILE_BYTES_MAX", 500)
    log.append(CONTENT, ["a"])
    log.append(bytes(5_000), ["b"])
    assert (tables.rows, log.rows_waiting()) == (["a"], ["b"])
    log.append(CONTENT, ["c"])
    log.fold_all()
    assert tables.rows == ["a", "b", "c"]


def test_nothing_is_begun_anew_while_the_tables_are_not_durable(
    log: CommitLog, tables: Folded
) -> None:
    log.append(CONTENT, ["a"])
    log.fold_all()
    used = log.used
    tables.fault = StorageError("The disk failed.")
    with pytest.raises(StorageError):
        log.rewind()
    assert log.used == used
    tables.fault = None
    log.rewind()
    assert (log.used, tables.durable) == (0, 1)


def test_tables_on_a_full_disk_refuse_a_commit_only_when_room_has_to_be_made(
    log: CommitLog, tables: Folded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_module, "FILE_BYTES_MAX", 10 * (HEADER_BYTES + len(CONTENT)))
    tables.fault = LimitReached("The disk is full.")
    for row in range(6):
        log.append(CONTENT, [row])
    for _ in range(3):
        with pytest.raises(LimitReached):
            log.append(CONTENT, ["not"])
    tables.fault = None
    log.append(CONTENT, [6])
    log.fold_all()
    assert tables.rows == [*range(7)]


def test_one_that_was_not_appended_is_nowhere(
    log: CommitLog, tables: Folded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    log.append(CONTENT, ["a"])
    with monkeypatch.context() as patch:
        patch.setattr(LogFile, "append", full)
        with pytest.raises(LimitReached, match="disk is full"):
            log.append(CONTENT, ["not"])
    log.append(CONTENT, ["b"])
    log.fold_all()
    assert (tables.rows, tables.position) == (["a", "b"], 2)


def test_what_is_found_goes_on_where_it_was(log: CommitLog, tables: Folded, tmp_path: Path) -> None:
    for row in (b"a", b"b"):
        log.append(row, [row])
    log.close(remove=False)
    later = CommitLog(tmp_path / "commits", tables)
    assert later.open(), "it was there"
    later.begin(TAG, 0)
    for commit in later.read(TAG):
        later.keep(commit, [commit.content])
    later.append(b"c", [b"c"])
    later.fold_all()
    assert (tables.rows, tables.position) == ([b"a", b"b", b"c"], 3)
    later.close(remove=True)
    assert not (tmp_path / "commits").exists()
