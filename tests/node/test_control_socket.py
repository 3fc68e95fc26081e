"""What a session may ask of a node, and what it is told when it asks wrongly or too early."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from meshagent.core.model.peers import AgentId
from meshagent.errors import AmbiguousPeer, NoSuchPeer
from meshagent.node import control_socket as control
from meshagent.node.control_socket import ControlServer
from meshagent.node.mailbox import Mailbox

BACKEND, TESTER, REVIEWER = (
    AgentId(f"{role}-k3f9a2qd") for role in ("backend", "tester", "reviewer")
)
LOG, LOG_FILE = logging.getLogger("tests.control"), Path("/agents/tester/node.log")


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
    return ControlServer(None, room, Path("/nowhere"), LOG, LOG_FILE)  # type: ignore[arg-type]


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


# -- what is asked wrongly ------------------------------------------------------------------------


class Faulty(Room):
    """Has bugs."""

    def __init__(self) -> None:
        super().__init__(0)

    async def read(self, ident: str) -> dict[str, Any]:
        return len(ident)()  # type: ignore[operator]

    async def outbox(self, limit: int, ended: bool) -> list[object]:
        return [object()]  # which no JSON can hold

    async def newest(self) -> int:
        raise KeyError("newest")


def conversation(room: Room, path: Path, *lines: bytes) -> list[dict[str, Any]]:
    """What a session is told which sends these lines: one answer for each until it is cut off."""

    async def talk() -> list[bytes]:
        node = server(room)
        node.path = path / "node.sock"
        await node.start()
        try:
            reader, writer = await asyncio.open_unix_connection(str(node.path))
            writer.write(b"".join(each + b"\n" for each in lines))
            said = [await reader.readline() for _ in lines]
            writer.close()
            return said
        finally:
            await node.close()

    return [json.loads(line) for line in asyncio.run(talk()) if line]


def asked(**request: object) -> bytes:
    return json.dumps({"id": 7, **request}).encode()


MALFORMED: dict[str, tuple[bytes, str, str]] = {
    "a field of another type": (asked(do="read", ident=5), "ident", "valid string"),
    "a field that is missing": (asked(do="send", text="private"), "to", "is missing"),
    "a field that is not known": (asked(do="peers", colour="private"), "colour", "is not known"),
    "a number beyond its limit": (asked(do="inbox", limit=0), "limit", "greater than or equal"),
    "a number as text": (asked(do="outbox", limit="5"), "limit", "valid integer"),
    "no number at all": (b'{"id": 7, "do": "send", "to": "x", "wait_s": NaN}', "wait_s", "finite"),
    "a lifetime that has no end": (asked(do="send", to="x", ttl_s=1e300), "ttl_s", "less than"),
    "a switch as a number": (asked(do="send", to="x", strict=1), "strict", "valid boolean"),
    "half a pair": (asked(do="send", to="x", attach=[["private"]]), "attach.0.1", "is missing"),
    "a presence as an object": (asked(do="status", presence={}), "presence", "valid string"),
    "a request that can't follow": (asked(do="log", follow=True), "follow", "is not known"),
}


@pytest.mark.parametrize(("line", "field", "wrong"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_request_is_told_which_field_is_wrong(
    line: bytes, field: str, wrong: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told, after = conversation(Room(0), tmp_path, line, asked(do="nothing known"))
    assert told["id"] == 7
    assert told["error"]["exit_code"] == 2
    assert repr(field) in told["error"]["message"]
    assert wrong in told["error"]["message"]
    assert told["error"]["message"] in caplog.text
    assert "private" not in caplog.text + str(told)
    assert "'nothing known'" in after["error"]["message"]  # the session goes on


@pytest.mark.parametrize(
    "line", [b"GET / HTTP/1.1", b"[1]", b'{"id": 1}', b'{"do": 5}', b"[" * 9999]
)
def test_what_is_no_request_is_told_so_and_ends_the_session(
    line: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (told,) = conversation(Room(0), tmp_path, line, asked(do="nothing known"))
    assert told["error"]["exit_code"] == 2
    assert told["error"]["message"] in caplog.text


@pytest.mark.parametrize(
    ("request_line", "bug"),
    [
        (asked(do="read", ident="abc"), "TypeError"),
        (asked(do="outbox"), "TypeError"),
        (asked(do="inbox", follow=True), "KeyError"),
    ],
)
def test_a_bug_of_ours_is_never_told_as_the_sessions_mistake(
    request_line: bytes, bug: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (told,) = conversation(Faulty(), tmp_path, request_line)
    assert told["id"] == 7
    assert told["error"]["exit_code"] == 1
    assert "unexpectedly" in told["error"]["message"]
    assert str(LOG_FILE) in told["error"]["hint"]
    assert "Traceback" in caplog.text
    assert bug in caplog.text


def test_a_channel_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    (told,) = conversation(Room(0), tmp_path, asked(do="subscribe", channel="mesh-rumours:/"))
    assert told["error"]["exit_code"] == 2
    assert "'mesh-rumours:/'" in told["error"]["message"]
    assert "mesh-peers:/" in told["error"]["hint"]


def test_every_request_fits_the_method_that_does_it() -> None:
    node = ControlServer(None, Mailbox, Path("/nowhere"), LOG, LOG_FILE)  # type: ignore[arg-type]
    for verb, (model, method) in node._verbs.items():
        fields = dict.fromkeys(model.model_fields)
        itself = [] if inspect.ismethod(method) else [None]
        assert inspect.signature(method).bind(*itself, **fields), verb
