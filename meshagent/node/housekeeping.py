"""What a node does by the wall clock: expiry at its time, retention, counts, its own addresses.

Never stands in anybody's way: what fails is logged and tried again. Invariant: each look goes on
until nothing is left to do, so that no page or batch is where it stops.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshagent.core.delivery.engine import Delivery
from meshagent.core.model.message_states import MessageState
from meshagent.core.model.peers import AgentId
from meshagent.core.model.rows import OutEntry
from meshagent.errors import MeshError

if TYPE_CHECKING:
    from meshagent.node.driver import Driver

__all__ = ["Housekeeping"]

ADDRESS_CHECK_S = 5.0  # interfaces come and go with Wi-Fi and VPNs; a look costs well under a ms
COUNT_S = 1.0  # messages that are dealt with one by one share a count
LOOK_S = 600.0  # retention needs no more; an expiry sets its own time
RETRY_MS = 30_000
DUE_ITEMS_MAX = 1000  # expire at a time, beside those that are on the wire
ON_WIRE_S = 1.0  # what is on the wire when its time is up has an answer by then, or no link
SHORTEST_S = 0.05
RETAIN_MS = 30 * 24 * 3600 * 1000  # delivered history is kept for a month
RETAIN_BYTES = 1024 * 1024 * 1024  # and up to a gigabyte


class Housekeeping:
    """The clockwork of one node."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._wake = asyncio.Event()
        self._counting: asyncio.Task[None] | None = None
        self._held_timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """The node runs."""
        self._driver.spawn(self._watch_addresses())
        self._driver.spawn(self._driver.damage.watch())
        self._driver.spawn(self._keep_house())

    # -- expiry and retention -----------------------------------------------------------------

    def look_at_expiries(self, _: object = None) -> None:
        """Something with a time limit became durable: look when the next one is due."""
        self._wake.set()

    async def withdraw(self, entries: Sequence[OutEntry], state: MessageState) -> None:
        """Cancel pending messages, or note that their time is up; durable when this returns."""
        driver = self._driver
        for entry in entries:
            driver.perform(driver.mesh.withdraw(entry, state, driver.loop.time()))
        await driver.committed()
        for peer in {entry.peer for entry in entries}:
            await driver.spool.withdrawn(AgentId(peer))

    async def _keep_house(self) -> None:
        while True:
            self._wake.clear()  # before looking: what is set while we look wakes us again
            with contextlib.suppress(TimeoutError):
                wait_s = await self._look()
                async with asyncio.timeout(wait_s):  # `wait_for` may swallow the word that we end
                    await self._wake.wait()
            self.count_unread()

    async def _look(self) -> float:
        """Do what is due; in how many seconds to look again."""
        driver, now_ms = self._driver, self._driver.wall_ms()
        due: Sequence[OutEntry] = ()
        due_max = DUE_ITEMS_MAX
        try:
            if (delivery := driver.mesh.delivery) is not None:
                # That stays due until it has an answer, and must not hide what waits here.
                due_max += delivery.sending.on_wire
            due = await driver.store.due(now_ms, due_max)
            await self.withdraw(due, MessageState.EXPIRED)
            driver.perform(driver.mesh.expire(driver.loop.time()))
            while await driver.store.retain(now_ms, RETAIN_MS, RETAIN_BYTES):
                pass  # a step at a time: commits that wait have their turn between them
            await driver.damage.look()
            if driver.blob_transfers is not None:
                await driver.blob_transfers.tidy(set(await driver.store.blobs()))
            self.watch_held()
            due_ms = await driver.store.next_expiry()
        except MeshError as error:
            driver.log.warning("not tidied: %s", error)
            due_ms = now_ms + RETRY_MS
        wait_s = LOOK_S if due_ms is None else min(LOOK_S, (due_ms - now_ms) / 1000)
        if wait_s <= 0:  # all that was read is on the wire, or there was more than one look
            wait_s = ON_WIRE_S if len(due) < due_max else 0.0
        return max(SHORTEST_S, wait_s)

    def watch_held(self) -> None:
        """Expire messages that wait for attachments at their time, by a timer of its own: others'
        mail must not make us keep house."""
        if self._held_timer is not None:
            self._held_timer.cancel()
        delivery = self._driver.mesh.delivery if self._driver.runs else None
        at_ms = None if delivery is None else delivery.incomplete.next_expiry()
        if at_ms is not None:
            left_s = (at_ms - self._driver.wall_ms()) / 1000
            delay_s = min(LOOK_S, max(SHORTEST_S, left_s))
            self._held_timer = self._driver.loop.call_later(delay_s, self._expire_held)

    def _expire_held(self) -> None:
        if self._driver.runs:
            self._driver.perform(self._driver.mesh.expire(self._driver.loop.time()))
            self.watch_held()

    # -- counting -----------------------------------------------------------------------------

    def inbox_shrank(self, by: int) -> None:
        """Messages were dealt with, durably: whoever waits for room may hear of it."""
        driver, now = self._driver, self._driver.loop.time()
        if by and driver.runs:
            driver.perform(driver.mesh.ask_delivery(lambda each: each.inbox_shrank(by), now))
            self.count_unread()

    def count_unread(self) -> None:
        """In a moment, as the disk has it: the engine can't tell a message that came again."""
        if self._counting is None or self._counting.done():
            self._counting = self._driver.spawn(self._hand_in_count())

    async def _hand_in_count(self) -> None:
        """Once for all that ask within a moment; again when something came or went meanwhile."""
        driver = self._driver
        while True:
            await asyncio.sleep(COUNT_S)
            await driver.committed()
            if not driver.runs or (delivery := driver.mesh.delivery) is None:
                return  # an engine begins with what the disk has
            before = delivery.receiving.inbox_changes
            try:
                unread = (await driver.store.mail_start()).unread
            except MeshError as error:
                driver.log.warning("not counted: %s", error)
                return
            if delivery.receiving.inbox_changes == before:
                self._hold(delivery, unread)
                return

    def _hold(self, delivery: Delivery, unread: int) -> None:
        driver, now = self._driver, self._driver.loop.time()
        if driver.runs and driver.mesh.delivery is delivery:
            driver.perform(driver.mesh.ask_delivery(lambda each: each.inbox_holds(unread), now))

    # -- addresses ----------------------------------------------------------------------------

    async def _watch_addresses(self) -> None:
        driver = self._driver
        while True:
            await asyncio.sleep(ADDRESS_CHECK_S)
            current = driver.transport.addresses()
            if current != driver.addresses and driver.runs:
                driver.log.info("addresses are now %s", ", ".join(current))
                driver.addresses = current
                driver.perform(driver.mesh.describe(driver.loop.time(), addresses=current))
                for discovery in driver.discoveries:
                    await discovery.update(driver.announcement())
