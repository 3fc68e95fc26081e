"""A few simulated nodes that share a mesh, their network, and what can be done to all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshagent.core.delivery.config import DeliveryConfig
from meshagent.core.effects import Effect
from meshagent.core.model.peers import AgentId, PeerState
from meshagent.core.wire.frames import Frame
from meshagent.simulator.blobs import Machine
from meshagent.simulator.disk import DiskFaults
from meshagent.simulator.driver import SimDriver
from meshagent.simulator.identities import identity_of
from meshagent.simulator.network import Network
from meshagent.simulator.node import SimNode
from meshagent.simulator.world import World

__all__ = ["SimMesh"]


class SimMesh:
    """The nodes, by number; each has a machine of its own unless it is told which to share."""

    def __init__(self, seed: int, delivery_config: DeliveryConfig | None = None) -> None:
        self.world = World(seed)
        self.network = Network(self.world)
        self.mesh_id, self.door = b"simulated mesh", b"simulated door"
        self.delivery_config = delivery_config or DeliveryConfig()
        self.nodes: list[SimNode] = []
        self.watchers: list[Callable[[SimDriver, Effect], None]] = []
        """Each sees every effect just before it is performed."""
        self._hosts = self._ticks = 0

    def add(self, count: int, machine: Machine | None = None) -> list[SimNode]:
        """New nodes, started, that discovery has told about all earlier ones."""
        fresh = []
        for _ in range(count):
            name = f"n{len(self.nodes)}"
            node = SimNode(self, name, identity_of(name), machine or Machine())
            node.start([each.hint() for each in self.running()])
            self.nodes.append(node)
            fresh.append(node)
        return fresh

    def running(self) -> list[SimNode]:
        """The nodes whose processes live."""
        return [node for node in self.nodes if node.engine is not None]

    def node_of(self, agent: AgentId) -> SimNode:
        """The node of this agent."""
        return next(node for node in self.nodes if node.agent == agent)

    def agree(self) -> bool:
        """Whether every running node sees exactly the running ones alive."""
        running = {node.agent for node in self.running()}
        for node in self.running():
            alive = {agent for agent, state in node.view().items() if state is PeerState.ALIVE}
            if alive != running - {node.agent}:
                return False
        return True

    def discover(self, nodes: Sequence[SimNode] | None = None) -> None:
        """Discovery works: each of these is told about each other one."""
        running = [node for node in nodes or self.nodes if node.engine is not None]
        for node in running:
            for other in running:
                if other is not node:
                    node.hear_of(other.hint())

    def part(self, one: SimNode, other: SimNode) -> None:
        """Nothing reaches one from the other any more, and both notice."""
        self.network.break_links(one.name, other.name)
        self.network.cut(one.name, other.name)
        self.network.cut(other.name, one.name)

    def meet(self, one: SimNode, other: SimNode) -> None:
        """They reach each other again, and discovery says so."""
        self.network.mend(one.name, other.name)
        self.discover([one, other])

    def heal(self) -> None:
        """Everyone runs, every path and disk works, clocks are right, nothing else goes wrong."""
        self.world.say("all is well again")
        self.network.heal()
        for node in self.nodes:
            self.heal_machine(node)
        self.discover()

    def heal_machine(self, node: SimNode) -> None:
        """It runs, and its disk works."""
        node.faults, node.clock_skew_ms = DiskFaults(), 0
        node.blobs.machine.is_full = node.blobs.machine.is_slow = False
        if node.engine is None:
            node.start()

    def power_fails(self, node: SimDriver, where: str) -> bool:
        """Whether this is the moment that the power goes."""
        return self.world.rng.random() < node.faults.crash

    def loses(self, node: SimDriver, frame: Frame) -> bool:
        """Whether this frame of this node is lost on its way."""
        return False

    def next_host(self) -> str:
        """A fresh address's middle part."""
        self._hosts += 1
        return f"{self._hosts // 250}.{self._hosts % 250}"

    def tick(self) -> int:
        """Start times that differ, as real ones do."""
        self._ticks += 1
        return int(self.world.now * 1000) * 1000 + self._ticks
