"""The driver alone, with a store in memory and no network: what it counts, keeps and believes."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from core.made import SECRET, identity

from meshagent.core.delivery.spool_files import Drop
from meshagent.core.effects import Persist, ReceiptChanged
from meshagent.core.model.message_states import MessageState
from meshagent.core.model.messages import Message, pack_body
from meshagent.core.model.peers import AgentId, LinkId
from meshagent.core.model.rows import InState, PeerRow, Row, Watermark
from meshagent.core.wire.frames import Mail
from meshagent.errors import StorageError, UsageError
from meshagent.node import driver as driver_module
from meshagent.node.driver import Driver, Profile
from meshagent.node.received import Receipt
from meshagent.storage.mail.database import Database
from meshagent.storage.mail.memory_store import MemoryStore
from meshagent.storage.mail.sqlite_store import SqliteStore

ME, BOB, EVE = identity("me"), identity("bob"), identity("eve")


class Nowhere:
    """A transport without links."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()

    async def start(self, listen: str, port: int, events: object) -> tuple[str, ...]:
        return ("127.0.0.1:1",)

    def addresses(self) -> tuple[str, ...]:
        return ("127.0.0.1:1",)

    def dial(self, address: str) -> LinkId:
        return LinkId(1)

    def send(self, link: LinkId, parts: Sequence[bytes]) -> bool:
        return True

    def close_link(self, link: LinkId) -> None:
        pass

    async def close(self) -> None:
        pass


class NoFiles:
    """A blob_transfers that has nothing to carry."""

    async def start(self, driver: Driver) -> None:
        pass

    async def close(self) -> None:
        pass

    async def tidy(self, needed: set[bytes]) -> None:
        pass

    def perform(self, effect: object) -> None:
        pass


class Sick(MemoryStore):
    """Takes nothing that has to do with mail while it is ill."""

    ill = False
    well_again: asyncio.Event | None = None
    """It is ill for one commit only, which ends when this is set."""

    async def commit(self, rows: Sequence[Row]) -> None:
        if self.ill and any(isinstance(row, Watermark) for row in rows):
            if self.well_again is not None:
                self.ill = False
                await self.well_again.wait()
            raise StorageError("The disk is ill.")
        await super().commit(rows)


def node(store: MemoryStore) -> Driver:
    profile = Profile(ME, SECRET, "mesh", "tester", (), "host", "0")
    log = logging.getLogger("test")
    blob_transfers: Any = NoFiles()  # beside it, nothing that is the driver's own may get lost
    return Driver(
        profile, Nowhere(), store, (), log, blob_transfers=blob_transfers, rng=random.Random(1)
    )


def run(script: Callable[[Driver, Sick], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        store = Sick()
        driver = node(store)
        async with asyncio.timeout(20):
            await driver.start("127.0.0.1", [0])
            try:
                await script(driver, store)
            finally:
                await driver.stop()

    asyncio.run(whole())


def drop(*idents: str, first: int = 1, epoch: bytes = b"theepoch") -> Drop:
    bodies = tuple(pack_body(Message(ident, "text", "", 1)) for ident in idents)
    return Drop(BOB.agent, BOB.key, Mail(epoch, 1, first, bodies))


def accepted(driver: Driver, message: Message) -> asyncio.Future[None]:
    """Done when this message to Bob is durable."""
    kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    driver.perform(driver.accept([(BOB.agent, message)], (), [(kept, None)]))
    return kept


async def nothing_to_do(driver: Driver) -> None:
    """No house-keeping, which counts too."""


async def counted(driver: Driver) -> int:
    """What is unread once the disk was asked."""
    while driver._counting is not None and not driver._counting.done():
        await driver._counting
    return driver.unread()


def test_a_receipt_is_believed_from_the_one_the_message_went_to_and_nobody_else() -> None:
    async def script(driver: Driver, store: Sick) -> None:
        receipt = Receipt("m", BOB.agent)
        driver.receipts.add(["m"], [receipt])
        driver._report([ReceiptChanged(EVE.agent, ["m"], MessageState.DONE, "")])
        assert receipt.state is MessageState.QUEUED
        driver._report([ReceiptChanged(BOB.agent, ["m"], MessageState.DONE, "")])
        assert receipt.state is MessageState.DONE

    run(script)


def test_a_message_that_comes_again_is_not_one_more_to_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver_module, "COUNT_S", 0.0)
    monkeypatch.setattr(Driver, "_keep_house", nothing_to_do)

    async def script(driver: Driver, store: Sick) -> None:
        for epoch in (b"epoch--1", b"epoch--2", b"epoch--3"):
            assert await driver.take(drop("same", "other", epoch=epoch))
        assert driver.unread() == 6, "the engine can't know"
        await driver.keep([InState(BOB.agent, "same", "done", 0, 5)], done=1)
        assert await counted(driver) == 1
        await driver.keep([InState(BOB.agent, "other", "done", 0, 5)], done=1)
        assert await counted(driver) == 0

    run(script)


def test_an_inbox_that_seems_full_is_counted_and_lets_mail_in_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver_module, "COUNT_S", 0.0)
    monkeypatch.setattr(Driver, "_keep_house", nothing_to_do)

    async def script(driver: Driver, store: Sick) -> None:
        assert driver.mesh.delivery is not None
        driver.mesh.delivery.unread = 249_999
        assert await driver.take(drop("one"))
        assert not await driver.take(drop("two", first=2)), "it seems to be full"
        assert await counted(driver) == 1
        assert await driver.take(drop("two", first=2))

    run(script)


def test_a_file_is_ours_only_when_all_of_it_is_durable() -> None:
    async def script(driver: Driver, store: Sick) -> None:
        assert await driver.take(drop("a", "b"))
        assert await driver.take(drop("a", "b")), "again"
        assert not await driver.take(drop("d", first=4)), "a file before it is missing"
        assert not await driver.take(drop("not b", "c", first=2)), "it is of another day"
        store.ill = True
        assert not await driver.take(drop("x", epoch=b"another!"))
        assert [entry.id for entry in await store.inbox(0, 9)] == ["a", "b"]

    run(script)


def test_what_was_decided_behind_a_failed_commit_is_not_kept_without_it() -> None:
    async def script(driver: Driver, store: Sick) -> None:
        store.ill, store.well_again = True, asyncio.Event()
        first = asyncio.create_task(driver.take(drop("a")))
        while store.ill:  # noqa: ASYNC110 - until its commit is under way
            await asyncio.sleep(0)
        second = asyncio.create_task(driver.take(drop("b", first=2)))
        await asyncio.sleep(0)
        store.well_again.set()
        assert not await first
        assert not await second
        assert [entry.id for entry in await store.inbox(0, 9)] == []
        assert (await store.mail_start()).watermarks == ()

    run(script)


def test_a_send_whose_commit_is_under_way_when_the_node_ends_does_not_wait_for_ever() -> None:
    async def whole() -> None:
        store = MemoryStore()
        driver = node(store)
        await driver.start("127.0.0.1", [0])
        store.hold()
        sending = [
            accepted(driver, Message(ident, "text", "", 1)) for ident in ("under way", "behind it")
        ]
        while not store.waiting:  # noqa: ASYNC110 - until the commit is under way
            await asyncio.sleep(0)
        later = asyncio.create_task(driver.committed())
        stopping = asyncio.create_task(driver.stop())
        await asyncio.sleep(0)
        store.let_go()
        async with asyncio.timeout(5):
            await stopping
            await asyncio.gather(*sending, later, return_exceptions=True)

    asyncio.run(whole())


def test_news_of_a_message_are_told_in_order_whatever_waits_for_the_disk() -> None:
    def news(state: MessageState) -> ReceiptChanged:
        return ReceiptChanged(BOB.agent, ["m"], state, "")

    async def script(driver: Driver, store: Sick) -> None:
        with driver.subscribers.subscribe(frozenset({"receipt"})) as events:
            store.hold()
            driver.perform([Persist([PeerRow(BOB.agent, BOB.key, ())])])
            driver.perform([Persist(()), news(MessageState.SENT)])
            driver.perform([news(MessageState.DELIVERED)])
            store.let_go()
            told = [(await anext(aiter(events))).data["state"] for _ in range(2)]
        assert told == ["sent", "delivered"]

    run(script)


def test_who_was_met_last_is_on_disk_when_the_node_has_ended() -> None:
    async def whole() -> None:
        store = MemoryStore()
        driver = node(store)
        await driver.start("127.0.0.1", [0])
        row = PeerRow(BOB.agent, BOB.key, ("10.0.0.1:1",))
        driver.mesh._unsaved[AgentId(BOB.agent)], driver.mesh._save_at = row, 1e12
        await driver.stop()
        await store.open()
        assert list(await store.peers()) == [row]

    asyncio.run(whole())


def test_what_was_taken_back_in_an_earlier_run_does_not_count_as_waiting() -> None:
    async def whole() -> None:
        store = MemoryStore()
        for _ in range(2):
            driver = node(store)
            await driver.start("127.0.0.1", [0])
            if not await store.outgoing("m"):
                for ident in ("m1", "m2", "m3"):
                    await accepted(driver, Message(ident, "text", "", 1))
                await driver.withdraw(await store.outgoing("m2"), MessageState.CANCELLED)
            assert driver.outbox_counts() == {"queued": 2, "sent": 0}
            assert driver.mesh.delivery is not None
            assert driver.mesh.delivery.pending == 3, "its number still has to be told"
            await driver.stop()

    asyncio.run(whole())


def test_a_commit_at_once_is_performed_like_any_other() -> None:
    async def script(driver: Driver, store: Sick) -> None:
        store.at_once = True
        for ident in ("m1", "m2"):
            kept = accepted(driver, Message(ident, "text", "", 1))
            assert kept.done(), "nothing was waited for"
            assert [entry.id for entry in await store.outgoing(ident)] == [ident]
        store.hold()  # from here on the disk is busy, and what comes waits in line
        third, fourth = (accepted(driver, Message(each, "text", "", 1)) for each in ("m3", "m4"))
        await asyncio.sleep(0)
        assert not third.done()
        store.let_go()
        await asyncio.gather(third, fourth)
        assert [entry.id for entry in await store.outgoing("m")] == ["m1", "m2", "m3", "m4"]

    run(script)


def test_a_commit_at_once_that_fails_suspends_delivery_and_is_told() -> None:
    async def script(driver: Driver, store: Sick) -> None:
        store.at_once = True
        store.fail_next(StorageError("The disk is ill."))
        kept = accepted(driver, Message("m", "text", "", 1))
        with pytest.raises(StorageError, match="ill"):
            await kept
        assert driver.trouble
        assert await store.outgoing("m") == []
        with pytest.raises(StorageError, match="ill"):
            driver.accept([(BOB.agent, Message("n", "text", "", 1))], (), [])

    run(script)


class Interrupted(MemoryStore):
    """Ctrl-C comes while it commits, once."""

    keeps: bool | None = None
    """Whether that commit is on the disk then."""

    def commit_at_once(self, rows: Sequence[Row]) -> bool:
        keeps, self.keeps = self.keeps, None
        if keeps is None or keeps:
            super().commit_at_once(rows)
        if keeps is not None:
            raise KeyboardInterrupt
        return True


@pytest.mark.parametrize("keeps", [False, True])
def test_an_interrupted_commit_is_told_and_the_disk_says_what_became_of_it(
    monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    monkeypatch.setattr(driver_module, "RECOVER_S", 0.0)

    async def whole() -> None:
        store = Interrupted()
        store.at_once = True
        driver = node(store)
        await driver.start("127.0.0.1", [0])
        await accepted(driver, Message("m1", "text", "", 1))
        assert await driver.take(drop("a"))
        kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        store.keeps = keeps
        with pytest.raises(KeyboardInterrupt):
            driver.perform(
                driver.accept([(BOB.agent, Message("m2", "text", "", 1))], (), [(kept, None)])
            )
        with pytest.raises(StorageError, match="may have been kept"):
            await kept
        assert driver._recovering is not None
        with pytest.raises(StorageError, match="Try again"):
            driver.accept([(BOB.agent, Message("not", "text", "", 1))], (), [])
        await driver._recovering
        store.keeps = keeps
        with pytest.raises(KeyboardInterrupt):
            driver.perform(driver.mesh.take(BOB.agent, drop("b", first=2).mail, driver.loop.time()))
        await driver._recovering
        assert await driver.take(drop("b", "c", first=2)), "what is not there is taken again"
        await accepted(driver, Message("m3", "text", "", 1))
        assert [entry.id for entry in await store.inbox(0, 9)] == ["a", "b", "c"]
        sent = ["m1", "m2", "m3"] if keeps else ["m1", "m3"]
        assert [(entry.seq, entry.id) for entry in await store.outgoing("m")] == list(
            enumerate(sent, 1)
        )
        await driver.stop()

    asyncio.run(whole())


def test_who_waits_hears_of_an_interrupt_that_comes_after_the_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(peer: AgentId) -> None:
        raise KeyboardInterrupt

    async def script(driver: Driver, store: Sick) -> None:
        store.hold()
        kept = accepted(driver, Message("m", "text", "", 1))
        with monkeypatch.context() as patch:
            patch.setattr(driver.post, "pending", interrupted)
            with pytest.raises(KeyboardInterrupt):
                driver._committed([], None)  # as when the disk has answered
        with pytest.raises(StorageError, match="may have been kept"):
            await kept

    run(script)


def test_what_is_at_the_disk_when_the_node_ends_hears_how_it_ended_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, release, real = threading.Event(), threading.Event(), Database.write

    def write(database: Database, rows: Sequence[Row]) -> None:
        begun.set()
        assert release.wait(20)
        real(database, rows)

    async def whole() -> None:
        store = SqliteStore(tmp_path / "mesh.db")
        monkeypatch.setattr(SqliteStore, "commit_at_once", lambda store, rows: False)
        driver = node(store)
        await driver.start("127.0.0.1", [0])
        monkeypatch.setattr(Database, "write", write)
        first = accepted(driver, Message("m1", "text", "", 1))
        assert await asyncio.to_thread(begun.wait, 20)
        second = accepted(driver, Message("m2", "text", "", 1))
        second.add_done_callback(lambda _: release.set())
        async with asyncio.timeout(20):
            await driver.stop()
            await first  # it is kept
            with pytest.raises(UsageError, match="before it was kept"):
                await second
            await driver.committed()  # which waits for nothing that will never come
        await store.open()
        assert [entry.id for entry in await store.outgoing("m")] == ["m1"]
        await store.close()

    asyncio.run(whole())


@pytest.mark.parametrize("turns", range(6))
def test_a_node_ends_at_once_whatever_it_was_about_to_tidy(turns: int) -> None:
    async def script(driver: Driver, store: Sick) -> None:
        for _ in range(20):
            await asyncio.sleep(0)  # until it has nothing to do
        house = next(each for each in driver._tasks if "_keep_house" in repr(each))
        driver._house.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        house.cancel()
        await asyncio.wait([house], timeout=5)
        assert house.done()

    run(script)
