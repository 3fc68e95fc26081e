"""Questions to the world: each ends within its bound, and tells apart what answers."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshagent.core.model.identity import MeshSecret
from meshagent.diagnosis import probes
from meshagent.diagnosis.probes import DialAnswer, ask_node, in_parallel, knock, multicast_trouble

DOOR = MeshSecret(b"s" * 32).door()


@contextmanager
def listening(greeting: bytes | None) -> Iterator[str]:
    """A program on loopback that says this to whoever connects, or nothing at all."""
    callers: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    caller, _ = server.accept()
                except OSError:
                    return
                callers.append(caller)
                if greeting:
                    caller.sendall(greeting)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for caller in callers:
        caller.close()


@pytest.mark.parametrize(
    ("greeting", "answer"),
    [
        (None, DialAnswer.SILENT),
        (b"SSH-2.0-OpenSSH_9.2\r\n", DialAnswer.OTHER),
        (b"\xff" + bytes(8) + b"\x7f", DialAnswer.FOREIGN),
    ],
)
def test_what_answers_at_a_port_is_told_apart(
    greeting: bytes | None, answer: DialAnswer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "DOOR_S", 0.5)
    monkeypatch.setattr(probes, "CONNECT_S", 0.5)
    with listening(greeting) as address:
        began = time.monotonic()
        assert knock(address, DOOR) is answer
        assert time.monotonic() - began < probes.DOOR_S + probes.CONNECT_S + 1
        assert knock(address, None) is DialAnswer.OPEN


def test_a_port_where_nobody_listens_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert knock(address, DOOR) is DialAnswer.REFUSED


@pytest.mark.parametrize("dribble", [b"", b" "])
def test_a_node_that_hangs_or_dribbles_costs_no_more_than_the_bound(
    tmp_path: Path, dribble: bytes
) -> None:
    path = str(tmp_path / "s")
    ended = threading.Event()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()

        def serve() -> None:
            caller, _ = server.accept()
            with caller:
                while not ended.wait(0.05):
                    caller.sendall(dribble)

        thread = threading.Thread(target=serve)
        thread.start()
        began = time.monotonic()
        answer = ask_node(path, 0.4)
        assert time.monotonic() - began < 1
        ended.set()
        thread.join()
    assert answer.hangs
    assert "no answer" in answer.trouble


def test_a_socket_without_a_node_is_trouble_and_not_a_hang(tmp_path: Path) -> None:
    answer = ask_node(str(tmp_path / "none"))
    assert answer.trouble
    assert not answer.hangs


@pytest.mark.parametrize(
    "lines",
    [
        [b"", b""],
        [b"{", b"{}"],
        [b"[]", b"[]"],
        [b'{"id":1,"result":{}}', b'{"id":2,"error":{"message":"no"}}'],
        [b'{"id":1,"result":7}', b'{"id":2,"result":{}}'],
    ],
)
def test_nonsense_from_a_node_is_trouble_and_never_an_exception(lines: list[bytes]) -> None:
    assert probes._parse_answers(lines).trouble


def test_questions_that_never_end_are_left_behind() -> None:
    release = threading.Event()

    def ask(question: int) -> int:
        if question == 1:
            release.wait(10)
        return question

    assert in_parallel(ask, [0, 1, 2], 0.2) == [0, None, 2]
    release.set()


def test_multicast_works_on_loopback_and_says_why_not_elsewhere() -> None:
    assert multicast_trouble("127.0.0.1") == ""
    # An address of the documentation range is on no interface: nothing can be sent.
    assert multicast_trouble("198.51.100.7") != ""


def test_interfaces_are_told_with_their_state() -> None:
    loopback = [each for each in probes.devices() if "127.0.0.1" in each.addresses]
    assert [each.up for each in loopback] == [True]


def test_a_running_process_is_not_stopped() -> None:
    assert not probes.is_stopped(os.getpid())
    assert not probes.is_stopped(2**22 + 1)
