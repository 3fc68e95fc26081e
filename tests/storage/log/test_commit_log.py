"""The journal: what was committed counts at once, whatever stands in the tables yet."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Sequence
from fcntl import F_GETFL, fcntl
from pathlib import Path
from typing import Any

import apsw
import pytest
from storage.mail.mail_rows import (
    EPOCH,
    OTHER,
    PEER,
    Syncs,
    became,
    beside,
    came,
    came_together,
    copy_files,
    live,
    out,
    out_together,
    outs,
    receipt,
    word,
)

from meshagent.core.model.rows import Arrived, Delivered, NewEpoch, OutRow, PeerRow, Row, Watermark
from meshagent.errors import LimitReached, MeshError, StorageError
from meshagent.storage.log import commit_log as journal_module
from meshagent.storage.log import log_file as commits_module
from meshagent.storage.log.commit_log import LOG_ENDING, LONG_BYTES, CommitLog
from meshagent.storage.log.log_file import HEADER_BYTES, MAGIC
from meshagent.storage.mail import sqlite_store as sqlite_module
from meshagent.storage.mail.backup import restore_database
from meshagent.storage.mail.database import Database
from meshagent.storage.mail.sqlite_store import SqliteStore
from meshagent.storage.mail.tables import MailTables

LONG = "x" * 2 * LONG_BYTES


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mesh.db"


@pytest.fixture
def database(path: Path) -> Database:
    """With the tables as they are: nothing is folded unless the test says so."""
    database = Database(path)
    database.open()
    return database


def table(database: Database, columns: str, name: str = "outbox") -> list[Any]:
    sql = f"SELECT {columns} FROM {name} ORDER BY position"
    return list(database.connected().execute(sql))


def die(database: Database) -> None:
    """As a process that is killed: what it has in memory is gone."""
    connection, database._connection = database.connected(), None
    connection.close()
    database.journal._file.used = 1  # of use to the next life
    database.close()


def again(path: Path) -> Database:
    database = Database(path)
    database.open()
    database.journal.recover()
    return database


# What a commit costs, and what it brings


def test_a_commit_changes_no_table_and_a_fold_does(path: Path, database: Database) -> None:
    rows: list[Row] = [*outs(3), came("c"), Watermark(PEER, EPOCH, 1, b"h" * 16)]
    changes = database.connected().total_changes()
    database.write(rows)
    assert table(database, "id") == table(database, "id", "inbox") == []
    assert database.connected().total_changes() == changes
    database.journal.fold_all()
    assert [ident for (ident,) in table(database, "id")] == ["b1", "b2", "b3"]
    assert [ident for (ident,) in table(database, "id", "inbox")] == ["c"]
    assert database.journal.size == 0
    database.close()
    assert [each.name for each in path.parent.iterdir()] == ["mesh.db"], "one file has it all"


@pytest.mark.parametrize("row", [out(2), PeerRow(PEER, b"k" * 32, ())])
def test_nothing_is_written_into_a_transaction_that_is_given_up(
    database: Database, row: Row
) -> None:
    database.write([out(1)])
    database.connected().execute("BEGIN IMMEDIATE")  # as while a full disk answers a question
    with pytest.raises(StorageError, match="takes nothing now"):
        database.write([row])
    database.connected().execute("ROLLBACK")
    database.journal.fold_all()
    assert table(database, "seq") == [(1,)]
    database.close()


@pytest.mark.parametrize("flood", [False, True])
def test_a_question_is_answered_though_a_commit_in_between_empties_the_journal(
    database: Database, monkeypatch: pytest.MonkeyPatch, flood: bool
) -> None:
    for number in range(1, 21):
        database.write([out(number)])
    monkeypatch.setattr(journal_module, "FOLD_BYTES", database.journal.size * 2 // 3)
    passed: list[OutRow] = []

    def passes() -> None:
        assert len(passed) < 20, "it never ends"
        passed.append(out(21 + len(passed), text="" if flood else "long " * 10_000))
        database.journal.overrun = flood
        database.write([passed[-1]])

    database.journal.between = passes
    assert len(database.look(lambda seen: seen.mail.outbox(99, False))) >= 20
    assert passed
    database.journal.fold_all(alone=True)
    assert table(database, "seq") == [(number,) for number in range(1, 21 + len(passed))]
    database.close()


def test_a_fold_says_what_the_commits_would_have_said_one_by_one(tmp_path: Path) -> None:
    commits: list[list[Row]] = [
        [*outs(4), *outs(2, OTHER)],
        [receipt("b2", "seen"), came("c1"), came("c1")],
        [Delivered(PEER, 1, 2, 7_000), out(5), out(6)],
        [word("b3", "cancelled"), became("c1", "seen")],
        [Delivered(PEER, 4, 5, 8_000), Watermark(PEER, EPOCH, 3, b"x" * 16)],
        [came("c2")._replace(blobs=(b"s" * 32,)), became("c2", "done"), came("c3")],
        [Arrived(PEER, "c2"), out(7), came("c4")],
        [word("b7", "refused", why="no"), Watermark(PEER, EPOCH, 9, b"y" * 16)],
        [out_together([out(8), out(9)]), came_together([came("c5"), came("c1"), came("c6")])],
        [Delivered(PEER, 8, 8, 9_000)],
    ]
    found = []
    for name, step in (("together.db", False), ("one by one.db", True)):
        database = Database(tmp_path / name)
        database.open()
        for rows in commits:
            database.write(rows)
            if step:
                database.journal.fold_all()
        database.journal.fold_all()
        outbox = "peer, seq, id, state, settled, changed_ms, reason, mark, checksum, body"
        inbox = "sender, id, state, failures, changed_ms, mark, checksum, body"
        marks = database.mail.start().watermarks
        streams = database.mail.start().streams
        found.append((table(database, outbox), table(database, inbox, "inbox"), marks, streams))
        assert not database.damaged()
        database.close()
    assert found[0] == found[1]
    assert [row[2] for row in found[0][0]][:4] == ["b1", "b2", "b3", "b4"]


def test_what_was_delivered_meanwhile_is_never_put_as_waiting(database: Database) -> None:
    database.write([*outs(3)])
    database.write([Delivered(PEER, 1, 2, 7_000)])
    changes = database.connected().total_changes()
    database.journal.fold_all()
    # A stream, three messages, and the mark of what is folded: no row is changed again.
    assert database.connected().total_changes() - changes == 1 + 3 + 1
    assert table(database, "state, settled") == [(4, 1), (4, 1), (0, 0)]
    database.close()


@pytest.mark.parametrize("directly", [True, False])
def test_every_commit_is_synced_and_a_fold_waits_for_no_disk(
    path: Path, directly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    syncs = Syncs(lambda synced: seen.append(synced.name), monkeypatch)
    monkeypatch.setattr(commits_module, "sync_data", lambda file: seen.append("commits"))
    real = os.pwrite

    def pwrite(file: int, data: bytes, at: int) -> int:
        if fcntl(file, F_GETFL) & os.O_DSYNC:  # then it is durable when it returns
            seen.append("commits")
        return real(file, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    if not directly:
        monkeypatch.setattr(commits_module, "open_direct", lambda path: None)
    database = Database(path)
    database.open()
    for seq in range(1, 4):
        seen.clear()
        database.write([out(seq)])
        assert seen == ["commits"], "accepted means durable"
        database.journal.fold_all()
        assert seen == ["commits"]
    database.write([out(seq, text=LONG) for seq in range(4, 90)])
    assert database.journal.size == 0
    assert seen == ["commits", "mesh.db-wal"]
    database.close()
    syncs.unregister()


def test_the_file_is_begun_anew_only_when_the_tables_are_on_the_disk(database: Database) -> None:
    database.write([out(1)])
    used = database.journal.used
    assert used
    database.journal.fold_all()
    assert database.journal.used == used, "a power cut may take what was folded"
    database.write([PeerRow(PEER, b"k" * 32, ())])  # synced, and with it all before
    assert database.journal.used == 0
    database.write([out(2)])
    database.journal.fold_all()
    database.write([PeerRow(PEER, b"k" * 32, ())])  # as it was: nothing is written or synced
    assert database.journal.used > 0
    database.rest()
    assert database.journal.used > 0, "not for so little"
    database.write([out(3)])
    database.write([PeerRow(OTHER, b"k" * 32, ())])
    assert database.journal.used > 0, "this one waits"
    database.close()


def test_a_commit_for_which_the_file_has_no_room_goes_to_the_tables_with_all_that_waits(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits_module, "FILE_BYTES_MAX", 2_000)
    for seq in range(1, 40):
        database.write([out(seq, text="x" * 300)])
        assert database.journal.used <= 2_000
    assert [entry.seq for entry in database.folded().mail.pending(PEER, 1, 99)] == [*range(1, 40)]
    database.close()


# Crashes


def test_what_a_crash_left_in_the_journal_is_there_in_the_next_life(
    path: Path, database: Database
) -> None:
    database.write([*outs(2)])
    database.write([out(3), came("c"), Watermark(PEER, EPOCH, 1, b"h" * 16)])
    die(database)
    risen = again(path)
    start = risen.mail.start()
    assert [(each.floor, each.next_seq) for each in start.streams] == [(1, 4)]
    assert (start.unread, start.watermarks[0].seq) == (1, 1)
    risen.write([out(4)])
    assert [entry.seq for entry in risen.folded().mail.pending(PEER, 1, 9)] == [1, 2, 3, 4]
    risen.close()


@pytest.mark.parametrize("fails", ["_mark", "_news"])
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
    risen = again(path)
    assert [entry.seq for entry in risen.folded().mail.pending(PEER, 1, 9)] == [1, 2, 3]
    risen.close()


def test_a_restore_that_fails_leaves_what_a_crash_has_left(path: Path, database: Database) -> None:
    database.write(outs(3))
    die(database)
    path.with_name("no backup").write_bytes(b"?" * 4096)
    with pytest.raises(MeshError):
        restore_database(path.with_name("no backup"), path)
    risen = again(path)
    assert [entry.seq for entry in risen.folded().mail.pending(PEER, 1, 9)] == [1, 2, 3]
    risen.close()


def test_a_backup_holds_what_came_while_it_was_made(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"

    async def script(store: SqliteStore) -> None:
        await store.commit(outs(2))
        worker = store._worker
        assert worker is not None
        snapshot = await worker.call(lambda db: sqlite_module.Snapshot(db, copy))
        await store.commit([out(3)])
        while not await worker.call(lambda _: snapshot.step()):
            pass
        await worker.call(lambda _: snapshot.finish())

    async def look(store: SqliteStore) -> None:
        assert [entry.seq for entry in await store.pending(PEER, 1, 9)] == [1, 2, 3]

    live(SqliteStore(path), script)
    restore_database(copy, path)
    live(SqliteStore(path), look)


# Decay


def spoil(path: Path, position: int, *, header: bool = False) -> None:
    """A bit of a commit is no more what it was."""
    commits = beside(path, LOG_ENDING)
    data = bytearray(commits.read_bytes())
    at = -1
    for _ in range(position):
        at = data.index(MAGIC, at + 1)
    data[at + (8 if header else HEADER_BYTES + 3)] ^= 4
    commits.write_bytes(data)


@pytest.mark.parametrize("header", [False, True], ids=["content", "header"])
@pytest.mark.parametrize("position", [1, 2])
def test_a_damaged_commit_is_named_and_no_number_is_given_twice(
    path: Path, database: Database, position: int, header: bool
) -> None:
    before = database.epoch()
    for seq in (1, 2, 3):
        database.write([out(seq)])
    die(database)
    spoil(path, position, header=header)
    risen = again(path)
    assert risen.facts()["damaged_rows"].startswith(f"journal {position}")
    start = risen.mail.start()
    assert start.epoch != before, "the numbers of what is lost may be known to others"
    found = [(entry.seq, entry.id) for entry in risen.mail.pending(PEER, 1, 9)]
    kept = [f"b{seq}" for seq in (1, 2, 3) if seq != position]
    assert found == list(enumerate(kept, 1))
    risen.write([out(3, "next")])
    risen.close()


def test_without_its_mark_the_journal_is_set_aside_and_named(
    path: Path, database: Database
) -> None:
    """Nobody can tell what of it the tables hold already."""
    before = database.epoch()
    database.write([out(1)])
    database.journal.fold_all()
    database.write([out(2)])
    die(database)
    connection = apsw.Connection(str(path))
    connection.execute("DELETE FROM meta WHERE key = 'journal'")
    connection.close()
    risen = again(path)
    assert "journal 1" in risen.facts()["damaged_rows"]
    assert "journal 2" in risen.facts()["damaged_rows"]
    assert [entry.id for entry in risen.mail.pending(PEER, 1, 9)] == ["b1"]
    assert risen.mail.start().epoch != before
    risen.close()


@pytest.mark.parametrize("between", [0, 1], ids=["next in line", "of another day"])
def test_a_database_that_was_put_back_takes_the_commits_that_follow_it_or_none(
    path: Path, tmp_path: Path, between: int
) -> None:
    database = again(path)
    database.write([out(1)])
    database.rest()
    database.folded().write([PeerRow(PEER, b"k" * 32, ())])  # the file is begun anew
    copy_files(path, tmp_path / "copy.db")
    for seq in range(2, 2 + between):
        database.write([out(seq)])
        database.folded().write([PeerRow(OTHER, b"k" * 32, ())])
    for seq in range(2 + between, 6):
        database.write([out(seq)])
    die(database)
    for ending in ("", "-wal"):
        beside(path, ending).write_bytes(beside(tmp_path / "copy.db", ending).read_bytes())
    kept = 1 if between else 5
    for life in range(1, 4):
        risen = again(path)
        assert risen.facts()["quarantined"] == "0"
        found = [entry.seq for entry in risen.folded().mail.pending(PEER, 1, 99)]
        assert found == [*range(1, kept + life)]
        risen.write([out(kept + life)])
        die(risen)


@pytest.mark.parametrize("together", [False, True])
def test_a_row_that_cannot_be_kept_stops_no_other_and_is_named(
    database: Database, together: bool
) -> None:
    database.write([out(1, "same")])
    new = [out(1, "same", OTHER), out(2, "good", OTHER)]
    database.write([*([out_together(new)] if together else new), came("c")])
    database.journal.fold_all()
    assert "journal same" in database.facts()["damaged_rows"]
    assert [entry.peer for entry in database.mail.outgoing("same")] == [PEER]
    waiting = database.mail.pending(OTHER, 1, 9)
    assert [(entry.seq, entry.state) for entry in waiting] == [(1, "cancelled"), (2, "queued")]
    assert "damaged" in waiting[0].reason
    assert database.mail.newest() == 1
    database.close()


def test_a_full_disk_is_not_taken_for_a_row_that_cannot_be_kept(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = MailTables.write

    def write(tables: MailTables, connection: apsw.Connection, rows: Sequence[Row]) -> None:
        if [row.id for row in rows if isinstance(row, OutRow)] == ["good"]:
            raise apsw.FullError
        real(tables, connection, rows)

    database.write([out(1, "same"), out(2, "good"), out(1, "same", OTHER)])
    with monkeypatch.context() as patch:
        patch.setattr(MailTables, "write", write)
        with pytest.raises(LimitReached):
            database.journal.fold_all()
    assert table(database, "id") == []
    database.journal.fold_all()
    assert [entry.id for entry in database.mail.pending(PEER, 1, 9)] == ["same", "good"]
    assert database.facts()["quarantined"] == "1"
    database.close()


# Bounds, and those who wait


def test_a_flood_goes_past_the_journal_until_there_is_a_quiet_moment(
    path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "LOG_BYTES_MAX", 20_000)
    monkeypatch.setattr(journal_module, "FOLD_BYTES", 5_000)
    largest = 0
    for seq in range(1, 200):
        database.write([out(seq, text="x" * 1_000), word(f"b{seq - 1}", "delivered")])
        largest = max(largest, database.journal.size)
    assert largest < 30_000
    assert (database.journal.size, database.journal.overrun) == (0, True)
    assert len(table(database, "id")) == 199
    database.write([NewEpoch(b"epoch--2"), out(2)._replace(id="next")])
    assert [entry.id for entry in database.mail.pending(PEER, 1, 9)] == ["b199", "next"]
    database.journal.overrun = False
    database.write([out(3)])
    assert len(table(database, "id")) == 200
    database.close()


def test_many_long_messages_are_written_once(database: Database) -> None:
    database.write([out(1)])
    database.write([out(seq, text=LONG) for seq in range(2, 130)])
    assert (database.journal.size, len(table(database, "id"))) == (0, 129)
    database.write([out(130, text=LONG)])  # one alone is not to be kept waiting
    assert len(table(database, "id")) == 129
    assert [entry.seq for entry in database.folded().mail.pending(PEER, 129, 9)] == [129, 130]
    database.close()


@pytest.mark.parametrize("together", [False, True])
def test_what_has_just_come_is_read_back_without_the_tables(
    database: Database, together: bool
) -> None:
    new = [out(seq) for seq in range(1, 10)]
    database.write([out_together(new)] if together else [*new])
    database.write([Delivered(PEER, 1, 3, 7_000)])
    assert [entry.seq for entry in database.pending(PEER, 4, 3)] == [4, 5, 6]
    assert table(database, "id") == []
    database.write([receipt("b5", "seen")])
    assert [entry.state for entry in database.pending(PEER, 4, 3)] == ["queued", "seen", "queued"]
    assert [entry.seq for entry in database.pending(PEER, 1, 99)] == [*range(4, 10)]
    assert len(table(database, "id")) == 9, "of some it is not known here how they ended"
    database.close()


@pytest.mark.parametrize("together", [False, True])
def test_many_messages_of_which_none_is_long_wait_to_be_folded(
    database: Database, together: bool
) -> None:
    new = [out(seq, text=LONG[: LONG_BYTES // 2]) for seq in range(1, 130)]
    database.write([out_together(new)] if together else [*new])
    assert (database.journal.size > 129 * LONG_BYTES // 2, table(database, "id")) == (True, [])
    assert len(database.folded().mail.pending(PEER, 1, 999)) == 129
    database.close()


@pytest.mark.parametrize("text", ["", LONG], ids=["to the journal", "to the tables"])
def test_a_commit_that_failed_takes_no_number(
    database: Database, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    def refuse(*_: object) -> bytes:
        raise apsw.FullError if text else OSError(errno.ENOSPC, "disk full")

    def fails(rows: list[Row], what: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(f"meshagent.storage.{what}", refuse)
            with pytest.raises(LimitReached):
                database.write(rows)

    database.write([out(1)])
    rows: list[Row] = [out(seq, text=text) for seq in range(2, 80)]
    if text:
        fails([PeerRow("a", b"", ())], "mail.database.encode_row")
    fails(rows, "mail.tables.out_values" if text else "log.direct_io.DirectWriter.append")
    database.write(rows)
    found = database.folded().mail.pending(PEER, 1, 99)
    assert [entry.seq for entry in found] == list(range(1, 80))
    database.close()


def test_commits_do_not_wait_for_a_long_fold(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "FOLD_BYTES", 1)
    folding, handed_in, told = threading.Event(), threading.Event(), threading.Event()
    real = CommitLog.fold_some

    def fold_some(journal: CommitLog) -> int:
        gate = told if folding.is_set() else handed_in
        folding.set()
        assert gate.wait(20), "the commit has to wait for the whole fold"
        return real(journal)

    async def script(store: SqliteStore) -> None:
        for row in outs(5):
            await store.commit([row])
        monkeypatch.setattr(CommitLog, "fold_some", fold_some)
        asked = asyncio.ensure_future(store.pending(PEER, 1, 99))
        assert await asyncio.to_thread(folding.wait, 20)
        commit = asyncio.ensure_future(store.commit([out(6)]))
        commit.add_done_callback(lambda _: told.set())
        later = asyncio.ensure_future(store.pending(PEER, 1, 99))
        await asyncio.sleep(0)  # both are handed in
        handed_in.set()
        await commit
        assert [entry.seq for entry in await asked] == [1, 2, 3, 4, 5]
        assert [entry.seq for entry in await later] == [1, 2, 3, 4, 5, 6]

    live(SqliteStore(path), script)


def test_a_quiet_moment_empties_the_journal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_module, "QUIET_S", 0.0)
    folded = threading.Event()
    real = CommitLog.fold_some

    def fold_some(journal: CommitLog) -> int:
        size = real(journal)
        if not journal.size:
            folded.set()
        return size

    monkeypatch.setattr(CommitLog, "fold_some", fold_some)

    async def script(store: SqliteStore) -> None:
        await store.commit(outs(2))
        assert await asyncio.to_thread(folded.wait, 30)

    live(SqliteStore(path), script)
