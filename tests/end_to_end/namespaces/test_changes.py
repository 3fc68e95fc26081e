"""The network changes under running agents, and they are the same agents afterwards."""

from __future__ import annotations

import itertools
import time

import pytest
from end_to_end.namespaces.lan import Host, Lan

from meshagent.bench.nodes import NodeProcess, NodeProcesses

pytestmark = [pytest.mark.process, pytest.mark.namespaces]

GONE_S = 5.0  # DESIGN 7
BACK_S = 15.0  # addresses are looked at every 5 s, a redial waits at most a few seconds


def mesh_of(lan: Lan, nodes: NodeProcesses, count: int) -> tuple[list[Host], list[NodeProcess]]:
    """So many machines in one mesh, each with a folder of its own, all seeing all."""
    hosts = [lan.host() for _ in range(count)]
    project = nodes.init("first")
    members = [nodes.join(project, "first", within=hosts[0].within)]
    code = nodes.command("invite", cwd=project, within=hosts[0].within)
    for number, host in enumerate(hosts[1:], 2):
        folder = nodes.folder / f"machine{number}"
        folder.mkdir()
        members.append(
            nodes.join(folder, f"m{number}", "--invite", "-", within=host.within, text=code)
        )
    all_see_all(nodes, members, 10)
    return hosts, members


def all_see_all(nodes: NodeProcesses, members: list[NodeProcess], seconds: float) -> float:
    pairs = list(itertools.permutations(members, 2))
    return nodes.until(lambda: all(a.sees(b) for a, b in pairs), seconds, "all see all")


def no_ghosts(members: list[NodeProcess]) -> None:
    agents = {member.agent for member in members}
    for member in members:
        assert set(member.view) == agents - {member.agent}


def test_a_new_address_is_the_same_peer(lan: Lan, nodes: NodeProcesses) -> None:
    hosts, members = mesh_of(lan, nodes, 3)
    moved = members[1]
    hosts[1].move_to("10.55.0.77")
    nodes.until(
        lambda: all(
            other.sees(moved) and other.view[moved.agent]["addresses"][0].startswith("10.55.0.77")
            for other in (members[0], members[2])
        ),
        BACK_S,
        "the others know the new address",
    )
    all_see_all(nodes, members, BACK_S)
    no_ghosts(members)
    # And it is heard there, not only said to be: news passes in both directions.
    nodes.ask(moved, "status", text="moved in")
    nodes.ask(members[0], "status", text="welcome")
    nodes.until(
        lambda: (
            members[0].view[moved.agent]["status"] == "moved in"
            and moved.view[members[0].agent]["status"] == "welcome"
        ),
        3,
        "word both ways",
    )


@pytest.mark.long
def test_a_card_that_was_down_for_8_s_brings_the_same_peer_back(
    lan: Lan, nodes: NodeProcesses
) -> None:
    hosts, members = mesh_of(lan, nodes, 3)
    away = members[2]
    hosts[2].card("down")
    down = time.monotonic()
    nodes.until(lambda: members[0].sees(away, "gone"), 8, "the others miss it")
    assert members[0].when(away, "gone") - down < GONE_S + 1
    time.sleep(max(0.0, down + 8 - time.monotonic()))
    hosts[2].card("up")
    all_see_all(nodes, members, BACK_S)
    no_ghosts(members)


def test_a_machine_that_vanishes_without_a_word_is_gone_in_5_s(
    lan: Lan, nodes: NodeProcesses
) -> None:
    """No packet says so: neither a FIN nor a reset, as when a cable is pulled."""
    hosts, members = mesh_of(lan, nodes, 4)
    lost, others = members[3], members[:3]
    hosts[3].pull_cable()
    lost.kill()
    pulled = time.monotonic()
    nodes.until(
        lambda: all(other.sees(lost, "gone") for other in others), GONE_S + 1, "gone everywhere"
    )
    for other in others:
        assert other.when(lost, "gone") - pulled < GONE_S
        for peer in others:
            assert not set(other.states_of(peer, pulled)) & {"suspect", "gone"}


@pytest.mark.long  # the simulator shows it for hundreds of partitions
def test_two_halves_that_were_apart_end_with_one_view(lan: Lan, nodes: NodeProcesses) -> None:
    hosts, members = mesh_of(lan, nodes, 4)
    left, right = members[:2], members[2:]
    for host in hosts[2:]:
        host.plug_into("right")
    across = [pair for pair in itertools.permutations(members, 2) if len({*pair} & {*left}) == 1]
    nodes.until(
        lambda: all(a.sees(b, "gone") for a, b in across), 12, "each half has given up the other"
    )
    for half in (left, right):
        assert half[0].sees(half[1])
        assert half[1].sees(half[0])
    nodes.ask(left[0], "status", text="said on the left")
    nodes.ask(right[0], "status", text="said on the right")
    for host in hosts[2:]:
        host.plug_into("left")
    all_see_all(nodes, members, 30)
    nodes.until(
        lambda: all(
            other.view[left[0].agent]["status"] == "said on the left" for other in right
        ) and all(other.view[right[0].agent]["status"] == "said on the right" for other in left),
        5,
        "what was said meanwhile",
    )  # fmt: skip
    no_ghosts(members)
