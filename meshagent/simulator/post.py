"""Delivery alone, between a few agents, with everything that can go wrong with links and disks.

Each node drives its engine as the real driver does: rows first, in one commit that takes time and
that a crash can cut short, then frames, then reports. What it reported as accepted is written
down, outside the simulated machines: that is what must arrive.
"""

from __future__ import annotations

import random
from collections import defaultdict

from meshagent.core.delivery.engine import Delivery, DeliveryConfig
from meshagent.core.delivery.mailbox import MailboxModel
from meshagent.core.effects import (
    Accepted,
    CountUnread,
    Deliver,
    Durable,
    Effect,
    Flush,
    Load,
    Note,
    Persist,
    ReceiptChanged,
    Send,
    may_pass,
    must_wait,
    overtakes,
)
from meshagent.core.model.message_states import PROGRESS, WITHDRAWN, MessageState
from meshagent.core.model.messages import Message, MessageIds, Texts
from meshagent.core.model.peers import AgentId
from meshagent.core.model.rows import Delivered, InState, OutEntry, OutState, Row
from meshagent.core.wire.frames import EPOCH_BYTES, MAIL_ITEMS_MAX, Frame, Mail
from meshagent.errors import LimitReached
from meshagent.simulator.disk import Disk
from meshagent.simulator.world import World

__all__ = ["Post", "PostNode"]

DISK_S = (0.0005, 0.02)
DAY_ZERO_MS = 1_700_000_000_000  # when the world begins: clocks can jump back from there
COUNT_S = 0.05
DUE_MAX = 1_000  # looked for at a time
NOTE_S = 0.05  # as node/driver.py
READ_S = (0.0001, 0.01)  # each way: what was read is older than what has happened since


class PostNode:
    """One agent: a disk that lasts, and an engine while it runs."""

    def __init__(self, post: Post, name: str) -> None:
        self.post, self.world, self.name = post, post.world, AgentId(name)
        self.disk = Disk(MailboxModel(self.world.rng.randbytes(EPOCH_BYTES)))
        self.engine: Delivery | None = None
        self.ids = MessageIds(self.world.rng)
        self.life = 0
        self.clock_skew_ms = 0
        self.accepted: dict[AgentId, list[str]] = defaultdict(list)
        self.states: dict[str, list[MessageState]] = defaultdict(list)
        self._waiting: list[list[Effect]] = []
        self._batch: list[list[Effect]] = []
        self._notes: list[OutState | Delivered] = []
        self._committing = False
        self._timer_at = float("inf")

    @property
    def mail(self) -> MailboxModel:
        """What its disk holds."""
        return self.disk.mail

    # -- living and dying ---------------------------------------------------------------------

    def start(self) -> None:
        """A new life from what the disk holds."""
        self.life += 1
        self._waiting, self._committing, self._timer_at = [], False, float("inf")
        self._batch, self._notes = [], []
        start = self.mail.start()
        self.engine = Delivery(
            start.epoch, start.streams, start.watermarks, start.unread,
            random.Random(self.world.rng.random()), self.post.config, self.mail.withdrawn(),
        )  # fmt: skip
        self.world.say(f"{self.name} starts")

    def crash(self) -> None:
        """Whatever was not committed is gone, and with it what was said and only noted."""
        kept = self.mail.states()
        for ident, said in self.states.items():
            known = PROGRESS[kept.get(ident, MessageState.QUEUED)]
            while said and said[-1] is not MessageState.SENT and PROGRESS[said[-1]] > known:
                said.pop()
        self.engine = None
        self.life += 1
        self.world.say(f"{self.name} crashes")
        self.post.unlink_all(self.name)

    # -- what a person does -------------------------------------------------------------------

    def send(self, to: AgentId, text: str, ttl_s: float = 0.0, kind: str = "text") -> str:
        """Ask the engine to take a message; its id, or nothing when it was not taken."""
        if self.engine is None:
            return ""
        now_ms = self.now_ms()
        expires_ms = now_ms + int(ttl_s * 1000) if ttl_s else 0
        ident = self.ids.next(now_ms)
        message = Message(ident, kind, text, now_ms, expires_ms=expires_ms)
        try:
            self.perform([*self.engine.accept(to, message, self.world.now), Accepted((to, ident))])
        except LimitReached:
            self.world.say(f"{self.name} could not accept")
            return ""
        return ident

    def send_many(self, to: AgentId, texts: list[str]) -> None:
        """Ask the engine to take these together."""
        if self.engine is None:
            return
        ids = self.ids.take(self.now_ms(), len(texts))
        crowd = Texts(to, ids, texts, self.now_ms())
        try:
            taken = self.engine.accept_texts(crowd, self.world.now)
        except LimitReached:
            self.world.say(f"{self.name} could not accept any of {len(texts)}")
        else:
            self.perform([*taken, *(Accepted((to, ident)) for ident in ids)])

    def withdraw(self, to: AgentId, state: MessageState) -> None:
        """Cancel, or let expire, the last message that is still pending."""
        fresh = [e for e in self.mail.unsettled() if e.peer == to and e.state == "queued"]
        if self.engine is not None and fresh:
            last = fresh[-1]
            self.world.say(f"{self.name} takes back {last.id}: {state}")
            self.perform(self.engine.withdraw(to, last.seq, last.id, state, self.now_ms()))

    def keep_house(self) -> None:
        """Count what is unread, and look for messages whose time is up, as a node does."""
        now_ms = self.now_ms()
        self._count_unread(self.life)
        for each in self.mail.due(now_ms, DUE_MAX):
            if self.engine is not None:
                to, state = AgentId(each.peer), MessageState.EXPIRED
                self.perform(self.engine.withdraw(to, each.seq, each.id, state, now_ms))

    def deal_with(self, count: int) -> None:
        """Somebody reads messages in the inbox."""
        read = self.mail.inbox(0, count, unread=True)
        self.disk.commit([InState(e.sender, e.id, "done", 0, self.now_ms()) for e in read])
        if self.engine is not None:
            self.perform(self.engine.inbox_shrank(len(read), self.world.now))

    def drop_for(self, peer: AgentId) -> Mail | None:
        """All that waits for a peer, as the spool carries it."""
        items = self.mail.pending(peer, 1, MAIL_ITEMS_MAX)
        if not items:
            return None
        bodies = tuple(None if each.state in WITHDRAWN else each.body for each in items)
        return Mail(self.mail.epoch, items[0].seq, items[0].seq, bodies)

    def take_drop(self, mail: Mail, sender: AgentId) -> None:
        """Find mail in the spool."""
        if self.engine is not None:
            self.perform(self.engine.take(mail, sender, self.now_ms(), True))

    # -- what the network does ----------------------------------------------------------------

    def connected(self, peer: AgentId) -> None:
        if self.engine is not None:
            self.perform(self.engine.connected(peer, self.world.now))

    def disconnected(self, peer: AgentId) -> None:
        if self.engine is not None:
            self.perform(self.engine.disconnected(peer))

    def receive(self, frame: Frame, peer: AgentId) -> None:
        if self.engine is not None:
            self.perform(self.engine.receive(frame, peer, self.world.now, self.now_ms()))

    # -- the driver ---------------------------------------------------------------------------

    def perform(self, effects: list[Effect]) -> None:
        """As node/driver.py: rows first; what rests on them waits behind them."""
        if may_pass(effects) and not overtakes(effects, [*self._batch, *self._waiting]):
            self._keep_notes(effects)
            self._apply(effects)
        else:
            self._waiting.append(effects)
            if not self._committing:
                self._go_on()
        self._arm()

    def _keep_notes(self, effects: list[Effect]) -> None:
        notes = [row for each in effects if isinstance(each, Note) for row in each.rows]
        if notes and self._waiting:
            self._waiting.append([Note(notes)])
        else:
            self._note(notes)

    def _note(self, notes: list[OutState | Delivered]) -> None:
        if notes and not self._notes:
            self.world.plan(NOTE_S, self._commit_notes, self.life)
        self._notes += notes

    def _go_on(self) -> None:
        life = self.life
        self._committing = True
        while self._waiting and not must_wait(self._waiting[0]):
            effects = self._waiting.pop(0)
            self._note([row for e in effects if isinstance(e, Note) for row in e.rows])
            self._apply(effects)
            if life != self.life:
                return
        self._committing = False
        if self._waiting:
            self._begin_commit()

    def _commit_notes(self, life: int) -> None:
        """What nothing rested on, when nothing else took it along."""
        if life != self.life or not self._notes:
            return
        if self._committing:
            self.world.plan(NOTE_S, self._commit_notes, life)
        else:
            self._begin_commit()

    def _begin_commit(self) -> None:
        self._committing = True
        self._batch, self._waiting = self._waiting, []
        notes, self._notes = self._notes, []
        self.world.plan(self.world.rng.uniform(*DISK_S), self._commit, self.life, notes)

    def _commit(self, life: int, notes: list[OutState | Delivered]) -> None:
        if life != self.life:
            return
        batch, self._batch = self._batch, []
        kept = [each for effects in batch for each in effects if isinstance(each, Persist | Note)]
        rows: list[Row] = [*notes, *(row for each in kept for row in each.rows)]
        if self.post.crash_before_commit(self):
            self.crash()
            return
        self.disk.commit(rows)
        if self.post.crash_after_commit(self):
            self.crash()
            return
        if self.engine is not None:
            noted = [row for each in kept if isinstance(each, Note) for row in each.rows]
            self.engine.noted([*notes, *noted])
        for effects in batch:
            self._apply(effects)
            if life != self.life:
                return
        self._go_on()
        self._arm()

    def _apply(self, effects: list[Effect]) -> None:
        for effect in sorted(effects, key=lambda each: isinstance(each, Flush)):  # these come last
            engine = self.engine
            if engine is None:
                return
            match effect:
                case Send(to, frame):
                    taken = self.post.carry(self.name, to, frame)
                    if not taken and isinstance(frame, Mail):
                        engine.not_sent(to, frame, self.world.now)
                case Flush(peer, epoch, upto):
                    self.perform(engine.flush(peer, epoch, upto, self.world.now))
                case Durable(peer, epoch, upto):
                    if then := engine.durable(peer, epoch, upto, self.world.now):
                        self.perform(then)
                case Load():
                    delay_s = self.world.rng.uniform(*READ_S)
                    self.world.plan(delay_s, self._read, self.life, effect)
                case Accepted((peer, ident)):
                    self.accepted[peer].append(ident)
                    self.world.say(f"{self.name} accepts {ident} for {peer}")
                case ReceiptChanged(_, idents, state, _):
                    for ident in idents:
                        self.states[ident].append(state)
                        self.world.say(f"{self.name} knows that {ident} is {state}")
                case CountUnread():
                    self.world.plan(COUNT_S, self._count_unread, self.life)
                case Deliver():
                    pass

    def _count_unread(self, life: int) -> None:
        if life == self.life and self.engine is not None:
            if self._committing:
                self.world.plan(COUNT_S, self._count_unread, life)
            else:
                self.perform(self.engine.inbox_holds(self.mail.unread(), self.world.now))

    def _read(self, life: int, load: Load) -> None:
        if life == self.life:
            items = self.mail.pending(load.peer, load.first, load.limit)
            self.world.plan(self.world.rng.uniform(*READ_S), self._loaded, life, load.peer, items)

    def _loaded(self, life: int, peer: AgentId, items: list[OutEntry]) -> None:
        if life == self.life and self.engine is not None:
            self.perform(self.engine.loaded(peer, items, self.world.now, self.now_ms()))

    def _arm(self) -> None:
        if self.engine is None:
            return
        at = self.engine.deadline()
        if at is not None and (at < self._timer_at or self._timer_at < self.world.now):
            self._timer_at = at
            self.world.plan(max(0.0, at - self.world.now), self._timer, self.life, at)

    def _timer(self, life: int, at: float) -> None:
        if life != self.life or at != self._timer_at or self.engine is None:
            return
        self._timer_at = float("inf")
        self.perform(self.engine.on_timer(self.world.now))

    def now_ms(self) -> int:
        """What its clock shows, rightly or not."""
        return DAY_ZERO_MS + int(self.world.now * 1000) + self.clock_skew_ms


class Post:
    """The agents and the links between them."""

    def __init__(self, seed: int, names: int, config: DeliveryConfig | None = None) -> None:
        self.world = World(seed)
        self.config = config or DeliveryConfig()
        self.nodes = {AgentId(f"n{at}"): PostNode(self, f"n{at}") for at in range(names)}
        self.links: dict[frozenset[AgentId], int] = {}
        self.loss = self.duplicate = self.reorder = self.full = self.crash_at_commit = 0.0
        self.delay_s = (0.0005, 0.01)
        self.one_way: set[tuple[AgentId, AgentId]] = set()
        self._links = 0
        self._arrives: dict[tuple[int, AgentId], float] = {}
        for node in self.nodes.values():
            node.start()

    def link(self, a: AgentId, b: AgentId) -> None:
        """A new link, when both run; an old one between them is gone."""
        self.unlink(a, b)
        if self.nodes[a].engine is None or self.nodes[b].engine is None:
            return
        self._links += 1
        self.world.say(f"{a} and {b} are linked")
        self.links[frozenset((a, b))] = self._links
        self.nodes[a].connected(b)
        self.nodes[b].connected(a)

    def unlink(self, a: AgentId, b: AgentId) -> None:
        """The link breaks, with everything that is on it."""
        if self.links.pop(frozenset((a, b)), None) is not None:
            self.world.say(f"{a} and {b} lose their link")
            self.nodes[a].disconnected(b)
            self.nodes[b].disconnected(a)

    def unlink_all(self, name: AgentId) -> None:
        """Its process ended."""
        for pair in [each for each in self.links if name in each]:
            self.unlink(*pair)

    def heal(self) -> None:
        """Everyone runs, every link works, nothing else goes wrong."""
        self.loss = self.duplicate = self.reorder = self.full = self.crash_at_commit = 0.0
        self.delay_s = (0.0005, 0.01)
        self.one_way.clear()
        for node in self.nodes.values():
            if node.engine is None:
                node.start()
        for a in self.nodes:
            for b in self.nodes:
                if a < b:
                    self.link(a, b)

    def carry(self, source: AgentId, to: AgentId, frame: Frame) -> bool:
        """Put a frame on the link, if there is one; False when it is full."""
        link = self.links.get(frozenset((source, to)))
        rng = self.world.rng
        if link is not None and rng.random() < self.full:
            return False
        if link is None or (source, to) in self.one_way or rng.random() < self.loss:
            return True
        for _ in range(2 if rng.random() < self.duplicate else 1):
            at = self.world.now + rng.uniform(*self.delay_s)
            if rng.random() >= self.reorder:
                at = max(at, self._arrives.get((link, to), 0.0))
                self._arrives[link, to] = at
            self.world.plan(at - self.world.now, self._arrive, link, source, to, frame)
        return True

    def crash_before_commit(self, node: PostNode) -> bool:
        """Whether the power goes before what is being written is durable."""
        return self.world.rng.random() < self.crash_at_commit / 2

    def crash_after_commit(self, node: PostNode) -> bool:
        """Whether this is the moment that the power goes: committed, and nobody was told."""
        return self.world.rng.random() < self.crash_at_commit / 2

    def _arrive(self, link: int, source: AgentId, to: AgentId, frame: Frame) -> None:
        if self.links.get(frozenset((source, to))) == link:
            self.nodes[to].receive(frame, source)

    # -- what must hold -----------------------------------------------------------------------

    def inbox(self, owner: AgentId, sender: AgentId) -> list[str]:
        """The ids in `owner`'s inbox from `sender`, in the order they became visible."""
        return [each.id for each in self.nodes[owner].mail.came.values() if each.sender == sender]

    def settled(self) -> bool:
        """Whether nothing is pending anywhere."""
        return not any(any(node.mail.unsettled()) for node in self.nodes.values())
