"""Nodes for the tests: a real driver with a store in memory, no network and no files."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from core.delivery.desk import outgoing
from core.made import SECRET, identity

from meshagent.core.delivery.spool_files import Drop
from meshagent.core.model.messages import Message, pack_body
from meshagent.core.model.peers import AgentId, LinkId
from meshagent.core.model.rows import Row, Watermark
from meshagent.core.ports import Store
from meshagent.core.wire.frames import Mail
from meshagent.errors import MeshError, StorageError
from meshagent.node.driver import Driver
from meshagent.node.profile import Profile
from meshagent.node.spool import SpoolDriver
from meshagent.storage.mail.memory_store import MemoryStore

S = TypeVar("S", bound=MemoryStore)
ME, BOB, EVE = identity("me"), identity("bob"), identity("eve")


class Nowhere:
    """A transport without links; what was sent anyway is noted."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()
        self.sent: list[LinkId] = []

    async def start(self, listen: str, port: int, events: object) -> tuple[str, ...]:
        return ("127.0.0.1:1",)

    def addresses(self) -> tuple[str, ...]:
        return ("127.0.0.1:1",)

    def dial(self, address: str) -> LinkId:
        return LinkId(1)

    def send(self, link: LinkId, parts: Sequence[bytes | memoryview]) -> bool:
        self.sent.append(link)
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


class Quick(MemoryStore):
    """As quick as a disk can be: it calls back before `begin` returns."""

    held = False

    def hold(self) -> None:
        """From now on it is as slow as any other."""
        self.held = True
        super().hold()

    def let_go(self) -> None:
        """What waits is told in a moment; what comes from now on is told at once."""
        self.held = False
        super().let_go()

    def begin(self, rows: Sequence[Row], then: Callable[[MeshError | None], None]) -> None:
        if self.held:
            super().begin(rows, then)
            return
        error: MeshError | None = None
        try:
            self.commit(rows).send(None)
        except StopIteration:
            pass
        except MeshError as failure:
            error = failure
        then(error)


def node(store: Store, spool: SpoolDriver | None = None) -> Driver:
    """A driver that was not started yet."""
    profile = Profile(ME, SECRET, "mesh", "tester", (), "host", "0")
    log = logging.getLogger("test")
    blob_transfers: Any = NoFiles()  # beside it, nothing that is the driver's own may get lost
    return Driver(
        profile, Nowhere(), store, (), log, spool, blob_transfers, rng=random.Random(1)
    )  # fmt: skip


def run(store: S, script: Callable[[Driver, S], Coroutine[Any, Any, None]]) -> None:
    """A script with a node that runs."""

    async def whole() -> None:
        driver = node(store)
        async with asyncio.timeout(20):
            await driver.start("127.0.0.1", [0])
            try:
                await script(driver, store)
            finally:
                await driver.stop()

    asyncio.run(whole())


def drop(*idents: str, first: int = 1, epoch: bytes = b"theepoch") -> Drop:
    """Mail that Bob left for us."""
    bodies = tuple(pack_body(Message(ident, "text", "", 1)) for ident in idents)
    return Drop(BOB.agent, BOB.key, Mail(epoch, 1, first, bodies))


async def take(driver: Driver, left: Drop) -> bool:
    """Whether all of it was taken; what it brings is durable then, or has failed."""
    delivery = driver.mesh.delivery
    driver.perform(driver.mesh.take(left.sender, left.mail, driver.loop.time()))
    await driver.committed()
    return delivery is not None and delivery.receiving.has(left.mail, left.sender, spooled=True)


def accepted(
    driver: Driver, ident: str, to: AgentId = BOB.agent, **fields: Any
) -> asyncio.Future[None]:
    """Done when a message with this id is durable."""
    kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    message = Message(ident, "text", "", 1, **fields)
    driver.accept(outgoing(message, to=[to]), (), [(kept, None)])
    return kept
