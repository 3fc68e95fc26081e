"""Turns at a real driver: what is told when, and who hears of a commit that fails or is cut off."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from core.delivery.desk import outgoing
from node.made import BOB, Quick, Sick, accepted, drop, node, run, take

from meshagent.core.effects import Deliver, PeerChanged, ReceiptChanged, Transmit
from meshagent.core.model.message_states import MessageState
from meshagent.core.model.messages import Message
from meshagent.core.model.peers import AgentId, LinkId
from meshagent.core.model.rows import InState, PeerRow, Row
from meshagent.core.turns import Turn
from meshagent.core.wire.frames import Bye
from meshagent.errors import MeshError, StorageError
from meshagent.node import recovery, turn_runner
from meshagent.node.driver import Driver
from meshagent.node.housekeeping import Housekeeping
from meshagent.storage.mail.database import Database
from meshagent.storage.mail.memory_store import MemoryStore
from meshagent.storage.mail.sqlite_store import SqliteStore

ROW = PeerRow(BOB.agent, BOB.key, ("10.0.0.1:1",))


def news(state: MessageState) -> ReceiptChanged:
    return ReceiptChanged(BOB.agent, ["m"], state, "")


def heard(driver: Driver, kind: type) -> list[Any]:
    """What the feed of changes tells, as it comes."""
    told: list[Any] = []
    driver.changes.listen(kind, told.append)
    return told


async def until_begun(store: MemoryStore) -> None:
    """Until a commit is under way at a store that is held."""
    while not store.waiting:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0)


# -- the order ------------------------------------------------------------------------------------


def test_what_is_free_leaves_while_a_commit_is_under_way_and_what_rests_on_it_does_not() -> None:
    async def script(driver: Driver, store: MemoryStore) -> None:
        told = heard(driver, ReceiptChanged)
        store.hold()
        driver.perform(Turn((), [ROW], [news(MessageState.DELIVERED)]))
        await until_begun(store)
        frame = Transmit(LinkId(7), Bye("leaving"))
        driver.perform(Turn([frame, news(MessageState.SENT)], (), [news(MessageState.SEEN)]))
        assert driver.transport.sent == [LinkId(7)]  # type: ignore[attr-defined]
        assert told == [news(MessageState.SENT)]
        store.let_go()
        await driver.committed()
        order = [MessageState.SENT, MessageState.DELIVERED, MessageState.SEEN]
        assert [each.state for each in told] == order

    run(MemoryStore(), script)


@pytest.mark.parametrize("first_waits", [False, True])
@pytest.mark.parametrize("store", [MemoryStore(), Quick()], ids=["a thread", "at once"])
def test_what_comes_of_an_effect_stands_behind_what_was_decided_before(
    store: MemoryStore, first_waits: bool
) -> None:
    """Who hears that something is durable has the next thing kept at once: that is told later."""

    async def script(driver: Driver, store: MemoryStore) -> None:
        if first_waits:
            store.hold()
        told = heard(driver, ReceiptChanged)

        def hears(change: object) -> None:
            driver.perform(Turn((), [ROW], [news(MessageState.DONE)]))

        driver.changes.listen(PeerChanged, hears)
        change = PeerChanged(None)  # type: ignore[arg-type]
        driver.runner._do = driver.changes.publish
        driver.perform(Turn((), [ROW], [change, news(MessageState.DELIVERED)]))
        if first_waits:
            await until_begun(store)
            store.let_go()
        while len(told) < 2:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
        assert [each.state for each in told] == [MessageState.DELIVERED, MessageState.DONE]

    run(store, script)


def test_a_commit_that_is_over_before_the_call_returns_is_performed_like_any_other() -> None:
    async def script(driver: Driver, store: Quick) -> None:
        for ident in ("m1", "m2"):
            assert accepted(driver, ident).done(), "nothing was waited for"
            assert [entry.id for entry in await store.outgoing(ident)] == [ident]
        store.hold()  # from here on the disk is busy, and what comes waits in line
        third, fourth = (accepted(driver, each) for each in ("m3", "m4"))
        await until_begun(store)
        assert not third.done()
        store.let_go()
        await asyncio.gather(third, fourth)
        assert [entry.id for entry in await store.outgoing("m")] == ["m1", "m2", "m3", "m4"]

    run(Quick(), script)


def test_notes_are_written_soon_though_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_runner, "NOTE_S", 0.0)
    monkeypatch.setattr(Housekeeping, "start", lambda house: None)  # which waits for commits, too

    async def script(driver: Driver, store: MemoryStore) -> None:
        driver.perform(Turn((), [ROW], (), may_wait=True))
        assert not driver.runner.turns.is_committing
        while not list(await store.peers()):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)

    run(MemoryStore(), script)


def test_what_a_session_keeps_stands_in_line_with_what_the_engine_decides() -> None:
    async def script(driver: Driver, store: MemoryStore) -> None:
        assert await take(driver, drop("a"))
        store.hold()
        first = accepted(driver, "m")
        kept = asyncio.create_task(driver.keep([InState(BOB.agent, "a", "done", 0, 5)]))
        await until_begun(store)
        assert not first.done()
        assert not kept.done()
        store.let_go()
        await asyncio.gather(first, kept)
        assert [entry.state for entry in await store.inbox(0, 9)] == ["done"]

    run(MemoryStore(), script)


# -- failure --------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", [MemoryStore(), Quick()], ids=["a thread", "at once"])
def test_a_commit_that_fails_suspends_delivery_and_is_told(store: MemoryStore) -> None:
    async def script(driver: Driver, store: MemoryStore) -> None:
        store.fail_next(StorageError("The disk is ill."))
        with pytest.raises(StorageError, match="ill"):
            await accepted(driver, "m")
        assert "ill" in driver.recovery.trouble
        assert await store.outgoing("m") == []
        with pytest.raises(StorageError, match="ill"):
            accepted(driver, "n")
        with pytest.raises(StorageError, match="ill"):
            await driver.keep([ROW])

    run(store, script)


def test_what_was_decided_behind_a_failed_commit_is_not_kept_without_it() -> None:
    async def script(driver: Driver, store: Sick) -> None:
        told = heard(driver, Deliver)
        store.ill, store.well_again = True, asyncio.Event()
        first = asyncio.create_task(take(driver, drop("a")))
        while store.ill:  # noqa: ASYNC110 - until its commit is under way
            await asyncio.sleep(0)
        second = asyncio.create_task(take(driver, drop("b", first=2)))
        third = accepted(driver, "m")
        await asyncio.sleep(0)
        store.well_again.set()
        await asyncio.gather(first, second)
        with pytest.raises(StorageError, match="ill"):
            await third
        assert told == []
        assert [entry.id for entry in await store.inbox(0, 9)] == []
        assert (await store.mail_start()).watermarks == ()
        assert await store.outgoing("m") == []

    run(Sick(), script)


# -- Ctrl-C ---------------------------------------------------------------------------------------


class Interrupted(Quick):
    """Ctrl-C comes while it commits, once."""

    keeps: bool | None = None
    """Whether that commit is on the disk then."""

    def begin(self, rows: Sequence[Row], then: Callable[[MeshError | None], None]) -> None:
        keeps, self.keeps = self.keeps, None
        if keeps is None:
            super().begin(rows, then)
            return
        if keeps:
            super().begin(rows, lambda _: None)
        raise KeyboardInterrupt


async def recovered(driver: Driver) -> None:
    """Until delivery has begun again."""
    while driver.recovery.trouble:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0)


@pytest.mark.parametrize("keeps", [False, True])
def test_an_interrupted_commit_is_told_and_the_disk_says_what_became_of_it(
    monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    monkeypatch.setattr(recovery, "RECOVER_S", 0.0)

    async def script(driver: Driver, store: Interrupted) -> None:
        await accepted(driver, "m1")
        assert await take(driver, drop("a"))
        kept: asyncio.Future[None] = driver.loop.create_future()
        store.keeps = keeps
        with pytest.raises(KeyboardInterrupt):
            driver.accept(
                outgoing(Message("m2", "text", "", 1), to=[BOB.agent]), (), [(kept, None)]
            )
        with pytest.raises(StorageError, match="may have been kept"):
            await kept
        with pytest.raises(StorageError, match="Try again"):
            accepted(driver, "not")
        await recovered(driver)
        store.keeps = keeps
        with pytest.raises(KeyboardInterrupt):
            driver.perform(driver.mesh.take(BOB.agent, drop("b", first=2).mail, driver.loop.time()))
        await recovered(driver)
        assert await take(driver, drop("b", "c", first=2)), "what is not there is taken again"
        await accepted(driver, "m3")
        assert [entry.id for entry in await store.inbox(0, 9)] == ["a", "b", "c"]
        sent = ["m1", "m2", "m3"] if keeps else ["m1", "m3"]
        assert [(entry.seq, entry.id) for entry in await store.outgoing("m")] == list(
            enumerate(sent, 1)
        )

    run(Interrupted(), script)


def test_who_waits_hears_of_an_interrupt_that_comes_after_the_commit() -> None:
    def interrupted(peer: AgentId) -> None:
        raise KeyboardInterrupt

    async def script(driver: Driver, store: MemoryStore) -> None:
        answers: list[Any] = []
        begin = store.begin
        store.begin = lambda rows, then: answers.append(then)  # type: ignore[method-assign]
        kept, behind = accepted(driver, "m"), accepted(driver, "n")
        driver.spool.pending = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            answers.pop()(None)
        store.begin = begin  # type: ignore[method-assign]
        with pytest.raises(StorageError, match="it is kept"):
            await kept
        with pytest.raises(StorageError, match="may have been kept"):
            await behind

    run(MemoryStore(), script)


def test_an_interrupt_while_notes_are_written_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "RECOVER_S", 0.0)

    async def script(driver: Driver, store: Interrupted) -> None:
        driver.perform(Turn((), [ROW], (), may_wait=True))
        store.keeps = False
        with pytest.raises(KeyboardInterrupt):
            driver.runner._commit_notes()  # as its timer does
        await recovered(driver)
        await accepted(driver, "m")

    run(Interrupted(), script)


def test_a_commit_that_was_given_up_is_not_taken_for_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "RECOVER_S", 0.0)

    async def script(driver: Driver, store: MemoryStore) -> None:
        answers: list[Any] = []
        begin = store.begin
        store.begin = lambda rows, then: answers.append(then)  # type: ignore[method-assign]
        first = accepted(driver, "m1")
        driver.runner.interrupted()
        with pytest.raises(StorageError):
            await first
        await recovered(driver)
        second = accepted(driver, "m2")
        answers[0](None)
        assert not second.done(), "that was the one before"
        answers[1](None)
        await second
        store.begin = begin  # type: ignore[method-assign]

    run(MemoryStore(), script)


# -- the end --------------------------------------------------------------------------------------


def test_a_send_whose_commit_is_under_way_when_the_node_ends_does_not_wait_for_ever() -> None:
    async def whole() -> None:
        store = MemoryStore()
        driver = node(store)
        await driver.start("127.0.0.1", [0])
        store.hold()
        sending = [accepted(driver, ident) for ident in ("m1", "m2")]
        await until_begun(store)
        later = asyncio.create_task(driver.committed())
        stopping = asyncio.create_task(driver.stop())
        await asyncio.sleep(0)
        store.let_go()
        async with asyncio.timeout(5):
            await stopping
            await asyncio.gather(*sending, later)
        await store.open()
        assert [entry.id for entry in await store.outgoing("m")] == ["m1", "m2"]

    asyncio.run(whole())


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
        driver = node(store)
        await driver.start("127.0.0.1", [0])
        monkeypatch.setattr(Database, "write", write)
        first = accepted(driver, "m1")
        assert await asyncio.to_thread(begun.wait, 20)
        second = accepted(driver, "m2")
        driver.loop.call_later(0.05, release.set)
        async with asyncio.timeout(20):
            await driver.stop()
            await asyncio.gather(first, second)
            await driver.committed()  # which waits for nothing that will never come
        await store.open()
        assert [entry.id for entry in await store.outgoing("m")] == ["m1", "m2"]
        await store.close()

    asyncio.run(whole())


def test_what_the_disk_never_answered_is_told_when_the_node_has_ended() -> None:
    async def script(driver: Driver, store: MemoryStore) -> None:
        store.begin = lambda rows, then: None  # type: ignore[method-assign]
        kept = accepted(driver, "m")
        await driver._close()
        with pytest.raises(Exception, match="may have been kept"):
            await kept

    run(MemoryStore(), script)
