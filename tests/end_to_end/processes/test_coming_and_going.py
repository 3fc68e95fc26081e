"""Crash, leave, pause, move: what the others see, and how soon."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from end_to_end.processes.harness import Mesh, Node, wait_until

from meshagent.discovery.registry import process_start

pytestmark = pytest.mark.process


def met(mesh: Mesh, roles: list[str], *arguments: str) -> list[Node]:
    nodes = [mesh.join(role, *arguments) for role in roles]
    for node in nodes:
        for other in nodes:
            if other is not node:
                node.wait_for_peer(other.agent, "alive")
    return nodes


@pytest.mark.parametrize("size", [2, 5])
def test_a_killed_node_is_gone_everywhere_within_5_s(mesh: Mesh, size: int) -> None:
    *others, victim = met(mesh, [f"role{number}" for number in range(size)])
    killed = victim.signal(signal.SIGKILL)
    for node in others:
        seen = node.wait_for_peer(victim.agent, "gone")
        assert seen.at - killed < 5.0
    for node in others:  # and nobody else was doubted to death
        assert not [
            each for other in others for each in node.peer_events(other.agent)
            if each.get("state") == "gone"
        ]  # fmt: skip


def test_whoever_leaves_has_left_at_once_by_command_signal_or_closed_window(mesh: Mesh) -> None:
    watcher = mesh.join("watcher")
    by_command, by_int, by_term = met(mesh, ["one", "two", "three"])
    window = mesh.screen("join", "--role", "four", "--discovery", "file")

    started = time.monotonic()
    ran = mesh.run("leave", "--as", by_command.agent)
    assert (ran.code, ran.out) == (0, f"{by_command.agent} has left.\n")
    assert mesh.holder(by_command.agent) is None, "leave waits until the node has ended"
    seen = watcher.wait_for_peer(by_command.agent, "left")
    assert seen.at - started < 1.5, "the command's own start included"

    for node, number in ((by_int, signal.SIGINT), (by_term, signal.SIGTERM)):
        sent = node.signal(number)
        assert watcher.wait_for_peer(node.agent, "left").at - sent < 1.0
    for node in (by_command, by_int, by_term):
        assert node.wait() == 0
        assert not node.err
        assert mesh.holder(node.agent) is None
        assert not mesh.registry_file(node.agent).exists()

    def four(event: dict[str, object], state: str) -> bool:
        return event.get("role") == "four" and event.get("state") == state

    watcher.wait_for(lambda event: four(event, "alive"), "the fourth")
    closed = time.monotonic()
    window.hang_up()
    seen = watcher.wait_for(lambda event: four(event, "left"), "the fourth to leave")
    assert seen.at - closed < 1.0


def test_a_paused_node_comes_back_by_itself_as_the_same_agent(mesh: Mesh) -> None:
    watcher, paused = met(mesh, ["watcher", "sleeper"])
    stopped = paused.signal(signal.SIGSTOP)
    seen = watcher.wait_for_peer(paused.agent, "gone", since=stopped)
    assert seen.at - stopped < 5.0
    time.sleep(max(0.0, stopped + 10.0 - time.monotonic()))
    resumed = paused.signal(signal.SIGCONT)
    back = watcher.wait_for_peer(paused.agent, "alive", since=resumed)
    assert back.at - resumed < 5.0
    wait_until(lambda: _states(mesh, watcher) == {paused.agent: "alive"}, "the watcher's list")
    wait_until(lambda: _states(mesh, paused) == {watcher.agent: "alive"}, "the sleeper's list")
    assert watcher.everybody() == {paused.agent}


def test_after_a_restart_at_another_port_it_is_the_same_peer_and_no_ghost(mesh: Mesh) -> None:
    watcher, first = met(mesh, ["watcher", "mover"])
    old = first.joined.event["addresses"]
    killed = first.signal(signal.SIGKILL)
    first.wait()
    again = mesh.join("mover", "--listen", f"127.0.0.1:{_free_port()}")
    assert again.agent == first.agent
    assert again.joined.event["addresses"] != old
    seen = watcher.wait_for(
        lambda event: event.get("addresses") == again.joined.event["addresses"],
        "the new address",
        since=killed,
    )
    assert seen.at - again.joined.at < 2.0
    assert _states(mesh, watcher) == {first.agent: "alive"}
    # A ghost would fall silent and be given up; nothing of the kind comes within its time.
    time.sleep(max(0.0, killed + 5.0 - time.monotonic()))
    assert _states(mesh, watcher) == {first.agent: "alive"}
    assert watcher.everybody() == {first.agent}


def test_a_stale_registry_file_never_shows_as_a_peer(mesh: Mesh) -> None:
    node = mesh.join("tester")
    node.joined  # noqa: B018 - waits
    ours = json.loads(mesh.registry_file(node.agent).read_text())
    ended = subprocess.Popen(["true"])
    ended.wait()
    sleeper = subprocess.Popen(["sleep", "30"])
    try:
        stale = {
            "ended-k3f9a2qd": (ended.pid, ours["process_start"]),
            "reused-k3f9a2qd": (sleeper.pid, ours["process_start"]),
            # Of a kernel that does not tell when a process started: only traffic can tell.
            "untold-k3f9a2qd": (sleeper.pid, None),
            # Nobody is at its address, though its process lives.
            "silent-k3f9a2qd": (sleeper.pid, process_start(sleeper.pid)),
        }
        for agent, (pid, start) in stale.items():
            file = ours | {"agent": agent, "pid": pid, "process_start": start, "run": agent}
            file["addresses"] = [f"127.0.0.1:{_free_port()}"]
            file["control"] = str(mesh.runtime / "nobody.sock")
            _place(mesh.registry_file(agent), file)
        gone = mesh.registry_file("ended-k3f9a2qd")
        wait_until(lambda: not gone.exists(), "the dead one's file to be removed")
        late = mesh.join("late")
        late.wait_for_peer(node.agent, "alive")
        time.sleep(1.0)
        listed = mesh.run("peers", "--json")  # from whichever node does answer
        assert {peer["agent"] for peer in listed.json} == {node.agent, late.agent}
        for each in (node, late):
            assert set(_states(mesh, each)) == {node.agent, late.agent} - {each.agent}
            assert each.everybody() == {node.agent, late.agent} - {each.agent}
    finally:
        sleeper.kill()
        sleeper.wait()


def _states(mesh: Mesh, node: Node) -> dict[str, str]:
    ran = mesh.run("peers", "--json", "--as", node.agent)
    assert ran.code == 0, ran.err
    return {peer["agent"]: peer["state"] for peer in ran.json}


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _place(path: Path, content: dict[str, object]) -> None:
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(json.dumps(content))
    os.replace(aside, path)
