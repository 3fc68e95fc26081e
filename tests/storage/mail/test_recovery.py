"""After a crash, decay or a lost file: all that is sound is kept, and the rest is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import apsw
import msgpack
import pytest
from storage.mail.mail_rows import (
    EPOCH,
    OTHER,
    PEER,
    beside,
    came,
    copy_files,
    out,
    outs,
    word,
)

from meshagent.core.model.rows import Delivered, NewEpoch, PeerRow, Row, Watermark
from meshagent.errors import MeshError, StorageError
from meshagent.storage.log.commit_log import LOG_ENDING, CommitLog
from meshagent.storage.log.log_file import MAGIC
from meshagent.storage.mail.backup import restore_database
from meshagent.storage.mail.database import Database


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mesh.db"


@pytest.fixture
def database(path: Path) -> Database:
    return opened(path)


def opened(path: Path) -> Database:
    database = Database(path)
    database.open()
    return database


def die(database: Database) -> None:
    """As a process that is killed: what it has in memory is gone."""
    database.log.close(remove=False)
    database.disconnect()


def put_back(path: Path, old: Path) -> None:
    """The tables are again what they were; the log stays as it is."""
    for ending in ("", "-wal"):
        beside(path, ending).write_bytes(beside(old, ending).read_bytes())


def waiting(database: Database, peer: str = PEER) -> list[tuple[int, str]]:
    return [(entry.seq, entry.id) for entry in database.pending(peer, 1, 99)]


def named(database: Database) -> list[tuple[str, str, str]]:
    return [(each.origin, each.peer, each.message_id) for each in database.damage()]


# Crashes


def test_what_a_crash_left_in_the_log_is_there_in_the_next_life(
    path: Path, database: Database
) -> None:
    database.write([*outs(2)])
    database.write([out(3), came("c"), Watermark(PEER, EPOCH, 1, b"h" * 16)])
    database.write([PeerRow(PEER, b"k" * 32, ())])
    assert database.next_run(7) == 7
    database.write([NewEpoch(b"epoch--2"), out(4)])
    die(database)
    risen = opened(path)
    start = risen.reader.start()
    assert [(each.floor, each.next_seq) for each in start.streams] == [(1, 5)]
    assert (start.epoch, start.unread, start.watermarks[0].seq) == (b"epoch--2", 1, 1)
    assert (len(risen.peers()), risen.next_run(0)) == (1, 8)
    risen.write([out(5)])
    assert [seq for seq, _ in waiting(risen)] == [1, 2, 3, 4, 5]
    assert risen.damage() == []
    risen.close()


@pytest.mark.parametrize("fails", ["open", "read"])
def test_a_start_that_fails_leaves_what_a_crash_has_left(
    path: Path, database: Database, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.write(outs(3))
    die(database)

    def broken(*_: object) -> None:
        raise StorageError("It can't be read now.")

    with monkeypatch.context() as patch:
        patch.setattr(CommitLog, fails, broken)
        failing = Database(path)
        with pytest.raises(StorageError):
            failing.open()
        failing.close()
    risen = opened(path)
    assert [seq for seq, _ in waiting(risen)] == [1, 2, 3]
    risen.close()


def test_a_restore_that_fails_leaves_what_a_crash_has_left(path: Path, database: Database) -> None:
    database.write(outs(3))
    die(database)
    path.with_name("no backup").write_bytes(b"?" * 4096)
    with pytest.raises(MeshError):
        restore_database(path.with_name("no backup"), path)
    risen = opened(path)
    assert [seq for seq, _ in waiting(risen)] == [1, 2, 3]
    risen.close()


# Damaged commits


def spoil(path: Path, position: int, *, header: bool = False) -> None:
    """A bit of a commit is no more what it was."""
    commits = beside(path, LOG_ENDING)
    data = bytearray(commits.read_bytes())
    at = -1
    for _ in range(position):
        at = data.index(MAGIC, at + 1)
    data[at + 8 if header else data.index(b"spoil", at)] ^= 4
    commits.write_bytes(data)


@pytest.mark.parametrize("header", [False, True], ids=["content", "header"])
@pytest.mark.parametrize("position", [1, 2])
def test_a_damaged_commit_is_named_with_its_message_and_no_number_is_given_twice(
    path: Path, database: Database, position: int, header: bool
) -> None:
    before = database.epoch()
    for seq in (1, 2, 3):
        database.write([out(seq, text="spoil this")])
    die(database)
    spoil(path, position, header=header)
    risen = opened(path)
    (damage,) = risen.damage()
    assert (damage.origin, damage.peer, damage.message_id) == ("log", PEER, f"b{position}")
    assert "checksum" in damage.reason
    assert risen.facts()["damaged_rows"].startswith(f"log {position}")
    assert risen.epoch() != before, "the numbers of what is lost may be known to others"
    kept = [f"b{seq}" for seq in (1, 2, 3) if seq != position]
    assert waiting(risen) == list(enumerate(kept, 1))
    risen.write([out(3, "next")])
    die(risen)
    again = opened(path)
    assert waiting(again) == list(enumerate([*kept, "next"], 1))
    assert again.damage() == [damage], "once"
    again.close()


def test_every_message_of_a_damaged_commit_is_named(path: Path, database: Database) -> None:
    database.write([out(1), came("c", text="spoil this"), out(1, "o", OTHER)])
    database.write([word("b1", "delivered")])
    die(database)
    spoil(path, 1)
    risen = opened(path)
    assert named(risen) == [("log", PEER, "b1"), ("log", PEER, "c"), ("log", OTHER, "o")]
    risen.close()


def test_behind_a_lost_commit_words_about_old_numbers_settle_nothing_else(
    path: Path, database: Database
) -> None:
    """It may have been the one that numbered all anew."""
    database.write([*outs(3)])
    database.log.fold_all()
    database.write([word("b1", "delivered"), NewEpoch(b"epoch--2"), out(3, "spoil")])
    database.write([out(4, "later"), out(5, "last")])
    database.write([Delivered(PEER, 1, 1, 7), Delivered(PEER, 4, 4, 8)])  # b2 and "later"
    die(database)
    spoil(path, 1)
    risen = opened(path)
    assert waiting(risen) == [(1, "b1"), (2, "b2"), (3, "b3"), (4, "last")]
    states = {each.id: each.state for each in risen.reader.outbox(99, ended=True)}
    assert states["later"] == "delivered"
    assert risen.epoch() not in (EPOCH, b"epoch--2")
    risen.close()


def test_behind_a_lost_commit_a_new_epoch_ends_what_old_numbers_mean(
    path: Path, tmp_path: Path, database: Database
) -> None:
    database.write([out(1, "spoil")])
    copy_files(path, tmp_path / "old.db")
    database.write([out(2, "x"), out(3, "y"), Delivered(PEER, 1, 1, 7)])
    database.write([NewEpoch(b"epoch--2")])  # from here on 1 is x, and 2 is y
    database.write([Delivered(PEER, 2, 2, 8)])
    die(database)
    put_back(path, tmp_path / "old.db")
    spoil(path, 1)
    risen = opened(path)
    assert waiting(risen) == [(1, "x"), (2, "y")], "x would be taken for delivered"
    risen.close()


def unknown_kind(database: Database) -> bytes:
    content: bytes = msgpack.packb([(99, [("of", "the", "future")]), (0, [out(2)])])
    return content


def more_fields(database: Database) -> bytes:
    content: bytes = msgpack.packb([(0, [(*out(2), "a", "new", "field")]), (4, [came("c")])])
    return content


def no_rows(database: Database) -> bytes:
    return b"\xc1 no msgpack at all"


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (unknown_kind, [("log", PEER, "b2")]),
        (more_fields, [("log", "", "")]),
        (no_rows, [("log", "", "")]),
    ],
)
def test_a_sound_commit_that_is_not_understood_is_set_aside_and_named(
    path: Path,
    database: Database,
    content: Callable[[Database], bytes],
    names: list[tuple[str, str, str]],
) -> None:
    before = database.epoch()
    database.write([out(1)])
    database.log.append(content(database), [])
    database.log.append(database._packer.pack([out(3)]), [out(3)])
    die(database)
    risen = opened(path)
    assert named(risen) == names
    assert "does not know" in risen.damage()[0].reason
    assert waiting(risen) == [(1, "b1"), (2, "b3")]
    assert risen.epoch() != before
    kept = risen.connected().execute("SELECT content FROM quarantine ORDER BY id LIMIT 1").get
    assert kept == content(risen)
    risen.close()


# Tables and log that do not fit together


def test_sound_commits_behind_a_gap_are_kept_under_a_new_epoch_and_the_gap_is_named(
    path: Path, tmp_path: Path, database: Database
) -> None:
    """As when SQLite cut its WAL off: the tables are older than the first commit in the log."""
    database.write([*outs(3)])
    database.log.fold_all()
    database.log.rewind()
    copy_files(path, tmp_path / "old.db")
    before = database.epoch()
    database.write([out(4)])
    database.log.fold_all()
    database.log.rewind()  # from here on the log knows nothing of b4
    database.write([Delivered(PEER, 1, 1, 7_000), out(5), came("c")])
    database.write([out(6), PeerRow(PEER, b"k" * 32, ()), Delivered(PEER, 5, 5, 8_000)])
    die(database)
    put_back(path, tmp_path / "old.db")
    for life in range(3):
        risen = opened(path)
        (gap,) = risen.damage()
        assert (gap.origin, "missing" in gap.reason) == ("log", True)
        assert risen.facts()["damaged_rows"].startswith("log 2 to 2")
        assert risen.epoch() != before
        pending = [ident for _, ident in waiting(risen)]
        assert pending == ["b1", "b2", "b3", "b6", *(f"new{n}" for n in range(life))]
        assert [seq for seq, _ in waiting(risen)] == [*range(1, len(pending) + 1)]
        assert [entry.id for entry in risen.reader.inbox(0, 9, False)] == ["c"]
        assert len(risen.peers()) == 1
        (stream,) = risen.reader.start().streams
        risen.write([out(stream.next_seq, f"new{life}")])
        die(risen)


def test_a_database_that_was_put_back_takes_the_commits_that_follow_it(
    path: Path, tmp_path: Path, database: Database
) -> None:
    database.write([out(1)])
    database.log.fold_all()
    database.log.rewind()
    copy_files(path, tmp_path / "copy.db")
    for seq in range(2, 6):
        database.write([out(seq)])
        database.log.fold_all()
    die(database)
    put_back(path, tmp_path / "copy.db")
    risen = opened(path)
    assert waiting(risen) == [(seq, f"b{seq}") for seq in range(1, 6)]
    assert risen.damage() == []
    risen.close()


@pytest.mark.parametrize("key", ["log", "epoch"])
def test_tables_that_forgot_what_they_hold_take_each_commit_once(
    path: Path, database: Database, key: str
) -> None:
    before = database.epoch()
    database.write([out(1), came("c")])
    database.log.fold_all()
    database.write([out(2), came("d"), Delivered(PEER, 1, 1, 7)])
    die(database)
    connection = apsw.Connection(str(path))
    connection.execute(f"DELETE FROM meta WHERE key = '{key}'")
    connection.close()
    risen = opened(path)
    expected = [] if key == "log" else ["b1"]  # what was said by its number was not in the tables
    assert [ident for _, ident in waiting(risen)] == [*expected, "b2"]
    assert [entry.id for entry in risen.reader.inbox(0, 9, False)] == ["c", "d"]
    assert risen.epoch() != before
    risen.close()


# A file that is not there


def test_a_log_that_is_missing_after_an_unclean_stop_is_noticed(
    path: Path, database: Database
) -> None:
    before = database.epoch()
    database.write([out(1)])
    database.log.fold_all()
    database.write([out(2)])
    die(database)
    beside(path, LOG_ENDING).unlink()
    risen = opened(path)
    (damage,) = risen.damage()
    assert (damage.origin, "missing after an unclean stop" in damage.reason) == ("log", True)
    assert waiting(risen) == [(1, "b1")]
    assert risen.epoch() != before, "number 2 may have been seen"
    assert "log file" in risen.facts()["damaged_rows"]
    risen.close()
    later = opened(path)
    assert later.damage() == [damage], "and told once"
    later.close()


def test_a_clean_stop_leaves_no_log_and_nothing_is_missed(path: Path, database: Database) -> None:
    rows: list[Row] = [*outs(2)]
    for _ in range(3):
        database.write(rows)
        epoch = database.epoch()
        database.close()
        assert not beside(path, LOG_ENDING).exists()
        database.open()
        assert (database.damage(), database.epoch()) == ([], epoch)
        rows = [came("c")]
    database.close()


def test_the_tables_say_durably_that_a_log_is_needed_before_the_first_commit(
    path: Path, tmp_path: Path, database: Database
) -> None:
    database.close()
    database.open()
    copy = tmp_path / "copy.db"
    copy.write_bytes(path.read_bytes())  # as a power cut leaves it, without its WAL and its log
    database.close()
    risen = opened(copy)
    assert named(risen) == [("log", "", "")]
    risen.close()


def test_a_log_that_a_clean_stop_could_not_remove_harms_nobody(
    path: Path, database: Database
) -> None:
    database.write([out(1)])
    left = beside(path, LOG_ENDING).read_bytes()
    database.close()
    beside(path, LOG_ENDING).write_bytes(left)
    risen = opened(path)
    assert (waiting(risen), risen.damage()) == ([(1, "b1")], [])
    risen.close()


def test_what_a_full_disk_keeps_out_of_the_tables_is_asked_for_and_numbered_all_the_same(
    path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.write([*outs(3), Delivered(PEER, 1, 1, 7)])
    database.write([NewEpoch(b"epoch--2"), out(3, "n")])
    die(database)

    def full(*_: object) -> None:
        raise StorageError("The disk is full.")

    with monkeypatch.context() as patch:
        patch.setattr(Database, "fold", full)
        risen = opened(path)
        assert waiting(risen) == [(1, "b2"), (2, "b3"), (3, "n")]
        with pytest.raises(StorageError, match="where 4 comes next"):
            risen.write([out(3, "again")])
        risen.write([out(4, "o")])
    assert waiting(risen) == [(1, "b2"), (2, "b3"), (3, "n"), (4, "o")]
    risen.close()
