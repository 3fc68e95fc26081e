"""An agent runs once: resumed when it is free, a second one when it is not, never twice."""

from __future__ import annotations

import shutil
import signal
from typing import Any

import pytest
from end_to_end.processes.harness import Mesh, finish, wait_until

from meshagent.node import agents
from meshagent.storage.folders.agent_lock import AgentLock
from meshagent.storage.folders.agents import AgentFolder, create_agent

pytestmark = pytest.mark.process

AT_ONCE = 20


def test_the_same_role_resumes_what_is_free_and_makes_a_second_when_it_is_not(mesh: Mesh) -> None:
    first = mesh.join("tester")
    first.joined  # noqa: B018 - waits
    second = mesh.join("tester")
    assert second.agent != first.agent
    first.signal(signal.SIGKILL)  # a crash leaves the lock's file and the registry's
    first.wait()
    third = mesh.join("tester")
    assert third.agent == first.agent
    assert len(list(mesh.folder.agents.iterdir())) == 2

    refused = mesh.run("join", "--as", third.agent)
    assert refused.code == 5
    assert refused.err.splitlines() == [
        f"meshagent: The agent {third.agent} is running already (pid {third.pid}).",
        f"  End it with: meshagent leave --as {third.agent}",
    ]
    assert third.process.poll() is None


def test_who_was_cut_off_comes_back_before_who_left_later(mesh: Mesh) -> None:
    crashed, left = mesh.join("tester"), mesh.join("tester")
    assert left.agent != crashed.agent
    crashed.signal(signal.SIGKILL)
    crashed.wait()
    left.signal(signal.SIGTERM)
    assert left.wait() == 0
    assert [mesh.join("tester").agent, mesh.join("tester").agent] == [crashed.agent, left.agent]


def test_an_agent_that_is_known_and_does_not_run_is_named_with_the_way_to_start_it(
    mesh: Mesh,
) -> None:
    stopped, running = mesh.make_agent("tester").agent, mesh.join("backend")
    assert running.agent
    refused = mesh.run("status", "--as", "tester")
    assert refused.code == 4
    assert f"start it: meshagent join --as {stopped}" in refused.err


def test_twenty_joins_at_the_same_instant_are_twenty_agents(mesh: Mesh) -> None:
    nodes = [mesh.join("tester", discovery="none") for _ in range(AT_ONCE)]
    ids = {node.agent for node in nodes}
    assert len(ids) == AT_ONCE
    assert {mesh.holder(agent) for agent in ids} == {node.pid for node in nodes}
    assert {path.name for path in mesh.folder.agents.iterdir()} == ids, "none made in vain"
    assert not [node.err for node in nodes if node.err]


def test_a_new_agent_that_another_join_resumes_first_is_left_to_it(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between making an agent and locking it, another join of the same role may find it."""
    rivals: list[AgentLock] = []

    def made_and_taken(*arguments: Any) -> AgentFolder:
        folder = create_agent(*arguments)
        if not rivals:
            rivals.append(AgentLock(folder.lock_file))
            assert rivals[0].acquire()
        return folder

    monkeypatch.setattr(agents, "create_agent", made_and_taken)
    taken = agents.take_agent(mesh.folder, "tester", None, ())
    assert taken.lock.held
    assert taken.folder.lock_file != rivals[0].path
    for lock in (taken.lock, *rivals):
        lock.release()


def test_a_copy_of_a_running_agent_is_refused_and_the_first_goes_on(mesh: Mesh) -> None:
    first = mesh.join("tester", discovery="")
    watcher = mesh.join("watcher", discovery="")
    first.wait_for_peer(watcher.agent, "alive")
    copy = mesh.root / "copy"
    copy.mkdir()
    shutil.copytree(mesh.folder.path, copy / ".meshagent")
    shutil.rmtree(copy / ".meshagent" / "registry")  # found on the network, not by its file

    second = mesh.join("tester", discovery="", cwd=copy)
    assert second.wait() == 5
    assert "copy" in second.err
    assert first.agent in second.err
    assert "another --role or --name" in second.err
    assert "Traceback" not in second.err

    assert first.process.poll() is None
    ran = mesh.run("peers", "--json", "--as", watcher.agent)
    assert [(peer["agent"], peer["state"]) for peer in ran.json] == [(first.agent, "alive")]
    assert all(event["state"] == "alive" for event in watcher.peer_events(first.agent))


def test_as_finds_an_agent_by_name_and_says_so_when_it_can_not(mesh: Mesh) -> None:
    agent = mesh.make_agent("tester").agent
    mesh.make_agent("backend")
    unknown = mesh.command("join", "--as", "nobody")
    node = mesh.join("tester", "--as", "test")
    assert node.agent == agent
    refused = finish(unknown)
    assert refused.code == 4
    assert "nobody" in refused.err
    assert agent in refused.err, "who could be meant"
    node.signal(signal.SIGTERM)
    assert node.wait() == 0
    by_environment = mesh.run("join", "--detach", "--json", env={"MESHAGENT_AGENT": "tester"})
    assert by_environment.json["agent"] == agent
    wait_until(lambda: mesh.holder(agent) == by_environment.json["pid"], "the lock")
