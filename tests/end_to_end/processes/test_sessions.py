"""Sessions cost the node little, and one that misbehaves costs itself its connection."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from end_to_end.processes.harness import Mesh, Node, Ran, finish, wait_until

from meshagent.discovery.registry import process_start, this_host
from meshagent.errors import NotRunning
from meshagent.node.control_socket import SESSIONS_MAX
from meshagent.session import Session, running_agents

pytestmark = pytest.mark.process

CALLS = 30


@pytest.fixture(scope="module")
def node(shared: Mesh) -> Node:
    node = shared.join("tester")
    node.joined  # noqa: B018 - waits
    return node


def test_the_control_socket_is_private(shared: Mesh, node: Node) -> None:
    path = _socket_of(shared, node)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(shared.registry_file(node.agent).stat().st_mode) == 0o600


def test_thirty_commands_at_once_all_succeed(shared: Mesh, node: Node) -> None:
    calls = [shared.command("peers", "--json") for _ in range(CALLS)]
    for ran in [finish(each) for each in calls]:
        assert (ran.code, ran.out, ran.err) == (0, "[]\n", "")


NONSENSE = {
    "not JSON": b"GET / HTTP/1.1\r\n\r\n",
    "binary": bytes(range(256)) * 40 + b"\n",
    "not a request": b"[1, 2, 3]\n",
    "nested": b"[" * 100_000 + b"\n",
    "a line of 3 MB": b"x" * 3_000_000 + b"\n",
    "half a line": b'{"id": 1, "do": "peers"',
    "status of a wrong type": b'{"id": 1, "do": "status", "text": [7]}\n',
    "presence of a wrong type": b'{"id": 1, "do": "status", "presence": {}}\n',
}


def test_nonsense_costs_only_its_own_connection(shared: Mesh, node: Node) -> None:
    with _attached(shared, node) as witness:
        for data in NONSENSE.values():
            with _attached(shared, node) as session:
                try:
                    session.sendall(data)
                    session.shutdown(socket.SHUT_WR)
                    answer = session.recv(65536)
                except ConnectionError:
                    answer = b""
                assert not answer or json.loads(answer)["error"]["exit_code"] == 2, answer
        assert _ask(witness, {"id": 7, "do": "unheard of"})["error"]["exit_code"] == 2
        assert _ask(witness, {"id": 8, "do": "status"})["result"]["agent"] == node.agent
    assert node.err == ""


def test_sessions_beyond_the_limit_are_told_and_the_rest_go_on(shared: Mesh, node: Node) -> None:
    beyond = 10
    _until_nobody_is_attached(shared, node)
    with ExitStack() as sessions:
        node.signal(signal.SIGSTOP)  # it accepts nobody: all of them come at once
        try:
            crowd = [
                sessions.enter_context(_attached(shared, node))
                for _ in range(SESSIONS_MAX + beyond)
            ]
        finally:
            node.signal(signal.SIGCONT)
        told = [_answer(each) for each in crowd[SESSIONS_MAX:]]  # without having asked
        assert [each["error"]["exit_code"] for each in told] == [6] * beyond
        served = [_ask(each, {"id": 1, "do": "status"}) for each in crowd[:SESSIONS_MAX]]
        assert all(each["result"]["agent"] == node.agent for each in served)
        ran = shared.run("peers")
        assert ran.code == 6
        assert str(SESSIONS_MAX) in ran.err
        assert "Traceback" not in ran.err
    _until_nobody_is_attached(shared, node)
    assert shared.run("peers").code == 0
    assert node.err == ""


def test_a_command_waits_while_too_many_others_wait_to_be_accepted(mesh: Mesh) -> None:
    agent, path = "crowded-k3f9a2qd", mesh.runtime / "node.sock"
    _register(mesh, agent, path)
    with ExitStack() as opened:
        listener = opened.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen(0)
        listener.settimeout(10.0)
        first = opened.enter_context(socket.socket(socket.AF_UNIX))
        first.connect(str(path))
        second = opened.enter_context(socket.socket(socket.AF_UNIX))
        second.setblocking(False)
        with pytest.raises(BlockingIOError):  # the queue is full
            second.connect(str(path))
        command = mesh.command("peers", "--json")
        time.sleep(1.0)  # it has met the full queue by now
        assert command.poll() is None
        opened.enter_context(listener.accept()[0])
        session = opened.enter_context(listener.accept()[0])
        session.recv(1024)
        session.sendall(b'{"id": 1, "result": {"me": {}, "peers": []}}\n')
        ran = finish(command)
    assert (ran.code, ran.out, ran.err) == (0, "[]\n", "")


def test_a_session_that_never_reads_delays_neither_others_nor_the_end(mesh: Mesh) -> None:
    node = mesh.join("tester")
    with _attached(mesh, node) as stalled, _attached(mesh, node) as watching:
        watching.sendall(b'{"id": 1, "do": "subscribe", "channel": "mesh-peers:/"}\n')
        stalled.setblocking(False)
        request = b'{"id": 1, "do": "status"}\n' * 1000
        sent_at = time.monotonic()
        while time.monotonic() - sent_at < 0.3:  # until the node has had enough of us
            try:
                stalled.send(request)
                sent_at = time.monotonic()
            except BlockingIOError:
                time.sleep(0.01)
        with _attached(mesh, node) as other:  # it would wait no longer than for 5 s
            assert _ask(other, {"id": 1, "do": "status"})["result"]["agent"] == node.agent
        node.signal(signal.SIGTERM)
        assert node.wait(5.0) == 0


def test_a_session_is_told_when_its_node_does_not_answer(mesh: Mesh) -> None:
    node = mesh.join("tester")
    watch = mesh.command("peers", "--watch", "--json")
    other = mesh.join("backend")
    other.joined  # noqa: B018 - waits
    assert watch.stdout is not None
    watch.stdout.readline()
    node.signal(signal.SIGKILL)
    other.signal(signal.SIGKILL)
    ended = finish(watch)
    assert ended.code in (0, 5)
    assert "Traceback" not in ended.err
    node.wait()
    # A crashed node's file and socket are still there, and its pid is nobody's.
    ran = mesh.run("peers")
    assert ran.code == 5
    assert "No agent of this mesh is running" in ran.err


def test_a_copy_may_take_longer_than_any_other_answer(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshagent.session.ANSWER_TIMEOUT_S", 0.2)
    path = mesh.runtime / "node.sock"
    _register(mesh, "slow-k3f9a2qd", path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with Session(running_agents(mesh.folder.registry)[0]) as session:
            node, _ = listener.accept()
            answer = threading.Timer(0.6, node.sendall, [b'{"id": 1, "result": "copied"}\n'])
            with node:
                answer.start()
                assert session.ask("backup", path="x") == "copied"
                with pytest.raises(NotRunning, match="timed out"):
                    session.ask("status")
                answer.join()


def _broken_off(mesh: Mesh, *arguments: str, after: bytes = b"") -> Ran:
    """What a command says whose node takes the request, answers so much, and is gone."""
    path = mesh.runtime / "node.sock"
    _register(mesh, "crashed-k3f9a2qd", path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(10.0)
        command = mesh.command(*arguments)
        session, _ = listener.accept()
        with session:
            session.recv(1024)
            session.sendall(after)
    return finish(command)


@pytest.mark.parametrize("words", ["half a line", "silence"])
def test_a_node_that_breaks_off_is_one_clear_error(mesh: Mesh, words: str) -> None:
    peers = b'{"id": 1, "result": {"seq": 0, "snapshot": {"me": {}, "peers": []}}}\n'
    after = peers + b'{"channel": "mesh-' if words == "half a line" else b""
    ran = _broken_off(mesh, "peers", "--watch", "--json", after=after)
    assert (ran.code, ran.out) == (5, "")
    error = json.loads(ran.err)["error"]
    assert "The node of crashed-k3f9a2qd gave no answer" in error["message"]
    assert "node.log" in error["hint"]


def test_a_node_that_breaks_off_while_it_sends_may_have_accepted_the_message(mesh: Mesh) -> None:
    ran = _broken_off(mesh, "send", "backend-aaaaaaaa", "hello")
    assert ran.code == 5
    assert "may have been accepted" in ran.err
    assert "meshagent outbox" in ran.err


def test_neither_log_nor_any_other_file_holds_the_secret(mesh: Mesh) -> None:
    first = mesh.join("tester", "-v")
    agent = first.agent
    invite = mesh.run("invite").out.strip()
    home = mesh.root / "home"
    accepted = mesh.run(
        "join", "--role", "guest", "--invite", "-", "--detach", "--json",
        cwd=home, text=f"{invite}\n",
    )  # fmt: skip
    assert accepted.code == 0, accepted.err
    first.wait_for_peer(accepted.json["agent"], "alive")
    for data in (invite, mesh.folder.read_secret().hex()):
        with _attached(mesh, first) as session:
            session.sendall(data.encode() + b"\n")
            assert data.encode() not in session.recv(1024)
    assert mesh.run("leave", "--dir", str(home)).code == 0
    assert mesh.run("leave", "--as", agent).code == 0
    assert first.wait() == 0

    secret = mesh.folder.read_secret()
    seed = (mesh.folder.agents / agent / "agent.key").read_text().partition(":")[2].strip()
    forms = [secret, invite.encode(), bytes.fromhex(seed), seed.encode()]
    forms += [secret.hex().encode(), base64.b64encode(secret).rstrip(b"=")]
    forms += [base64.urlsafe_b64encode(secret).rstrip(b"="), base64.b32encode(secret).rstrip(b"=")]
    looked = 0
    for path in mesh.root.rglob("*"):
        if path.is_file() and path.name not in ("mesh.key", "agent.key"):
            content = path.read_bytes().lower()
            looked += 1
            assert not [form for form in forms if form.lower() in content], path
    assert looked > 6
    log = (mesh.folder.agents / agent / "node.log").read_text()
    assert f"joined as {agent}" in log
    for path in (home / ".meshagent" / "mesh.key", mesh.folder.key_file):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.path.samefile(mesh.folder.path.parent, mesh.project)


def _socket_of(mesh: Mesh, node: Node) -> Path:
    node.joined  # noqa: B018 - waits
    return Path(json.loads(mesh.registry_file(node.agent).read_text())["control"])


def _register(mesh: Mesh, agent: str, control: Path) -> None:
    """As a node does, with us as its process."""
    entry = {
        "agent": agent, "mesh": "x", "run": "x", "started": "x", "addresses": [],
        "pid": os.getpid(), "process_start": process_start(os.getpid()), "host": this_host(),
        "control": str(control),
    }  # fmt: skip
    mesh.registry_file(agent).write_text(json.dumps(entry))


def _until_nobody_is_attached(mesh: Mesh, node: Node) -> None:
    """The node needs a moment to notice that sessions have ended; it holds a socket for each."""
    path = str(_socket_of(mesh, node))

    def held() -> int:
        lines = Path("/proc/net/unix").read_text().splitlines()
        return sum(line.endswith(f" {path}") for line in lines)

    wait_until(lambda: held() == 1, "only the listening socket to be left")


@contextmanager
def _attached(mesh: Mesh, node: Node) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as session:
        session.settimeout(5.0)
        session.connect(str(_socket_of(mesh, node)))
        yield session


def _ask(session: socket.socket, request: dict[str, object]) -> dict[str, dict[str, object]]:
    session.sendall(json.dumps(request).encode() + b"\n")
    return _answer(session)


def _answer(session: socket.socket) -> dict[str, dict[str, object]]:
    with session.makefile("rb") as lines:
        answer: dict[str, dict[str, object]] = json.loads(lines.readline())
    return answer
