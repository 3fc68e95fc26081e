"""What is said by multicast is a hint from nobody: absurd, false and crowded records do no harm."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import time
from collections.abc import Iterator

import pytest
from end_to_end.intruders.conftest import Attacked
from end_to_end.intruders.test_strangers import hidden_from_strangers

pytestmark = pytest.mark.process

GROUP = ("224.0.0.251", 5353)
FAKES = 2_000
PTR, TXT, A, SRV, ANY_FLUSH, IN = 12, 16, 1, 33, 0x8001, 1
SERVICE = b"\x0a_meshagent\x04_tcp\x05local\x00"
LISTENED_S = 3.0
DISCOVERY = "mdns"  # for the members; on the loopback interface, where they listen


@contextlib.contextmanager
def multicast() -> Iterator[socket.socket]:
    """A socket that speaks to the group, and hears it, on the loopback interface only."""
    loopback = socket.inet_aton("127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as spoken:
        spoken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        spoken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        spoken.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, loopback)
        spoken.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 0)
        spoken.bind(GROUP)
        membership = socket.inet_aton(GROUP[0]) + loopback
        spoken.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
        yield spoken


def name(*labels: bytes) -> bytes:
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\x00"


def answer(owner: bytes, kind: int, data: bytes, ttl: int = 120) -> bytes:
    rights = IN if kind == PTR else ANY_FLUSH
    return owner + struct.pack("!HHIH", kind, rights, ttl, len(data)) + data


def announcement(instance: bytes, txt: bytes, port: int, address: bytes) -> bytes:
    """A whole mDNS answer: pointer, service, text and address."""
    owner = bytes([len(instance)]) + instance + SERVICE
    host = name(instance[:63], b"local")
    answers = [
        answer(SERVICE, PTR, owner),
        answer(owner, SRV, struct.pack("!HHH", 0, 0, port) + host),
        answer(owner, TXT, txt),
        answer(host, A, address),
    ]
    return struct.pack("!HHHHHH", 0, 0x8400, 0, len(answers), 0, 0) + b"".join(answers)


def txt(*entries: bytes) -> bytes:
    return b"".join(bytes([len(entry)]) + entry for entry in entries)


def ours(attacked: Attacked, agent: bytes) -> bytes:
    return txt(b"v=1", b"mesh=" + attacked.secret.tag.encode(), b"id=" + agent)


def absurd(attacked: Attacked) -> list[bytes]:
    tag = b"mesh=" + attacked.secret.tag.encode()
    local = socket.inet_aton("127.0.0.1")
    good = ours(attacked, b"fake-aaaaaaaa")
    return [
        announcement(b"no-text", b"", 4711, local),
        announcement(b"long-text", (b"\xff" + b"x" * 255) * 20, 4711, local),
        announcement(b"text-past-its-end", b"\xffx", 4711, local),
        announcement(b"no-id", txt(b"v=1", tag), 4711, local),
        announcement(b"bad-id", ours(attacked, b"../../etc/passwd"), 4711, local),
        announcement(b"escape", ours(attacked, b"\x1b[31m-aaaaaaaa"), 4711, local),
        announcement(b"own-id", ours(attacked, attacked.node.agent.encode()), 4711, local),
        announcement(b"port-0", good, 0, local),
        announcement(b"everywhere", good, 4711, bytes(4)),
        announcement(b"a-group", good, 4711, socket.inet_aton("224.0.0.1")),
        announcement(b"short-address", good, 4711, b"\x7f"),
        announcement(b"\xff\xfe\x00\x01", good, 4711, local),
        announcement(b"x" * 63, good, 4711, local),
        struct.pack("!HHHHHH", 0, 0x8400, 0, 65535, 0, 0) + SERVICE,  # more promised than there is
        struct.pack("!HHHHHH", 0, 0x8400, 0, 1, 0, 0) + b"\xc0\x0c" * 100,  # points at itself
        os.urandom(1400),
        b"",
    ]


def test_absurd_records_are_ignored_and_counted(attacked: Attacked) -> None:
    with multicast() as spoken:
        for _ in range(3):
            for packet in absurd(attacked):
                spoken.sendto(packet, GROUP)
            time.sleep(0.3)
        time.sleep(2)
    assert not attacked.newcomers
    ignored = attacked.nodes.ask(attacked.node, "status")["ignored"]
    for why in ("mdns mesh", "mdns id", "mdns addresses"):
        assert ignored.get(why, 0) >= 1, ignored


def test_a_stranger_learns_nothing_from_multicast(attacked: Attacked) -> None:
    """But that there is a node, at which address, with which key, of a mesh with that tag."""
    attacked.nodes.ask(attacked.node, "status", text="a secret status")
    question = struct.pack("!HHHHHH", 0, 0, 1, 0, 0, 0) + SERVICE + struct.pack("!HH", PTR, IN)
    heard = b""
    with multicast() as spoken:
        spoken.settimeout(0.2)
        deadline, asked_at = time.monotonic() + LISTENED_S, 0.0
        while time.monotonic() < deadline:
            if time.monotonic() - asked_at > 1:
                asked_at = time.monotonic()
                spoken.sendto(question, GROUP)
            with contextlib.suppress(TimeoutError):
                heard += spoken.recv(9000)
    assert attacked.node.agent[-8:].encode() in heard
    for hidden in (attacked.node.agent.encode(), *hidden_from_strangers(attacked)):
        assert hidden not in heard


def test_2000_made_up_instances_are_bounded(attacked: Attacked) -> None:
    """All of this mesh, as far as anyone can tell, and all at ports where nobody listens."""
    chance = random.Random(7)
    with multicast() as spoken:
        for number in range(FAKES):
            agent = f"fake{number}-{''.join(chance.choices('abcdefgh234567', k=8))}".encode()
            port = chance.randrange(2000, 20_000)
            packet = announcement(agent, ours(attacked, agent), port, socket.inet_aton("127.0.0.1"))
            spoken.sendto(packet, GROUP)
            if number % 50 == 0:
                time.sleep(0.15)
    time.sleep(5)
    assert not attacked.newcomers
    assert attacked.nodes.ask(attacked.node, "status")["ignored"]["mdns full"] > 0
