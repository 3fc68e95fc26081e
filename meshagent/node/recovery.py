"""What happens when the disk does not take what it was given: nothing is accepted until it is well.

What delivery believed since the last commit never happened, so a new engine begins where the disk
stands. Membership goes on meanwhile: a node with a full disk is alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from meshagent.core.delivery.engine import Delivery
from meshagent.core.delivery.incomplete_messages import IncompleteMessages
from meshagent.core.model.messages import parse_body
from meshagent.core.model.peers import AgentId
from meshagent.errors import LimitReached, MeshError

if TYPE_CHECKING:
    from meshagent.node.driver import Driver

__all__ = ["Recovery"]

RECOVER_S = 2.0  # between looks whether a full or failing disk is well again
FREE_BYTES_MIN = 8 * 1024 * 1024  # what the store's log may take: with less it is soon full again


class Recovery:
    """The state of one node's disk, and the way back."""

    def __init__(self, driver: Driver, free_bytes: Callable[[], int] | None = None) -> None:
        self._driver = driver
        self._free_bytes = free_bytes or (lambda: FREE_BYTES_MIN)
        self._error: MeshError | None = None
        self._recovering: asyncio.Task[None] | None = None

    @property
    def trouble(self) -> str:
        """What is wrong with the disk, in a sentence; empty when it is well."""
        return "" if self._error is None else str(self._error)

    def check_disk(self) -> None:
        """Raise why nothing can be kept now, if that is so."""
        if (error := self._error) is not None:
            raise type(error)(error.message, hint=error.hint, **error.data)

    async def engine_from_disk(self) -> Delivery:
        """A delivery engine that begins where the disk stands."""
        store = self._driver.store
        start = replace(await store.mail_start(), withdrawn=await store.withdrawn())
        incomplete = IncompleteMessages(self._driver.limits)
        for entry in await store.receiving():
            incomplete.hold(AgentId(entry.sender), parse_body(entry.body), len(entry.body))
        return Delivery(start, self._driver.rng, incomplete=incomplete)

    def suspend(self, error: MeshError) -> None:
        """The disk failed: stop delivery, and look now and then whether it is well again."""
        self._error = error
        driver = self._driver
        if driver.runs:
            driver.mesh.deliver_with(None, driver.loop.time())
            if self._recovering is None or self._recovering.done():
                self._recovering = driver.spawn(self._recover())

    async def _recover(self) -> None:
        driver = self._driver
        while driver.runs:
            await asyncio.sleep(RECOVER_S)
            if isinstance(self._error, LimitReached) and self._free_bytes() < FREE_BYTES_MIN:
                continue
            try:
                await driver.store.next_run()  # a small write that changes nothing of weight
                delivery = await self.engine_from_disk()
            except MeshError as again:
                self._error = again
                continue
            if driver.runs:
                driver.log.info("the disk is well again")
                self._error = None
                driver.perform(driver.mesh.deliver_with(delivery, driver.loop.time()))
                driver.housekeeping.look_at_expiries()
            return

    async def backup(self, path: str) -> None:
        """A copy of everything this agent keeps, while it runs."""
        await self._driver.committed()
        await self._driver.store.backup(path)

    async def restore(self, path: str) -> str:
        """Replace the mailbox with a backup; where the replaced one is kept."""
        driver = self._driver
        driver.mesh.deliver_with(None, driver.loop.time())
        await driver.committed()
        try:
            return await driver.store.restore(path)
        finally:
            delivery = await self.engine_from_disk()
            await driver.damage.look()
            driver.perform(driver.mesh.deliver_with(delivery, driver.loop.time()))
