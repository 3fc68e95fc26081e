"""Goal: a second node of one agent stops, the first goes on; and a lying member changes nothing."""

from __future__ import annotations

import random

import pytest

from meshagent.core.model.peers import PeerState
from meshagent.core.model.records import Accusation, Record, sign_accusation, sign_record
from meshagent.core.wire.codec import encode
from meshagent.core.wire.frames import Gossip, Refuse
from meshagent.simulator.blobs import Machine
from meshagent.simulator.mesh import SimMesh
from meshagent.simulator.node import SimNode

SEEDS = range(10)


def copy_of(mesh: SimMesh, node: SimNode, place: str) -> SimNode:
    """A second node from a copy of the agent's folder, at another place in the network."""
    copy = SimNode(mesh, f"{node.name}/{place}", node.identity, Machine())
    copy.runs = node.runs
    assert copy.agent == node.agent
    return copy


def settled(mesh: SimMesh, count: int) -> list[SimNode]:
    nodes = mesh.add(count)
    mesh.world.run_until(mesh.agree, 5.0)
    return nodes


@pytest.mark.parametrize("witness", [True, False])
def test_a_copy_that_starts_later_stops_and_the_first_goes_on(witness: bool) -> None:
    for seed in SEEDS:
        mesh = SimMesh(seed)
        first, *others = settled(mesh, 2 if witness else 1)
        mesh.world.run(2.0)
        copy = copy_of(mesh, first, "copy")
        copy.start([each.hint() for each in (others or [first])])
        mesh.world.run(10.0)
        print(mesh.world.transcript())
        assert copy.engine is None
        assert [each.stop for each in copy.clones] == [True]
        assert first.engine is not None
        assert not any(each.stop for each in first.clones)
        mesh.world.run_until(mesh.agree, 10.0)


def test_a_copy_that_the_first_one_dials_stops_too() -> None:
    for seed in SEEDS:
        mesh = SimMesh(seed)
        (first,) = settled(mesh, 1)
        mesh.world.run(1.0)
        copy = copy_of(mesh, first, "copy")
        copy.start()
        first.hear_of(copy.hint())
        mesh.world.run(5.0)
        assert copy.engine is None, mesh.world.transcript()
        assert first.engine is not None


@pytest.mark.parametrize("silently", [True, False])
@pytest.mark.parametrize("away_s", [0.1, 2.0, 30.0])
def test_a_restart_is_not_taken_for_a_copy(silently: bool, away_s: float) -> None:
    for seed in SEEDS:
        mesh = SimMesh(seed)
        first, *_ = settled(mesh, 3)
        mesh.world.run(2.0)
        first.crash(silently=silently)
        mesh.world.run(away_s)
        first.start([each.hint() for each in mesh.running() if each is not first])
        mesh.world.run_until(mesh.agree, 10.0, 0.05)
        assert first.clones == [], mesh.world.transcript()
        assert all(node.engine and not node.engine.refused()["clone"] for node in mesh.nodes)


def on_every_link(liar: SimNode, parts: list[bytes]) -> None:
    """The liar sends this to whoever it has a link to."""
    assert liar.engine is not None
    for known in list(liar.engine.links.table):
        liar.network.send(liar, known.link, parts)


def test_a_lie_about_a_copy_stops_nobody() -> None:
    for seed in SEEDS:
        mesh = SimMesh(seed)
        *honest, liar = settled(mesh, 4)
        for proof in (b"", b"\x92\x01\xc4\x00"):
            on_every_link(liar, encode(Refuse("clone", "Stop!", proof)))
            mesh.world.run(1.0)
        assert all(node.engine is not None for node in honest), mesh.world.transcript()
        assert all(node.clones == [] for node in honest)
        mesh.world.run_until(mesh.agree, 40.0)


def lie(liar: SimNode, about: SimNode, accuser: SimNode, rng: random.Random) -> bytes:
    """A record or an accusation in somebody else's name, under the liar's signature."""
    assert about.engine is not None
    record: Record = about.engine.me
    later = record.incarnation + rng.choice([0, 1, 1000, 2**61])
    mesh_id = liar.mesh_id
    if rng.random() < 0.5:
        forged = Record(
            record.agent, record.key, later, 0, rng.random() < 0.5, "spy", (), ("6.6.6.6:6",),
            "nowhere", record.presence, "forged", "0",
        )  # fmt: skip
        return sign_record(forged, liar.identity, mesh_id).data
    state = rng.choice([PeerState.SUSPECT, PeerState.GONE])
    said = Accusation(record.agent, record.incarnation, state, accuser.agent)
    return sign_accusation(said, liar.identity, mesh_id).data


def test_forged_gossip_changes_nobodys_view() -> None:
    for seed in range(4):
        mesh, rng = SimMesh(seed), random.Random(seed)
        *honest, liar = settled(mesh, 8)
        for _ in range(50):
            words = tuple(lie(liar, *rng.sample(honest, 2), rng) for _ in range(20))
            on_every_link(liar, encode(Gossip(words)))
            mesh.world.run(0.1)
            for node in honest:
                assert node.engine is not None
                for peer in node.engine.peers():
                    assert peer.state is PeerState.ALIVE, mesh.world.transcript()
                    assert (peer.role, peer.status) == ("tester", "")
        assert mesh.agree()
        for node in honest:
            assert node.engine is not None
            assert node.engine.refused()["forged update"] > 100
            assert node.engine.me.incarnation < (node.runs << 32) + 2000
