"""The spool's driver: drops what waits for absent agents of this machine, takes what was left.

Decides when to drop, never what counts as news: that is delivery's. Invariant: a file is removed
only after what it holds is durable in our own database.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from meshagent.core.delivery.send_stream import FRAME_BYTES_MAX
from meshagent.core.delivery.spool_files import DROP_BYTES_MAX, Drop, pack_drop, parse_drop
from meshagent.core.model.identity import Identity, verify
from meshagent.core.model.message_states import WITHDRAWN, MessageState
from meshagent.core.model.messages import parse_body
from meshagent.core.model.peers import AgentId
from meshagent.core.model.rows import OutEntry
from meshagent.core.ports import Store
from meshagent.core.wire.frames import MAIL_ITEMS_MAX, Mail
from meshagent.errors import MeshError, RemoteProtocolError
from meshagent.transports.spool import Spool, read, stream_of

if TYPE_CHECKING:
    from meshagent.node.driver import Driver

__all__ = ["FolderSpool", "SpoolDriver"]

T = TypeVar("T")

LOOK_S = 30.0  # a running agent has links; the spool is for when it had not
SETTLE_S = 2.0  # after a start: whoever is here is linked by then, and needs no file
TAKE_FIRST_S = 1.0  # a join waits so long for what was left for it; a long backlog comes behind
TAKE_FILES_MAX = 16  # in memory and in one commit: a few MiB
GATHER_S = 0.02  # messages that come together share a file and its sync


class SpoolDriver:
    """No spool: for nodes that share no folder with anybody."""

    async def start(self, driver: Driver) -> None:
        """The node has started."""

    def pending(self, peer: AgentId) -> None:
        """Something for this peer has become durable."""

    async def withdrawn(self, peer: AgentId) -> None:
        """Something for this peer was taken back, or has expired; durably."""

    async def close(self) -> None:
        """The node ends."""


class FolderSpool(SpoolDriver):
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
        self._swept: dict[AgentId, bytes] = {}
        self._dropping: dict[AgentId, asyncio.Task[None]] = {}
        self._more: set[AgentId] = set()

    async def start(self, driver: Driver) -> None:
        """Take what was left for us, before anything else if it is little; look now and then."""
        self._driver = driver
        self._pool = ThreadPoolExecutor(1, "meshagent-spool")
        self._taking = asyncio.create_task(self._take())
        self._looking = asyncio.create_task(self._look())
        await asyncio.wait([self._taking], timeout=TAKE_FIRST_S)

    async def close(self) -> None:
        """Leave what waits for those who are away: we may not come back soon. The thread ends."""
        looking = (self._taking, self._looking)
        for task in looking:
            task.cancel()
        await asyncio.gather(*self._dropping.values(), *looking, return_exceptions=True)
        try:
            await self._drop_all()
        except MeshError as error:
            self._driver.log.warning("not dropped: %s", error)
        finally:
            self._pool.shutdown(wait=True)

    def pending(self, peer: AgentId) -> None:
        """Drop what waits for an agent of this machine that has no link."""
        self._more.add(peer)  # one that drops already must look once more
        if peer in self._dropping or (self._is_linked(peer) and self._is_swept(peer)):
            return
        if self._is_local(peer):
            self._dropping[peer] = asyncio.create_task(self._gather(peer))

    async def withdrawn(self, peer: AgentId) -> None:
        """Write the files anew that hold what was taken back: their numbers carry nothing now."""
        if (dropping := self._dropping.get(peer)) is not None:
            await asyncio.gather(dropping, return_exceptions=True)
        if not self._is_local(peer) or (start := await self._stream(peer)) is None:
            return
        epoch, floor = start
        await self._sweep(peer, epoch)
        for first, last in await self._in_thread(self._spool.dropped, peer, epoch):
            limit = last - first + 1
            entries = [e for e in await self._store.pending(peer, first, limit) if e.seq <= last]
            if (now := await self._numbers(peer)) is not None and now[0] != epoch:
                await self.withdrawn(peer)  # what was read may have the numbers of a new epoch
                return
            if entries:
                await self._write(peer, _mail(epoch, floor, entries), first, last)

    async def _gather(self, peer: AgentId) -> None:
        await asyncio.sleep(GATHER_S)
        try:
            while peer in self._more:
                self._more.discard(peer)
                await self._drop_for(peer)
        finally:
            del self._dropping[peer]  # with the last look at `_more`: nothing comes between

    async def _drop_all(self) -> None:
        """What waits for every agent of this machine that has no link."""
        for peer in await self._correspondents():
            if peer not in self._dropping and self._is_local(peer):
                await self._drop_for(peer)

    async def _drop_for(self, peer: AgentId) -> None:
        """What waits for this one. A box that is full or can't be written holds up no other."""
        try:
            if (start := await self._stream(peer)) is None:
                return
            if not self._is_linked(peer):
                await self._drop(peer, *start)
            await self._sweep(peer, start[0])
        except MeshError as error:
            self._driver.log.warning("not dropped for %s: %s", peer, error)

    async def _drop(self, peer: AgentId, epoch: bytes, floor: int) -> None:
        """All that is not in a file of this run yet.

        Files of an earlier run don't count: if our database was put back since then, the same
        numbers mean other messages in them, and the recipient must be able to see that.
        """
        known, upto = self._dropped.get(peer, (epoch, 0))
        first = max(floor, upto + 1 if known == epoch else 0)
        while entries := list(await self._store.pending(peer, first, MAIL_ITEMS_MAX)):
            if await self._numbers(peer) != (epoch, floor):
                self._more.add(peer)  # numbers have changed while we read
                return
            mail = _mail(epoch, floor, entries)
            last = mail.first + len(mail.items) - 1
            await self._write(peer, mail, mail.first, last)
            self._dropped[peer] = (epoch, last)
            first = last + 1

    async def _write(self, peer: AgentId, mail: Mail, first: int, last: int) -> None:
        data = pack_drop(self._identity, self._mesh_id, peer, mail)
        await self._in_thread(self._spool.drop, peer, mail.epoch, first, last, data)

    async def _sweep(self, peer: AgentId, epoch: bytes) -> None:
        """Remove our files of another epoch, once all that they hold is in this one or has ended.

        One that holds more is the only copy of a message that a lost database had accepted.
        """
        if self._swept.get(peer) == epoch:
            return
        for path in await self._in_thread(self._spool.outdated, peer, epoch):
            data = await self._in_thread(read, path, DROP_BYTES_MAX)
            if data is not None and await self._is_kept(peer, data):
                with contextlib.suppress(OSError):
                    await self._in_thread(path.unlink)
        self._swept[peer] = epoch

    async def _is_kept(self, peer: AgentId, data: bytes) -> bool:
        try:
            mail = parse_drop(data, peer, self._mesh_id, verify).mail
            ids = [parse_body(body).id for body in mail.items if body is not None]
        except RemoteProtocolError:
            return False
        for ident in ids:
            found = await self._store.outgoing(ident)
            if not any((each.id, each.peer) == (ident, peer) for each in found):
                return False
        return True

    def _is_swept(self, peer: AgentId) -> bool:
        numbers = self._decided(peer)
        if numbers is not None and peer not in self._swept and not self._is_local(peer):
            self._swept[peer] = numbers[0]  # nobody left files for one who is elsewhere
        return numbers is None or self._swept.get(peer) == numbers[0]

    async def _stream(self, peer: AgentId) -> tuple[bytes, int] | None:
        """Our epoch and the first number that waits, once the disk has them too."""
        numbers = await self._numbers(peer)
        if self._driver.runs:
            await self._driver.committed()
        return numbers

    async def _correspondents(self) -> list[AgentId]:
        if self._driver.runs:
            delivery = self._driver.mesh.delivery
            return [] if delivery is None else delivery.correspondents()
        return [AgentId(each.peer) for each in (await self._store.mail_start()).streams]

    async def _numbers(self, peer: AgentId) -> tuple[bytes, int] | None:
        """As decided; from the disk when the engine has ended."""
        if self._driver.runs:
            return self._decided(peer)
        start = await self._store.mail_start()
        floors = [each.floor for each in start.streams if each.peer == peer]
        return (start.epoch, floors[0]) if floors else None

    def _decided(self, peer: AgentId) -> tuple[bytes, int] | None:
        delivery = self._driver.mesh.delivery
        return None if delivery is None else delivery.numbers(peer)

    def _is_linked(self, peer: AgentId) -> bool:
        return self._driver.runs and self._driver.is_linked(peer)

    async def _look(self) -> None:
        await asyncio.sleep(SETTLE_S)
        while True:
            try:
                await self._taking
                await self._drop_all()
            except MeshError as error:
                self._driver.log.warning("the spool waits: %s", error)
            await asyncio.sleep(LOOK_S)
            self._taking = asyncio.create_task(self._take())

    async def _take(self) -> None:
        waiting: set[str] = set()
        found = await self._in_thread(self._spool.mine)
        files = (path for path in found if stream_of(path) not in waiting)
        while batch := list(islice(files, TAKE_FILES_MAX)):
            drops = await self._in_thread(
                lambda batch: [read(p, DROP_BYTES_MAX) for p in batch], batch
            )
            # In order, and in one commit: each is decided upon before the first is waited for.
            taken = await asyncio.gather(*map(self._take_one, batch, drops))
            # What comes behind one that is not ours yet waits; other senders' files don't.
            waiting |= {
                stream_of(path) for path, ours in zip(batch, taken, strict=True) if not ours
            }

    async def _take_one(self, path: Path, data: bytes | None) -> bool:
        try:
            if data is None:
                raise RemoteProtocolError("The file can't be read.")
            drop = parse_drop(data, self._identity.agent, self._mesh_id, verify)
            if not await self._hand_in(drop):
                return False
        except RemoteProtocolError as error:
            self._driver.log.warning("a file in the spool was refused: %s", error)
        with contextlib.suppress(OSError):
            await self._in_thread(path.unlink)
        return True

    async def _hand_in(self, drop: Drop) -> bool:
        """Whether delivery has all of it now, durably."""
        driver = self._driver
        if driver.mesh.links.pin(drop.sender, drop.key) != drop.key:
            raise RemoteProtocolError("The drop's sender is known with another key.")
        delivery = driver.mesh.delivery
        if delivery is None:
            return False
        driver.perform(driver.mesh.take(drop.sender, drop.mail, driver.loop.time()))
        has_all = delivery.receiving.has(drop.mail, drop.sender, spooled=True)
        await driver.committed()
        # Had the disk not taken it, this engine would not be in use any more.
        return has_all and driver.runs and driver.mesh.delivery is delivery

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: function(*arguments))


def _mail(epoch: bytes, floor: int, entries: list[OutEntry]) -> Mail:
    size = 0
    items: list[bytes | None] = []
    for entry in entries:
        body = None if MessageState(entry.state) in WITHDRAWN else entry.body
        size += len(body or b"")
        if items and size > FRAME_BYTES_MAX:
            break
        items.append(body)
    return Mail(epoch, min(floor, entries[0].seq), entries[0].seq, tuple(items))
