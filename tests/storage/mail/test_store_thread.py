"""The store's thread: it alone touches the files, and the loop waits for it only a moment."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from storage.mail.mail_rows import PEER, copy_files, live, out, outs

from meshagent.core.model.rows import Row
from meshagent.errors import LimitReached, MeshError
from meshagent.storage.log import commit_log as log_module
from meshagent.storage.log.commit_log import CommitLog
from meshagent.storage.log.wait_policy import WaitPolicy
from meshagent.storage.mail import store_thread as thread_module
from meshagent.storage.mail.backup import Snapshot, restore_database
from meshagent.storage.mail.database import Database
from meshagent.storage.mail.sqlite_store import SqliteStore

LONG_S = 20.0  # what no test waits for unless it fails


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mesh.db"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is quick, whatever this machine's is: the loop waits for every lone commit."""
    monkeypatch.setattr(WaitPolicy, "allows", lambda policy, now: True)
    monkeypatch.setattr(thread_module, "WAIT_S", LONG_S)


class Gate:
    """Holds every commit up until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.open = threading.Event(), threading.Event()
        self.sizes: list[int] = []
        real = Database.write

        def write(database: Database, rows: list[Row]) -> None:
            self.sizes.append(len(rows))
            self.begun.set()
            assert self.open.wait(LONG_S)
            real(database, rows)

        monkeypatch.setattr(Database, "write", write)


async def heard(told: list[Any], count: int) -> None:
    async with asyncio.timeout(LONG_S):
        while len(told) < count:  # noqa: ASYNC110 - what it waits for is the loop
            await asyncio.sleep(0)


@pytest.mark.usefixtures("quick")
def test_a_lone_commit_is_told_and_durable_before_begin_returns(path: Path) -> None:
    copy, told = path.with_name("copy.db"), list[MeshError | None]()

    async def script(store: SqliteStore) -> None:
        await store.commit([out(1)])
        store.begin([out(2)], told.append)
        assert told == [None]
        copy_files(path, copy)
        store.begin([out(9)], told.append)
        assert isinstance(told[1], MeshError), "also why it failed"

    async def look(store: SqliteStore) -> None:
        assert [entry.seq for entry in await store.pending(PEER, 1, 9)] == [1, 2]

    live(SqliteStore(path), script)
    for each in (path, copy):
        live(SqliteStore(each), look)


@pytest.mark.parametrize("stalls", ["a lone commit", "one in a crowd"])
def test_a_commit_that_stalls_leaves_the_loop_free(
    path: Path, stalls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WaitPolicy, "allows", lambda policy, now: True)
    told: list[MeshError | None] = []

    async def script(store: SqliteStore) -> None:
        await store.commit([out(1)])
        gate = Gate(monkeypatch)
        began = time.monotonic()
        for number in (2, 3) if stalls == "one in a crowd" else (2,):
            store.begin([out(number)], told.append)
        assert time.monotonic() - began < LONG_S / 4, "it waits for the disk"
        assert await asyncio.to_thread(gate.begun.wait, LONG_S)
        for _ in range(100):
            await asyncio.sleep(0)  # the loop goes round
        assert told == []
        asked = asyncio.ensure_future(store.outbox(9))
        gate.open.set()
        assert [entry.seq for entry in await asked] == [1, 2, 3][: len(told) + 1]
        assert told
        assert set(told) == {None}

    live(SqliteStore(path), script)


@pytest.mark.usefixtures("quick")
def test_the_loop_waits_for_no_commit_that_has_others_before_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[MeshError | None] = []

    async def script(store: SqliteStore) -> None:
        await store.commit([out(1)])
        gate = Gate(monkeypatch)
        first = asyncio.ensure_future(store.commit([out(2)]))
        await asyncio.sleep(0)
        began = time.monotonic()
        store.begin([out(3)], told.append)
        assert time.monotonic() - began < LONG_S / 4
        gate.open.set()
        await first
        await heard(told, 1)

    live(SqliteStore(path), script)


@pytest.mark.usefixtures("quick")
def test_only_its_own_thread_touches_the_files(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users: set[int] = set()
    for kind, name in ((Database, "write"), (Database, "fold"), (Database, "connected")):
        real = getattr(kind, name)

        def noted(*args: Any, real: Callable[..., Any] = real, **more: Any) -> Any:
            users.add(threading.get_ident())
            return real(*args, **more)

        monkeypatch.setattr(kind, name, noted)

    async def script(store: SqliteStore) -> None:
        for row in outs(5):
            store.begin([row], lambda error: None)
            await store.outbox(9)
        await store.log(9, search="x")

    live(SqliteStore(path), script)
    assert len(users) == 1
    assert threading.get_ident() not in users


@pytest.mark.parametrize("seed", range(3))
def test_whoever_is_first_every_commit_is_told_once_and_in_order(
    path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait runs out just when the commit is made, or just not."""
    monkeypatch.setattr(WaitPolicy, "allows", lambda policy, now: True)
    monkeypatch.setattr(thread_module, "WAIT_S", 0.0002)
    rng, told, within, real = random.Random(seed), list[int](), [0], Database.write

    def write(database: Database, rows: list[Row]) -> None:
        time.sleep(rng.choice((0.0, 0.0001, 0.0002)))
        real(database, rows)

    async def script(store: SqliteStore) -> None:
        await store.commit([out(1)])
        monkeypatch.setattr(Database, "write", write)
        for number in range(2, 400):
            before = len(told)
            store.begin([out(number)], lambda error, number=number: told.append(number))
            within[0] += len(told) > before
            if rng.random() < 0.7:
                await heard(told, number - 1)
        await heard(told, 398)

    async def look(store: SqliteStore) -> None:
        assert len(await store.pending(PEER, 1, 999)) == 399

    live(SqliteStore(path), script, look)
    assert told == [*range(2, 400)]
    assert within[0] < 398


@pytest.mark.usefixtures("quick")
def test_an_interrupt_while_the_loop_waits_loses_nobody(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[MeshError | None] = []

    interrupted = threading.Event()

    def interrupt(*_: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    async def script(store: SqliteStore) -> None:
        await store.commit([out(1)])
        gate = Gate(monkeypatch)
        main = threading.get_ident()

        def disturb() -> None:
            assert gate.begun.wait(LONG_S)
            while not interrupted.wait(0.01):  # one may come just before it waits
                signal.pthread_kill(main, signal.SIGUSR1)

        thread = threading.Thread(target=disturb)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            store.begin([out(2)], told.append)
        gate.open.set()
        thread.join()
        await heard(told, 1)
        await store.commit([out(3)])
        assert told == [None]

    async def look(store: SqliteStore) -> None:
        assert [entry.seq for entry in await store.pending(PEER, 1, 9)] == [1, 2, 3]

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        live(SqliteStore(path), script, look)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("quick")
def test_a_burst_shares_its_syncs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_module, "WAIT_S", 0.002)
    told: list[MeshError | None] = []

    async def script(store: SqliteStore) -> None:
        await store.commit([out(1)])
        gate = Gate(monkeypatch)
        for number in range(2, 102):
            store.begin([out(number)], told.append)
        gate.open.set()
        await heard(told, 100)
        assert sum(gate.sizes) == 100
        assert len(gate.sizes) <= 3

    live(SqliteStore(path), script)


def test_one_too_many_is_told_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_module, "PENDING_JOBS_MAX", 3)
    told: list[MeshError | None] = []

    async def script(store: SqliteStore) -> None:
        gate = Gate(monkeypatch)
        for number in range(1, 9):
            store.begin([out(number)], told.append)
        assert told
        assert all(isinstance(error, LimitReached) for error in told)
        gate.open.set()
        await heard(told, 8)
        assert told[-1] is None

    live(SqliteStore(path), script)


def test_commits_do_not_wait_for_a_long_fold(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "FOLD_BYTES", 1)
    monkeypatch.setattr(thread_module, "QUIET_S", 600.0)
    folding, handed_in, told = threading.Event(), threading.Event(), threading.Event()
    real = CommitLog.fold_some

    def fold_some(log: CommitLog) -> None:
        gate = told if folding.is_set() else handed_in
        folding.set()
        assert gate.wait(LONG_S), "the commit has to wait for the whole fold"
        real(log)

    async def script(store: SqliteStore) -> None:
        for row in outs(5):
            await store.commit([row])
        monkeypatch.setattr(CommitLog, "fold_some", fold_some)
        asked = asyncio.ensure_future(store.outbox(99))
        assert await asyncio.to_thread(folding.wait, LONG_S)
        commit = asyncio.ensure_future(store.commit([out(6)]))
        commit.add_done_callback(lambda _: told.set())
        later = asyncio.ensure_future(store.outbox(99))
        await asyncio.sleep(0)  # both are handed in
        handed_in.set()
        await commit
        assert [entry.seq for entry in await asked] == [1, 2, 3, 4, 5]
        assert [entry.seq for entry in await later] == [1, 2, 3, 4, 5, 6]

    live(SqliteStore(path), script)


def chores_done(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    done, real = threading.Event(), Database.do_chore

    def do_chore(database: Database) -> None:
        real(database)
        if not database.has_chores():
            done.set()

    monkeypatch.setattr(Database, "do_chore", do_chore)
    return done


def test_a_quiet_moment_folds_all_and_begins_the_log_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_module, "QUIET_S", 0.0)
    monkeypatch.setattr("meshagent.storage.mail.database.REWIND_BYTES", 1)
    monkeypatch.setattr(log_module, "FOLD_BYTES", 1)

    async def script(store: SqliteStore) -> None:
        done = chores_done(monkeypatch)
        await asyncio.gather(*(store.commit([row]) for row in outs(5)))
        assert await asyncio.to_thread(done.wait, LONG_S)
        thread = store._thread
        assert thread is not None
        log = thread._database.log
        assert (log.size, log.used) == (0, 0)
        assert len(await store.outbox(9)) == 5

    live(SqliteStore(path), script)


def test_a_disk_that_takes_no_table_is_asked_again_later_and_not_at_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_module, "QUIET_S", 0.0)
    monkeypatch.setattr(thread_module, "RETRY_S", 0.05)
    asked: list[float] = []
    enough = threading.Event()

    def full(_: Database) -> None:
        asked.append(time.monotonic())
        if len(asked) == 3:
            enough.set()
        raise LimitReached("The disk is full.")

    async def script(store: SqliteStore) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Database, "do_chore", full)
            await store.commit([out(1)])
            assert await asyncio.to_thread(enough.wait, LONG_S)
        gaps = [later - sooner for sooner, later in itertools.pairwise(asked)]
        assert min(gaps) >= 0.04

    live(SqliteStore(path), script)


def test_a_backup_holds_what_came_while_it_was_made(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshagent.storage.mail.backup.STEP_PAGES", 1)
    copy = path.with_name("copy.db")

    async def steps(call: Callable[[Callable[[Any], Any]], Awaitable[Any]]) -> Any:
        snapshot = await call(lambda database: Snapshot(database.folded(), copy))
        assert not await call(lambda _: snapshot.step())
        return snapshot

    async def script(store: SqliteStore) -> None:
        await store.commit(outs(2))
        thread = store._thread
        assert thread is not None
        snapshot = await steps(thread.call)
        await store.commit([out(3)])
        while not await thread.call(lambda _: snapshot.step()):
            pass
        await thread.call(lambda _: snapshot.finish())

    async def look(store: SqliteStore) -> None:
        assert [entry.seq for entry in await store.pending(PEER, 1, 9)] == [1, 2, 3]
        assert list(await store.damage()) == []

    live(SqliteStore(path), script)
    restore_database(copy, path)
    live(SqliteStore(path), look)
