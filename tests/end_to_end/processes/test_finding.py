"""Two terminals, one command each, and two agents see each other."""

from __future__ import annotations

import pytest
from end_to_end.processes.harness import Mesh, Node

pytestmark = pytest.mark.process


def time_to_meet(first: Node, second: Node) -> float:
    """From the second one's start-up until each lists the other."""
    start = second.joined.at
    met = (
        first.wait_for_peer(second.agent, "alive"),
        second.wait_for_peer(first.agent, "alive"),
    )
    return max(seen.at for seen in met) - start


def test_two_joins_in_a_fresh_folder_see_each_other_within_a_second(mesh: Mesh) -> None:
    first = mesh.join("tester")
    first.joined  # noqa: B018 - waits
    second = mesh.join("backend")
    assert time_to_meet(first, second) < 1.0
    assert not first.err
    assert not second.err


def test_mdns_alone_finds_within_two_seconds(mesh: Mesh) -> None:
    first = mesh.join("tester", discovery="mdns")
    first.joined  # noqa: B018 - waits
    second = mesh.join("backend", discovery="mdns")
    assert time_to_meet(first, second) < 2.0


def test_both_sources_run_by_default(mesh: Mesh) -> None:
    node = mesh.join("tester", discovery="")
    node.joined  # noqa: B018 - waits
    assert mesh.run("status", "--json").json["health"] == {
        "file": "ok",
        "mdns": "ok",
        "store": "ok",
    }


def test_peer_option_finds_without_any_discovery(mesh: Mesh) -> None:
    first = mesh.join("tester", discovery="none")
    address = first.joined.event["addresses"][0]
    second = mesh.join("backend", "--peer", address, discovery="none")
    assert time_to_meet(first, second) < 2.0


def test_outside_a_project_agents_of_one_person_share_a_mesh(bare: Mesh) -> None:
    here, there = bare.root / "here", bare.root / "there"
    here.mkdir()
    there.mkdir()
    first = bare.join("tester", cwd=here)
    first.joined  # noqa: B018 - waits
    second = bare.join("backend", cwd=there)
    assert time_to_meet(first, second) < 1.0
    assert first.joined.event["mesh"] == "personal"
    assert (bare.root / "data" / "meshagent" / "mesh.key").stat().st_mode & 0o777 == 0o600
    assert not list(here.iterdir())


def test_inside_a_project_its_mesh_is_found_upward(mesh: Mesh) -> None:
    deep = mesh.project / "src" / "deep"
    deep.mkdir(parents=True)
    first = mesh.join("tester", cwd=deep)
    assert first.joined.event["mesh"] == "project"
    second = mesh.join("backend", "--dir", str(mesh.project), cwd=mesh.root)
    assert time_to_meet(first, second) < 1.0
    assert not (mesh.root / "data").exists(), "the personal mesh is not touched"
    listed = mesh.run("peers", "--json", cwd=mesh.root, env={"MESHAGENT_DIR": str(mesh.project)})
    assert {peer["agent"] for peer in listed.json} == {first.agent, second.agent}
