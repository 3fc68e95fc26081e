"""A node in the background: it has joined when the command returns, or the command says why not."""

from __future__ import annotations

import os
import re
import signal
import socket

import pytest
from end_to_end.processes.harness import Mesh, finish, wait_until

pytestmark = pytest.mark.process


def test_detach_returns_when_it_has_joined_and_leave_waits_for_its_end(mesh: Mesh) -> None:
    ran = mesh.run("join", "--role", "tester", "--detach", "--discovery", "file")
    assert ran.code == 0
    told = re.fullmatch(r"(tester-\w{8}) runs in the background \(pid (\d+)\)\.\n", ran.out)
    assert told, ran.out
    agent, pid = told[1], int(told[2])
    assert ran.err == f"End it with: meshagent leave --as {agent}\n"
    assert mesh.holder(agent) == pid
    status = mesh.run("status", "--json").json
    assert (status["agent"], status["pid"]) == (agent, pid)
    left = mesh.run("leave", "--json")
    assert left.json == {"agent": agent, "left": True}
    assert mesh.holder(agent) is None
    assert not mesh.registry_file(agent).exists()
    wait_until(lambda: not _lives(pid), "its process to end", 2.0)


def test_a_detached_node_survives_its_terminal(mesh: Mesh) -> None:
    window = mesh.screen("join", "--role", "tester", "--detach", "--json", "--discovery", "file")
    assert window.wait() == 0
    window.hang_up()
    status = mesh.run("status", "--json").json
    assert status["agent"] in window.drawn
    assert os.getsid(status["pid"]) == status["pid"], "a session of its own"
    os.kill(status["pid"], signal.SIGTERM)
    wait_until(lambda: not _lives(status["pid"]), "its process to end", 5.0)
    assert not mesh.registry_file(status["agent"]).exists(), "a clean end by signal too"


def test_what_stops_a_detached_node_is_told_with_its_code(mesh: Mesh) -> None:
    node = mesh.join("tester")
    running = mesh.command("join", "--as", node.agent, "--detach")
    damaged = mesh.make_agent("backend")
    damaged.key_file.write_text("nonsense")
    corrupt = mesh.command("join", "--role", "backend", "--detach", "--json")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        busy = finish(mesh.command("join", "--role", "x", "--detach", "--listen", address))
    refused, broken = finish(running), finish(corrupt)
    assert (busy.code, refused.code, broken.code) == (2, 5, 1)
    assert f"Another program listens at {address}" in busy.err
    assert f"is running already (pid {node.pid})" in refused.err
    assert f"meshagent leave --as {node.agent}" in refused.err
    assert "agent.key is damaged" in broken.err
    for ran in (busy, refused, broken):
        assert ran.out == ""
        assert "Traceback" not in ran.err
        assert len(ran.err.splitlines()) <= 2


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
