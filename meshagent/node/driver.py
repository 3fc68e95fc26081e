"""The driver: one agent's running node. Feeds the engine with events, and runs its turns.

Decides nothing about the protocol. Events come from the transport, discovery, sessions and timers;
each ends in `perform`. What must wait for the disk is said by the turns (core/turns.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from meshagent.core.effects import (
    Accepted,
    BlobFailed,
    BlobProgress,
    BlobReady,
    CloneFound,
    Collect,
    CountUnread,
    Deliver,
    Durable,
    Effect,
    Load,
    Noted,
    PeerChanged,
    ReceiptChanged,
    TakenBack,
)
from meshagent.core.mesh import Mesh
from meshagent.core.model.attachments import Attachment, AttachmentLimits
from meshagent.core.model.identity import verify
from meshagent.core.model.messages import Outgoing
from meshagent.core.model.peers import AgentId, Candidate, LinkId, PeerState
from meshagent.core.model.rows import Row
from meshagent.core.ports import Announcement, Discovery, Store, Transport
from meshagent.core.turns import Turn
from meshagent.errors import CloneRunning, MeshError, UsageError
from meshagent.node.blobs import BlobTransfers
from meshagent.node.changes import ChangeFeed
from meshagent.node.damage_watch import DamageWatch
from meshagent.node.engine_timer import EngineTimer
from meshagent.node.housekeeping import Housekeeping
from meshagent.node.profile import Profile, first_record, own_presence, own_status
from meshagent.node.received import ReceiptBook
from meshagent.node.recovery import Recovery
from meshagent.node.spool import SpoolDriver
from meshagent.node.turn_runner import TurnRunner, Waiter
from meshagent.node.views import NodeViews

__all__ = ["Driver"]

_REPORTED = frozenset(
    {ReceiptChanged, Deliver, PeerChanged, CloneFound, BlobReady, BlobFailed, BlobProgress}
)
"""What the feed of changes tells, and nobody performs."""


class Driver:
    """One agent's running node."""

    def __init__(
        self,
        profile: Profile,
        transport: Transport,
        store: Store,
        discoveries: Sequence[Discovery],
        log: logging.Logger,
        spool: SpoolDriver | None = None,
        blob_transfers: BlobTransfers | None = None,
        limits: AttachmentLimits | None = None,
        rng: random.Random | None = None,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        self.profile, self.log = profile, log
        self.agent: AgentId = profile.identity.agent
        self.loop: asyncio.AbstractEventLoop
        """The one it was started in."""
        self.addresses: tuple[str, ...] = ()
        self.started_at = time.time()
        self.inbox_start = 0
        """The newest position in the inbox when the node started."""
        self.transport, self.store, self.discoveries = transport, store, discoveries
        self.rng = rng or random.SystemRandom()
        self.spool = spool or SpoolDriver()
        self.blob_transfers = blob_transfers
        self.limits = limits or AttachmentLimits()
        self.changes = ChangeFeed(log)
        self.receipts = ReceiptBook(self.changes)
        self.runner = TurnRunner(
            store,
            transport,
            log,
            lambda: self._mesh,
            self._do,
            lambda error: self.recovery.suspend(error),
        )  # fmt: skip
        self.recovery = Recovery(self, free_bytes)
        self.housekeeping = Housekeeping(self)
        self.damage = DamageWatch(self)
        self.views = NodeViews(self)
        self.timer = EngineTimer(lambda: self._mesh, self.perform)
        self._run = ""
        self._mesh: Mesh | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._end_error: MeshError | None = None
        self._started: list[Callable[[], Any]] = []

    # -- life ---------------------------------------------------------------------------------

    async def start(self, listen: str, ports: Sequence[int]) -> None:
        """Open the store, listen on the first free of `ports`, and look for others."""
        self.loop = asyncio.get_running_loop()
        try:
            await self._start(listen, ports)
        except BaseException:
            await self._close()
            raise

    async def _start(self, listen: str, ports: Sequence[int]) -> None:
        self._started.append(self.store.close)
        await self.store.open()
        run = await self.store.next_run()
        remembered = list(await self.store.peers())
        delivery = await self.recovery.engine_from_disk()
        await self.damage.look()
        self.inbox_start = await self.store.newest()
        self._started.append(self.transport.close)
        self.addresses = await self._listen(listen, ports)
        self._run = f"{self.rng.getrandbits(64):016x}"
        me = first_record(self.profile, run, self.wall_ms(), self.addresses)
        self._mesh = Mesh(
            me, self.profile.identity, self.profile.secret.mesh_id, verify, self.rng,
            self.loop.time(), wall_ms=lambda now: self.wall_ms(),
        )  # fmt: skip
        self._mesh.remember(remembered, self.loop.time())
        self.log.info("joined as %s at %s", self.agent, ", ".join(self.addresses))
        if self.blob_transfers is not None:
            self._started.append(self.blob_transfers.close)
            await self.blob_transfers.start(self)
        self.perform(self._mesh.deliver_with(delivery, self.loop.time()))
        self._started.append(self.spool.close)
        await self.spool.start(self)
        for discovery in self.discoveries:
            self._started.append(discovery.close)
            await discovery.start(self.announcement(), self._found)
        self.housekeeping.start()
        self.timer.look_soon()

    async def _listen(self, listen: str, ports: Sequence[int]) -> tuple[str, ...]:
        for port in ports[:-1]:
            with contextlib.suppress(UsageError):
                return await self.transport.start(listen, port, self)
        return await self.transport.start(listen, ports[-1], self)

    async def wait(self) -> None:
        """Until the node is told to end, or has to; the reason it has to is raised."""
        await self._ended.wait()
        if self._end_error is not None:
            raise self._end_error

    def end(self, error: MeshError | None = None) -> None:
        """Ask the node to end; `wait` returns, and `stop` does the work."""
        self._end_error = self._end_error or error
        self._ended.set()

    async def stop(self) -> None:
        """Say goodbye, keep what is left to keep, then close everything. Safe to call twice."""
        if self._mesh is not None:
            self.perform(self._mesh.leave(self.loop.time()))
            await self.committed()
            self._mesh = None
            self.log.info("left")
        self._ended.set()
        await self._close()
        self.changes.end()

    async def _close(self) -> None:
        self._mesh = None  # a commit that is under way tells nobody any more
        self.timer.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._started:  # the store among them: what is at the disk already hears how it ends
            try:
                await self._started.pop()()
            except Exception:
                self.log.exception("closing failed")
        self.runner.close(UsageError("The node ended, and it may have been kept."))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do this beside everything else; it ends with the node at the latest."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- what sessions ask --------------------------------------------------------------------

    @property
    def mesh(self) -> Mesh:
        """The engine; only while the node runs."""
        if self._mesh is None:
            raise UsageError("This node has ended.", hint="Join again.")
        return self._mesh

    @property
    def runs(self) -> bool:
        """Whether there is an engine: not before the start is over, nor after the goodbye."""
        return self._mesh is not None

    def wall_ms(self) -> int:
        """Milliseconds since the epoch, as this machine's clock shows them."""
        return time.time_ns() // 1_000_000

    def accept(
        self,
        outgoing: Outgoing,
        rows: Sequence[Row],
        waiters: Sequence[Waiter],
        receipts: bool = False,
    ) -> None:
        """Take messages (or receipts), or raise and take none. When they are durable, and `rows`
        with them, each waiter has its result."""
        self.recovery.check_disk()
        turn = self.mesh.accept(outgoing, self.loop.time(), receipts)
        if outgoing.expires:
            waiters[0][0].add_done_callback(self.housekeeping.look_at_expiries)
        after = [*turn.after, Accepted(waiters)]
        self.perform(turn._replace(rows=[*rows, *turn.rows], after=after))

    async def keep(self, rows: Sequence[Row]) -> None:
        """Returns when the rows are durable, and all that was decided before."""
        self.recovery.check_disk()
        kept: asyncio.Future[None] = self.loop.create_future()
        self.perform(Turn((), rows, [Accepted([(kept, None)])]))
        await kept

    async def committed(self) -> None:
        """Until all that was decided so far is durable, or has failed."""
        if self._mesh is not None and not self.runner.turns.is_idle:
            passed = self.loop.create_future()
            self.perform(Turn(after=[Accepted([(passed, None)])]))
            with contextlib.suppress(MeshError):
                await passed

    def describe(self, presence: str | None, status: str | None) -> None:
        """Set what others see this agent doing."""
        said = own_presence(presence), own_status(status)
        self.perform(self.mesh.describe(self.loop.time(), *said))

    def is_linked(self, peer: str) -> bool:
        """Whether a frame to this peer would leave now."""
        return self.mesh.links.link_to(AgentId(peer)) is not None

    def fetch(self, sender: AgentId, attachment: Attachment) -> None:
        """Get this blob; the feed of changes tells when it is here."""
        self.perform(self.mesh.fetch(sender, attachment, self.loop.time()))

    def transferred(self, answer: Callable[..., list[Effect]], *arguments: Any) -> None:
        """Tell the transfer engine what came of an effect."""
        if self._mesh is not None:
            now = self.loop.time()
            self.perform(self._mesh.relay(answer(*arguments, now), now))

    # -- what the adapters tell ---------------------------------------------------------------

    def link_opened(self, link: LinkId, curve_key: bytes | None) -> None:
        """A connection passed the door."""
        if self._mesh is not None:
            self.perform(self._mesh.opened(link, curve_key, self.loop.time()))

    def link_received(self, link: LinkId, parts: Sequence[bytes | memoryview]) -> None:
        """A frame came."""
        if self._mesh is not None:
            try:
                self.perform(self._mesh.received_parts(link, parts, self.loop.time()))
            except (KeyboardInterrupt, SystemExit):
                self.runner.interrupted()
                raise

    def link_closed(self, link: LinkId, reason: str) -> None:
        """A connection ended."""
        if self._mesh is not None:
            self.perform(self._mesh.closed(link, reason, self.loop.time()))

    def _found(self, candidate: Candidate) -> None:
        if self._mesh is None:
            return
        mine = candidate.agent == self.agent
        if mine and set(candidate.addresses) & set(self.addresses):
            return  # an echo of ourselves; another address would be a copy of this agent
        self._mesh.found(candidate, self.loop.time())
        self.timer.look_soon()

    def announcement(self) -> Announcement:
        """What discovery may say of this node."""
        return Announcement(self.agent, self.profile.secret.tag, self._run, self.addresses)

    # -- turns --------------------------------------------------------------------------------

    def perform(self, turn: Turn) -> None:
        """Run a turn of the engine; look soon when the engine wants to be woken next."""
        self.runner.perform(turn)
        self.timer.look_soon()

    def _do(self, effect: Effect) -> None:
        """Perform an effect that is neither a frame nor a link."""
        if type(effect) in _REPORTED:
            self._report(effect)
            return
        if self._mesh is None:
            return
        now = self.loop.time()
        match effect:
            case Durable(peer, epoch, upto):
                self.perform(
                    self._mesh.ask_delivery(lambda each: each.durable(peer, epoch, upto, now), now)
                )
                self.spool.pending(peer)
            case TakenBack(peer, epoch, seq):
                self.perform(
                    self._mesh.ask_delivery(lambda it: it.taken_back(peer, epoch, seq, now), now)
                )
            case Noted(peer, epoch, upto):
                if self._mesh.delivery is not None:
                    self._mesh.delivery.noted(peer, epoch, upto)
            case Load():
                self.spawn(self._load(effect))
            case Collect(sender, message):
                self.perform(self._mesh.collect(sender, message, now))
                self.housekeeping.watch_held()
            case CountUnread():
                self.housekeeping.count_unread()
            case _ if self.blob_transfers is not None:
                self.blob_transfers.perform(effect)

    async def _load(self, effect: Load) -> None:
        try:
            entries = await self.store.pending(effect.peer, effect.first, effect.limit)
        except MeshError as error:
            self.log.error("not read: %s", error)
            self.recovery.suspend(error)
            return
        if self._mesh is not None:
            self.perform(self._mesh.loaded(effect.peer, entries, self.loop.time()))

    def _report(self, effect: Effect) -> None:
        self.changes.publish(effect)
        match effect:
            case PeerChanged(peer):
                self.log.info("%s is %s", peer.agent, peer.state.value)
                if peer.state in (PeerState.GONE, PeerState.LEFT) and self._mesh is not None:
                    self.spool.pending(peer.agent)
            case CloneFound(stop, where):
                self.log.warning("a copy of this agent runs elsewhere (%s)", where)
                if stop:
                    self.end(_clone_running(self.agent, where))


def _clone_running(agent: AgentId, where: str) -> CloneRunning:
    return CloneRunning(
        f"Another node already runs as {agent}, from a copy of its folder.",
        hint="Stop that one first, or join here with another --role or --name.",
        agent=agent,
        where=where,
    )
