"""What every Store promises: the suite that the real one and the one in memory both pass."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from storage.mail.mail_rows import PEER, out

from meshagent.core.model.rows import PeerRow
from meshagent.core.ports import Store
from meshagent.errors import MeshError, StorageError
from meshagent.storage.mail.memory_store import MemoryStore
from meshagent.storage.mail.sqlite_store import SqliteStore

Script = Callable[[Store], Awaitable[None]]

ALPHA = PeerRow("alpha-aaaaaaaa", bytes(range(32)), ("10.0.0.1:7400", "[fe80::1]:7400"))
BETA = PeerRow("beta-bbbbbbbb", b"\xff" * 32, ())


@pytest.fixture(params=["sqlite", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return SqliteStore(tmp_path / "mesh.db") if request.param == "sqlite" else MemoryStore()


def run(store: Store, *scripts: Script) -> None:
    """Run each script in a life of its own: open, script, close."""

    async def live() -> None:
        for script in scripts:
            await store.open()
            try:
                await script(store)
            finally:
                await store.close()

    asyncio.run(live())


def test_committed_rows_outlive_the_process(store: Store) -> None:
    async def write(store: Store) -> None:
        await store.commit([ALPHA, BETA])

    async def look(store: Store) -> None:
        assert sorted(await store.peers(), key=lambda row: row.agent) == [ALPHA, BETA]

    run(store, write, look)


def test_a_later_row_replaces_the_one_with_the_same_key(store: Store) -> None:
    moved = PeerRow(ALPHA.agent, ALPHA.key, ("192.168.7.7:9000",))

    async def script(store: Store) -> None:
        await store.commit([ALPHA, BETA])
        await store.commit([moved])
        assert set(await store.peers()) == {moved, BETA}
        await store.commit([ALPHA, moved, ALPHA])
        assert set(await store.peers()) == {ALPHA, BETA}

    run(store, script)


def test_runs_only_grow_even_across_restarts(store: Store) -> None:
    seen: list[int] = []

    async def script(store: Store) -> None:
        seen.append(await store.next_run())
        seen.append(await store.next_run(at_least=100 * len(seen)))
        seen.append(await store.next_run(at_least=1))

    run(store, script, script)
    assert seen == sorted(set(seen))
    assert seen[:3] == [1, 100, 101]
    assert seen[3:] == [102, 400, 401]


def test_concurrent_runs_are_all_different(store: Store) -> None:
    async def script(store: Store) -> None:
        runs = await asyncio.gather(*(store.next_run() for _ in range(50)))
        assert len(set(runs)) == 50

    run(store, script)


def test_the_epoch_stays_with_the_database(store: Store) -> None:
    epochs: list[str] = []

    async def script(store: Store) -> None:
        epochs.append((await store.facts())["epoch"])

    run(store, script, script)
    assert len(epochs[0]) == 16
    assert epochs[0] == epochs[1]


def test_facts_name_what_doctor_shows(store: Store) -> None:
    async def script(store: Store) -> None:
        facts = await store.facts()
        assert facts["quarantined"] == "0"
        assert {"path", "journal_mode", "schema", "epoch"} <= set(facts)
        assert all(isinstance(value, str) for value in facts.values())

    run(store, script)


def test_nothing_is_committed_by_an_empty_commit(store: Store) -> None:
    async def script(store: Store) -> None:
        await store.commit([])
        assert list(await store.peers()) == []

    run(store, script)


def test_a_closed_store_says_so(store: Store) -> None:
    async def script() -> None:
        with pytest.raises(StorageError, match="not open"):
            await store.commit([ALPHA])
        await store.open()
        await store.close()
        await store.close()
        with pytest.raises(StorageError, match="not open"):
            await store.commit([])
        with pytest.raises(StorageError, match="not open"):
            await store.next_run()
        with pytest.raises(StorageError, match="not open"):
            await store.peers()

    asyncio.run(script())


def test_close_finishes_what_waits(store: Store) -> None:
    async def script() -> None:
        await store.open()
        waiting = [asyncio.ensure_future(store.commit([row])) for row in (ALPHA, BETA)]
        await asyncio.sleep(0)
        await store.close()
        await asyncio.gather(*waiting)
        await store.open()
        assert set(await store.peers()) == {ALPHA, BETA}
        await store.close()

    asyncio.run(script())


def test_what_was_begun_is_told_once_and_kept_in_order(store: Store) -> None:
    if isinstance(store, MemoryStore):
        store.at_once = True
    told: list[int] = []

    async def write(store: Store) -> None:
        for number in range(1, 40):
            store.begin([out(number)], lambda error, number=number: told.append(number))
            if number % 4:
                await store.next_run()  # behind all that was begun
                assert told == list(range(1, number + 1))
        await store.next_run()

    async def look(store: Store) -> None:
        assert [entry.seq for entry in await store.pending(PEER, 1, 99)] == list(range(1, 40))

    run(store, write, look)
    assert told == list(range(1, 40))


def test_what_was_begun_in_vain_is_told_why(store: Store) -> None:
    told: list[MeshError | None] = []

    async def script(store: Store) -> None:
        store.begin([out(1)], told.append)
        store.begin([out(7)], told.append)
        async with asyncio.timeout(20):
            while len(told) < 2:  # noqa: ASYNC110 - what it waits for is the loop
                await asyncio.sleep(0)
        assert [entry.seq for entry in await store.pending(PEER, 1, 99)] == [1]

    run(store, script)
    assert told[0] is None
    assert isinstance(told[1], StorageError)


def test_nothing_is_damaged_in_a_store_that_is_whole(store: Store) -> None:
    async def script(store: Store) -> None:
        await store.commit([ALPHA, out(1)])
        assert list(await store.damage()) == []

    run(store, script)
