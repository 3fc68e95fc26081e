"""A copy while everything goes on, and the way back from it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import apsw
import pytest
from storage.mail.mail_rows import OTHER, PEER, came, copy_files, live, out, outs, word

from meshagent.core.model.rows import PeerRow, Row, StreamStart
from meshagent.core.ports import Store
from meshagent.errors import CorruptFile, MeshError, StorageError
from meshagent.storage.mail import backup as backup_module
from meshagent.storage.mail.backup import finish_restore, restore_database
from meshagent.storage.mail.memory_store import MemoryStore
from meshagent.storage.mail.schema import SCHEMA_VERSION
from meshagent.storage.mail.sqlite_store import SqliteStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mesh.db"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return tmp_path / "copy.db"


def back_up(path: Path, copy: Path, rows: list[object]) -> None:
    async def script(store: SqliteStore) -> None:
        await store.commit(rows)  # type: ignore[arg-type]
        await store.backup(copy)

    live(SqliteStore(path), script)


def test_a_backup_is_whole_while_ten_thousand_commits_run(
    path: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup_module, "STEP_PAGES", 8)
    done = 0

    async def send(store: SqliteStore) -> None:
        nonlocal done
        for first in range(2_001, 12_001, 250):
            rows = [[out(first + n), came(f"c{first + n}")] for n in range(250)]
            await asyncio.gather(*(store.commit(pair) for pair in rows))
            done = first + 249

    async def script(store: SqliteStore) -> None:
        await store.commit([out(n, text="x" * 300) for n in range(1, 2_001)])
        sending = asyncio.ensure_future(send(store))
        await asyncio.sleep(0.01)
        before = done
        await store.backup(copy)
        assert done > before, "nobody could send meanwhile"
        await sending

    async def look(store: SqliteStore) -> None:
        found = [entry.seq for entry in await store.pending(PEER, 1, 100_000)]
        assert found == list(range(1, len(found) + 1))
        assert len(found) - 2_000 == (await store.mail_start()).unread
        assert (await store.facts())["quarantined"] == "0"

    live(SqliteStore(path), script)
    assert copy.stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(copy.parent)) == ["copy.db", "mesh.db"]
    live(SqliteStore(copy), look)


def test_a_backup_that_fails_leaves_the_old_one(
    path: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back_up(path, copy, [*outs(3)])
    before = copy.read_bytes()

    def no_step(self: object) -> bool:
        raise StorageError("The disk failed.")

    async def script(store: SqliteStore) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(backup_module.Snapshot, "step", no_step)
            with pytest.raises(StorageError):
                await store.backup(copy)
        with pytest.raises(StorageError, match="does not exist"):
            await store.backup(copy.parent / "no" / "copy.db")
        await store.commit([out(4)])

    live(SqliteStore(path), script)
    assert copy.read_bytes() == before
    assert sorted(os.listdir(copy.parent)) == ["copy.db", "mesh.db"]


def test_a_backup_that_is_given_up_leaves_nothing(path: Path, copy: Path) -> None:
    async def script(store: SqliteStore) -> None:
        await store.commit([out(n, text="x" * 5_000) for n in range(1, 2_001)])
        backup = asyncio.ensure_future(store.backup(copy))
        await asyncio.sleep(0.005)
        backup.cancel()
        with pytest.raises(asyncio.CancelledError):
            await backup
        await store.commit([out(2_001)])

    live(SqliteStore(path), script)
    assert os.listdir(copy.parent) == ["mesh.db"]


def test_a_restored_database_numbers_what_waits_under_a_new_epoch(path: Path, copy: Path) -> None:
    epochs: list[bytes] = []

    async def yesterday(store: SqliteStore) -> None:
        await store.commit([PeerRow("p", b"k" * 32, ()), *outs(4), *outs(1, OTHER), came("c")])
        await store.commit([word("b1", "delivered"), word("b2", "cancelled")])
        epochs.append((await store.mail_start()).epoch)
        assert await store.next_run() == 1
        await store.backup(copy)
        assert await store.next_run(70) == 70
        await store.commit([word("b3", "delivered"), out(5)])

    async def today(store: SqliteStore) -> None:
        start = await store.mail_start()
        assert start.epoch != epochs[0]
        assert set(start.streams) == {StreamStart(PEER, 1, 4), StreamStart(OTHER, 1, 2)}
        found = await store.pending(PEER, 1, 9)
        assert [(entry.seq, entry.id) for entry in found] == [(1, "b2"), (2, "b3"), (3, "b4")]
        assert found[0].state == "cancelled"
        assert len(list(await store.peers())) == len(await store.inbox(0, 9)) == 1
        assert await store.next_run() > 71, "a run must not be used twice"
        await store.commit([out(4, "new")])

    live(SqliteStore(path), yesterday)
    whole = copy.read_bytes()
    kept = restore_database(copy, path)
    assert path.stat().st_mode & 0o777 == 0o600
    live(SqliteStore(path), today)
    assert copy.read_bytes() == whole
    assert kept is not None
    assert restore_database(copy, path.with_name("other.db")) is None, "nothing was replaced"
    assert sorted(os.listdir(path.parent)) == ["copy.db", "mesh.db", kept.name, "other.db"]


@pytest.mark.parametrize("kind", ["sqlite", "memory"])
def test_an_open_store_becomes_what_the_copy_holds(path: Path, copy: Path, kind: str) -> None:
    store: Store = SqliteStore(path) if kind == "sqlite" else MemoryStore()

    async def script(store: Store) -> None:
        await store.commit([*outs(2), came("c")])
        epoch = (await store.mail_start()).epoch
        await store.backup(copy)
        run = await store.next_run()
        await store.commit([out(3), came("d"), word("b1", "delivered")])
        with pytest.raises(MeshError):
            await store.restore(copy.with_name("no.db"))
        assert (await store.mail_start()).epoch == epoch
        assert len(await store.outbox(9)) == 2
        kept = Path(await store.restore(copy))
        start = await store.mail_start()
        assert start.epoch != epoch
        assert start.streams == (StreamStart(PEER, 1, 3),)
        assert [entry.id for entry in await store.inbox(0, 9)] == ["c"]
        assert await store.next_run() > run
        await store.commit([out(3)])
        assert [entry.seq for entry in await store.pending(PEER, 1, 9)] == [1, 2, 3]
        await store.restore(kept / "mesh.db" if kind == "sqlite" else kept)

    async def look(store: Store) -> None:
        """What was replaced is back."""
        assert [entry.id for entry in await store.pending(PEER, 1, 9)] == ["b2", "b3"]
        assert [entry.id for entry in await store.inbox(0, 9)] == ["c", "d"]

    live(store, script, look)


def test_another_agents_backup_is_refused_and_nothing_changes(path: Path, copy: Path) -> None:
    ours, theirs, nobodys = SqliteStore(path, "tester-aa"), path.with_name("b.db"), copy

    async def script(store: SqliteStore) -> None:
        await store.commit([*outs(2)])
        await store.backup(path.with_name("own.db"))
        await store.commit([out(3)])
        with pytest.raises(StorageError, match="belongs to reader-bb, and this agent is tester-aa"):
            await store.restore(path.with_name("b.db.copy"))
        with pytest.raises(StorageError, match="does not say which agent it belongs to"):
            await store.restore(nobodys)
        assert len(await store.outbox(9)) == 3
        await store.restore(path.with_name("own.db"))
        assert len(await store.outbox(9)) == 2

    async def back_up_theirs(store: SqliteStore) -> None:
        await store.backup(path.with_name("b.db.copy"))

    back_up(path.with_name("c.db"), nobodys, [*outs(1)])
    live(SqliteStore(theirs, "reader-bb"), back_up_theirs)
    live(ours, script, lambda store: store.commit([out(3)]))


def test_a_database_stays_with_its_agent(path: Path) -> None:
    live(SqliteStore(path), lambda store: store.commit([out(1)]))  # from before it was written down
    live(SqliteStore(path, "tester-aa"), lambda store: store.commit([out(2)]))
    with pytest.raises(StorageError, match="belongs to tester-aa, and this agent is reader-bb"):
        live(SqliteStore(path, "reader-bb"), lambda store: store.commit([out(3)]))
    live(SqliteStore(path, "tester-aa"), lambda store: store.commit([out(3)]))


# A restore that is cut off


STEPS = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "shutil.copyfile"}


def killed(work: Callable[[], object], at: int) -> bool:
    """Do it in a process that is killed before the n-th step; whether it was. A step is a call that
    changes names or bytes; what SQLite does to the copy lies between two of them."""
    child = os.fork()
    if child == 0:
        steps = 0

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal steps
            is_step = event in STEPS or (event == "open" and arguments[2] & os.O_CREAT > 0)
            steps += is_step
            if is_step and steps == at:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(count)
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def leave_unclean(path: Path, rows: Sequence[Row]) -> None:
    """As a killed node leaves it: what was committed last stands in the commit log only."""

    async def script() -> None:
        store = SqliteStore(path)
        await store.open()
        await store.commit(rows)
        os._exit(0)

    child = os.fork()
    if child == 0:
        asyncio.run(script())
    os.waitpid(child, 0)


async def ids(store: SqliteStore) -> set[str]:
    return {each.id for each in [*await store.outbox(99), *await store.inbox(0, 99)]}


def test_a_restore_that_is_cut_off_anywhere_loses_nothing(tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    back_up(tmp_path / "first.db", copy, [*outs(2)])
    unclean = tmp_path / "unclean.db"
    leave_unclean(unclean, [*outs(3), came("c")])
    found: list[set[str]] = []

    async def look(store: SqliteStore) -> None:
        found.append(await ids(store))

    before, after = {"b1", "b2", "b3", "c"}, {"b1", "b2"}
    ends = set()
    for at in range(1, 1_000):
        folder = tmp_path / f"{at}"
        folder.mkdir()
        path = folder / "mesh.db"
        copy_files(unclean, path)
        was_killed = killed(lambda path=path: restore_database(copy, path), at)  # type: ignore[misc]
        live(SqliteStore(path), look)
        assert found[-1] in (before, after), at
        if found[-1] == after:
            (kept,) = folder.glob("mesh.db-replaced-*/mesh.db")
            restore_database(kept, path)
            live(SqliteStore(path), look)
            assert found.pop() == before, f"{at}: the old database was lost"
        ends.add(found[-1] == after)
        assert not [each for each in os.listdir(folder) if ".tmp" in each], at
        shutil.rmtree(folder)
        if not was_killed:
            break
    assert at > 10
    assert ends == {True, False}


def test_a_broken_database_and_its_log_stay_together_wherever_a_restore_is_cut_off(
    tmp_path: Path,
) -> None:
    copy = tmp_path / "copy.db"
    back_up(tmp_path / "first.db", copy, [*outs(2)])
    broken = {"mesh.db": b"garbage" * 1_000, "mesh.db-commits": b"what was committed"}
    in_kept = 0
    for at in range(1, 1_000):
        folder = tmp_path / f"{at}"
        folder.mkdir()
        for name, content in broken.items():
            (folder / name).write_bytes(content)
        path = folder / "mesh.db"
        was_killed = killed(lambda path=path: restore_database(copy, path), at)  # type: ignore[misc]
        finish_restore(path)  # as the next run does
        kept = [*folder.glob("mesh.db-replaced-*")]
        for name, content in broken.items():
            assert (*kept, folder)[0].joinpath(name).read_bytes() == content, (at, name)
        if kept:
            in_kept += 1
            assert sorted(os.listdir(folder)) == ["mesh.db", kept[0].name], at
        if not was_killed:
            break
    assert 1 < in_kept < at


def test_a_stale_log_does_not_reach_the_restored_file(path: Path, copy: Path) -> None:
    back_up(path, copy, [*outs(2)])

    async def crash(store: SqliteStore) -> None:
        await store.commit([out(3), *outs(50, OTHER)])
        stale.write_bytes(path.with_name("mesh.db-wal").read_bytes())

    async def look(store: SqliteStore) -> None:
        assert {entry.id for entry in await store.outbox(99)} == {"b1", "b2"}
        assert (await store.facts())["quarantined"] == "0"

    stale = path.with_name("stale")
    live(SqliteStore(path), crash)
    path.write_bytes(b"garbage" * 1_000)
    stale.rename(path.with_name("mesh.db-wal"))
    kept = restore_database(copy, path)
    live(SqliteStore(path), look)
    assert kept is not None
    assert (kept / "mesh.db").read_bytes() == b"garbage" * 1_000
    assert (kept / "mesh.db-wal").exists(), "somebody may still make sense of it"


def refused(copy: Path, path: Path, kind: type[MeshError], text: str) -> None:
    before = path.read_bytes()
    with pytest.raises(kind, match=text) as caught:
        restore_database(copy, path)
    assert str(copy) in caught.value.message
    assert path.read_bytes() == before
    assert not [name for name in os.listdir(path.parent) if name.endswith(".tmp")]


def test_a_bad_backup_is_refused_and_nothing_changes(path: Path, copy: Path) -> None:
    back_up(path, copy, [out(n, text=f"content of {n} " * 20) for n in range(1, 40)])
    whole = copy.read_bytes()
    copy.write_bytes(whole.replace(b"content of 7 ", b"content of 8 "))
    refused(copy, path, CorruptFile, "outbox")
    copy.write_bytes(whole[: len(whole) // 2 // 4096 * 4096])
    refused(copy, path, CorruptFile, "damaged")
    copy.write_bytes(b"something else" * 500)
    refused(copy, path, CorruptFile, "not a database")
    copy.write_bytes(whole)
    connection = apsw.Connection(str(copy))
    connection.pragma("user_version", 99)
    connection.close()
    refused(copy, path, StorageError, f"knows {SCHEMA_VERSION}")
    copy.unlink()
    refused(copy, path, StorageError, "does not exist")


@pytest.mark.parametrize("content", [b"no database at all, but a log\n" * 300, None])
def test_a_file_that_is_no_backup_is_not_taken_for_a_damaged_database(
    path: Path, copy: Path, content: bytes | None
) -> None:
    """To move the database away would be the wrong thing to do."""
    if content is not None:
        copy.write_bytes(content)
    with pytest.raises(MeshError) as caught:
        restore_database(copy, path)
    assert "'meshagent backup'" in caught.value.hint
    assert "nothing was changed" in caught.value.hint
