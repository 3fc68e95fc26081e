"""Membership alone, for meshes too large to simulate with their links: up to ten thousand nodes.

Every node is the real engine and can send to every other; frames are lost, delayed and answered
late by slow nodes. Signatures are a keyed hash, since what is studied here is the protocol and not
the cryptography. Nodes share the records that never change; what a node thinks is asked of its
engine and nowhere written twice. Invariant: no node keeps more members than a real one does, so in
a mesh of more than MEMBERS_MAX each keeps that many, itself counted, drawn at random.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshagent.core.effects import Effect, PeerChanged, Send
from meshagent.core.membership.engine import LAN, Membership, MembershipConfig
from meshagent.core.model.peers import AgentId, PeerState
from meshagent.core.model.presence import Presence
from meshagent.core.model.records import Record, Signed, parse_update
from meshagent.core.wire.frames import MEMBERS_MAX, Frame
from meshagent.simulator.identities import HashSigner, hash_verify
from meshagent.simulator.world import World

__all__ = ["Conditions", "Swarm"]

MESH_ID = b"simulated mesh"


@dataclass(frozen=True, slots=True)
class Conditions:
    """How bad the network and the machines are."""

    loss: float = 0.0
    delay_s: tuple[float, float] = (0.0005, 0.005)
    slow_share: float = 0.0
    """This share of the nodes stalls again and again, as a machine does that compiles."""
    slow_every_s: float = 30.0
    stall_s: tuple[float, float] = (0.2, 2.0)


@dataclass(slots=True)
class SwarmNode:
    """One agent of the swarm."""

    engine: Membership
    alive: bool = True
    slow: bool = False
    stalled_until: float = 0.0
    timer_at: float = field(default=float("inf"))


class Swarm:
    """Many membership engines on one virtual network."""

    def __init__(
        self,
        world: World,
        conditions: Conditions = Conditions(),
        config: MembershipConfig = LAN,
    ) -> None:
        self.world, self.conditions, self.config = world, conditions, config
        self.nodes: dict[AgentId, SwarmNode] = {}
        self.frames = 0
        self.false_deaths: set[tuple[AgentId, int]] = set()

    def add(self, count: int, *, introduced: bool) -> list[AgentId]:
        """New nodes; `introduced` ones know everybody already, others know one random member.

        Everybody, or as many at random as a node keeps.
        """
        known = [agent for agent, node in self.nodes.items() if node.alive]
        fresh = [self._make() for _ in range(count)]
        words = {agent: self._word_of(agent) for agent in self.nodes} if introduced else {}
        for agent in fresh:
            if introduced:
                self._introduce(agent, words)
            else:
                self._join(agent, self.world.rng.choice(known))
            self._arm(agent)
        return fresh

    def crash(self, agents: list[AgentId]) -> None:
        """These stop, without a word."""
        for agent in agents:
            self.nodes[agent].alive = False

    def all_see(self, agents: list[AgentId], state: PeerState) -> bool:
        """Whether every live node sees each of these so."""
        return all(
            self._view(me, agent) is state
            for agent in agents
            for me, node in self.nodes.items()
            if node.alive and me != agent
        )

    def believers(self, agent: AgentId) -> int:
        """How many live nodes keep `agent` as a member that may be alive."""
        return sum(
            self._view(me, agent) in (PeerState.ALIVE, PeerState.SUSPECT)
            for me, node in self.nodes.items()
            if node.alive
        )

    def _view(self, me: AgentId, agent: AgentId) -> PeerState | None:
        peer = self.nodes[me].engine.peer(agent)
        return peer.state if peer else None

    # -- how nodes come to know each other ----------------------------------------------------

    def _make(self) -> AgentId:
        signer = HashSigner(f"n{len(self.nodes)}", self.world.seed)
        engine = Membership(
            _record(signer), signer, MESH_ID, hash_verify,
            random.Random(self.world.rng.random()), self.world.now, self.config,
        )  # fmt: skip
        node = SwarmNode(engine, slow=self.world.rng.random() < self.conditions.slow_share)
        self.nodes[signer.agent] = node
        if node.slow:
            self.world.plan(self._next_stall(), self._stall, signer.agent)
        return signer.agent

    def _word_of(self, agent: AgentId) -> Signed:
        engine = self.nodes[agent].engine
        word = parse_update(engine.record_bytes)
        assert word.is_genuine(engine.record.key, MESH_ID, hash_verify)
        return word

    def _introduce(self, agent: AgentId, words: Mapping[AgentId, Signed]) -> None:
        others = [word for other, word in words.items() if other != agent]
        if len(others) >= MEMBERS_MAX:
            others = self.world.rng.sample(others, MEMBERS_MAX - 1)
        self.nodes[agent].engine.acquaint(others, self.world.now)

    def _join(self, agent: AgentId, seed: AgentId) -> None:
        for me, other, asks in ((agent, seed, True), (seed, agent, False)):
            word = self.nodes[other].engine.record_bytes
            self._perform(me, self.nodes[me].engine.connected(other, word, asks, self.world.now))

    # -- the network --------------------------------------------------------------------------

    def _send(self, source: AgentId, to: AgentId, frame: Frame) -> None:
        self.frames += 1
        rng = self.world.rng
        if rng.random() < self.conditions.loss:
            return
        self.world.plan(rng.uniform(*self.conditions.delay_s), self._arrive, source, to, frame)

    def _arrive(self, source: AgentId, to: AgentId, frame: Frame) -> None:
        node = self.nodes[to]
        if not node.alive:
            return
        if node.stalled_until > self.world.now:
            wait = node.stalled_until - self.world.now
            self.world.plan(wait, self._arrive, source, to, frame)
            return
        self._perform(to, node.engine.receive(frame, source, self.world.now))
        self._arm(to)

    def _next_stall(self) -> float:
        return self.world.rng.expovariate(1 / self.conditions.slow_every_s)

    def _stall(self, agent: AgentId) -> None:
        node = self.nodes[agent]
        if node.alive:
            stall_s = self.world.rng.uniform(*self.conditions.stall_s)
            node.stalled_until = self.world.now + stall_s
            self.world.plan(stall_s + self._next_stall(), self._stall, agent)

    # -- driving ------------------------------------------------------------------------------

    def _perform(self, agent: AgentId, effects: list[Effect]) -> None:
        node = self.nodes[agent]
        for effect in effects:
            if isinstance(effect, Send):
                self._send(agent, effect.to, effect.frame)
            elif isinstance(effect, PeerChanged):
                self._note(node, effect.peer.agent, effect.peer.state)

    def _note(self, node: SwarmNode, subject: AgentId, state: PeerState) -> None:
        if state is PeerState.GONE and self.nodes[subject].alive:
            self.false_deaths.add((subject, self.nodes[subject].engine.record.incarnation))
            self.world.say(f"false death of {subject} at {node.engine.record.agent}")

    def _arm(self, agent: AgentId) -> None:
        node = self.nodes[agent]
        at = node.engine.deadline()
        if at is not None and (at < node.timer_at or node.timer_at < self.world.now):
            node.timer_at = at
            self.world.plan(max(0.0, at - self.world.now), self._timer, agent, at)

    def _timer(self, agent: AgentId, at: float) -> None:
        node = self.nodes[agent]
        if not node.alive or at != node.timer_at:
            return
        if node.stalled_until > self.world.now:
            node.timer_at = node.stalled_until
            self.world.plan(
                node.stalled_until - self.world.now, self._timer, agent, node.stalled_until
            )
            return
        node.timer_at = float("inf")
        self._perform(agent, node.engine.on_timer(self.world.now))
        self._arm(agent)


def _record(signer: HashSigner) -> Record:
    return Record(
        signer.agent, signer.key, 1 << 32, 0, False, "tester", (), (), "simulated",
        Presence.IDLE, "", "0",
    )  # fmt: skip
