"""Who is alive. Never opens a socket or reads a clock. Invariant: incarnations only grow.

SWIM with Lifeguard's extensions, over links that are already authenticated. In short:

    ALIVE ──accused, or our probe failed──▶ SUSPECT ──time is up──▶ GONE
      ▲                                        │                     │
      └── heard from it, or it refutes with a larger incarnation ────┘     LEFT: it said so itself

An agent's state belongs to an incarnation. Only the agent itself makes a new one (its Record is
signed), so a larger incarnation always wins; within one, LEFT > GONE > SUSPECT > ALIVE. A member
that we heard from a moment ago is not suspected, whoever accuses it: it is told of the accusation
and refutes it. Any frame counts as having heard from its sender.

The pieces: `members.py` what we know of each, `member_states.py` what changes a state,
`suspicion.py` who is suspected and for how long, `own_record.py` what we say of ourselves,
`probe_order.py` whom to probe next, `probes.py` the probes under way, `gossip.py` what to pass on,
`lifeguard.py` the formulas. This module puts them together and keeps the timers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from meshagent.core.effects import Effect, Send
from meshagent.core.membership.gossip import UPDATES_PER_FRAME_MAX, GossipQueue
from meshagent.core.membership.lifeguard import LocalHealth, gossip_transmits
from meshagent.core.membership.member_states import MemberStates
from meshagent.core.membership.members import (
    LAN,
    RANK,
    Digest,
    MembershipConfig,
    digest_of,
    lacking,
)
from meshagent.core.membership.own_record import OwnRecord
from meshagent.core.membership.probes import Probe, Probes, Relay
from meshagent.core.model.identity import Signer, Verify
from meshagent.core.model.peers import AgentId, Peer, PeerState
from meshagent.core.model.presence import Presence
from meshagent.core.model.records import Record, Signed
from meshagent.core.wire.frames import Ack, Frame, Gossip, Nack, Ping, PingReq, Sync

__all__ = ["LAN", "Membership", "MembershipConfig"]


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
        self.health = LocalHealth()
        self.gossip = GossipQueue()
        self.probes = Probes()
        self._me = OwnRecord(me, signer, mesh_id, self.gossip)
        self.states = MemberStates(
            self._me, self.gossip, self.health, mesh_id, verify, rng, config, now
        )
        self.refused = self.states.refused
        self.members, self.suspicion = self.states.members, self.states.suspicion
        self._reachable = reachable  # a frame to anybody else would be lost
        self._config, self._rng = config, rng
        self._tick_at = now + rng.uniform(0, config.probe_interval_s)
        self._gossip_at = now
        self._sync_at = now + rng.uniform(0.5, 1.0) * config.sync_interval_s

    # -- queries ------------------------------------------------------------------------------

    @property
    def record(self) -> Record:
        """Our own record, as last signed."""
        return self._me.record

    @property
    def record_bytes(self) -> bytes:
        """Our record as it goes on the wire."""
        return self._me.signed.data

    def peers(self) -> list[Peer]:
        """Everyone we know of, by id."""
        return [self.members[agent].peer() for agent in sorted(self.members)]

    def peer(self, agent: AgentId) -> Peer | None:
        """How we see `agent`; None when we never heard of it."""
        member = self.members.get(agent)
        return member.peer() if member else None

    def key_of(self, agent: AgentId) -> bytes | None:
        """The key of this agent. Whoever uses another key for its id is an impostor."""
        member = self.members.get(agent)
        return member.record.key if member else None

    def is_fresh(self, agent: AgentId, now: float) -> bool:
        """Whether we heard from `agent` a moment ago."""
        return self.states.is_fresh(agent, now)

    # -- what we say about ourselves ----------------------------------------------------------

    def describe(
        self,
        now: float,
        *,
        presence: Presence | None = None,
        status: str | None = None,
        addresses: tuple[str, ...] | None = None,
    ) -> list[Effect]:
        """Change what we say about ourselves, and pass it on."""
        self._me.describe(presence, status, addresses)
        return self._spread(now)

    def leave(self, now: float) -> Gossip:
        """The frame that says we stop on purpose, to be sent to everyone."""
        self._me.leave()
        return Gossip((self._me.signed.data,))

    # -- what the links report ----------------------------------------------------------------

    def connected(self, agent: AgentId, record: bytes, ask: bool, now: float) -> list[Effect]:
        """A link to `agent` is open and it proved who it is; with `ask` we compare views."""
        effects = self.states.learn([record], agent, now)
        if agent in self.members:
            self.members[agent].met = True
        effects += self.states.heard(agent, now)
        if ask:
            effects.append(Send(agent, Sync(1, self._digest())))
        return effects

    def acquaint(self, words: Iterable[Signed], now: float) -> None:
        """Begin as a node that has met all of these: as `connected` with each, in one step.

        For simulations, where n nodes would meet n x n times. The caller has checked each record.
        """
        self.states.acquaint(words, now)

    def heard(self, agent: AgentId, now: float) -> list[Effect]:
        """Any frame came from this peer, so it is alive."""
        return self.states.heard(agent, now)

    def disconnected(self, agent: AgentId, now: float) -> list[Effect]:
        """The last link to `agent` broke: probe it at once."""
        if agent in self.members.order:
            self.members.order.hurry(agent)
            self._tick_at = min(self._tick_at, now)
        return []

    def unreachable(self, agent: AgentId, now: float) -> list[Effect]:
        """Nobody listens at its addresses. A member we never met may just be out of our reach."""
        member = self.members.get(agent)
        if member is None or not member.met or member.state is not PeerState.ALIVE:
            return []
        return self.states.accuse(member, now)

    # -- the engine contract ------------------------------------------------------------------

    def receive(self, frame: Frame, peer: AgentId, now: float) -> list[Effect]:
        """A frame from an authenticated peer."""
        effects: list[Effect] = []
        if isinstance(frame, Ping | Ack | PingReq | Gossip):
            effects += self.states.learn(frame.updates, peer, now)
        effects += self.states.heard(peer, now)
        match frame:
            case Ping(seq):
                effects.append(Send(peer, Ack(seq, self._piggyback(peer))))
            case Ack(seq):
                effects += self._answered(seq, peer, now)
            case PingReq(seq, target):
                effects += self._relay(seq, AgentId(target), peer, now)
            case Nack(seq):
                self.probes.nacked(seq)
            case Sync(reply, digest):
                effects += self._compare(digest, peer)
                if reply:
                    effects.append(Send(peer, Sync(0, self._digest())))
        return effects

    def on_timer(self, now: float) -> list[Effect]:
        """Do what is due."""
        effects: list[Effect] = []
        if now - self._tick_at > self._config.probe_fail_s:
            self._stalled(now)
        for probe in self.probes.late(now):
            effects += self._probe_is_late(probe, now)
        for relay in self.probes.expired_relays(now):
            effects.append(Send(relay.requester, Nack(relay.their_seq)))
        effects += self.states.give_up_suspects(now)
        if now >= self._tick_at:
            effects += self._tick(now)
        if now >= self._sync_at:
            effects += self._sync(now)
        if self.gossip and now >= self._gossip_at:
            effects += self._spread(now)
        return effects

    def deadline(self) -> float | None:
        """When on_timer is wanted next."""
        times = [self._tick_at, self._sync_at, self.suspicion.deadline(), *self.probes.deadlines()]
        if self.gossip:
            times.append(self._gossip_at)
        return min(times)

    # -- probing ------------------------------------------------------------------------------

    def _tick(self, now: float) -> list[Effect]:
        self._tick_at = now + self.health.stretch(self._config.probe_interval_s)
        effects: list[Effect] = []
        target = self.members.order.next()
        if target is not None:
            effects += self._probe(target, now)
        for suspect in self.suspicion.agents()[: self._config.helpers]:
            if suspect != target:
                effects.append(Send(suspect, Ping(0, self._piggyback(suspect))))
        self.members.forget(now - self._config.forget_s)
        return effects

    def _probe(self, target: AgentId, now: float) -> list[Effect]:
        heard_at = self.members[target].heard_at
        recent = now - self._config.probe_interval_s / 2
        if heard_at is not None and heard_at >= recent and target not in self.suspicion:
            return []
        ask_helpers_at = now + self.health.stretch(self._config.probe_timeout_s)
        fail_at = now + self.health.stretch(self._config.probe_fail_s)
        seq = self.probes.start(target, now, ask_helpers_at, fail_at)
        return [Send(target, Ping(seq, self._piggyback(target)))]

    def _answered(self, seq: int, peer: AgentId, now: float) -> list[Effect]:
        match self.probes.answered(seq, peer):
            case Relay(requester, _, their_seq):
                return [Send(requester, Ack(their_seq))]
            case Probe(_, target):
                self.health.note(-1)
                return self.states.heard(target, now)
        return []

    def _probe_is_late(self, probe: Probe, now: float) -> list[Effect]:
        member = self.members.get(probe.target)
        if member is None or (member.heard_at is not None and member.heard_at >= probe.started):
            self.probes.end(probe)
            return []
        if probe.helpers is None:
            probe.helpers = tuple(self._sample(self._config.helpers, without=probe.target))
            return [Send(each, PingReq(probe.seq, probe.target)) for each in probe.helpers]
        if now < probe.fail_at:
            return []
        self.probes.end(probe)
        self.health.note(max(0, len(probe.helpers) - probe.nacks))
        return self.states.accuse(member, now)

    def _relay(self, seq: int, target: AgentId, requester: AgentId, now: float) -> list[Effect]:
        """Somebody asks us to probe `target`."""
        if target == self._me.agent:
            return [Send(requester, Ack(seq))]
        if target not in self.members:
            return []
        nack_at = now + self._config.probe_timeout_s
        own_seq = self.probes.start_relay(Relay(requester, target, seq, nack_at))
        return [] if own_seq is None else [Send(target, Ping(own_seq))]

    def _stalled(self, now: float) -> None:
        """This node did not run for a while: what went unanswered meanwhile proves nothing."""
        self.probes.end_all()
        self.health.note(+1)
        self.suspicion.restart(now)

    # -- spreading ----------------------------------------------------------------------------

    def _piggyback(self, to: AgentId) -> tuple[bytes, ...]:
        """Updates to send with a frame. A suspect always gets the accusations against it."""
        accusers = self.members[to].accusers if to in self.suspicion else None
        against_it = tuple(accusers.values()) if accusers else ()  # no more than have to agree
        room = UPDATES_PER_FRAME_MAX - len(against_it)
        return self.gossip.take(self._transmits(), room) + against_it

    def _transmits(self) -> int:
        return gossip_transmits(self.members.living + 1, self._config.gossip_multiplier)

    def _spread(self, now: float) -> list[Effect]:
        self._gossip_at = now + self._config.gossip_interval_s
        effects: list[Effect] = []
        for agent in self._sample(self._config.gossip_fanout):
            updates = self.gossip.take(self._transmits())
            if not updates:
                break
            effects.append(Send(agent, Gossip(updates)))
        return effects

    def _sync(self, now: float) -> list[Effect]:
        self._sync_at = now + self._rng.uniform(0.5, 1.0) * self._config.sync_interval_s
        return [Send(agent, Sync(1, self._digest())) for agent in self._sample(1)]

    def _sample(self, count: int, without: AgentId | None = None) -> list[AgentId]:
        """Random members, of those that a frame would reach."""
        return self.members.order.sample(count, without, self._reachable)

    def _digest(self) -> Digest:
        return digest_of(self._me.record, self.members)

    def _compare(self, digest: Digest, peer: AgentId) -> list[Effect]:
        """Send what the peer lacks or sees differently; refute what it thinks of us."""
        me = self._me.record
        missing = lacking(digest, peer, self.members)
        ranks = {rank for agent, incarnation, rank in digest if agent == me.agent
                 and incarnation == me.incarnation}  # fmt: skip
        if ranks - {RANK[PeerState.ALIVE]}:
            # A larger incarnation counts only in a record that we signed.
            self.health.note(+1)
            self._me.refute(me.incarnation)
        if ranks != {RANK[PeerState.ALIVE]}:
            missing.insert(0, self._me.signed.data)
        return [
            Send(peer, Gossip(tuple(missing[at : at + UPDATES_PER_FRAME_MAX])))
            for at in range(0, len(missing), UPDATES_PER_FRAME_MAX)
        ]
