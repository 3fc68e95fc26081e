"""Whatever is wrong: one sentence, the next step, the right code, and nothing changed on disk."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from end_to_end.processes.harness import COMMAND, Mesh, finish

from meshagent.core.model.invites import Invite, format_invite

pytestmark = pytest.mark.process

INVITE = format_invite(Invite(b"s" * 32, "theirs", "alice-k3f9a2qd", ("127.0.0.1:9",)))


def _nothing(_: Mesh) -> None:
    pass


@dataclass(frozen=True)
class Case:
    """A wrong call, and what must be said about it."""

    arguments: tuple[str, ...]
    code: int
    says: tuple[str, ...]
    prepare: Callable[[Mesh], object] = _nothing
    text: str = ""
    cwd: str = "project"
    env: dict[str, str] = field(default_factory=dict)


def _write(path: str, content: bytes) -> Callable[[Mesh], object]:
    return lambda mesh: (mesh.root / path).write_bytes(content)


def _damage_agent_key(mesh: Mesh) -> None:
    mesh.make_agent("tester").key_file.write_bytes(b"agentkey1:00\n")


def _append_to_settings(line: str) -> Callable[[Mesh], object]:
    def append(mesh: Mesh) -> None:
        with mesh.folder.settings_file.open("a") as file:
            file.write(line)

    return append


JOIN = ("join", "--role", "tester")
FILE = _write("file", b"a regular file")
NEXT_JOIN = "meshagent join --role tester"

CASES = {
    "role": Case(("join", "--role", "No Good!"), 2, ("role 'No Good!'", "Try 'no-good'")),
    "role, first use": Case(("join", "--role", "Ä"), 2, ("role 'Ä'", "Try"), cwd="home"),
    "name": Case((*JOIN, "--name", "../up"), 2, ("name '../up'", "Try 'up'")),
    "capability": Case((*JOIN, "--capability", "a b"), 2, ("capability 'a b'", "Try 'a-b'")),
    "no role": Case(("join",), 2, ("A role is needed", NEXT_JOIN)),
    "init in no folder": Case(
        ("init", "../file/x"), 1, ("Can't create", "not a folder", "Check the path"), FILE
    ),
    "personal mesh in no folder": Case(
        JOIN, 1, ("Can't create", "something else is in its place", "Move that"),
        FILE, cwd="home", env={"XDG_DATA_HOME": "file"},
    ),
    "no mesh there": Case((*JOIN, "--dir", "../home"), 2, ("no mesh in", "meshagent init")),
    "not our address": Case(
        (*JOIN, "--listen", "192.0.2.1"), 2, ("192.0.2.1 is not an address of this", "--listen")
    ),
    "not an address": Case((*JOIN, "--listen", "127.0.0.1:x"), 2, ("not an address", "host:port")),
    "not a peer": Case((*JOIN, "--peer", "nowhere"), 2, ("'nowhere' is not an", "host:port")),
    "agent.key": Case(
        JOIN, 1, ("agent.key is damaged", "Restore it", "remove the folder"), _damage_agent_key
    ),
    "mesh.key": Case(
        JOIN, 1, ("mesh.key is damaged", "Restore"),
        _write("project/.meshagent/mesh.key", b"\0" * 9),
    ),
    "mesh.toml, setting": Case(
        JOIN, 2, ("unknown setting 'discovry'", "Did you mean 'discovery'?"),
        _append_to_settings('discovry = "file"\n'),
    ),
    "mesh.toml, value": Case(
        JOIN, 2, ("discovery can't be 'fil'", "Did you mean 'file'?"),
        _append_to_settings('discovery = "fil"\n'),
    ),
    "mesh.toml, syntax": Case(
        JOIN, 2, ("not valid TOML", "line"), _append_to_settings("discovery file\n")
    ),
    "not an invite": Case(
        (*JOIN, "--invite", "-"), 5, ("not an invite", "meshagent invite"),
        text="hello\n", cwd="home",
    ),
    "damaged invite": Case(
        (*JOIN, "--invite", "-"), 5, ("damaged", "whole last line"), text=INVITE[:-3], cwd="home"
    ),
    "no invite": Case((*JOIN, "--invite", "-"), 5, ("No invite", "Copy"), cwd="home"),
    "invite for all to read": Case(
        (*JOIN, "--invite", INVITE), 2, ("does not belong on the command line", "--invite -"),
        cwd="home",
    ),
    "invite into another mesh": Case(
        (*JOIN, "--invite", "-"), 2, ("a mesh already, with another secret", "another folder"),
        text=INVITE,
    ),
    "good invite, bad role": Case(
        ("join", "--role", "B A", "--invite", "-"), 2, ("role 'B A'", "Try"),
        text=INVITE, cwd="home",
    ),
    "unknown agent": Case(
        ("join", "--as", "nobody"), 4, ("no agent 'nobody'", NEXT_JOIN), cwd="home"
    ),
    "empty role": Case(("join", "--role", ""), 2, ("role ''", "Try"), cwd="home"),
    "negative wait": Case(("send", "backend", "hello", "--wait", "-1"), 2, ("--wait", "-1")),
    "unknown command": Case(("jion",), 2, ("jion",)),
    "unknown option": Case(("join", "--rol", "x"), 2, ("--rol", "--role")),
    "unknown discovery": Case((*JOIN, "--discovery", "lan"), 2, ("'lan'", "mdns")),
    "peers of nobody": Case(("peers",), 5, ("No agent of this mesh is running", NEXT_JOIN)),
    "status, first use": Case(("status",), 5, ("No agent of this", NEXT_JOIN), cwd="home"),
    "leave nobody": Case(("leave", "--as", "x"), 4, ("answers to 'x'", NEXT_JOIN)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bad_input_is_one_clear_error_and_changes_nothing(mesh: Mesh, case: Case) -> None:
    case.prepare(mesh)
    with _unchanged(mesh):
        env = {key: str(mesh.root / value) for key, value in case.env.items()}
        options = {"cwd": mesh.root / case.cwd, "env": env, "stdin": subprocess.PIPE}
        for_people = mesh.command(*case.arguments, **options)
        for_programs = mesh.command(*case.arguments, "--json", **options)
        people, programs = finish(for_people, case.text), finish(for_programs, case.text)
    _check_for_people(people.code, people.err, case)
    assert programs.code == case.code
    error = json.loads(programs.err)["error"]
    assert set(error) == {"message", "hint", "exit_code"}
    assert error["exit_code"] == case.code
    assert error["message"]
    assert error["hint"]
    assert people.out == programs.out == ""
    assert INVITE not in people.err + programs.err


@pytest.mark.parametrize("known", [False, True], ids=["new agent", "known agent"])
def test_a_busy_port_changes_nothing(mesh: Mesh, known: bool) -> None:
    if known:
        mesh.make_agent("tester")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with _unchanged(mesh):
            ran = mesh.run(*JOIN, "--listen", address)
        says = (f"Another program listens at {address}", "--listen")
        _check_for_people(ran.code, ran.err, Case(JOIN, 2, says))
        with _unchanged(mesh):  # a good invite is not half accepted
            ran = mesh.run(
                *JOIN, "--listen", address, "--invite", "-", text=INVITE, cwd=mesh.root / "home"
            )
        _check_for_people(ran.code, ran.err, Case(JOIN, 2, says))


@pytest.mark.namespaces
@pytest.mark.parametrize("known", [False, True], ids=["new agent", "known agent"])
def test_a_read_only_folder_is_named(mesh: Mesh, known: bool) -> None:
    if known:
        mesh.make_agent("tester")
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    with _unchanged(mesh):
        ran = subprocess.run(
            ["unshare", "-m", "sh", "-c", script, str(mesh.project), *COMMAND, *JOIN],
            cwd=mesh.root, env=mesh.environment(MESHAGENT_DIR=str(mesh.project)),
            capture_output=True, text=True, timeout=20,
        )  # fmt: skip
    says = ("the filesystem is read-only", "--dir")
    _check_for_people(ran.returncode, ran.stderr, Case(JOIN, 1, says))


def test_a_damaged_agent_keeps_no_other_from_joining(mesh: Mesh) -> None:
    _damage_agent_key(mesh)
    node = mesh.join("backend")
    assert node.agent.startswith("backend-")


def _check_for_people(code: int, err: str, case: Case) -> None:
    assert code == case.code, err
    for words in case.says:
        assert words in err
    assert "Traceback" not in err
    ours = [line for line in err.splitlines() if line.startswith("meshagent: ")]
    from_click = [line for line in err.splitlines() if line.startswith("Error: ")]
    assert len(ours + from_click) == 1, err
    if ours:
        assert len(err.splitlines()) == 2, "what happened, and the next step"
    else:
        assert "--help" in err


@contextmanager
def _unchanged(mesh: Mesh) -> Iterator[None]:
    before = mesh.listing()
    yield
    after = mesh.listing()
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert not changed, sorted(map(Path, changed))
