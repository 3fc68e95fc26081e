"""A disk that fails and is well again: what is refused meanwhile, and where delivery goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from node.made import BOB, accepted, drop, node, run, take

from meshagent.core.effects import Load
from meshagent.core.model.message_states import MessageState
from meshagent.core.turns import Turn
from meshagent.errors import LimitReached, MeshError, StorageError
from meshagent.node import recovery
from meshagent.node.driver import Driver
from meshagent.storage.mail.memory_store import MemoryStore


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "RECOVER_S", 0.0)


async def well(driver: Driver) -> None:
    """Until the disk is well again."""
    while driver.recovery.trouble:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0)


def test_delivery_goes_on_where_the_disk_stands_and_nothing_of_what_failed_comes_back() -> None:
    async def script(driver: Driver, store: MemoryStore) -> None:
        await accepted(driver, "m1")
        assert await take(driver, drop("a"))
        store.fail_next(StorageError("The disk is ill."))
        with pytest.raises(StorageError, match="ill"):
            await accepted(driver, "lost")
        assert driver.views.health()["store"] == driver.recovery.trouble != ""
        assert driver.mesh.delivery is None
        await well(driver)
        assert driver.views.health()["store"] == "ok"
        await accepted(driver, "m2")
        kept = [(entry.seq, entry.id) for entry in await store.outgoing("m")]
        assert kept == [(1, "m1"), (2, "m2")], "no number was left out"
        assert await take(driver, drop("b", first=2)), "it knows what has come"

    run(MemoryStore(), script)


def test_a_disk_that_is_still_ill_is_looked_at_again() -> None:
    async def script(driver: Driver, store: MemoryStore) -> None:
        for _ in range(3):
            store.fail_next(StorageError("The disk is ill."))
        with pytest.raises(StorageError):
            await accepted(driver, "m")
        await well(driver)
        await accepted(driver, "m")

    run(MemoryStore(), script)


def test_a_full_disk_is_not_tried_before_there_is_room() -> None:
    async def script(driver: Driver, store: MemoryStore) -> None:
        free = [0]
        driver.recovery._free_bytes = lambda: free[0]
        store.fail_next(LimitReached("The disk is full."))
        with pytest.raises(LimitReached):
            await accepted(driver, "m")
        for _ in range(20):
            await asyncio.sleep(0)
        with pytest.raises(LimitReached, match="full"):
            accepted(driver, "m")
        free[0] = recovery.FREE_BYTES_MIN
        await well(driver)

    run(MemoryStore(), script)


def test_a_read_that_fails_suspends_delivery_too() -> None:
    async def script(driver: Driver, store: MemoryStore) -> None:
        async def ill(peer: str, first: int, limit: int) -> list[object]:
            raise StorageError("It can't be read.")

        pending, store.pending = store.pending, ill  # type: ignore[method-assign,assignment]
        driver.perform(Turn([Load(BOB.agent, 1, 9)]))
        while not driver.recovery.trouble:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
        store.pending = pending  # type: ignore[method-assign]
        await well(driver)

    run(MemoryStore(), script)


def test_a_node_goes_on_from_a_copy_of_what_it_kept(tmp_path: Path) -> None:
    async def script(driver: Driver, store: MemoryStore) -> None:
        copy = str(tmp_path / "copy")
        await accepted(driver, "m1")
        await driver.recovery.backup(copy)
        await accepted(driver, "m2")
        assert driver.mesh.delivery is not None
        epoch = driver.mesh.delivery.numbers(BOB.agent)[0]
        await driver.recovery.restore(copy)
        assert [entry.id for entry in await store.outgoing("m")] == ["m1"]
        assert driver.mesh.delivery is not None
        assert driver.mesh.delivery.numbers(BOB.agent)[0] != epoch, "numbers mean others now"
        await accepted(driver, "m3")

    run(MemoryStore(), script)


def test_a_copy_that_can_not_be_read_leaves_the_node_as_it_was(tmp_path: Path) -> None:
    async def script(driver: Driver, store: MemoryStore) -> None:
        await accepted(driver, "m1")
        with pytest.raises(MeshError):
            await driver.recovery.restore(str(tmp_path / "nothing"))
        await accepted(driver, "m2")
        assert [entry.id for entry in await store.outgoing("m")] == ["m1", "m2"]

    run(MemoryStore(), script)


def test_a_node_that_starts_knows_what_waits_and_what_was_withdrawn() -> None:
    async def whole() -> None:
        store = MemoryStore()
        driver = node(store)
        await driver.start("127.0.0.1", [0])
        for ident in ("m1", "m2"):
            await accepted(driver, ident)
        await driver.housekeeping.withdraw(await store.outgoing("m2"), MessageState.CANCELLED)
        engine = await driver.recovery.engine_from_disk()
        assert engine.outbox_counts() == {"queued": 1, "sent": 0}
        await driver.stop()

    asyncio.run(whole())
