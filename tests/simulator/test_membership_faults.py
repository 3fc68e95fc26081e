"""Goal: whatever goes wrong, nobody believes nonsense; and when it ends, all have one view.

Each seed makes a mesh of two to six whole engines, with links and handshakes, and runs it through
phases of loss, duplication, reordering, delay, cuts, crashes, leaves and restarts.
"""

from __future__ import annotations

import random

from meshagent.core.model.peers import AgentId, PeerState
from meshagent.simulator.mesh import SimMesh
from meshagent.simulator.modes import transcript
from meshagent.simulator.network import Faults
from meshagent.simulator.node import SimNode

PHASES = 6
HEAL_S = 45.0  # a lost frame is made good by the next comparing of notes, within 30 s
LINKS_MAX = 64
GOSSIP_MAX = 64


class Watch:
    """Checks, as the faults go on, what must hold at every moment."""

    def __init__(self, mesh: SimMesh) -> None:
        self.mesh = mesh
        self.left: set[AgentId] = set()
        self.seen: dict[tuple[str, int, AgentId], int] = {}

    def check(self) -> None:
        for node in self.mesh.running():
            assert node.engine is not None
            members = node.engine.membership.members
            assert node.agent not in members
            for agent, member in members.items():
                key = (node.name, node.runs, agent)
                assert member.record.incarnation >= self.seen.get(key, 0), (node.name, agent)
                self.seen[key] = member.record.incarnation
                assert member.state is not PeerState.LEFT or agent in self.left, (node.name, agent)
            self.check_bounds(node)

    def check_bounds(self, node: SimNode) -> None:
        assert node.engine is not None
        members, links = node.engine.membership, node.engine.links
        count = len(self.mesh.nodes)
        assert len(members.members) < count
        assert len(members.members.order._round) <= count
        assert len(links.table) <= LINKS_MAX
        assert len(links._attempts) == 0
        assert len(links._dialing.targets) <= count
        assert len(members.gossip) <= GOSSIP_MAX


def make_trouble(mesh: SimMesh, watch: Watch, rng: random.Random) -> None:
    """One phase: the network gets worse, and somebody comes or goes."""
    mesh.network.faults = Faults(
        loss=rng.choice([0, 0.1, 0.3]),
        duplicate=rng.choice([0, 0.1]),
        reorder=rng.choice([0, 0.2]),
        delay_s=(0.0005, rng.choice([0.003, 0.3])),
    )
    for _ in range(rng.randint(0, 4)):
        one, other = rng.sample(mesh.nodes, 2)
        mesh.network.cut(one.name, other.name)
        if rng.random() < 0.5:
            mesh.network.cut(other.name, one.name)
    node = rng.choice(mesh.nodes)
    if node.engine is None:
        node.start()
    elif rng.random() < 0.6:
        way = rng.choice(["crash", "power cut", "leave"])
        if way == "leave":
            watch.left.add(node.agent)
            node.leave()
        else:
            node.crash(silently=way == "power cut")
    for _ in range(4):
        mesh.world.run(rng.uniform(0.05, 5.0))
        watch.check()
    if rng.random() < 0.3:
        mesh.network.heal()


def test_faults_break_nothing_and_healing_ends_with_one_view(seeds: range) -> None:
    for seed in seeds:
        mesh, rng = SimMesh(seed), random.Random(seed)
        watch = Watch(mesh)
        with transcript(mesh):
            mesh.add(rng.randint(2, 6))
            for _ in range(PHASES):
                make_trouble(mesh, watch, rng)
            mesh.network.heal()
            for node in mesh.nodes:
                if node.engine is None:
                    node.start()
            mesh.discover()
            mesh.world.run_until(mesh.agree, HEAL_S, 0.25)
            watch.check()
            mesh.world.run(5.0)
            assert mesh.agree(), "the view did not last"


def test_a_partition_heals_by_itself_without_discovery() -> None:
    for seed in range(20):
        mesh = SimMesh(seed)
        with transcript(mesh):
            mesh.add(6)
            mesh.world.run_until(mesh.agree, 5.0)
            for one in mesh.nodes[:3]:
                for other in mesh.nodes[3:]:
                    mesh.network.cut(one.name, other.name)
                    mesh.network.cut(other.name, one.name)
            mesh.world.run(30.0)
            sides = [{n.agent for n in half} for half in (mesh.nodes[:3], mesh.nodes[3:])]
            for node in mesh.nodes:
                alive = {a for a, state in node.view().items() if state is PeerState.ALIVE}
                (own,) = [side for side in sides if node.agent in side]
                assert alive == own - {node.agent}
            mesh.network.heal()
            mesh.world.run_until(mesh.agree, 90.0, 0.25)


def test_one_way_cuts_with_a_third_helping_kill_nobody() -> None:
    for seed in range(20):
        mesh = SimMesh(seed)
        with transcript(mesh):
            mesh.add(3)
            mesh.world.run_until(mesh.agree, 5.0)
            mesh.network.cut("n0", "n1")
            for _ in range(240):
                mesh.world.run(0.5)
                states = {state for node in mesh.nodes for state in node.view().values()}
                assert states <= {PeerState.ALIVE, PeerState.SUSPECT}


def test_the_same_seed_gives_the_same_transcript() -> None:
    def run(seed: int) -> tuple[str, int, int]:
        mesh, rng = SimMesh(seed), random.Random(seed)
        mesh.add(5)
        watch = Watch(mesh)
        for _ in range(PHASES):
            make_trouble(mesh, watch, rng)
        return mesh.world.transcript(), mesh.world.events, mesh.network.frames

    for seed in (1, 2, 3):
        assert run(seed) == run(seed)
    assert run(1) != run(2)
