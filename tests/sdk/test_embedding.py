"""`async with meshagent.join(…)`: several in one process, and nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest

import meshagent
from meshagent.node import wiring
from meshagent.node.driver import Driver
from meshagent.storage.folders.agent_lock import AgentLock
from meshagent.storage.folders.mesh_folder import MeshFolder

pytestmark = pytest.mark.process

PATIENCE_S = 20.0
ROUNDS = 5


def run(body: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await body

    asyncio.run(bounded())


async def sees(node: meshagent.Node, agent: str, state: str = "alive") -> dict[str, Any]:
    async for event in node.events():
        if event.kind == "peer" and (event.data["agent"], event.data["state"]) == (agent, state):
            return event.data
    raise AssertionError(f"{node.agent} ended and never saw {agent} {state}")


def test_two_nodes_in_one_process_see_each_other_come_work_and_go(project: Path) -> None:
    async def body() -> None:
        async with meshagent.join(role="tester", capabilities=["python"]) as tester:
            async with meshagent.join(role="backend", name="bob", discovery="file") as backend:
                assert backend.agent.startswith("bob-")
                assert (backend.role, backend.mesh) == ("backend", "project")
                await asyncio.gather(sees(tester, backend.agent), sees(backend, tester.agent))
                (peer,) = backend.peers
                assert isinstance(peer, meshagent.Peer)
                assert (peer.agent, peer.role, peer.capabilities) == (
                    tester.agent, "tester", ("python",),
                )  # fmt: skip
                assert peer.state is meshagent.PeerState.ALIVE
                assert peer.addresses == tester.addresses

                status = tester.status("reading the log", presence="working")
                assert (status["status"], status["presence"]) == ("reading the log", "working")
                assert status["peers"] == {"alive": 1, "suspect": 0, "gone": 0}
                async for event in backend.events():
                    if event.data.get("status") == "reading the log":
                        break
                assert backend.peers[0].presence is meshagent.Presence.WORKING
            await sees(tester, backend.agent, "left")

    run(body())


def test_events_tell_who_is_here_first_and_end_with_the_node(project: Path) -> None:
    async def body() -> None:
        async with meshagent.join("a", discovery="file") as a:
            async with meshagent.join("b", discovery="file") as b:
                await sees(b, a.agent)
                listening = asyncio.create_task(collect(b.events()))
                await asyncio.sleep(0)
            events = await listening
            assert events[0].kind == "peer"
            assert events[0].data["agent"] == a.agent

    async def collect(events: AsyncIterator[meshagent.Event]) -> list[meshagent.Event]:
        return [event async for event in events]

    run(body())


def test_leave_from_another_process_ends_wait(project: Path) -> None:
    async def body() -> None:
        async with meshagent.join("tester", discovery="file") as node:
            waiting = asyncio.create_task(node.wait())
            leave = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "meshagent", "leave", stdout=subprocess.PIPE
            )
            await waiting
        out, _ = await leave.communicate()
        assert leave.returncode == 0
        assert out.decode() == f"{node.agent} has left.\n"

    run(body())


def test_nothing_stays_behind_when_the_body_is_cancelled(project: Path) -> None:
    async def one_round() -> str:
        joined: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def body() -> None:
            async with meshagent.join("tester") as node:
                joined.set_result(node.agent)
                await asyncio.sleep(PATIENCE_S)

        task = asyncio.create_task(body())
        agent = await joined
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return agent

    async def rounds() -> None:
        agents = {await one_round()}  # the first loads modules, which may keep files open
        before = await _held()
        for _ in range(ROUNDS):
            agents.add(await one_round())
            assert await _held() == before
        (agent,) = agents  # the same one is resumed each time
        assert AgentLock(project / ".meshagent" / "agents" / agent / "lock").holder() is None
        assert not list((project / ".meshagent" / "registry").iterdir())
        assert not _sockets()

    run(rounds())


def test_an_error_in_the_body_propagates_and_the_node_leaves(project: Path) -> None:
    async def body() -> None:
        async with meshagent.join("a", discovery="file") as a:
            agent = ""
            try:
                async with meshagent.join("b", discovery="file") as b:
                    agent = b.agent
                    await asyncio.gather(sees(a, agent), sees(b, a.agent))
                    raise ZeroDivisionError
            except ZeroDivisionError:
                await sees(a, agent, "left")
        with pytest.raises(meshagent.UsageError, match="has ended"):
            _ = a.peers

    run(body())


def test_it_runs_under_a_loop_of_another_thread(project: Path) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(body())
        except BaseException as error:
            failures.append(error)
        finally:
            loop.close()

    async def body() -> None:
        async with (
            meshagent.join("a", discovery="file") as a,
            meshagent.join("b", discovery="file") as b,
        ):
            await asyncio.gather(sees(a, b.agent), sees(b, a.agent))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert not failures


def test_nodes_that_start_together_are_different_agents(project: Path) -> None:
    async def one(meeting: asyncio.Barrier) -> str:
        async with meshagent.join("tester", discovery="none") as node:
            await meeting.wait()
            return str(node.agent)

    async def body() -> None:
        meeting = asyncio.Barrier(4)
        agents = await asyncio.gather(*(one(meeting) for _ in range(4)))
        assert len(set(agents)) == 4
        for path in (project / ".meshagent" / "agents").iterdir():
            assert path.stat().st_mode & 0o777 == 0o700

    run(body())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"role": "No Good"}, meshagent.UsageError),
        ({"role": "tester", "discovery": "lan"}, meshagent.UsageError),
        ({"role": "tester", "peers": ["nowhere"]}, meshagent.UsageError),
        ({"role": "tester", "listen": "192.0.2.1"}, meshagent.PortBusy),
        ({"role": "tester", "dir": "/nowhere"}, meshagent.UsageError),
    ],
    ids=["role", "discovery", "peer", "listen", "dir"],
)
def test_a_bad_call_raises_its_own_error_and_makes_nothing(
    project: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], error: type[Exception]
) -> None:
    monkeypatch.chdir(project.parent)  # outside the project: a join would make the personal mesh
    before = sorted(project.parent.rglob("*"))

    async def body() -> None:
        with pytest.raises(error) as raised:
            async with meshagent.join(**options):
                raise AssertionError("joined")
        assert isinstance(raised.value, meshagent.MeshError)
        assert raised.value.hint

    run(body())
    assert sorted(project.parent.rglob("*")) == before


def test_join_errors_are_typed_and_release_what_was_taken(project: Path) -> None:
    mesh = MeshFolder(project / ".meshagent")

    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(meshagent.PortBusy, match=address):
                async with meshagent.join("tester", listen=address):
                    pass
            async with meshagent.join("tester", discovery="file") as node:
                pass
            settings = project / ".meshagent" / "mesh.toml"
            text = settings.read_text()
            settings.write_text(f'{text}listen = "{address}"\n')
            before = {path: path.stat().st_mtime_ns for path in mesh.agents.rglob("*")}
            with pytest.raises(meshagent.PortBusy, match=address):
                async with wiring.open_node(mesh, wiring.JoinOptions("tester")):
                    pass
            assert {path: path.stat().st_mtime_ns for path in mesh.agents.rglob("*")} == before
        settings.write_text("nmae = 'x'\n")
        with pytest.raises(meshagent.ConfigError, match="Did you mean 'name'"):
            async with meshagent.join("tester"):
                pass
        settings.write_text(text)
        (mesh.agents / node.agent / "agent.key").write_text("nonsense")
        with pytest.raises(meshagent.CorruptFile, match="damaged"):
            async with meshagent.join("tester"):
                pass

    run(body())


def test_a_join_that_fails_late_leaves_no_agent_and_no_lock(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up, or the port is taken in the last instant."""

    async def fail(*_: object) -> None:
        raise meshagent.StorageError("The disk is full.")

    async def body() -> None:
        before = await _held()
        with monkeypatch.context() as patched:
            patched.setattr(Driver, "_start", fail)
            with pytest.raises(meshagent.StorageError):
                async with meshagent.join("tester", discovery="file"):
                    pass
        assert not list((project / ".meshagent" / "agents").iterdir())
        assert await _held() == before
        async with meshagent.join("tester", discovery="file") as node:
            assert node.agent

    run(body())


def test_the_log_rotates_and_keeps_a_bounded_number(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wiring, "LOG_BYTES_MAX", 2000)

    async def body() -> None:
        async with meshagent.join("tester", discovery="file") as node:
            (path,) = _sockets()
            for _ in range(150):  # each leaves a line
                reader, writer = await asyncio.open_unix_connection(str(path))
                writer.write(b"nonsense\n")
                assert b"not a line of JSON" in await reader.read()
                writer.close()
                await writer.wait_closed()
            logs = sorted((project / ".meshagent" / "agents" / node.agent).glob("node.log*"))
        assert [each.name for each in logs] == ["node.log", "node.log.1", "node.log.2"]
        assert all(each.stat().st_size <= 2000 for each in logs)

    run(body())


def _sockets() -> list[Path]:
    return list(Path(os.environ["XDG_RUNTIME_DIR"], "meshagent").iterdir())


async def _held() -> tuple[int, list[str]]:
    """Open descriptors and living threads, once those have ended that were told to.

    What watchfiles has under it ends its own thread a moment after it was let go, and nobody can
    join that; one that stayed would make this wait until the test's time is up.
    """
    gc.collect()
    while any(name.startswith("notify-rs") for name in _native_threads()):  # noqa: ASYNC110
        await asyncio.sleep(0)
    return len(os.listdir("/proc/self/fd")), sorted(each.name for each in threading.enumerate())


def _native_threads() -> list[str]:
    names = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended since
            names.append((thread / "comm").read_text())
    return names
