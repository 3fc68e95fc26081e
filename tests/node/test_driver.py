"""The driver alone, with a store in memory and no network: its life, and whom it believes."""

from __future__ import annotations

import asyncio

import pytest
from node.made import BOB, EVE, Nowhere, accepted, node, run

from meshagent.core.effects import ReceiptChanged
from meshagent.core.model.message_states import MessageState
from meshagent.core.model.peers import AgentId
from meshagent.core.model.rows import PeerRow
from meshagent.core.turns import Turn
from meshagent.errors import UsageError
from meshagent.node.driver import Driver
from meshagent.node.received import Receipt
from meshagent.storage.mail.memory_store import MemoryStore


def test_a_receipt_is_believed_from_the_one_the_message_went_to_and_nobody_else() -> None:
    async def script(driver: Driver, store: MemoryStore) -> None:
        receipt = Receipt("m", BOB.agent)
        driver.receipts.add(["m"], [receipt])
        driver.perform(Turn([ReceiptChanged(EVE.agent, ["m"], MessageState.DONE, "")]))
        assert receipt.state is MessageState.QUEUED
        driver.perform(Turn([ReceiptChanged(BOB.agent, ["m"], MessageState.DONE, "")]))
        assert receipt.state is MessageState.DONE

    run(MemoryStore(), script)


def test_who_was_met_last_is_on_disk_when_the_node_has_ended() -> None:
    async def whole() -> None:
        store = MemoryStore()
        driver = node(store)
        await driver.start("127.0.0.1", [0])
        addresses = ("10.0.0.1:1",)
        driver.mesh._remembered.note(AgentId(BOB.agent), BOB.key, addresses, driver.loop.time())
        await driver.stop()
        await store.open()
        assert list(await store.peers()) == [PeerRow(BOB.agent, BOB.key, addresses)]

    asyncio.run(whole())


def test_what_was_taken_back_in_an_earlier_run_does_not_count_as_waiting() -> None:
    async def whole() -> None:
        store = MemoryStore()
        for _ in range(2):
            driver = node(store)
            await driver.start("127.0.0.1", [0])
            if not await store.outgoing("m"):
                for ident in ("m1", "m2", "m3"):
                    await accepted(driver, ident)
                cancelled = await store.outgoing("m2")
                await driver.housekeeping.withdraw(cancelled, MessageState.CANCELLED)
            assert driver.views.status()["outbox"] == {"queued": 2, "sent": 0}
            assert driver.mesh.delivery is not None
            assert driver.mesh.delivery.sending.pending == 3, "its number still has to be told"
            await driver.stop()

    asyncio.run(whole())


def test_a_start_that_fails_closes_what_it_had_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    async def taken(transport: Nowhere, listen: str, port: int, events: object) -> tuple[str, ...]:
        raise UsageError("The port is taken.")

    async def whole() -> None:
        store = MemoryStore()
        with monkeypatch.context() as patch:
            patch.setattr(Nowhere, "start", taken)
            with pytest.raises(UsageError, match="taken"):
                await node(store).start("127.0.0.1", [1, 2])
        driver = node(store)
        await driver.start("127.0.0.1", [0])  # which opens the store again
        await driver.stop()
        await driver.stop()
        with pytest.raises(UsageError, match="ended"):
            accepted(driver, "m")

    asyncio.run(whole())
