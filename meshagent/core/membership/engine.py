"""Who is alive. Never opens a socket or reads a clock. Invariant: incarnations only grow.

SWIM with Lifeguard's extensions over links that are already authenticated. Theory, in short:

    ALIVE ──accused, or our probe failed──▶ SUSPECT ──time is up──▶ GONE
      ▲                                        │                     │
      └── heard from it, or it refutes with a larger incarnation ────┘     LEFT: its own word

An agent's state belongs to an incarnation. Only the agent itself makes a new one (its Record is
signed), so a larger incarnation always wins; within one, LEFT > GONE > SUSPECT > ALIVE. Having
heard from a member a moment ago outweighs anybody's accusation: the accused is told instead, and
refutes. Any frame counts as having heard.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from meshagent.core.effects import Effect, PeerChanged, Send
from meshagent.core.membership.gossip import UPDATES_PER_FRAME_MAX, GossipQueue
from meshagent.core.membership.lifeguard import LocalHealth, gossip_transmits, suspicion_s
from meshagent.core.membership.members import (
    LAN,
    Digest,
    Member,
    MembershipConfig,
    digest_of,
    lacking,
)
from meshagent.core.membership.probing import Probe, ProbeOrder, Relay
from meshagent.core.model.identity import Signer, Verify
from meshagent.core.model.peers import AgentId, Peer, PeerState, Presence
from meshagent.core.model.records import (
    Accusation,
    Record,
    Signed,
    UnknownUpdate,
    parse_update,
    sign_accusation,
    sign_record,
)
from meshagent.core.wire.frames import MEMBERS_MAX, Ack, Frame, Gossip, Nack, Ping, PingReq, Sync
from meshagent.errors import RemoteProtocolError

__all__ = ["LAN", "Membership", "MembershipConfig"]

RELAYS_MAX = 256  # PingReqs served at once; beyond it the requester hears nothing and asks others
TOLD_MAX = 256  # accused peers told in one interval


class Membership:
    """The SWIM engine of one agent."""

    def __init__(
        self,
        me: Record,
        signer: Signer,
        mesh_id: bytes,
        verify: Verify,
        rng: random.Random,
        now: float,
        config: MembershipConfig = LAN,
        reachable: Callable[[AgentId], bool] | None = None,
    ) -> None:
        self.refused: Counter[str] = Counter()
        self._reachable = reachable  # a frame for anybody else would be lost
        self.health = LocalHealth()
        self._config, self._rng = config, rng
        self._signer, self._mesh_id, self._verify = signer, mesh_id, verify
        self._me = me
        self._my_word = sign_record(me, signer, mesh_id)
        self._members: dict[AgentId, Member] = {}
        self._order = ProbeOrder(me.agent, rng)
        self._gossip = GossipQueue()
        self._probes: dict[int, Probe] = {}
        self._relays: dict[int, Relay] = {}
        self._told: dict[AgentId, float] = {}
        self._suspects: dict[AgentId, None] = {}  # not a set: the same seed gives the same order
        self._verdict_at = math.inf  # when the first suspect's time is up, or before
        self._seq = 0
        self._tick_at = now + rng.uniform(0, config.probe_interval_s)
        self._gossip_at = now
        self._sync_at = now + rng.uniform(0.5, 1.0) * config.sync_interval_s
        self._quiet_until = now

    # -- what others may ask ------------------------------------------------------------------

    @property
    def record(self) -> Record:
        """Our own word about ourselves, as last signed."""
        return self._me

    @property
    def record_bytes(self) -> bytes:
        """Our record as it goes on the wire."""
        return self._my_word.data

    def peers(self) -> list[Peer]:
        """Everyone we know of, by id."""
        return [self._members[agent].peer() for agent in sorted(self._members)]

    def peer(self, agent: AgentId) -> Peer | None:
        """How we see `agent`; None when we never heard of it."""
        member = self._members.get(agent)
        return member.peer() if member else None

    def key_of(self, agent: AgentId) -> bytes | None:
        """The key an agent is known by; another one for the same id is an impostor's."""
        member = self._members.get(agent)
        return member.record.key if member else None

    def is_fresh(self, agent: AgentId, now: float) -> bool:
        """Whether we heard from `agent` a moment ago."""
        member = self._members.get(agent)
        heard_at = member.heard_at if member else None
        return heard_at is not None and now - heard_at < self._config.probe_fail_s

    # -- what we say about ourselves ----------------------------------------------------------

    def describe(
        self,
        now: float,
        *,
        presence: Presence | None = None,
        status: str | None = None,
        addresses: tuple[str, ...] | None = None,
    ) -> list[Effect]:
        """Say something new about ourselves, under a new incarnation."""
        self._speak(
            replace(
                self._me,
                incarnation=self._me.incarnation + 1,
                presence=self._me.presence if presence is None else presence,
                status=self._me.status if status is None else status,
                addresses=self._me.addresses if addresses is None else addresses,
            )
        )
        return self._spread(now)

    def leave(self, now: float) -> Gossip:
        """The word that we go on purpose, to be given to everyone at once."""
        self._speak(replace(self._me, incarnation=self._me.incarnation + 1, left=True))
        return Gossip((self._my_word.data,))

    def _speak(self, record: Record) -> None:
        self._me = record
        self._my_word = sign_record(record, self._signer, self._mesh_id)
        self._gossip.put(f"{record.agent} record", self._my_word.data)

    def _refute(self, incarnation: int, doubt_ourselves: bool = True) -> None:
        if doubt_ourselves:
            self.health.note(+1)
        self._speak(replace(self._me, incarnation=max(incarnation, self._me.incarnation) + 1))

    # -- what the links tell us ---------------------------------------------------------------

    def connected(self, agent: AgentId, record: bytes, ask: bool, now: float) -> list[Effect]:
        """A link to `agent` is open and it proved who it is; the dialler compares notes first."""
        effects = self._learn([record], agent, now)
        if agent in self._members:
            self._members[agent].met = True
        effects += self.heard(agent, now)
        if ask:
            effects.append(Send(agent, Sync(1, self._digest())))
        return effects

    def acquaint(self, words: Iterable[Signed], now: float) -> None:
        """Begin as one that met all of these already: the end of `connected` with each, at once.

        For simulations, where n nodes would meet n x n times. Who calls it has checked each word.
        """
        assert not self._members, "a mesh that has begun"
        for word in words:
            record = word.statement
            assert isinstance(record, Record)
            self._members[record.agent] = Member(
                word, record, PeerState.ALIVE, heard_at=now, changed_at=now, met=True
            )
        assert len(self._members) < MEMBERS_MAX, "more than a node keeps"
        self._order.fill(self._members)

    def disconnected(self, agent: AgentId, now: float) -> list[Effect]:
        """The last link to `agent` broke: reason enough to look at once."""
        if agent in self._order:
            self._order.hurry(agent)
            self._tick_at = min(self._tick_at, now)
        return []

    def unreachable(self, agent: AgentId, now: float) -> list[Effect]:
        """Nobody listens where it used to. One we never met may just be out of our reach."""
        member = self._members.get(agent)
        if member is None or not member.met or member.state is not PeerState.ALIVE:
            return []
        return self._accuse(member, now)

    # -- the engine contract ------------------------------------------------------------------

    def receive(self, frame: Frame, peer: AgentId, now: float) -> list[Effect]:
        """A frame from an authenticated peer."""
        effects: list[Effect] = []
        match frame:
            case Ping(seq, updates):
                effects += self._learn(updates, peer, now)
                effects += self.heard(peer, now)
                effects.append(Send(peer, Ack(seq, self._riders(peer))))
            case Ack(seq, updates):
                effects += self._learn(updates, peer, now)
                effects += self.heard(peer, now)
                effects += self._answered(seq, peer, now)
            case PingReq(seq, target, updates):
                effects += self._learn(updates, peer, now)
                effects += self.heard(peer, now)
                effects += self._relay(seq, AgentId(target), peer, now)
            case Nack(seq):
                effects += self.heard(peer, now)
                if seq in self._probes:
                    self._probes[seq].nacks += 1
            case Gossip(updates):
                effects += self._learn(updates, peer, now)
                effects += self.heard(peer, now)
            case Sync(reply, digest):
                effects += self.heard(peer, now)
                effects += self._compare(digest, peer, now)
                if reply:
                    effects.append(Send(peer, Sync(0, self._digest())))
        return effects

    def on_timer(self, now: float) -> list[Effect]:
        """Do what is due."""
        effects: list[Effect] = []
        if now - self._tick_at > self._config.probe_fail_s:
            self._excuse_everyone(now)
        for probe in [each for each in self._probes.values() if now >= each.ask_helpers_at]:
            effects += self._probe_is_late(probe, now)
        for seq in [seq for seq, relay in self._relays.items() if now >= relay.nack_at]:
            relay = self._relays.pop(seq)
            effects.append(Send(relay.requester, Nack(relay.their_seq)))
        if now >= self._verdict_at:
            for agent in [each for each in self._suspects if now >= self._time_is_up(each)]:
                effects += self._give_up(self._members[agent], now)
            self._plan_verdict()
        if now >= self._tick_at:
            effects += self._tick(now)
        if now >= self._sync_at:
            effects += self._sync(now)
        if self._gossip and now >= self._gossip_at:
            effects += self._spread(now)
        return effects

    def deadline(self) -> float | None:
        """When on_timer is wanted next."""
        times = [self._tick_at, self._sync_at]
        if self._suspects:
            times.append(self._verdict_at)
        if self._gossip:
            times.append(self._gossip_at)
        times += [p.fail_at if p.asked else p.ask_helpers_at for p in self._probes.values()]
        times += [relay.nack_at for relay in self._relays.values()]
        return min(times)

    # -- probing ------------------------------------------------------------------------------

    def _tick(self, now: float) -> list[Effect]:
        self._tick_at = now + self.health.stretch(self._config.probe_interval_s)
        effects: list[Effect] = []
        target = self._order.next()
        if target is not None:
            effects += self._probe(target, now)
        for suspect in list(self._suspects)[: self._config.helpers]:
            if suspect != target:
                effects.append(Send(suspect, Ping(0, self._riders(suspect))))
        self._forget(now)
        return effects

    def _probe(self, target: AgentId, now: float) -> list[Effect]:
        member = self._members[target]
        recent = now - self._config.probe_interval_s / 2
        if (
            member.heard_at is not None
            and member.heard_at >= recent
            and target not in (self._suspects)
        ):
            return []
        self._seq += 1
        self._probes[self._seq] = Probe(
            self._seq, target, now,
            now + self.health.stretch(self._config.probe_timeout_s),
            now + self.health.stretch(self._config.probe_fail_s),
        )  # fmt: skip
        return [Send(target, Ping(self._seq, self._riders(target)))]

    def _answered(self, seq: int, peer: AgentId, now: float) -> list[Effect]:
        """Only the one that was probed, or a helper that was asked, can answer for it."""
        relay = self._relays.get(seq)
        if relay is not None and relay.target == peer:
            del self._relays[seq]
            return [Send(relay.requester, Ack(relay.their_seq))]
        probe = self._probes.get(seq)
        if probe is None or (peer != probe.target and peer not in probe.helpers):
            return []
        del self._probes[seq]
        self.health.note(-1)
        return self.heard(probe.target, now)

    def _probe_is_late(self, probe: Probe, now: float) -> list[Effect]:
        member = self._members.get(probe.target)
        if member is None or (member.heard_at is not None and member.heard_at >= probe.started):
            del self._probes[probe.seq]
            return []
        if not probe.asked:
            probe.asked = True
            helpers = self._some(self._config.helpers, without=probe.target)
            probe.helpers = tuple(helpers)
            return [Send(each, PingReq(probe.seq, probe.target)) for each in helpers]
        if now < probe.fail_at:
            return []
        del self._probes[probe.seq]
        self.health.note(max(0, len(probe.helpers) - probe.nacks))
        return self._accuse(member, now)

    def _relay(self, seq: int, target: AgentId, requester: AgentId, now: float) -> list[Effect]:
        if target == self._me.agent:
            return [Send(requester, Ack(seq))]
        if target not in self._members or len(self._relays) >= RELAYS_MAX:
            return []
        self._seq += 1
        self._relays[self._seq] = Relay(requester, target, seq, now + self._config.probe_timeout_s)
        return [Send(target, Ping(self._seq))]

    def _excuse_everyone(self, now: float) -> None:
        """We were asleep, not they: forget what went unanswered meanwhile, and doubt ourselves."""
        self._probes.clear()
        self.health.note(+1)
        for agent in self._suspects:
            self._members[agent].suspected_at = now
        self._quiet_until = now + self._config.probe_fail_s
        self._plan_verdict()

    # -- suspicion ----------------------------------------------------------------------------

    def _accuse(self, member: Member, now: float) -> list[Effect]:
        if member.state not in (PeerState.ALIVE, PeerState.SUSPECT):
            return []
        if member.accusers and self._me.agent in member.accusers:
            return []
        return self._suspect(member, self._word_against(member, PeerState.SUSPECT), now)

    def _suspect(self, member: Member, word: Signed, now: float) -> list[Effect]:
        accusation = word.statement
        assert isinstance(accusation, Accusation)
        agent = member.record.agent
        if member.accusers is None:
            member.accusers = {}
            member.suspected_at = now
        if accusation.accuser in member.accusers:
            return []
        if len(member.accusers) > self._config.agreeing:
            return []
        member.accusers[accusation.accuser] = word.data
        self._gossip.put(f"{agent} by {accusation.accuser}", word.data)
        self._suspects[agent] = None
        self._verdict_at = min(self._verdict_at, self._time_is_up(agent))
        if self._rng.random() < 3 * self._config.agreeing / max(1, len(self._order)):
            self._order.hurry(agent)
        return self._become(member, PeerState.SUSPECT, now)

    def _time_is_up(self, agent: AgentId) -> float:
        member = self._members[agent]
        members = len(self._order) + 1
        needed = min(self._config.agreeing, max(0, members - 2))
        agreeing = len(member.accusers or ()) - 1
        patience = suspicion_s(members, agreeing, needed, self._config.suspicion_s)
        return max(member.suspected_at + patience, self._quiet_until)

    def _plan_verdict(self) -> None:
        self._verdict_at = min(map(self._time_is_up, self._suspects), default=math.inf)

    def _give_up(self, member: Member, now: float) -> list[Effect]:
        word = self._word_against(member, PeerState.GONE)
        return self._bury(member, word, now)

    def _bury(self, member: Member, word: Signed, now: float) -> list[Effect]:
        agent = member.record.agent
        self._suspects.pop(agent, None)
        self._gossip.drop(f"{agent} by ")
        member.accusers = {self._me.agent: word.data}
        self._gossip.put(f"{agent} by gone", word.data)
        return self._become(member, PeerState.GONE, now)

    def _word_against(self, member: Member, state: PeerState) -> Signed:
        record = member.record
        accusation = Accusation(record.agent, record.incarnation, state, self._me.agent)
        return sign_accusation(accusation, self._signer, self._mesh_id)

    # -- news ---------------------------------------------------------------------------------

    def heard(self, agent: AgentId, now: float) -> list[Effect]:
        """Anything at all came from this peer, so it lives."""
        member = self._members.get(agent)
        if member is None:
            return []
        member.heard_at = now
        if member.state is PeerState.ALIVE or member.state is PeerState.LEFT:
            return []
        effects = self._tell(agent, list((member.accusers or {}).values()), now)
        if member.state is PeerState.GONE:
            effects.append(Send(agent, Sync(1, self._digest())))  # we were apart: compare notes
        self._acquit(member)
        return effects + self._become(member, PeerState.ALIVE, now)

    def _acquit(self, member: Member) -> None:
        if member.accusers is None:
            return  # nobody accuses it, so nothing about it waits: the usual case, and often
        self._suspects.pop(member.record.agent, None)
        self._gossip.drop(f"{member.record.agent} by ")
        member.accusers = None

    def _tell(self, agent: AgentId, words: list[bytes], now: float) -> list[Effect]:
        """Let the accused know, so that it can refute; at most once per second each."""
        if now < self._told.get(agent, 0.0) or not words:
            return []
        if len(self._told) >= TOLD_MAX:
            self._told.clear()
        self._told[agent] = now + self._config.probe_fail_s
        return [Send(agent, Gossip(tuple(words[:UPDATES_PER_FRAME_MAX])))]

    def _learn(self, updates: Iterable[bytes], source: AgentId, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for data in updates:
            try:
                word = parse_update(data)
            except UnknownUpdate:
                continue
            except RemoteProtocolError:
                self.refused["malformed update"] += 1
                continue
            if isinstance(word.statement, Record):
                effects += self._learn_record(word, word.statement, source, now)
            else:
                effects += self._learn_accusation(word, word.statement, now)
        return effects

    def _learn_record(
        self, word: Signed, record: Record, source: AgentId, now: float
    ) -> list[Effect]:
        agent = record.agent
        if agent == self._me.agent:
            news = record.incarnation >= self._me.incarnation and word.body != self._my_word.body
            if news and record.key == self._me.key and self._is_genuine(word, record.key):
                self._refute(record.incarnation)
            return []
        member = self._members.get(agent)
        if member is not None and record.incarnation <= member.record.incarnation:
            return []
        if member is not None and record.key != member.record.key:
            self.refused["impostor"] += 1
            return []
        if member is None and self._is_full():  # before the signature, which is what costs
            self.refused["members full"] += 1
            return []
        if not self._is_genuine(word, record.key):
            return []
        if member is None:
            self._make_room()
            member = self._members[agent] = Member(word, record, PeerState.GONE)
        member.signed, member.record = word, record
        if source == agent:
            member.heard_at = now
        self._acquit(member)
        self._gossip.put(f"{agent} record", word.data)
        state = PeerState.LEFT if record.left else PeerState.ALIVE
        return self._become(member, state, now, changed=True)

    def _learn_accusation(self, word: Signed, accusation: Accusation, now: float) -> list[Effect]:
        if accusation.subject == self._me.agent:
            # Whoever says so, and even if we can't check who: being alive is the answer. It moves
            # our incarnation by one at most, since a larger one than ours is nobody's to name.
            if accusation.incarnation == self._me.incarnation:
                blamed = self._is_known(word, accusation)
                self._refute(accusation.incarnation, doubt_ourselves=blamed)
            elif accusation.incarnation < self._me.incarnation:
                self._gossip.put(f"{self._me.agent} record", self._my_word.data)
            return []
        member = self._members.get(accusation.subject)
        if (
            member is None
            or accusation.incarnation != member.record.incarnation
            or member.state in (PeerState.GONE, PeerState.LEFT)
            or word.data in (member.accusers or {}).values()
            or not self._is_known(word, accusation)
        ):
            return []
        if self.is_fresh(accusation.subject, now):
            return self._tell(accusation.subject, [word.data], now)
        if accusation.state is PeerState.GONE:
            return self._bury(member, word, now)
        return self._suspect(member, word, now)

    def _is_known(self, word: Signed, accusation: Accusation) -> bool:
        accuser = self._members.get(accusation.accuser)
        if accuser is not None:
            return self._is_genuine(word, accuser.record.key)
        if accusation.accuser != self._me.agent:  # our own words come back to us all the time
            self.refused["unknown accuser"] += 1
        return False

    def _is_genuine(self, word: Signed, key: bytes) -> bool:
        if word.is_genuine(key, self._mesh_id, self._verify):
            return True
        self.refused["forged update"] += 1
        return False

    def _become(
        self, member: Member, state: PeerState, now: float, changed: bool = False
    ) -> list[Effect]:
        if member.state is state and not changed:
            return []
        member.state, member.changed_at = state, now
        members = len(self._order)
        if state in (PeerState.ALIVE, PeerState.SUSPECT):
            self._order.add(member.record.agent)
        else:
            self._order.remove(member.record.agent)
        if len(self._order) != members:
            self._plan_verdict()  # patience depends on how many there are
        return [PeerChanged(member.peer())]

    # -- spreading ----------------------------------------------------------------------------

    def _riders(self, to: AgentId) -> tuple[bytes, ...]:
        """Updates to go along with a frame; a suspect is always shown what it stands accused of."""
        riders = self._gossip.take(self._transmits())
        if to in self._suspects:
            riders += tuple((self._members[to].accusers or {}).values())
        return riders[:UPDATES_PER_FRAME_MAX]

    def _transmits(self) -> int:
        return gossip_transmits(len(self._order) + 1, self._config.gossip_multiplier)

    def _spread(self, now: float) -> list[Effect]:
        self._gossip_at = now + self._config.gossip_interval_s
        effects: list[Effect] = []
        for agent in self._some(self._config.gossip_fanout):
            updates = self._gossip.take(self._transmits())
            if not updates:
                break
            effects.append(Send(agent, Gossip(updates)))
        return effects

    def _sync(self, now: float) -> list[Effect]:
        self._sync_at = now + self._rng.uniform(0.5, 1.0) * self._config.sync_interval_s
        return [Send(agent, Sync(1, self._digest())) for agent in self._some(1)]

    def _some(self, count: int, without: AgentId | None = None) -> list[AgentId]:
        """Members at random, of those that a frame would reach."""
        return self._order.sample(count, without, self._reachable)

    def _digest(self) -> Digest:
        return digest_of(self._me, self._members)

    def _compare(self, digest: Digest, peer: AgentId, now: float) -> list[Effect]:
        """What the peer lacks or sees otherwise, from us; what it thinks of us, refuted."""
        rank = next(
            (r for a, i, r in digest if (a, i) == (self._me.agent, self._me.incarnation)), 0
        )
        if rank > 0:
            # A larger incarnation counts only as a record that we signed: see _learn_record.
            self._refute(self._me.incarnation)
        missing = lacking(digest, peer, self._members)
        if (self._me.agent, self._me.incarnation) not in {(a, i) for a, i, _ in digest}:
            missing.insert(0, self._my_word.data)
        return [
            Send(peer, Gossip(tuple(missing[at : at + UPDATES_PER_FRAME_MAX])))
            for at in range(0, len(missing), UPDATES_PER_FRAME_MAX)
        ]

    # -- bounds -------------------------------------------------------------------------------

    def _is_full(self) -> bool:
        """No room, and nobody who has gone or left to make some."""
        return len(self._members) >= MEMBERS_MAX - 1 and len(self._order) == len(self._members)

    def _make_room(self) -> None:
        if len(self._members) < MEMBERS_MAX - 1:
            return
        idle = [a for a, m in self._members.items() if m.state in (PeerState.GONE, PeerState.LEFT)]
        del self._members[min(idle, key=lambda agent: self._members[agent].changed_at)]

    def _forget(self, now: float) -> None:
        horizon = now - self._config.forget_s
        if len(self._order) == len(self._members):
            return
        for agent, member in list(self._members.items()):
            if member.changed_at < horizon and agent not in self._order:
                del self._members[agent]
