"""Commits in the loop's own thread: as durable and in order as all others, never a long wait."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from storage.mail.mail_rows import PEER, beside, came, copy_files, live, out, outs

from meshagent.core.model.rows import NewEpoch, PeerRow, Row
from meshagent.errors import LimitReached
from meshagent.storage.log import log_file as commits_module
from meshagent.storage.log import loop_commits as pace_module
from meshagent.storage.log.commit_log import NEVER_LONG_BYTES, CommitLog
from meshagent.storage.log.log_file import LogFile
from meshagent.storage.log.loop_commits import Pace
from meshagent.storage.mail import backup as backup_module
from meshagent.storage.mail import database as database_module
from meshagent.storage.mail import sqlite_store as sqlite_module
from meshagent.storage.mail.backup import Snapshot, restore_database
from meshagent.storage.mail.database import AT_ONCE_ROWS_MAX, Database
from meshagent.storage.mail.sqlite_store import SqliteStore


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """On a quick disk, whatever this machine's is: a test that means a slow one says so."""
    monkeypatch.setattr(pace_module, "QUICK_S", 60.0)
    monkeypatch.setattr(pace_module, "SLOW_S", 60.0)
    return tmp_path / "mesh.db"


async def at_once(store: SqliteStore, rows: list[Row]) -> None:
    """As soon as the loop may: not right after another one."""
    async with asyncio.timeout(20):
        while not store.commit_at_once(rows):  # noqa: ASYNC110 - what it waits for is the clock
            await asyncio.sleep(0)


Q = 0.0005  # a commit on a quick disk
HERE, THERE = Pace.took, Pace.saw  # in the loop, and in the store's thread
QUICK = (THERE, 1.0, Q)


@pytest.mark.parametrize(
    ("commits", "now", "allowed"),
    [
        ([], 9.0, False),  # nothing is known of the disk
        ([QUICK], 1.0 + 1.5 * Q, True),
        ([QUICK, (HERE, 2.0, Q)], 2.0 + 1.5 * Q, False),  # of a crowd: it has to share a sync
        ([QUICK, (HERE, 2.0, Q)], 2.0 + 2.5 * Q, True),
        ([(THERE, 1.0, 0.002)], 9.0, False),  # not slow, but what is a change of threads beside it?
        ([(THERE, at, 0.002) for at in (1.0, 2.0)] + [(THERE, 3.0, Q)], 9.0, False),
        # A busy loop keeps the thread waiting, most often.
        ([(THERE, 1.0, 0.0015)] + 2 * [(THERE, 2.0, 0.0015), (THERE, 3.0, Q)], 9.0, True),
        ([QUICK, (THERE, 2.0, 0.004), (THERE, 3.0, Q)], 9.0, True),
        ([QUICK, (HERE, 2.0, 0.002), (HERE, 3.0, Q)], 9.0, True),  # once
        ([QUICK] + [(HERE, 2.0, 0.002)] * 6, 9.0, False),
        # A slow one now and then is nobody's fault,
        ([QUICK, (HERE, 2.0, 0.006), (HERE, 3.0, Q)], 9.0, True),
        ([QUICK] + [(HERE, at, 0.006 if at % 7 == 0 else Q) for at in range(2, 200)], 999.0, True),
        # but not several in a row, or one that takes long: then somebody has to see a quick one.
        ([QUICK] + [(HERE, 2.0 + at, 0.006) for at in (0.0, 0.01, 0.02, 0.03)], 9.0, False),
        ([QUICK, (HERE, 2.0, 0.03)], 9.0, False),
        ([QUICK, (HERE, 2.0, 0.03), (THERE, 2.05, Q)], 9.0, False),  # it may last
        ([QUICK, (HERE, 2.0, 0.03), *[(THERE, 2.3, Q)] * 4], 9.0, True),
        ([QUICK, (HERE, 2.0, 1.0)] + [(THERE, 20.0, Q)] * 90, 29.0, False),  # made up for
        ([QUICK, (HERE, 2.0, 1.0)] + [(THERE, 24.0, Q)] * 90, 29.0, True),
    ],
)
def test_the_loop_waits_for_a_disk_that_is_quick_and_at_most_half_of_its_time(
    commits: list[tuple[Callable[[Pace, float, float], None], float, float]],
    now: float,
    allowed: bool,
) -> None:
    pace = Pace()
    for made, began, took in commits:
        made(pace, began, began + took)
    assert pace.allows(now) is allowed


def test_it_is_durable_when_the_call_returns(path: Path) -> None:
    copy = path.with_name("copy.db")

    async def script(store: SqliteStore) -> None:
        await store.commit([out(1)])
        await at_once(store, [out(2), came("c")])
        copy_files(path, copy)

    async def look(store: SqliteStore) -> None:
        assert [entry.seq for entry in await store.pending(PEER, 1, 9)] == [1, 2]
        assert [entry.id for entry in await store.inbox(0, 9)] == ["c"]

    live(SqliteStore(path), script)
    for each in (path, copy):
        live(SqliteStore(each), look)


def test_a_disk_that_is_slow_is_not_waited_for_in_the_loop(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace_module, "QUICK_S", 0.0)
    loops, writers, real = threading.get_ident(), set[int](), Database.write

    def write(database: Database, rows: list[Row]) -> None:
        writers.add(threading.get_ident())
        real(database, rows)

    monkeypatch.setattr(Database, "write", write)

    async def script(store: SqliteStore) -> None:
        for row in outs(5):
            assert not store.commit_at_once([row])
            await store.commit([row])

    live(SqliteStore(path), script)
    assert writers
    assert loops not in writers


def test_it_never_passes_a_commit_that_waits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, release, real = threading.Event(), threading.Event(), Database.write

    def write(database: Database, rows: list[Row]) -> None:
        begun.set()
        assert release.wait(20)
        real(database, rows)

    async def script(store: SqliteStore) -> None:
        await store.commit([out(1)])
        with monkeypatch.context() as patch:
            patch.setattr(Database, "write", write)
            second = asyncio.ensure_future(store.commit([out(2)]))
            await asyncio.sleep(0)
            assert not store.commit_at_once([out(3)]), "handed in"
            assert await asyncio.to_thread(begun.wait, 20)
            assert not store.commit_at_once([out(3)]), "at work"
            release.set()
            await second
        await at_once(store, [out(3)])
        assert [entry.seq for entry in await store.pending(PEER, 1, 9)] == [1, 2, 3]

    live(SqliteStore(path), script)


takes_longer = pytest.mark.parametrize(
    "rows",
    [
        [PeerRow(PEER, b"k" * 32, ())],
        [NewEpoch(b"epoch--2")],
        outs(AT_ONCE_ROWS_MAX + 1),
        [came("c", text="x" * 2 * NEVER_LONG_BYTES)],
    ],
    ids=["peers", "new numbers", "many", "long"],
)


@takes_longer
def test_what_takes_longer_than_a_sync_is_not_done_in_the_loop(path: Path, rows: list[Row]) -> None:
    async def script(store: SqliteStore) -> None:
        await store.commit([came("first")])
        await at_once(store, [came("second")])
        worker = store._worker
        assert worker is not None
        assert not worker._database.write_at_once(rows)
        assert worker._database.write_at_once([out(1), came("c")])
        worker._database.journal.overrun = True
        assert not worker._database.write_at_once([out(2)])

    live(SqliteStore(path), script)


@takes_longer
def test_what_takes_longer_than_a_sync_says_nothing_of_the_disk(
    path: Path, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, float]] = []
    monkeypatch.setattr(Pace, "saw", lambda _, *times: seen.append(times))

    async def script(store: SqliteStore) -> None:
        await store.commit(rows)
        assert not seen
        await store.commit([came("short")])
        assert len(seen) == 1

    live(SqliteStore(path), script)


def test_after_a_question_the_journals_file_is_begun_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a question brings into the tables must not be a burden of the next burst."""
    monkeypatch.setattr(database_module, "REST_BYTES", 10_000)

    async def script(store: SqliteStore) -> None:
        worker = store._worker
        assert worker is not None
        await store.commit([out(1)])
        await store.outbox(1)
        await store.outbox(1)  # behind all that the first one has left to do
        assert 0 < worker._database.journal.used < 10_000, "not for so little"
        await store.commit([out(number) for number in range(2, 200)])
        assert worker._database.journal.used > 10_000
        await store.outbox(1)
        await store.outbox(1)
        assert worker._database.journal.used == 0

    live(SqliteStore(path), script)


def test_a_disk_that_lets_no_file_be_begun_anew_is_not_asked_again_and_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "REST_BYTES", 1)
    asked = 0

    def full(_: Database) -> None:
        nonlocal asked
        asked += 1
        raise LimitReached("The disk is full.")

    monkeypatch.setattr(Database, "rest", full)

    async def script(store: SqliteStore) -> None:
        await store.commit([out(1)])
        for _ in range(5):
            await store.outbox(1)
        assert 0 < asked <= 6

    live(SqliteStore(path), script)


def test_a_backup_holds_what_was_committed_at_once_while_it_was_made(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup_module, "STEP_PAGES", 1)
    copy = path.with_name("copy.db")

    async def script(store: SqliteStore) -> None:
        await store.commit(outs(2))
        worker = store._worker
        assert worker is not None
        snapshot = await worker.call(lambda db: Snapshot(db.folded(), copy))
        for number in range(3, 8):
            assert not await worker.call(lambda _: snapshot.step())
            await at_once(store, [out(number)])
        while not await worker.call(lambda _: snapshot.step()):
            pass
        await worker.call(lambda _: snapshot.finish())

    async def look(store: SqliteStore) -> None:
        assert [entry.seq for entry in await store.pending(PEER, 1, 9)] == list(range(1, 8))

    live(SqliteStore(path), script)
    restore_database(copy, path)
    live(SqliteStore(path), look)


def test_one_that_fails_is_not_kept_and_takes_no_number(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "disk full")

    async def script(store: SqliteStore) -> None:
        await store.commit([out(1)])
        await at_once(store, [out(2)])
        with monkeypatch.context() as patch:
            patch.setattr(CommitLog, "append", full)
            with pytest.raises(LimitReached, match="disk is full"):
                await at_once(store, [out(3)])
        await at_once(store, [out(3, "again")])
        assert [entry.id for entry in await store.pending(PEER, 1, 9)] == ["b1", "b2", "again"]

    live(SqliteStore(path), script)


def test_a_quiet_moment_brings_it_into_the_tables(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded, real = threading.Event(), CommitLog.fold_some

    def fold_some(journal: CommitLog) -> None:
        real(journal)
        folded.set()

    async def script(store: SqliteStore) -> None:
        await store.commit([out(1)])
        await store.outbox(1)
        monkeypatch.setattr(sqlite_module, "QUIET_S", 0.0)
        await at_once(store, [out(2)])
        monkeypatch.setattr(CommitLog, "fold_some", fold_some)
        assert await asyncio.to_thread(folded.wait, 20)

    live(SqliteStore(path), script)


def test_lone_commits_are_written_where_the_file_is(path: Path) -> None:
    async def script(store: SqliteStore) -> None:
        sizes = {ending: beside(path, ending).stat().st_size for ending in ("", "-wal", "-commits")}
        assert sizes["-commits"] == commits_module.STEP_BYTES
        for number in range(1, 200):
            if not store.commit_at_once([out(number, text="x" * 900)]):
                await store.commit([out(number, text="x" * 900)])
            assert {ending: beside(path, ending).stat().st_size for ending in sizes} == sizes

    live(SqliteStore(path), script)


def test_a_moment_is_quiet_when_nobody_has_committed_for_a_while(path: Path) -> None:
    async def script(store: SqliteStore) -> None:
        worker = store._worker
        assert worker is not None
        await store.commit([out(1)])
        await at_once(store, [out(2)])
        assert worker._tidying is not None
        worker._tidying.cancel()
        worker._tidy()  # as if its time had come
        assert worker._untold == 0, "nothing is folded yet"
        quiet_at = worker._committed_at + sqlite_module.QUIET_S
        assert quiet_at <= worker._tidying.when() < quiet_at + sqlite_module.QUIET_S

    live(SqliteStore(path), script)


@pytest.mark.parametrize("when", ["before it is on the disk", "after"])
def test_an_interrupt_in_a_commit_loses_neither_it_nor_the_next(
    path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Ctrl-C while the loop waits for the disk is raised when that has answered."""
    real = LogFile.append

    def interrupted(file: LogFile, tag: bytes, position: int, content: bytes) -> None:
        if when == "after":
            real(file, tag, position, content)
        raise KeyboardInterrupt

    async def script(store: SqliteStore) -> None:
        await store.commit([out(1), came("a")])
        await at_once(store, [out(2), came("b")])
        with monkeypatch.context() as patch:
            patch.setattr(LogFile, "append", interrupted)
            with pytest.raises(KeyboardInterrupt):
                await at_once(store, [out(3), came("c")])
        kept = when == "after"
        assert not store.commit_at_once([out(4 if kept else 3), came("d")]), "first it is made sure"
        await store.commit([out(4 if kept else 3), came("d")])
        await at_once(store, [out(5 if kept else 4), came("e")])

    async def look(store: SqliteStore) -> None:
        wanted = ["a", "b", "c", "d", "e"] if when == "after" else ["a", "b", "d", "e"]
        assert [entry.id for entry in await store.inbox(0, 9)] == wanted
        found = [entry.seq for entry in await store.pending(PEER, 1, 9)]
        assert found == list(range(1, len(wanted) + 1))

    async def both(store: SqliteStore) -> None:
        await script(store)
        await look(store)

    live(SqliteStore(path), both, look)
