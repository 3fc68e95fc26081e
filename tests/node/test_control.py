"""What a session may ask of a node that has only just started."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from meshagent.core.types import AgentId
from meshagent.errors import AmbiguousPeer, NoSuchPeer
from meshagent.node import control
from meshagent.node.control import ControlServer

BACKEND = AgentId("backend-k3f9a2qd")


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
