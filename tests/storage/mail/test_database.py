"""Commits and tables: what was committed counts at once, whatever stands in the tables yet."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
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
    out,
    out_together,
    outs,
    receipt,
    word,
)

from meshagent.core.model.rows import Arrived, Delivered, NewEpoch, OutRow, PeerRow, Row, Watermark
from meshagent.errors import LimitReached, StorageError
from meshagent.storage.log import commit_log as log_module
from meshagent.storage.log import log_file as file_module
from meshagent.storage.mail import database as database_module
from meshagent.storage.mail.database import Database
from meshagent.storage.mail.tables import MailTables


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


# What a commit costs, and what it brings


EVERY_KIND: list[Row] = [
    *outs(3),
    came("c"),
    Watermark(PEER, EPOCH, 1, b"h" * 16),
    PeerRow(PEER, b"k" * 32, ("10.0.0.1:7400",)),
    NewEpoch(b"epoch--2"),
    out(4),
    out(5, text="x" * 1024 * 1024),
]


def test_a_commit_changes_no_table_and_a_fold_does(path: Path, database: Database) -> None:
    changes = database.connected().execute("SELECT count(*) FROM outbox").get
    database.write(EVERY_KIND)
    assert database.next_run(41) == 41
    database.write([Delivered(PEER, 1, 1, 7_000)])
    assert database.connected().execute("SELECT count(*) FROM outbox").get == changes + 5
    assert table(database, "settled")[0] == (0,), "this one waits"
    database.log.fold_all()
    assert [ident for (ident,) in table(database, "id")] == ["b1", "b2", "b3", "b4", "b5"]
    assert [ident for (ident,) in table(database, "id", "inbox")] == ["c"]
    assert table(database, "settled")[0] == (1,)
    assert (database.epoch(), len(database.peers())) == (b"epoch--2", 1)
    assert database.next_run(0) == 42
    database.close()
    assert [each.name for each in path.parent.iterdir()] == ["mesh.db"], "one file has it all"


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
        [PeerRow(PEER, b"k" * 32, ()), NewEpoch(b"epoch--2"), out(4, "b10")],
        [Delivered(PEER, 1, 2, 9_500), out(5, "b11"), PeerRow(PEER, b"k" * 32, ("a:1",))],
    ]
    found = []
    for name, step in (("together.db", False), ("one by one.db", True)):
        database = Database(tmp_path / name)
        database.open()
        for rows in commits:
            database.write(rows)
            if step:
                database.log.fold_all()
        database.log.fold_all()
        outbox = "peer, seq, id, state, settled, changed_ms, reason, mark, checksum, body"
        inbox = "sender, id, state, failures, changed_ms, mark, checksum, body"
        start = database.reader.start()
        assert start.epoch == b"epoch--2"
        found.append((
            table(database, outbox), table(database, inbox, "inbox"), start.watermarks,
            start.streams, database.peers(),
        ))  # fmt: skip
        assert not database.damaged()
        database.close()
    assert found[0] == found[1]
    assert [row[2] for row in found[0][0]][:4] == ["b1", "b2", "b3", "b4"]


def test_what_was_delivered_meanwhile_is_never_put_as_waiting(database: Database) -> None:
    database.write([*outs(3)])
    database.write([Delivered(PEER, 1, 2, 7_000)])
    changes = database.connected().total_changes()
    database.log.fold_all()
    # A stream, three messages, and the mark of what is folded: no row is changed again.
    assert database.connected().total_changes() - changes == 1 + 3 + 1
    assert table(database, "state, settled") == [(4, 1), (4, 1), (0, 0)]
    database.close()


@pytest.mark.parametrize("directly", [True, False])
@pytest.mark.parametrize(
    "rows", [[row] for row in EVERY_KIND[3:6]] + [[out(1, text="x" * 2**20)], EVERY_KIND[:3]]
)
def test_every_commit_is_one_synced_append_and_a_fold_waits_for_no_disk(
    path: Path, rows: list[Row], directly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    syncs = Syncs(lambda synced: seen.append(synced.name), monkeypatch)
    monkeypatch.setattr(file_module, "sync_data", lambda file: seen.append("log"))
    real = os.pwrite

    def pwrite(file: int, data: bytes, at: int) -> int:
        if fcntl(file, F_GETFL) & os.O_DSYNC:  # then it is durable when it returns
            seen.append("log")
        return real(file, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    if not directly:
        monkeypatch.setattr(file_module, "open_direct", lambda path: None)
    database = Database(path)
    database.open()
    database.write([came("first")])
    database.log.fold_all()  # the first one after a checkpoint syncs the head of the WAL
    seen.clear()
    database.write(rows)
    assert seen == ["log"], "accepted means durable"
    database.log.fold_all()
    assert seen == ["log"]
    database.log.rewind()
    assert seen == ["log", "mesh.db-wal", "mesh.db"], "before the log is begun anew"
    database.close()
    syncs.unregister()


def test_a_new_epoch_that_cannot_be_kept_changes_nothing(database: Database) -> None:
    database.write(outs(3))
    before = database.epoch()
    with pytest.raises(StorageError, match="number 9 where 4"):
        database.write([Delivered(PEER, 1, 1, 5), NewEpoch(b"epoch--2"), out(3, "n"), out(9)])
    assert database.epoch() == before
    database.write([out(4)])
    assert [entry.seq for entry in database.pending(PEER, 1, 9)] == [1, 2, 3, 4]
    database.close()


def test_numbers_go_on_behind_a_new_epoch_that_is_not_folded_yet(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "FOLD_BYTES", 1)
    database.write([*outs(4), *outs(2, OTHER), Delivered(PEER, 1, 2, 5)])
    database.write([NewEpoch(b"epoch--2")])
    database.write([out(3, "n")])
    database.log.fold_some()  # the epoch, and not the message
    database.write([out(4, "o"), out(3, "p", OTHER)])
    found = [(entry.seq, entry.id) for entry in database.pending(PEER, 1, 9)]
    assert found == [(1, "b3"), (2, "b4"), (3, "n"), (4, "o")]
    database.close()


def test_a_commit_may_give_numbers_on_both_sides_of_a_new_epoch(database: Database) -> None:
    database.write([*outs(4), Delivered(PEER, 1, 2, 5)])
    database.write([out(5), NewEpoch(b"epoch--2"), out(4, "n")])
    assert database.pending(PEER, 5, 9) == [], "the number that b5 had"
    found = [(entry.seq, entry.id) for entry in database.pending(PEER, 1, 9)]
    assert found == [(1, "b3"), (2, "b4"), (3, "b5"), (4, "n")]
    database.close()


def test_nothing_is_written_into_a_trial(database: Database) -> None:
    database.write([out(1)])
    with database.trial(), pytest.raises(StorageError, match="takes nothing now"):
        database.write([out(2)])  # as while a full disk answers a question
    database.log.fold_all()
    assert table(database, "seq") == [(1,)]
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


def test_a_commit_that_failed_takes_no_number(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bytes:
        raise OSError(errno.ENOSPC, "disk full")

    database.write([out(1)])
    with monkeypatch.context() as patch:
        patch.setattr("meshagent.storage.log.direct_io.DirectWriter.append", refuse)
        with pytest.raises(LimitReached):
            database.write([out(2), out(3)])
    database.write([out(2), out(3)])
    assert [entry.seq for entry in database.pending(PEER, 1, 9)] == [1, 2, 3]
    database.close()


# Disks that fail


class Failing(apsw.VFS):
    """A disk under SQLite whose syncs fail while `broken` names the file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__("failing", "unix")
        self.broken = ""
        real = apsw.Connection
        monkeypatch.setattr(apsw, "Connection", lambda *a, **k: real(*a, **k, vfs="failing"))

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        vfs, path = self, name.filename() if hasattr(name, "filename") else str(name)

        class File(apsw.VFSFile):
            def xSync(self, flags: int) -> None:
                if vfs.broken and path.endswith(vfs.broken):
                    raise apsw.IOError("broken")
                super().xSync(flags)

        return File("unix", name, flags)


@pytest.mark.parametrize("file", ["mesh.db-wal", "mesh.db"])
def test_after_a_sync_that_failed_nothing_is_begun_anew_before_a_checkpoint_has_succeeded(
    path: Path, file: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(database_module, "REWIND_BYTES", 1)
    disk = Failing(monkeypatch)
    database = Database(path)
    database.open()
    database.write(outs(3))
    database.log.fold_all()
    used = database.log.used
    disk.broken = file
    for _ in range(3):
        assert database.has_chores()
        with pytest.raises(StorageError, match="disk failed"), caplog.at_level(logging.ERROR):
            database.do_chore()
        assert "not on the disk" in caplog.text
        assert database.log.used == used
    database.write([out(4)])
    database.log.fold_all()
    with contextlib.suppress(StorageError):  # of apsw: SQLite itself would not mind
        database.close()
    assert beside(path, "-commits").exists(), "the next run needs it"
    disk.broken = ""
    database = Database(path)
    database.open()
    assert [entry.seq for entry in database.pending(PEER, 1, 9)] == [1, 2, 3, 4]
    database.do_chore()
    assert not database.has_chores()
    database.close()
    assert not beside(path, "-commits").exists()
    disk.unregister()


@pytest.mark.parametrize("together", [False, True])
def test_a_row_that_cannot_be_kept_stops_no_other_and_is_named(
    database: Database, together: bool
) -> None:
    database.write([out(1, "same")])
    new = [out(1, "same", OTHER), out(2, "good", OTHER)]
    database.write([*([out_together(new)] if together else new), came("c")])
    database.log.fold_all()
    (damage,) = database.damage()
    assert (damage.origin, damage.peer, damage.message_id) == ("log", OTHER, "same")
    assert [entry.peer for entry in database.reader.outgoing("same")] == [PEER]
    waiting = database.reader.pending(OTHER, 1, 9)
    assert [(entry.seq, entry.state) for entry in waiting] == [(1, "cancelled"), (2, "queued")]
    assert "damaged" in waiting[0].reason
    assert database.reader.newest() == 1
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
            database.log.fold_all()
    assert table(database, "id") == []
    database.log.fold_all()
    assert [entry.id for entry in database.reader.pending(PEER, 1, 9)] == ["same", "good"]
    assert database.facts()["quarantined"] == "1"
    database.close()
