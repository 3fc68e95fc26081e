"""Whole engines, with links, handshakes and identities, in one process on a virtual clock.

A SimNode drives a Mesh exactly as the real driver does: persist, then send, then report. It can
crash with or without its machine, restart with what was persisted, and move to another address.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from meshagent.core.effects import (
    CloneFound,
    CloseLink,
    Dial,
    Effect,
    PeerChanged,
    Persist,
    Transmit,
)
from meshagent.core.mesh import Mesh
from meshagent.core.model.identity import Identity, MeshSecret, verify
from meshagent.core.model.peers import AgentId, Candidate, LinkId, PeerState, Presence
from meshagent.core.model.records import Record
from meshagent.core.model.rows import PeerRow
from meshagent.core.wire.codec import encode
from meshagent.simulator.network import Network
from meshagent.simulator.world import World

__all__ = ["SimMesh", "SimNode"]


class SimNode:
    """One agent: what it keeps across crashes, and its engine while it runs."""

    def __init__(self, mesh: SimMesh, name: str, secret: MeshSecret, seed: bytes) -> None:
        self.mesh, self.world, self.network = mesh, mesh.world, mesh.network
        self.name = name
        self.identity = Identity(name.split("/")[0], seed)
        self.agent = self.identity.agent
        self.curve_public = self.identity.curve_public
        self.secret = secret
        self.door = secret.door()[0]
        self.rows: dict[str, PeerRow] = {}
        self.runs = 0
        self.address = ""
        self.engine: Mesh | None = None
        self.clones: list[CloneFound] = []
        self._timer_at = float("inf")

    # -- living and dying ---------------------------------------------------------------------

    def start(self, hints: Sequence[Candidate] = ()) -> None:
        """A new run, at a new address, with what earlier runs persisted."""
        self.runs += 1
        self.clones = []
        self.address = f"10.0.{self.mesh.next_host()}:{7000 + self.runs}"
        self.network.listen(self.address, self)
        me = Record(
            self.agent, self.identity.key, self.runs << 32, self.mesh.tick(), False, "tester", (),
            (self.address,), self.name, Presence.IDLE, "", "0",
        )  # fmt: skip
        self.engine = Mesh(
            me, self.identity, self.secret.mesh_id, verify,
            random.Random(self.world.rng.random()), self.world.now,
        )  # fmt: skip
        self.engine.remember(list(self.rows.values()), self.world.now)
        self.world.say(f"{self.name} starts at {self.address}")
        self._timer_at = float("inf")
        self._arm()
        for hint in hints:
            self.hear_of(hint)

    def crash(self, *, silently: bool = False) -> None:
        """The process ends in the middle of everything; `silently` takes the machine along."""
        self.engine = None
        self.network.vanish(self, silently=silently)
        self.world.say(f"{self.name} crashes{' silently' if silently else ''}")

    def leave(self) -> None:
        """The process says goodbye and ends."""
        assert self.engine is not None
        self._perform(self.engine.leave(self.world.now))
        self.engine = None
        self.network.vanish(self, silently=False)
        self.world.say(f"{self.name} leaves")

    def hint(self) -> Candidate:
        """What discovery would say of this node."""
        return Candidate(self.agent, (self.address,), "file")

    def hear_of(self, hint: Candidate) -> None:
        """Discovery tells this node about another."""
        assert self.engine is not None
        self.engine.found(hint, self.world.now)
        self._arm()

    def view(self) -> dict[AgentId, PeerState]:
        """How this node sees the others."""
        assert self.engine is not None
        return {peer.agent: peer.state for peer in self.engine.peers()}

    # -- what the network tells ---------------------------------------------------------------

    def link_opened(self, link: LinkId, curve_key: bytes | None) -> None:
        if self.engine is not None:
            self._perform(self.engine.opened(link, curve_key, self.world.now))

    def link_received(self, link: LinkId, parts: Sequence[bytes | memoryview]) -> None:
        if self.engine is not None:
            self._perform(self.engine.received_parts(link, parts, self.world.now))

    def link_closed(self, link: LinkId, reason: str) -> None:
        if self.engine is not None:
            self._perform(self.engine.closed(link, reason, self.world.now))

    # -- driving ------------------------------------------------------------------------------

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Persist):
                self.rows |= {row.agent: row for row in effect.rows if isinstance(row, PeerRow)}
        for effect in effects:
            match effect:
                case Transmit(link, frame):
                    self.network.send(self, link, encode(frame))
                case Dial(attempt, address):
                    assert self.engine is not None
                    self.engine.dialled(attempt, self.network.dial(self, address))
                case CloseLink(link):
                    self.network.close_link(self, link)
                case PeerChanged(peer):
                    self.world.say(f"{self.name}: {peer.agent} is {peer.state.value}")
                case CloneFound():
                    self.world.say(f"{self.name}: clone, stop={effect.stop}")
                    self.clones.append(effect)
                    if effect.stop:
                        self.crash()
                        return
        if self.engine is not None:
            self._arm()

    def _arm(self) -> None:
        assert self.engine is not None
        at = self.engine.deadline()
        if at is not None and (at < self._timer_at or self._timer_at < self.world.now):
            self._timer_at = at
            self.world.plan(max(0.0, at - self.world.now), self._timer, self.engine, at)

    def _timer(self, engine: Mesh, at: float) -> None:
        if engine is not self.engine or at != self._timer_at:
            return
        self._timer_at = float("inf")
        self._perform(engine.on_timer(self.world.now))


class SimMesh:
    """A few nodes that share a secret."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.network = Network(self.world)
        self.secret = MeshSecret(hashlib.sha256(b"mesh %d" % seed).digest())
        self.nodes: list[SimNode] = []
        self._hosts = 0
        self._ticks = 0

    def add(self, count: int) -> list[SimNode]:
        """New nodes, started, that discovery has told about all earlier ones."""
        fresh = []
        for _ in range(count):
            name = f"n{len(self.nodes)}"
            seed = hashlib.sha256(f"{self.world.seed} {name}".encode()).digest()
            node = SimNode(self, name, self.secret, seed)
            node.start([each.hint() for each in self.running()])
            self.nodes.append(node)
            fresh.append(node)
        return fresh

    def running(self) -> list[SimNode]:
        """The nodes whose processes live."""
        return [node for node in self.nodes if node.engine is not None]

    def agree(self) -> bool:
        """Whether every running node sees exactly the running ones alive."""
        running = {node.agent for node in self.running()}
        for node in self.running():
            alive = {agent for agent, state in node.view().items() if state is PeerState.ALIVE}
            if alive != running - {node.agent}:
                return False
        return True

    def discover(self) -> None:
        """Discovery works: everyone is told about everyone once."""
        for node in self.running():
            for other in self.running():
                if other is not node:
                    node.hear_of(other.hint())

    def next_host(self) -> str:
        """A fresh address's middle part."""
        self._hosts += 1
        return f"{self._hosts // 250}.{self._hosts % 250}"

    def tick(self) -> int:
        """Start times that differ, as real ones do."""
        self._ticks += 1
        return int(self.world.now * 1000) * 1000 + self._ticks
