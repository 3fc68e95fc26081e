"""The faults that the store in memory can be asked for."""

from __future__ import annotations

import asyncio

import pytest

from meshagent.core.model.rows import PeerRow
from meshagent.errors import LimitReached, StorageError
from meshagent.storage.mail.memory_store import MemoryStore

ALPHA = PeerRow("alpha-aaaaaaaa", b"a" * 32, ("10.0.0.1:7400",))
BETA = PeerRow("beta-bbbbbbbb", b"b" * 32, ())


async def opened() -> MemoryStore:
    store = MemoryStore()
    await store.open()
    return store


def test_a_crash_drops_what_was_not_synced_and_nothing_else() -> None:
    async def script() -> None:
        store = await opened()
        await store.commit([ALPHA])
        store.hold()
        lost = asyncio.ensure_future(store.commit([BETA]))
        lost_run = asyncio.ensure_future(store.next_run())
        await asyncio.sleep(0)
        assert (store.waiting, store.commits) == (2, 1)
        store.crash()
        for waiter in (lost, lost_run):
            with pytest.raises(StorageError, match="crashed"):
                await waiter
        with pytest.raises(StorageError, match="not open"):
            await store.peers()
        await store.open()
        assert list(await store.peers()) == [ALPHA]
        assert await store.next_run() == 1

    asyncio.run(script())


def test_a_held_commit_does_not_return_until_it_is_durable() -> None:
    async def script() -> None:
        store = await opened()
        store.hold()
        commit = asyncio.ensure_future(store.commit([ALPHA]))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not commit.done()
        assert list(await store.peers()) == []
        store.let_go()
        await commit
        assert list(await store.peers()) == [ALPHA]
        assert (store.waiting, store.commits) == (0, 1)

    asyncio.run(script())


def test_an_injected_failure_hits_the_next_write_only_and_changes_nothing() -> None:
    async def script() -> None:
        store = await opened()
        store.fail_next(LimitReached("The disk is full."))
        with pytest.raises(LimitReached):
            await store.commit([ALPHA])
        assert list(await store.peers()) == []
        await store.commit([ALPHA])
        assert (list(await store.peers()), store.commits) == ([ALPHA], 1)

    asyncio.run(script())
