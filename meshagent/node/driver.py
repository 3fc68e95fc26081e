"""The driver: the one place where the core's effects are performed, in one order.

Decides nothing about the protocol. Invariant, per turn: every Persist is committed and synced,
then frames leave, then sessions hear of it. A turn that comes while a commit is under way waits
behind it and shares the next one, so nothing overtakes what it rests on; one that rests on nothing
(`may_pass`) does not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

from meshagent.core.delivery.engine import Delivery
from meshagent.core.delivery.incomplete_messages import IncompleteMessages
from meshagent.core.delivery.spool_files import Drop
from meshagent.core.effects import (
    Accepted,
    CloneFound,
    CloseLink,
    Collect,
    CountUnread,
    Deliver,
    Dial,
    Durable,
    Effect,
    Flush,
    Load,
    Note,
    PeerChanged,
    Persist,
    ReceiptChanged,
    Transmit,
    may_pass,
    must_wait,
    overtakes,
)
from meshagent.core.mesh import Mesh
from meshagent.core.model.attachments import Attachment, AttachmentLimits
from meshagent.core.model.identity import Identity, MeshSecret, verify
from meshagent.core.model.messages import Message, MessageState, Texts, parse_body
from meshagent.core.model.peers import AgentId, Candidate, LinkId, Peer, PeerState, Presence
from meshagent.core.model.records import STATUS_CHARACTERS_MAX, Record
from meshagent.core.model.rows import Delivered, NewEpoch, OutEntry, OutState, PeerRow, Row
from meshagent.core.ports import Announcement, Discovery, Store, Transport
from meshagent.core.transfer.engine import Transfer
from meshagent.core.wire.codec import encode
from meshagent.core.wire.frames import Mail, MailAck
from meshagent.errors import (
    CloneRunning,
    LimitReached,
    MeshError,
    RemoteProtocolError,
    StorageError,
    UsageError,
)
from meshagent.node.blobs import BLOB_EFFECTS, BlobTransfers
from meshagent.node.received import ReceiptBook
from meshagent.node.spool import SpoolDriver
from meshagent.node.subscribers import Event, Subscribers
from meshagent.node.views import peer_view

__all__ = ["Driver", "Profile"]

ADDRESS_CHECK_S = 5.0  # interfaces come and go with Wi-Fi and VPNs; a look costs well under a ms
RECOVER_S = 2.0  # between looks whether a full or failing disk is well again
ROOM_BYTES_MIN = 8 * 1024 * 1024  # what the store's log may take: with less it is soon full again
COUNT_S = 1.0  # messages that are dealt with one by one share a count
HOUSE_S = 600.0  # retention needs no more; an expiry sets its own time
HOUSE_RETRY_MS = 30_000
DUE_ITEMS_MAX = 1000
ON_WIRE_S = 1.0  # what is on the wire when its time is up has an answer by then, or no link
RETAIN_MS = 30 * 24 * 3600 * 1000  # delivered history is kept for a month
RETAIN_BYTES = 1024 * 1024 * 1024  # and up to a gigabyte
NOTE_S = 0.05  # a note that no commit took along is kept after so long
LOOK_S = 0.005  # so much later than it wants the engine may be woken: its shortest time is 10 ms
_SEE_OUTBOX = "See what waits: meshagent outbox"
OLDER_COPY = (
    "a peer has messages that this database never sent: it is an older copy; "
    "what waits was numbered anew, and nothing is lost"
)
_REPORTED = frozenset({ReceiptChanged, Deliver, PeerChanged, CloneFound})
_message, _expires = itemgetter(1), attrgetter("expires_ms")
Waiter = tuple[asyncio.Future[Any], Any]
"""Who waits until something is durable, and what comes of it then."""
RUN_SHIFT = 32  # an incarnation is the durable run number and a counter within the run


@dataclass(frozen=True, slots=True)
class Profile:
    """Who this node is and what it says of itself at the start."""

    identity: Identity
    secret: MeshSecret
    mesh_name: str
    role: str
    capabilities: tuple[str, ...]
    host: str
    version: str


class Driver:
    """One agent's running node."""

    def __init__(
        self,
        profile: Profile,
        transport: Transport,
        store: Store,
        discoveries: Sequence[Discovery],
        log: logging.Logger,
        post: SpoolDriver | None = None,
        blob_transfers: BlobTransfers | None = None,
        limits: AttachmentLimits | None = None,
        rng: random.Random | None = None,
        room: Callable[[], int] = lambda: ROOM_BYTES_MIN,
    ) -> None:
        self.profile = profile
        self.agent: AgentId = profile.identity.agent
        self.subscribers = Subscribers()
        self.loop: asyncio.AbstractEventLoop
        """The one it was started in."""
        self.moment = 0
        """Grows only when the loop has come round, though not each time: it has no word for that,
        and to be called for it costs a lone message a twentieth of its time."""
        self.addresses: tuple[str, ...] = ()
        self.started_at = time.time()
        self.trouble = ""
        self._suspended_by: MeshError | None = None
        self._recovering: asyncio.Task[None] | None = None
        self._run = ""
        self._transport, self._store, self._discoveries = transport, store, discoveries
        self.log = log
        self._rng = rng or random.SystemRandom()
        self._mesh: Mesh | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._waiting: list[list[Effect]] = []
        self._batch: list[list[Effect]] = []
        self._committing = False
        self._notes: list[OutState | Delivered] = []
        self._note_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.post = post or SpoolDriver()
        self.blob_transfers = blob_transfers
        self.limits = limits or AttachmentLimits()
        self._room = room
        self.receipts = ReceiptBook()
        self._mail_came: asyncio.Event | None = None
        self.inbox_start = 0
        self._house = asyncio.Event()
        self._counting: asyncio.Task[None] | None = None
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
        self._started.append(self._store.close)
        await self._store.open()
        run = await self._store.next_run()
        remembered = list(await self._store.peers())
        delivery = await self._delivery()
        self.inbox_start = await self._store.newest()
        self._started.append(self._transport.close)
        self.addresses = await self._listen(listen, ports)
        started_ms = time.time_ns() // 1_000_000
        self._run = f"{self._rng.getrandbits(64):016x}"
        self._mesh = Mesh(
            self._first_record(run, started_ms), self.profile.identity,
            self.profile.secret.mesh_id, verify, self._rng, self.loop.time(),
            delivery=delivery, wall_ms=self._wall_ms,
        )  # fmt: skip
        self._mesh.remember(remembered, self.loop.time())
        self.log.info("joined as %s at %s", self.agent, ", ".join(self.addresses))
        if self.blob_transfers is not None:
            self._started.append(self.blob_transfers.close)
            await self.blob_transfers.start(self)
        for sender, message in delivery.incomplete.held():
            self.perform(self._mesh.collect(sender, message, self.loop.time()))
        self._started.append(self.post.close)
        await self.post.start(self)
        for discovery in self._discoveries:
            self._started.append(discovery.close)
            await discovery.start(self._announcement(), self._found)
        self._tasks.add(asyncio.create_task(self._watch_addresses()))
        self._tasks.add(asyncio.create_task(self._keep_house()))
        self.perform([])

    async def _listen(self, listen: str, ports: Sequence[int]) -> tuple[str, ...]:
        for port in ports[:-1]:
            with contextlib.suppress(UsageError):
                return await self._transport.start(listen, port, self)
        return await self._transport.start(listen, ports[-1], self)

    def _first_record(self, run: int, started_ms: int) -> Record:
        profile = self.profile
        return Record(
            self.agent, profile.identity.key, run << RUN_SHIFT, started_ms, False, profile.role,
            profile.capabilities, self.addresses, profile.host, Presence.IDLE, "", profile.version,
        )  # fmt: skip

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
        """Say goodbye, then close everything. Safe to call twice."""
        if self._mesh is not None:
            mesh, self._mesh = self._mesh, None
            effects = mesh.leave(self.loop.time())
            self._apply(effects)
            self.log.info("left")
            try:
                await self._store.commit([*self._notes, *_rows(effects)])
            except MeshError as error:
                self.log.warning("the last news is not kept: %s", error)
        self._ended.set()
        await self._close()
        self.subscribers.close()

    async def _close(self) -> None:
        self._mesh = None  # a commit that is under way tells nobody any more
        for timer in (self._timer, self._looking, self._expiry, self._note_timer):
            if timer is not None:
                timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        waiting, self._waiting = self._waiting, []
        _tell(waiting, UsageError("The node ended before it was kept."))
        while self._started:  # the store among them: what is at the disk already hears how it ends
            try:
                await self._started.pop()()
            except Exception:
                self.log.exception("closing failed")
        _tell(self._batch, UsageError("The node ended, and it may have been kept."))

    # -- what sessions ask --------------------------------------------------------------------

    @property
    def mesh(self) -> Mesh:
        """The engine; only while the node runs."""
        if self._mesh is None:
            raise UsageError("This node has ended.", hint="Join again.")
        return self._mesh

    def peers(self) -> list[Peer]:
        """Everyone known, by id."""
        return self.mesh.peers()

    def peers_view(self) -> list[dict[str, Any]]:
        """As `peers`, in JSON form."""
        return [self.view(peer) for peer in self.peers()]

    def view(self, peer: Peer) -> dict[str, Any]:
        """A peer in JSON form."""
        return peer_view(peer, self.clock_offset)

    @property
    def clock_offset(self) -> float:
        """What to add to an engine time to get wall time."""
        return time.time() - self.loop.time()

    def me_view(self) -> dict[str, Any]:
        """This agent as its peers see it."""
        me = self.mesh.me
        seen = Peer(
            me.agent, me.name, me.role, PeerState.ALIVE, me.presence, me.status,
            me.capabilities, self.addresses, me.host, self.loop.time(), me.version,
        )  # fmt: skip
        return self.view(seen)

    def refused(self) -> Counter[str]:
        """Who was turned away, at the door and behind it."""
        return self._transport.refused + self.mesh.refused()

    def ignored(self) -> Counter[str]:
        """Hints of discovery that were not followed, by source and reason."""
        return Counter(
            {
                f"{source.name} {why}": count
                for source in self._discoveries
                for why, count in source.ignored.items()
            }
        )

    def health(self) -> dict[str, str]:
        """Each discovery source, and the store, in a word."""
        states = {each.name: each.health() for each in self._discoveries}
        return states | {"store": self.trouble or "ok"}

    def describe(self, presence: str | None, status: str | None) -> None:
        """Set what others see this agent doing."""
        state = None
        if presence is not None:
            try:
                state = Presence(presence)
            except ValueError:
                raise UsageError(
                    f"{presence!r} is not a presence.",
                    hint=f"Choose one of {', '.join(each.value for each in Presence)}.",
                ) from None
        if status is not None:
            status = " ".join("".join(c if c.isprintable() else " " for c in status).split())
            status = status[:STATUS_CHARACTERS_MAX]
        self.perform(self.mesh.describe(self.loop.time(), state, status))

    # -- messages -----------------------------------------------------------------------------

    def accept(
        self,
        outgoing: Sequence[tuple[AgentId, Message]] | Texts,
        rows: Sequence[Row],
        waiters: Sequence[Waiter],
    ) -> list[Effect]:
        """Take messages, or raise and take none. Then `perform` this, before anything else: when
        they are durable, and `rows` with them, each waiter has its result."""
        if (error := self._suspended_by) is not None:
            raise type(error)(error.message, hint=error.hint, **error.data)
        taken = self.mesh.accept(outgoing, self.loop.time())
        if not isinstance(outgoing, Texts) and any(map(_expires, map(_message, outgoing))):
            waiters[0][0].add_done_callback(self._look_at_expiries)  # not before the disk has it
        if rows:
            taken.insert(0, Persist(rows))
        taken.append(Accepted(waiters))
        return taken

    def _look_at_expiries(self, kept: asyncio.Future[Any]) -> None:
        self._house.set()

    async def take(self, drop: Drop) -> bool:
        """Mail that was left for us in the spool; whether we have all of it now, durably."""
        if self.mesh.links.pin(drop.sender, drop.key) != drop.key:
            raise RemoteProtocolError("The drop's sender is known with another key.")
        delivery = self.mesh.delivery
        if delivery is None:
            return False
        self.perform(self.mesh.take(drop.sender, drop.mail, self.loop.time()))
        has_all = delivery.has(drop.mail, drop.sender, spooled=True)
        await self.committed()
        # Had the disk not taken it, this engine would not be in use any more.
        return has_all and self._mesh is not None and self._mesh.delivery is delivery

    async def committed(self) -> None:
        """Until all that was decided so far is durable, or has failed."""
        if self._mesh is None or not (self._committing or self._notes):
            return
        passed = self.loop.create_future()
        self.perform([Persist(()), Accepted([(passed, None)])])  # in line behind the others
        with contextlib.suppress(MeshError):
            await passed

    @property
    def runs(self) -> bool:
        """Whether there is an engine: not before the start is over, nor after the goodbye."""
        return self._mesh is not None

    async def keep(self, rows: Sequence[Row], done: int = 0) -> None:
        """Returns when the rows are durable; `done` of them made room in the inbox."""
        await self._store.commit(rows)
        if done:
            self.perform(self.mesh.inbox_shrank(done, self.loop.time()))
            self._count_unread()

    def _count_unread(self) -> None:
        """In a moment, as the disk has it: the engine can't tell a message that came again."""
        if self._counting is None or self._counting.done():
            self._counting = self.spawn(self._hand_in_count())

    async def _hand_in_count(self) -> None:
        """Once for all that ask within a moment; again when something came or went meanwhile."""
        while True:
            await asyncio.sleep(COUNT_S)
            await self.committed()
            if self._mesh is None or (delivery := self._mesh.delivery) is None:
                return  # an engine begins with what the disk has
            before = delivery.inbox_changes
            try:
                unread = (await self._store.mail_start()).unread
            except MeshError as error:
                self.log.warning("not counted: %s", error)
                return
            if delivery.inbox_changes == before:
                self._hold(delivery, unread)
                return

    def _hold(self, delivery: Delivery, unread: int) -> None:
        if self._mesh is not None and self._mesh.delivery is delivery:
            self.perform(self._mesh.inbox_holds(unread, self.loop.time()))

    @property
    def mail_came(self) -> asyncio.Event:
        """Set when mail comes: all who wait hold the same; who comes later waits for the next."""
        if self._mail_came is None:
            self._mail_came = asyncio.Event()
        return self._mail_came

    async def wait_for_mail(self, came: asyncio.Event) -> bool:
        """Until mail comes after `came` was taken from us; False when the node ends instead."""
        waits = [asyncio.create_task(each.wait()) for each in (came, self._ended)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        return not self._ended.is_set()

    def is_linked(self, peer: str) -> bool:
        """Whether a frame to this peer would leave now."""
        return self.mesh.links.link_to(AgentId(peer)) is not None

    async def withdraw(self, entries: Sequence[OutEntry], state: MessageState) -> None:
        """Cancel pending messages, or note that their time is up; durable when this returns."""
        for entry in entries:
            self.perform(self.mesh.withdraw(entry, state, self.loop.time()))
        await self.committed()
        for peer in {entry.peer for entry in entries}:
            await self.post.withdrawn(AgentId(peer))

    def outbox_counts(self) -> dict[str, int]:
        """How many messages wait here, and how many are on the wire without an answer."""
        delivery = self._mesh.delivery if self._mesh is not None else None
        if delivery is None:
            return {"queued": 0, "sent": 0}
        waiting = max(0, delivery.pending - delivery.withdrawn)
        sent = min(waiting, delivery.on_wire)
        return {"queued": waiting - sent, "sent": sent + len(delivery.taken)}

    def unread(self) -> int:
        """How many messages in the inbox nobody has dealt with."""
        delivery = self._mesh.delivery if self._mesh is not None else None
        return delivery.unread if delivery is not None else 0

    async def _delivery(self) -> Delivery:
        """An engine that begins where the disk stands."""
        mail, withdrawn = await self._store.mail_start(), await self._store.withdrawn()
        incomplete = IncompleteMessages(self.limits)
        for entry in await self._store.receiving():
            incomplete.hold(AgentId(entry.sender), parse_body(entry.body), len(entry.body))
        return Delivery(
            mail.epoch, mail.streams, mail.watermarks, mail.unread, self._rng,
            withdrawn=withdrawn, incomplete=incomplete, taken=mail.taken,
        )  # fmt: skip

    def _go_on_with(self, delivery: Delivery) -> None:
        """Use this engine from now on, and go on with what it holds."""
        now = self.loop.time()
        self.perform(self.mesh.deliver_with(delivery, now))
        for sender, message in delivery.incomplete.held():
            self.perform(self.mesh.collect(sender, message, now))

    def _wall_ms(self, now: float) -> int:
        return time.time_ns() // 1_000_000  # which `now` is in the engine's clock

    async def backup(self, path: str) -> None:
        """A copy of everything this agent keeps, while it runs."""
        await self.committed()
        await self._store.backup(path)

    async def restore(self, path: str) -> None:
        """Go on from a copy: messages that came or went since then are forgotten here."""
        self.mesh.deliver_with(None, self.loop.time())
        await self.committed()
        try:
            await self._store.restore(path)
        finally:
            self._go_on_with(await self._delivery())

    # -- attachments --------------------------------------------------------------------------

    @property
    def transfer(self) -> Transfer:
        """The engine that moves blobs."""
        return self.mesh.transfer

    def blob(self, answer: Callable[..., list[Effect]], *arguments: Any) -> None:
        """Tell the transfer engine what came of an effect."""
        if self._mesh is not None:
            now = self.loop.time()
            self.perform(self._mesh.relay(answer(*arguments, now), now))

    def fetch(self, sender: AgentId, attachment: Attachment) -> None:
        """Get this blob; the blob_transfers hears when it is here."""
        self.perform(self.mesh.fetch(sender, attachment, self.loop.time()))

    async def names_blob(self, sha256: bytes, peer: AgentId, direction: str) -> bool:
        """Whether a message to (`out`) or from (`in`) this peer names the blob."""
        return await self._store.names_blob(sha256, peer, direction)

    def key_of(self, agent: AgentId) -> bytes | None:
        """The key this agent is known with."""
        return self.mesh.links.key_of(agent)

    async def _load(self, effect: Load) -> None:
        try:
            entries = await self._store.pending(effect.peer, effect.first, effect.limit)
        except MeshError as error:
            self.log.error("not read: %s", error)
            self._suspend(error)
            return
        if self._mesh is not None:
            self.perform(self._mesh.loaded(effect.peer, entries, self.loop.time()))

    async def _keep_house(self) -> None:
        """What is due by the wall clock: expiry at its time, retention now and then."""
        while True:
            self._house.clear()  # before looking: what is set while we look wakes us again
            due: Sequence[OutEntry] = ()
            now_ms = self._wall_ms(self.loop.time())
            try:
                due = await self._store.due(now_ms, DUE_ITEMS_MAX)
                await self.withdraw(due, MessageState.EXPIRED)
                self.perform(self.mesh.expire(self.loop.time()))
                while await self._store.retain(now_ms, RETAIN_MS, RETAIN_BYTES):
                    pass  # a step at a time: commits that wait have their turn between them
                if self.blob_transfers is not None:
                    await self.blob_transfers.tidy(set(await self._store.blobs()))
                self._watch_expiry()
                due_ms = await self._store.next_expiry()
            except MeshError as error:
                self.log.warning("not tidied: %s", error)
                due_ms = now_ms + HOUSE_RETRY_MS
            wait_s = HOUSE_S if due_ms is None else min(HOUSE_S, (due_ms - now_ms) / 1000)
            if wait_s <= 0:  # all that was read is on the wire, or there was more than one look
                wait_s = ON_WIRE_S if len(due) < DUE_ITEMS_MAX else 0.0
            wait_s = max(0.05, wait_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):  # `wait_for` may swallow the word that we end
                    await self._house.wait()
            self._count_unread()

    def _next_held_expiry(self) -> int | None:
        delivery = self.mesh.delivery
        return delivery.incomplete.next_expiry() if delivery is not None else None

    def _watch_expiry(self) -> None:
        """At its time, by a timer of its own: others' mail must not make us keep house."""
        if self._expiry is not None:
            self._expiry.cancel()
        at_ms = None if self._mesh is None else self._next_held_expiry()
        if at_ms is not None:
            left_s = (at_ms - self._wall_ms(self.loop.time())) / 1000
            self._expiry = self.loop.call_later(min(HOUSE_S, max(0.05, left_s)), self._expire)

    def _expire(self) -> None:
        if self._mesh is not None:
            self.perform(self._mesh.expire(self.loop.time()))
            self._watch_expiry()

    def _suspend(self, error: MeshError) -> None:
        """The disk did not take what it was given: nothing is accepted until it is well.

        What delivery believed since the last commit never happened; it begins again from the disk.
        """
        self.trouble, self._suspended_by = str(error), error
        self._notes.clear()
        if self._mesh is not None:
            self._mesh.deliver_with(None, self.loop.time())
            if self._recovering is None or self._recovering.done():
                self._recovering = self.spawn(self._recover())

    async def _recover(self) -> None:
        while self._mesh is not None:
            await asyncio.sleep(RECOVER_S)
            if isinstance(self._suspended_by, LimitReached) and self._room() < ROOM_BYTES_MIN:
                continue
            try:
                await self._store.next_run()  # a small write that changes nothing of weight
                delivery = await self._delivery()
            except MeshError as again:
                self.trouble, self._suspended_by = str(again), again
                continue
            if self._mesh is not None:
                self.log.info("the disk is well again")
                self.trouble, self._suspended_by = "", None
                self._go_on_with(delivery)
                self._house.set()
            return

    # -- what the adapters tell ---------------------------------------------------------------

    def link_opened(self, link: LinkId, curve_key: bytes | None) -> None:
        """A connection passed the door."""
        if self._mesh is not None:
            self.perform(self._mesh.opened(link, curve_key, self.loop.time()))

    def link_received(self, link: LinkId, parts: Sequence[bytes | memoryview]) -> None:
        """A frame came."""
        self.moment += 1
        if self._mesh is not None:
            try:
                self.perform(self._mesh.received_parts(link, parts, self.loop.time()))
            except (KeyboardInterrupt, SystemExit):
                self.interrupted([])
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
        self.perform([])

    async def _watch_addresses(self) -> None:
        while True:
            await asyncio.sleep(ADDRESS_CHECK_S)
            current = self._transport.addresses()
            if current != self.addresses and self._mesh is not None:
                self.log.info("addresses are now %s", ", ".join(current))
                self.addresses = current
                self.perform(self._mesh.describe(self.loop.time(), addresses=current))
                for discovery in self._discoveries:
                    await discovery.update(self._announcement())

    def _announcement(self) -> Announcement:
        return Announcement(self.agent, self.profile.secret.tag, self._run, self.addresses)

    # -- effects ------------------------------------------------------------------------------

    def perform(self, effects: list[Effect]) -> None:
        """One turn: commit, then send, then report, behind all that was decided before."""
        try:
            if (
                (self._committing or self._waiting)  # else there is nothing to pass
                and may_pass(effects)
                and not (
                    (self._batch or self._waiting)
                    and overtakes(effects, chain(self._batch, self._waiting))
                )
            ):
                if notes := _noted(effects):
                    self._note(notes)
                self._apply(effects)
            else:
                self._waiting.append(effects)
                if not self._committing:
                    self._go_on()
        except (KeyboardInterrupt, SystemExit):
            self.interrupted(effects)
            raise
        if self._looking is None:
            self._arm()

    def interrupted(self, effects: list[Effect]) -> None:
        """A signal ended a turn in the middle: what the engine has decided may be neither kept nor
        sent. Delivery begins again from the disk, which has all that was accepted."""
        error = StorageError("This was interrupted: it may have been kept.", hint=_SEE_OUTBOX)
        batch, self._batch = self._batch, []
        waiting, self._waiting = self._waiting, []
        _tell([*batch, *waiting, effects], error)
        self._suspend(StorageError("The node was interrupted.", hint="Try again in a moment."))

    def _note(self, notes: list[OutState | Delivered]) -> None:
        """With the next commit, and behind whatever was decided before."""
        if self._waiting:
            self._waiting.append([Note(notes)])
        else:
            self._notes += notes
            if not self._committing:
                self._keep_notes_soon()

    def _keep_notes_soon(self) -> None:
        if self._note_timer is None:
            self._note_timer = self.loop.call_later(NOTE_S, self._commit_notes)

    def _go_on(self) -> None:
        """Perform what waits, up to a turn that rests on rows: all from there on wait for these."""
        self._committing, begun = True, False  # turns that come of these stand in line
        try:
            while self._waiting and not begun:
                if must_wait(self._waiting[0]):
                    begun = self._begin()
                else:
                    effects = self._waiting.pop(0)
                    self._notes += _noted(effects)
                    self._apply(effects)
        finally:
            self._committing = begun
        if self._notes and not begun:
            self._keep_notes_soon()

    def _begin(self) -> bool:
        """Commit the rows of all that waits; False when it is done already."""
        batch, self._waiting = self._waiting, []
        notes, self._notes = self._notes, []
        rows: list[Row] = notes + _rows(chain.from_iterable(batch))
        self._batch = batch
        within, done, interrupted = True, False, False

        def then(error: MeshError | None) -> None:
            nonlocal done
            done = True
            if within:
                self._conclude(notes, error)
            elif not interrupted:  # else nothing waits for it any more
                self._committed(notes, error)

        try:
            if rows:
                self._store.begin(rows, then)
            else:
                then(None)
        except (KeyboardInterrupt, SystemExit):
            interrupted = True
            raise
        finally:
            within = False
        return not done

    def _committed(self, notes: list[OutState | Delivered], error: MeshError | None) -> None:
        if self._mesh is None:
            _tell(self._batch, error)  # the node ends, and nothing more comes of it
            self._batch, self._committing = [], False
            return
        try:
            self._conclude(notes, error)
        except (KeyboardInterrupt, SystemExit):
            self.interrupted([])
            raise
        finally:
            self._go_on()
        self._arm()

    def _conclude(self, notes: list[OutState | Delivered], error: MeshError | None) -> None:
        """The rows of the batch are durable: perform the rest of its turns. Or they are not."""
        batch, self._batch = self._batch, []
        if error is None:
            effects = batch[0] if len(batch) == 1 else [*chain.from_iterable(batch)]
            try:
                self._apply(effects)
            except (KeyboardInterrupt, SystemExit):
                self._batch = batch  # whoever waits for it has to hear of that
                raise
            noted = notes + _noted(effects)
            if noted and self._mesh is not None:
                self._mesh.noted(noted)
        else:
            # What waits was decided upon as if this had been kept: it goes the same way.
            waiting, self._waiting = self._waiting, []
            self._fail([*batch, *waiting, [Note(notes)]], error)

    def _commit_notes(self) -> None:
        """What nothing rested on, when nothing else took it along."""
        self._note_timer = None
        if self._notes and not self._committing:
            self.perform([Persist(())])

    def _fail(self, batch: list[list[Effect]], error: MeshError) -> None:
        """Nothing of delivery leaves; membership goes on, since its rows are only hints."""
        _tell(batch, error)
        effects = [each for effects in batch for each in effects]
        kept: list[Effect] = [
            e
            for e in effects
            if isinstance(e, (Dial, CloseLink, PeerChanged, CloneFound, *BLOB_EFFECTS))
        ]
        kept += [
            e
            for e in effects
            if isinstance(e, Transmit) and not isinstance(e.frame, Mail | MailAck)
        ]
        self._apply(kept)
        if any(not isinstance(row, PeerRow) for row in _rows(effects)):
            self.log.error("not kept: %s", error)
            self._suspend(error)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do this beside everything else; it ends with the node at the latest."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _apply(self, effects: list[Effect]) -> None:
        flush: dict[tuple[AgentId, bytes], int] = {}
        reports: list[Effect] = []
        collect: list[tuple[AgentId, Message]] = []
        accepted: list[Waiter] = []
        for effect in effects:
            if type(effect) in _REPORTED:
                reports.append(effect)
            elif type(effect) is Transmit:
                link, frame = effect
                if not self._transport.send(link, encode(frame)) and self._mesh is not None:
                    self._mesh.not_sent(link, frame, self.loop.time())
            elif type(effect) is Durable:
                if self._mesh is not None and (
                    then := self._mesh.durable(*effect, self.loop.time())
                ):
                    self.perform(then)
            elif type(effect) is Flush:
                peer, epoch, upto = effect
                flush[peer, epoch] = upto
            elif type(effect) is Accepted:
                accepted += effect.who
            elif type(effect) is Persist:
                rows = effect.rows
                if rows and type(rows[0]) is NewEpoch:
                    self.log.warning(OLDER_COPY)
            elif type(effect) is not Note:
                self._apply_rare(effect, collect)
        if flush:
            for (peer, epoch), upto in flush.items():
                if self._mesh is not None:
                    self.perform(self._mesh.flush(peer, epoch, upto, self.loop.time()))
                self.post.pending(peer)
        if collect:
            self._collect(collect)
        if accepted:
            _answer(accepted, None)
        if reports:
            self._report(reports)

    def _apply_rare(self, effect: Effect, collect: list[tuple[AgentId, Message]]) -> None:
        """Those that no message brings by itself."""
        match effect:
            case Dial(attempt, address):
                if self._mesh is not None:
                    self._mesh.dialled(attempt, self._transport.dial(address))
            case CloseLink(link):
                self._transport.close_link(link)
            case Load():
                self.spawn(self._load(effect))
            case Collect(sender, message):
                collect.append((sender, message))
            case CountUnread():
                self._count_unread()
            case _ if self.blob_transfers is not None:
                self.blob_transfers.perform(effect)

    def _collect(self, held: Sequence[tuple[AgentId, Message]]) -> None:
        """These are durable: get what they name."""
        for sender, message in held:
            if self._mesh is not None:
                self.perform(self._mesh.collect(sender, message, self.loop.time()))
        if any(message.expires_ms for _, message in held):
            self._watch_expiry()

    def _report(self, reports: list[Effect]) -> None:
        came = False
        for effect in reports:
            match effect:
                case ReceiptChanged(peer, idents, state, reason):
                    self.receipts.advance(peer, idents, state, reason)
                    for ident in idents if self.subscribers else ():
                        news = {"id": ident, "to": peer, "state": state.value, "reason": reason}
                        self.subscribers.tell(Event("receipt", news))
                case Deliver(sender, messages):
                    came = True
                    for message in messages if self.subscribers else ():
                        news = {"from": sender, "id": message.id}
                        self.subscribers.tell(Event("mail", news))
                case PeerChanged(peer):
                    self.log.info("%s is %s", peer.agent, peer.state.value)
                    self.subscribers.tell(Event("peer", self.view(peer)))
                    if peer.state in (PeerState.GONE, PeerState.LEFT) and self._mesh is not None:
                        self.post.pending(peer.agent)
                case CloneFound(stop, where):
                    self._clone_found(stop, where)
        if came and self._mail_came is not None:
            self._mail_came.set()
            self._mail_came = None

    def _clone_found(self, stop: bool, where: str) -> None:
        self.log.warning("a copy of this agent runs elsewhere (%s)", where)
        self.subscribers.tell(Event("clone", {"where": where, "stop": stop}))
        if stop:
            self.end(
                CloneRunning(
                    f"Another node already runs as {self.agent}, from a copy of its folder.",
                    hint="Stop that one first, or join here with another --role or --name.",
                    agent=self.agent,
                    where=where,
                )
            )

    # -- timers -------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Look when the engine wants to be woken: soon, and once for many turns."""
        if self._looking is None:
            self._looking = self.loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self.moment += 1
        self._looking = None
        if self._mesh is None:
            return
        at = self._mesh.deadline()
        if self._timer is not None:
            if at is not None and self._timer.when() <= at and not self._timer.cancelled():
                return  # an early wake-up is cheaper than a new timer for every frame
            self._timer.cancel()
        self._timer = None if at is None else self.loop.call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._mesh is not None:
            self.perform(self._mesh.on_timer(self.loop.time()))


def _noted(effects: Iterable[Effect]) -> list[OutState | Delivered]:
    rows: list[OutState | Delivered] = []
    for effect in effects:
        if type(effect) is Note:
            rows += effect.rows
    return rows


def _rows(effects: Iterable[Effect]) -> list[Row]:
    rows: list[Row] = []
    for effect in effects:
        if type(effect) is Persist or type(effect) is Note:
            rows += effect.rows
    return rows


def _tell(batch: Sequence[Sequence[Effect]], error: MeshError | None) -> None:
    """Whoever handed something in hears that it is kept, or why not."""
    for effects in batch:
        for effect in effects:
            if isinstance(effect, Accepted):
                _answer(effect.who, error)


def _answer(waiters: Sequence[Waiter], error: MeshError | None) -> None:
    for each, result in waiters:
        if not each.done():
            if error is None:
                each.set_result(result)
            else:
                each.set_exception(error)
