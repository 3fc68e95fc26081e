"""What a node does by the clock: counts that are right, expiry at its time, and an end at once."""

from __future__ import annotations

import asyncio

import pytest
from core.delivery.desk import outgoing
from node.made import BOB, EVE, accepted, drop, run, take

from meshagent.core.effects import ReceiptChanged
from meshagent.core.model.message_states import MessageState
from meshagent.core.model.messages import Message
from meshagent.core.model.rows import InState
from meshagent.core.wire.frames import EPOCH_BYTES, HASH_BYTES, MailAck
from meshagent.node import housekeeping
from meshagent.node.driver import Driver
from meshagent.node.housekeeping import Housekeeping
from meshagent.storage.mail.memory_store import MemoryStore


async def nothing_to_do(house: Housekeeping) -> None:
    """No house-keeping, which counts too."""


@pytest.fixture
def only_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is counted unless somebody asks, and then at once."""
    monkeypatch.setattr(housekeeping, "COUNT_S", 0.0)
    monkeypatch.setattr(Housekeeping, "_keep_house", nothing_to_do)


def unread(driver: Driver) -> int:
    count: int = driver.views.status()["inbox"]["unread"]
    return count


async def counted(driver: Driver) -> int:
    """What is unread once the disk was asked."""
    while (counting := driver.housekeeping._counting) is not None and not counting.done():
        await counting
    return unread(driver)


async def done(driver: Driver, ident: str) -> None:
    await driver.keep([InState(BOB.agent, ident, "done", 0, 5)])
    driver.housekeeping.inbox_shrank(1)


@pytest.mark.usefixtures("only_asked")
def test_a_message_that_comes_again_is_not_one_more_to_read() -> None:
    async def script(driver: Driver, store: MemoryStore) -> None:
        for epoch in (b"epoch--1", b"epoch--2", b"epoch--3"):
            assert await take(driver, drop("same", "other", epoch=epoch))
        assert unread(driver) == 6, "the engine can't know"
        await done(driver, "same")
        assert await counted(driver) == 1
        await done(driver, "other")
        assert await counted(driver) == 0

    run(MemoryStore(), script)


@pytest.mark.usefixtures("only_asked")
def test_an_inbox_that_seems_full_is_counted_and_lets_mail_in_again() -> None:
    async def script(driver: Driver, store: MemoryStore) -> None:
        assert driver.mesh.delivery is not None
        driver.mesh.delivery.receiving.unread = 249_999
        assert await take(driver, drop("one"))
        assert not await take(driver, drop("two", first=2)), "it seems to be full"
        assert await counted(driver) == 1
        assert await take(driver, drop("two", first=2))

    run(MemoryStore(), script)


@pytest.mark.usefixtures("only_asked")
def test_a_count_that_is_out_of_date_when_it_comes_is_made_again() -> None:
    async def script(driver: Driver, store: MemoryStore) -> None:
        assert await take(driver, drop("one"))
        real, asked = store.mail_start, 0

        async def slow() -> object:
            nonlocal asked
            asked += 1
            start = await real()
            if asked == 1:
                assert await take(driver, drop("two", first=2))  # meanwhile
            return start

        store.mail_start = slow  # type: ignore[method-assign,assignment]
        driver.housekeeping.count_unread()
        assert await counted(driver) == 2
        assert asked == 2

    run(MemoryStore(), script)


def test_more_than_one_look_takes_expires_in_as_many_looks_as_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(housekeeping, "DUE_ITEMS_MAX", 2)
    monkeypatch.setattr(housekeeping, "SHORTEST_S", 0.0)

    async def script(driver: Driver, store: MemoryStore) -> None:
        kept: asyncio.Future[None] = driver.loop.create_future()
        messages = [Message(f"m{number}", "text", "", 1, expires_ms=2) for number in range(5)]
        driver.accept(outgoing(*messages, to=[BOB.agent]), (), [(kept, None)])
        await kept
        expired = [False]
        while not all(expired):
            expired = [e.state == MessageState.EXPIRED for e in await store.outgoing("m")]
            await asyncio.sleep(0)

    run(MemoryStore(), script)


def test_what_is_on_the_wire_when_its_time_is_up_holds_up_no_other_expiry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer that is here and never answers keeps what was sent to it; the others' is not its."""
    monkeypatch.setattr(housekeeping, "DUE_ITEMS_MAX", 2)
    monkeypatch.setattr(housekeeping, "SHORTEST_S", 0.0)

    async def script(driver: Driver, store: MemoryStore) -> None:
        delivery, now = driver.mesh.delivery, driver.loop.time()
        assert delivery is not None
        delivery.connected(BOB.agent, now)
        silent = MailAck(bytes(EPOCH_BYTES), 0, bytes(HASH_BYTES))  # it has nothing, so we may send
        driver.perform(delivery.receive(silent, BOB.agent, now, 1))
        for number in range(3):
            await accepted(driver, f"sent{number}", expires_ms=2)
        assert delivery.sending.on_wire == 3
        expired: asyncio.Event = asyncio.Event()
        driver.changes.listen(ReceiptChanged, lambda _: expired.set())
        await accepted(driver, "waits", EVE.agent, expires_ms=3)
        await expired.wait()
        assert (await store.outgoing("waits"))[0].state == MessageState.EXPIRED
        assert {e.state for e in await store.outgoing("sent")} == {MessageState.QUEUED}

    run(MemoryStore(), script)


def test_what_expires_is_looked_at_when_it_became_durable_and_not_at_the_next_long_look() -> None:
    async def script(driver: Driver, store: MemoryStore) -> None:
        await accepted(driver, "m", expires_ms=driver.wall_ms() + 60)
        expired: asyncio.Event = asyncio.Event()
        driver.changes.listen(ReceiptChanged, lambda _: expired.set())
        await expired.wait()
        assert (await store.outgoing("m"))[0].state == MessageState.EXPIRED

    run(MemoryStore(), script)


@pytest.mark.parametrize("turns", range(6))
def test_a_node_ends_at_once_whatever_it_was_about_to_tidy(turns: int) -> None:
    async def script(driver: Driver, store: MemoryStore) -> None:
        for _ in range(20):
            await asyncio.sleep(0)  # until it has nothing to do
        house = next(each for each in driver._tasks if "_keep_house" in repr(each))
        driver.housekeeping.look_at_expiries()
        for _ in range(turns):
            await asyncio.sleep(0)
        house.cancel()
        await asyncio.wait([house], timeout=5)
        assert house.done()

    run(MemoryStore(), script)
