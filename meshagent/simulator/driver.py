"""Drives a simulated node: the engine and the turn queue that ship, on a simulated disk.

It does what node/driver.py and node/turn_runner.py do, in the order that core/turns.py says. The
machine can fail at any point: before a commit, after it and before anybody is told, between two
effects. A new run begins with what the disk holds. What a person was told is kept outside of the
machine (`accepted`, `states`): a crash does not take it back.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from meshagent.core.delivery.engine import Delivery
from meshagent.core.delivery.incomplete_messages import IncompleteMessages
from meshagent.core.delivery.mailbox import MailboxModel
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
    Load,
    Noted,
    PeerChanged,
    ReceiptChanged,
    TakenBack,
    Transmit,
)
from meshagent.core.mesh import Mesh
from meshagent.core.model.message_states import PROGRESS, MessageState
from meshagent.core.model.messages import parse_body
from meshagent.core.model.peers import AgentId, Candidate, LinkId, PeerState
from meshagent.core.model.presence import Presence
from meshagent.core.model.records import Record
from meshagent.core.model.rows import NewEpoch, OutEntry, Row
from meshagent.core.turns import Turn, TurnQueue, in_order
from meshagent.core.wire.codec import encode
from meshagent.core.wire.frames import EPOCH_BYTES
from meshagent.simulator.blobs import Machine, SimBlobs
from meshagent.simulator.disk import Disk, DiskFaults
from meshagent.simulator.identities import SimIdentity, hash_verify

if TYPE_CHECKING:
    from meshagent.simulator.mesh import SimMesh

__all__ = ["Asked", "SimDriver"]

DAY_ZERO_MS = 1_700_000_000_000  # when the world begins: clocks can jump back from there
NOTE_S = 0.05  # as node/turn_runner.py
RECOVER_S = 2.0  # as node/recovery.py
_ON_ITS_WAY = frozenset({MessageState.SENT, MessageState.DELIVERED})
_SAID_LATER = frozenset({MessageState.SEEN, MessageState.DONE})
COUNT_S = 1.0  # as node/housekeeping.py


class Asked(NamedTuple):
    """Who waits until something is durable: `then` hears whether it is."""

    then: Callable[[bool], None]
    ids: Sequence[str] = ()
    """The messages that were handed in."""


class SimDriver:
    """One agent: a disk that lasts, and an engine while it runs."""

    verify = staticmethod(hash_verify)

    def __init__(self, mesh: SimMesh, name: str, identity: SimIdentity, machine: Machine) -> None:
        self.mesh, self.world, self.network = mesh, mesh.world, mesh.network
        self.name, self.identity, self.agent = name, identity, identity.agent
        self.curve_public, self.door, self.mesh_id = identity.curve_public, mesh.door, mesh.mesh_id
        self.disk = self.empty_disk()
        self.faults = DiskFaults()
        self.clock_skew_ms = 0
        self.engine: Mesh | None = None
        self.turns = TurnQueue()
        self.address = ""
        self.runs = self.life = 0
        """How often it was started; `life` changes with each crash, too."""
        self.clones: list[CloneFound] = []
        self.accepted: dict[AgentId, list[str]] = defaultdict(list)
        self.states: dict[str, list[MessageState]] = defaultdict(list)
        self._timer_at = float("inf")
        self._noting = self._recovering = self._counting = self._is_handing_over = False
        self.blobs = SimBlobs(self, machine)
        machine.agents.add(self.agent)

    # -- living and dying ---------------------------------------------------------------------

    def start(self, hints: Sequence[Candidate] = ()) -> None:
        """A new run, at a new address, from what the disk holds."""
        self.life += 1
        self.runs += 1
        self.turns, self.clones, self._timer_at = TurnQueue(), [], float("inf")
        self._noting = self._recovering = self._counting = self._is_handing_over = False
        self.blobs.start()
        self.address = f"10.0.{self.mesh.next_host()}:{7000 + self.runs % 1000}"
        self.network.listen(self.address, self)
        self.world.say(f"{self.name} starts at {self.address}")
        me = Record(
            self.agent, self.identity.key, self.runs << 32, self.mesh.tick(), False, "tester", (),
            (self.address,), self.name, Presence.IDLE, "", "0",
        )  # fmt: skip
        now = self.world.now
        self.engine = Mesh(
            me, self.identity, self.mesh_id, hash_verify, self._rng(), now,
            wall_ms=lambda now: self.now_ms(),
        )  # fmt: skip
        self.engine.remember(list(self.disk.peers.values()), now)
        self.perform(self.engine.deliver_with(self._engine_from_disk(), now))
        for hint in hints:
            self.hear_of(hint)

    def crash(self, *, silently: bool = False) -> None:
        """The process ends in the middle of everything; `silently` takes the machine along."""
        self._forget_notes()
        self.world.say(f"{self.name} crashes{' silently' if silently else ''}")
        self.life += 1
        self.engine = None
        self.blobs.crash()
        self.network.vanish(self, silently=silently)

    def _forget_notes(self) -> None:
        """What was said of messages and only noted is forgotten: it will be said again."""
        kept = self.disk.mail.states()
        for ident, said in self.states.items():
            known = PROGRESS[kept.get(ident, MessageState.QUEUED)]
            while said and said[-1] is not MessageState.SENT and PROGRESS[said[-1]] > known:
                said.pop()

    def leave(self) -> None:
        """The process says goodbye and ends."""
        assert self.engine is not None
        self.perform(self.engine.leave(self.world.now))
        if self.engine is not None:
            self.crash()

    def restore(self, backup: Disk, replace_disk: Callable[[Disk], None]) -> None:
        """As `meshagent restore`: go on from a backup, under a new epoch, while the node runs."""
        assert self.engine is not None
        self.engine.deliver_with(None, self.world.now)
        life = self.life

        def put_back(kept: bool) -> None:
            if life == self.life and self.engine is not None:
                disk = backup.copy()
                disk.commit([NewEpoch(self.world.rng.randbytes(EPOCH_BYTES))])
                replace_disk(disk)
                engine = self._engine_from_disk()
                self.perform(self.engine.deliver_with(engine, self.world.now))

        self.when_committed(put_back)

    def empty_disk(self) -> Disk:
        """A disk that nothing was written to."""
        return Disk(MailboxModel(self.world.rng.randbytes(EPOCH_BYTES)))

    def _engine_from_disk(self) -> Delivery:
        """As node/recovery.py."""
        mail, incomplete = self.disk.mail, IncompleteMessages()
        for entry in mail.receiving():
            incomplete.hold(AgentId(entry.sender), parse_body(entry.body), len(entry.body))
        start = replace(mail.start(), withdrawn=mail.withdrawn())
        return Delivery(start, self._rng(), self.mesh.delivery_config, incomplete)

    def _rng(self) -> random.Random:
        return random.Random(self.world.rng.random())

    # -- what others tell ---------------------------------------------------------------------

    def hint(self) -> Candidate:
        """What discovery would say of this node."""
        return Candidate(self.agent, (self.address,), "file")

    def hear_of(self, hint: Candidate) -> None:
        """Discovery tells this node about another."""
        if self.engine is not None:
            self.engine.found(hint, self.world.now)
            self._arm()

    def peer_on(self, link: LinkId) -> AgentId | None:
        """Who is at the other end of a link."""
        return None if self.engine is None else self.engine.links.agent_on(link)

    def is_linked(self, other: SimDriver) -> bool:
        """Whether a frame to the other would leave now."""
        return self.engine is not None and self.engine.links.link_to(other.agent) is not None

    def view(self) -> dict[AgentId, PeerState]:
        """How this node sees the others."""
        assert self.engine is not None
        return {peer.agent: peer.state for peer in self.engine.peers()}

    def link_opened(self, link: LinkId, curve_key: bytes | None) -> None:
        """A connection passed the door."""
        if self.engine is not None:
            self.perform(self.engine.opened(link, curve_key, self.world.now))

    def link_received(self, link: LinkId, parts: Sequence[bytes | memoryview]) -> None:
        """A frame came."""
        if self.engine is not None:
            self.perform(self.engine.received_parts(link, parts, self.world.now))

    def link_closed(self, link: LinkId, reason: str) -> None:
        """A connection ended."""
        if self.engine is not None:
            self.perform(self.engine.closed(link, reason, self.world.now))

    def now_ms(self) -> int:
        """What its clock shows, rightly or not."""
        return DAY_ZERO_MS + int(self.world.now * 1000) + self.clock_skew_ms

    # -- turns --------------------------------------------------------------------------------

    def perform(self, turn: Turn) -> None:
        """Do what of a turn may be done now; the rest follows when the disk has its rows."""
        if self._apply(self.turns.add(turn)):
            if turn.rows or turn.after:
                self._commit()
            self._arm()

    def _commit(self) -> None:
        if self._is_handing_over:
            return  # the loop below goes on with it
        life, self._is_handing_over = self.life, True
        while life == self.life and (rows := self.turns.next_commit()) is not None:
            if self.world.rng.random() < self.faults.at_once:
                self._write(life, rows)
            else:
                takes_s = self.world.rng.uniform(*self.faults.commit_s)
                self.world.plan(takes_s, self._write, life, rows)
        self._is_handing_over = False
        if life == self.life and self.turns.has_notes and not self._noting:
            self._noting = True
            self.world.plan(NOTE_S, self._commit_notes, life)

    def _commit_notes(self, life: int) -> None:
        if life == self.life:
            self._noting = False
            self.turns.hurry()
            self._commit()

    def _write(self, life: int, rows: Sequence[Row]) -> None:
        if life != self.life or self._fails_here("before a commit"):
            return
        failed = self.faults.is_full or self.world.rng.random() < self.faults.failing
        if not failed or (not self.faults.is_full and self.world.rng.random() < 0.5):
            self.disk.commit(rows)
        if self._fails_here("after a commit"):
            return
        if failed:
            self.world.say(f"{self.name}'s disk fails")
            for effect in self.turns.failed():
                if type(effect) is Accepted:
                    effect.who.then(False)
            self._suspend()
        else:
            before, self._is_handing_over = self._is_handing_over, True
            runs = self._apply(self.turns.committed())
            self._is_handing_over = before
            if runs:
                self._commit()
                self._arm()

    def _apply(self, effects: Sequence[Effect]) -> bool:
        """Perform these; False when the machine fails meanwhile."""
        life = self.life
        for at, effect in enumerate(in_order(effects)):
            if at and self._fails_here("between two effects"):
                return False
            for watch in self.mesh.watchers:
                watch(self, effect)
            self._do(effect)
            if life != self.life:
                return False
        return True

    def _fails_here(self, where: str) -> bool:
        if not self.mesh.power_fails(self, where):
            return False
        self.world.say(f"{self.name} loses power {where}")
        self.crash(silently=self.world.rng.random() < 0.5)
        return True

    def _suspend(self) -> None:
        """As node/recovery.py: nothing is kept until the disk is well."""
        assert self.engine is not None
        self._forget_notes()
        self.engine.deliver_with(None, self.world.now)
        if not self._recovering:
            self._recovering = True
            self.world.plan(RECOVER_S, self._recover, self.life)

    def _recover(self, life: int) -> None:
        if life != self.life or self.engine is None:
            return
        if self.faults.is_full:
            self.world.plan(RECOVER_S, self._recover, life)
            return
        self._recovering = False
        self.perform(self.engine.deliver_with(self._engine_from_disk(), self.world.now))

    def when_committed(self, then: Callable[[bool], None]) -> None:
        """When all that was decided so far is durable, or has failed."""
        if self.turns.is_idle:
            then(True)
        else:
            self.perform(Turn(after=[Accepted(Asked(then))]))

    # -- effects ------------------------------------------------------------------------------

    def _do(self, effect: Effect) -> None:
        engine, now = self.engine, self.world.now
        assert engine is not None
        match effect:
            case Transmit(link, frame):
                is_lost = self.mesh.loses(self, frame)
                if not is_lost and not self.network.send(self, link, encode(frame)):
                    engine.not_sent(link, frame, now)
            case Dial(attempt, address):
                engine.dialled(attempt, self.network.dial(self, address))
            case CloseLink(link):
                self.network.close_link(self, link)
            case Durable(peer, epoch, upto):
                self.perform(
                    engine.ask_delivery(lambda each: each.durable(peer, epoch, upto, now), now)
                )
            case TakenBack(peer, epoch, seq):
                self.perform(
                    engine.ask_delivery(lambda each: each.taken_back(peer, epoch, seq, now), now)
                )
            case Noted(peer, epoch, upto):
                if engine.delivery is not None:
                    engine.delivery.noted(peer, epoch, upto)
            case Load():
                self.after_read(self._read, effect)
            case Collect(sender, message):
                self.perform(engine.collect(sender, message, now))
            case CountUnread():
                self.count_unread()
            case Accepted(who):
                who.then(True)
            case Deliver():
                pass
            case ReceiptChanged(_, idents, state, _):
                self._note_states(idents, state)
                self.world.say(f"{self.name} knows that {', '.join(idents)} are {state}")
            case PeerChanged(changed):
                self.world.say(f"{self.name}: {changed.agent} is {changed.state.value}")
            case CloneFound():
                self._met_clone(effect)
            case _:
                self.blobs.perform(effect)

    def _note_states(self, idents: Sequence[str], state: MessageState) -> None:
        """As node/received.py: what a recipient says of itself counts for more than its answer.

        The answer may come later, on a link that loses the order or after a file in the spool, or
        speak of another epoch. An end that contradicts another is noted, for others to judge.
        """
        for ident in idents:
            said = self.states[ident]
            is_less = bool(said) and PROGRESS[state] < PROGRESS[said[-1]]
            is_late = state in _ON_ITS_WAY or (bool(said) and said[-1] in _SAID_LATER)
            if not (is_less and is_late):
                said.append(state)

    def _met_clone(self, found: CloneFound) -> None:
        self.world.say(f"{self.name}: clone, stop={found.stop}")
        self.clones.append(found)
        if found.stop:
            self.crash()

    def after_read(self, then: Callable[..., None], *arguments: Any) -> None:
        takes_s = self.world.rng.uniform(*self.faults.read_s)
        self.world.plan(takes_s, then, self.life, *arguments)

    def _read(self, life: int, load: Load) -> None:
        if life == self.life:
            entries = self.disk.mail.pending(load.peer, load.first, load.limit)
            self.after_read(self._loaded, load.peer, entries)

    def _loaded(self, life: int, peer: AgentId, entries: list[OutEntry]) -> None:
        if life == self.life and self.engine is not None:
            self.perform(self.engine.loaded(peer, entries, self.world.now))

    def count_unread(self) -> None:
        """In a moment: again when something came or went while it was counted."""
        if not self._counting and self.engine is not None:
            self._counting = True
            self.world.plan(COUNT_S, self._count, self.life)

    def _count(self, life: int) -> None:
        if life == self.life:
            self.when_committed(lambda kept: self.after_read(self._hand_in_count, self._changes()))

    def _hand_in_count(self, life: int, before: int) -> None:
        if life != self.life or self.engine is None:
            return
        self._counting = False
        if self._changes() != before:
            self.count_unread()
        else:
            unread, now = self.disk.mail.unread(), self.world.now
            self.perform(self.engine.ask_delivery(lambda each: each.inbox_holds(unread), now))

    def _changes(self) -> int:
        delivery = None if self.engine is None else self.engine.delivery
        return -1 if delivery is None else delivery.receiving.inbox_changes

    # -- timers -------------------------------------------------------------------------------

    def _arm(self) -> None:
        at = None if self.engine is None else self.engine.deadline()
        if at is not None and (at < self._timer_at or self._timer_at < self.world.now):
            self._timer_at = at
            self.world.plan(max(0.0, at - self.world.now), self._timer, self.life, at)

    def _timer(self, life: int, at: float) -> None:
        if life == self.life and at == self._timer_at and self.engine is not None:
            self._timer_at = float("inf")
            self.perform(self.engine.on_timer(self.world.now))
