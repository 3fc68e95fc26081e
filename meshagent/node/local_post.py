"""The spool's driver: drops what waits for absent agents of this machine, takes what was left.

Decides when to drop, never what counts as news: that is delivery's. Invariant: a file is removed
only after what it holds is durable in our own database.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from meshagent.core.frames import MAIL_ITEMS_MAX, Mail
from meshagent.core.identity import Identity, verify
from meshagent.core.messages import MessageState
from meshagent.core.outgoing import FRAME_BYTES_MAX, WITHDRAWN
from meshagent.core.ports import OutEntry, Store
from meshagent.core.spooling import DROP_BYTES_MAX, pack_drop, parse_drop
from meshagent.core.types import AgentId
from meshagent.errors import MeshError, RemoteProtocolError
from meshagent.transports.spool import Spool

if TYPE_CHECKING:
    from meshagent.node.driver import Driver

__all__ = ["FolderPost", "LocalPost"]

LOOK_S = 30.0  # a running agent has links; the spool is for when it had not
GATHER_S = 0.02  # messages that come together share a file and its sync


class LocalPost:
    """No spool: for nodes that share no folder with anybody."""

    async def start(self, driver: Driver) -> None:
        """The node has started."""

    def pending(self, peer: AgentId) -> None:
        """Something for this peer has become durable."""

    async def close(self) -> None:
        """The node ends."""


class FolderPost(LocalPost):
    """The spool in the mesh folder."""

    def __init__(
        self,
        spool: Spool,
        store: Store,
        identity: Identity,
        mesh_id: bytes,
        is_local: Callable[[AgentId], bool],
    ) -> None:
        self._spool, self._store, self._is_local = spool, store, is_local
        self._identity, self._mesh_id = identity, mesh_id
        self._dropped: dict[AgentId, tuple[bytes, int]] = {}
        self._dropping: dict[AgentId, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None

    async def start(self, driver: Driver) -> None:
        """Take what was left for us, before anything else; then look now and then."""
        self._driver = driver
        self._pool = ThreadPoolExecutor(1, "meshagent-spool")
        await self._take()
        self._looking = asyncio.create_task(self._look())

    async def close(self) -> None:
        """Stop dropping; the thread ends."""
        tasks = [*self._dropping.values(), *([self._looking] if self._looking else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._pool.shutdown(wait=True)

    def pending(self, peer: AgentId) -> None:
        """Drop what waits for an agent of this machine that has no link."""
        if peer in self._dropping or self._driver.mesh.links.link_to(peer) is not None:
            return
        if self._is_local(peer):
            self._dropping[peer] = task = asyncio.create_task(self._drop(peer))
            task.add_done_callback(lambda _: self._dropping.pop(peer, None))

    async def _drop(self, peer: AgentId) -> None:
        await asyncio.sleep(GATHER_S)
        while self._driver.mesh.links.link_to(peer) is None:
            where = self._driver.mesh.numbers(peer)
            if where is None:
                return
            epoch, floor = where
            known, upto = self._dropped.get(peer, (epoch, 0))
            first = max(floor, upto + 1 if known == epoch else 0)
            entries = list(await self._store.pending(peer, first, MAIL_ITEMS_MAX))
            if not entries:
                return
            mail = _mail(epoch, floor, entries)
            data = pack_drop(self._identity, self._mesh_id, peer, mail)
            last = mail.first + len(mail.items) - 1
            try:
                await self._in_thread(self._spool.drop, peer, epoch, mail.first, last, data)
            except MeshError as error:
                self._driver.log.warning("not dropped for %s: %s", peer, error)
                return
            self._dropped[peer] = (epoch, last)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self._take()

    async def _take(self) -> None:
        for path, data in await self._in_thread(lambda: list(self._spool.mine(DROP_BYTES_MAX))):
            try:
                if data is None:
                    raise RemoteProtocolError("The file can't be read.")
                drop = parse_drop(data, self._identity.agent, self._mesh_id, verify)
                await self._driver.take(drop)
            except RemoteProtocolError as error:
                self._driver.log.warning("a file in the spool was refused: %s", error)
            except MeshError:
                return  # our disk is full: the file waits
            with contextlib.suppress(OSError):
                path.unlink()

    async def _in_thread(self, function: Callable[..., object], *arguments: object) -> object:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: function(*arguments))


def _mail(epoch: bytes, floor: int, entries: list[OutEntry]) -> Mail:
    size, items = 0, []
    for entry in entries:
        body = None if MessageState(entry.state) in WITHDRAWN else entry.body
        size += len(body or b"")
        if items and size > FRAME_BYTES_MAX:
            break
        items.append(body)
    return Mail(epoch, min(floor, entries[0].seq), entries[0].seq, tuple(items))
