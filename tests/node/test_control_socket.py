"""What a session may ask of a node that has only just started."""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest

from meshagent.core.model.peers import AgentId
from meshagent.errors import AmbiguousPeer, NoSuchPeer
from meshagent.node import control_socket as control
from meshagent.node.control_socket import ControlServer

BACKEND, TESTER, REVIEWER = (
    AgentId(f"{role}-k3f9a2qd") for role in ("backend", "tester", "reviewer")
)


class Room:
    """Meets the peer when it was asked for so many times."""

    def __init__(self, unknown_times: int, why: type[NoSuchPeer] = NoSuchPeer) -> None:
        self.unknown_times, self.why, self.asked = unknown_times, why, 0

    def __getattr__(self, verb: str) -> Any:
        return None  # what the others do is not asked here

    def recipients(self, to: str) -> list[AgentId]:
        self.asked += 1
        if self.asked <= self.unknown_times:
            raise self.why(f"Nobody here is called {to!r}.")
        return [BACKEND]

    async def send(self, to: list[AgentId], texts: list[str]) -> list[Any]:
        assert to == [BACKEND]
        return []


def answer(room: Room, do: str, **request: object) -> dict[str, Any]:
    """What a session is told that asks a node which has just started."""

    async def ask(path: Path) -> dict[str, Any]:
        server = ControlServer(None, room, path, logging.getLogger())  # type: ignore[arg-type]
        await server.start()
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(json.dumps({"id": 1, "do": do, **request}).encode() + b"\n")
        said: dict[str, Any] = json.loads(await reader.readline())
        writer.close()
        await writer.wait_closed()
        await server.close()
        return said

    with tempfile.TemporaryDirectory(prefix="ma-", dir="/tmp") as folder:  # for a short path
        return asyncio.run(ask(Path(folder) / "socket"))


def recipients(room: Room, to: str) -> list[AgentId]:
    found: list[AgentId] = answer(room, "recipients", to=to)["result"]
    return found


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "LOOK_S", 0.0)


@pytest.fixture
def has_run_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MEETING_S", -1.0)


def test_a_name_is_waited_for_by_a_node_that_has_just_started() -> None:
    room = Room(unknown_times=5)
    assert recipients(room, "backend") == [BACKEND]
    room = Room(unknown_times=5)
    assert answer(room, "send", to="backend", text="hello")["result"] == []
    assert room.asked == 6


class Clock:
    """Goes on by 10 ms at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 0.01
        return self.now


class Gathering(Room):
    """Meets one more peer at every twentieth look, three in all."""

    def recipients(self, to: str) -> list[AgentId]:
        self.asked += 1
        return [BACKEND, TESTER, REVIEWER][: 1 + self.asked // 20]


def test_a_group_is_whole_when_nobody_has_joined_it_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "time", Clock())
    for group in ("@all", "@worker"):
        assert recipients(Gathering(0), group) == [BACKEND, TESTER, REVIEWER]
    assert recipients(Gathering(0), "any:worker") == [BACKEND]


@pytest.mark.usefixtures("has_run_for_a_while")
def test_a_group_is_what_is_known_to_one_that_has_run_for_a_while() -> None:
    room = Gathering(0)
    assert recipients(room, "@all") == [BACKEND]
    assert room.asked == 1


@pytest.mark.usefixtures("has_run_for_a_while")
def test_a_name_that_nobody_has_is_told_at_once_by_one_that_has_run_for_a_while() -> None:
    room = Room(unknown_times=5)
    told = answer(room, "send", to="backend", text="hello")["error"]
    assert told["exit_code"] == NoSuchPeer.exit_code
    assert room.asked == 1


def test_a_name_that_several_have_is_told_at_once() -> None:
    room = Room(unknown_times=5, why=AmbiguousPeer)
    told = answer(room, "recipients", to="backend")["error"]
    assert told["exit_code"] == AmbiguousPeer.exit_code
    assert room.asked == 1
