"""What a session may ask of a node that has only just started."""

from __future__ import annotations

import asyncio
import logging
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


def server(room: Room) -> ControlServer:
    return ControlServer(None, room, Path("/nowhere"), logging.getLogger())  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "LOOK_S", 0.0)


def test_a_name_is_waited_for_by_a_node_that_has_just_started() -> None:
    room = Room(unknown_times=5)
    assert asyncio.run(server(room)._recipients("backend")) == [BACKEND]
    room = Room(unknown_times=5)
    assert asyncio.run(server(room)._send("backend", "hello")) == []
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
        found = asyncio.run(server(Gathering(0))._recipients(group))
        assert found == [BACKEND, TESTER, REVIEWER]
    assert asyncio.run(server(Gathering(0))._recipients("any:worker")) == [BACKEND]


def test_a_group_is_what_is_known_to_one_that_has_run_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = Gathering(0)
    node = server(room)
    monkeypatch.setattr(control, "MEETING_S", -1.0)
    assert asyncio.run(node._recipients("@all")) == [BACKEND]
    assert room.asked == 1


def test_a_name_that_nobody_has_is_told_at_once_by_one_that_has_run_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = Room(unknown_times=5)
    node = server(room)
    monkeypatch.setattr(control, "MEETING_S", -1.0)
    with pytest.raises(NoSuchPeer):
        asyncio.run(node._send("backend", "hello"))
    assert room.asked == 1


def test_a_name_that_several_have_is_told_at_once() -> None:
    room = Room(unknown_times=5, why=AmbiguousPeer)
    with pytest.raises(AmbiguousPeer):
        asyncio.run(server(room)._recipients("backend"))
    assert room.asked == 1
