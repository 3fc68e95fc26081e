"""Asks the machine, its nodes and its network. Judges nothing; writes no file.

Invariant: no question waits longer than its bound, and none raises for what the world answers.
Nothing is sent but to addresses that were passed in, and multicast never leaves the machine.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

__all__ = [
    "Device",
    "DialAnswer",
    "NodeAnswer",
    "Surroundings",
    "ask_node",
    "descriptor_limit",
    "devices",
    "in_parallel",
    "is_stopped",
    "knock",
    "multicast_trouble",
    "surroundings",
]

NODE_ANSWER_S = 2.0  # a node answers in milliseconds; on a machine that swaps in a second
NODE_ANSWER_BYTES_MAX = 16 * 1024 * 1024  # a thousand peers take less than one
CONNECT_S = 1.0  # a LAN answers in milliseconds; longer means that packets are dropped
DOOR_S = 2.0  # of which CONNECT_S for the connection; a busy machine needs time for the handshake
RESOLVE_S = 2.0  # the system's own patience with a name server can be half a minute
MULTICAST_S = 0.5  # it comes back within the same machine
PARTING_MS = 100  # for the goodbye to a door that opened
MDNS_GROUP = "224.0.0.251"
DEVICES_MAX = 64
PARALLEL_MAX = 64

_IFF_UP = 0x1
_SIOCGIFFLAGS = 0x8913  # linux/sockios.h
_ZMTP_SIGNATURE_BYTES = 10  # 0xff, eight bytes, 0x7f: what every ZeroMQ socket says first

T = TypeVar("T")
R = TypeVar("R")


def in_parallel(ask: Callable[[T], R], questions: Sequence[T], patience_s: float) -> list[R | None]:
    """Each answer in its place; None for what has not come in time or was one too many."""
    answers: list[R | None] = [None] * len(questions)

    def work(place: int) -> None:
        answers[place] = ask(questions[place])

    # Daemons: a name server that never answers must not keep the command from ending.
    workers = [
        threading.Thread(target=work, args=(place,), daemon=True)
        for place in range(min(len(questions), PARALLEL_MAX))
    ]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + patience_s
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
    return list(answers)


# -- nodes on this machine ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """What a node said of itself and of its peers; `trouble` when it said nothing of use."""

    status: Mapping[str, Any]
    peers: Sequence[Mapping[str, Any]]
    trouble: str = ""
    hangs: bool = False


def ask_node(control: str, patience_s: float = NODE_ANSWER_S) -> NodeAnswer:
    """Attach to a node's socket and ask; a node that hangs costs `patience_s`, not more."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as session:
            session.settimeout(patience_s)
            session.connect(control)
            session.sendall(b'{"id":1,"do":"status"}\n{"id":2,"do":"peers"}\n')
            lines = _read_lines(session, 2, time.monotonic() + patience_s)
    except TimeoutError:
        return NodeAnswer({}, (), f"no answer within {patience_s:.0f} s", hangs=True)
    except OSError as error:
        return NodeAnswer({}, (), error.strerror or str(error))
    return _parse_answers(lines)


def _read_lines(session: socket.socket, wanted: int, deadline: float) -> list[bytes]:
    data = b""
    while data.count(b"\n") < wanted and len(data) < NODE_ANSWER_BYTES_MAX:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        session.settimeout(left_s)
        more = session.recv(1 << 16)
        if not more:
            break
        data += more
    return data.split(b"\n")[:wanted]


def _parse_answers(lines: Sequence[bytes]) -> NodeAnswer:
    import json

    results = []
    for line in lines:
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            return NodeAnswer({}, (), "it closed the connection")
        if not isinstance(answer.get("result"), dict):
            error = answer.get("error")
            words = error.get("message") if isinstance(error, dict) else None
            return NodeAnswer({}, (), str(words or "it gave an answer of another kind"))
        results.append(answer["result"])
    peers = results[1].get("peers", ())
    return NodeAnswer(results[0], [each for each in peers if isinstance(each, dict)])


def is_stopped(pid: int) -> bool:
    """Whether the process is held by a signal (SIGSTOP, Ctrl-Z). Told on Linux only."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[:1] in (["T"], ["t"])


def descriptor_limit(pid: int = 0) -> int | None:
    """How many files the process (0: this one) may have open; None when nobody can tell."""
    try:
        import resource

        if pid and sys.platform.startswith("linux"):
            soft = resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]
        else:
            soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except (ImportError, OSError):
        return None
    return 1 << 20 if soft < 0 else soft


# -- the network ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Device:
    """A network interface of this machine."""

    name: str
    addresses: tuple[str, ...]
    up: bool


def devices() -> list[Device]:
    """Every interface, with or without an address, up or down."""
    import ifaddr

    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    for adapter in ifaddr.get_adapters():
        for ip in adapter.ips:
            address = ip.ip if isinstance(ip.ip, str) else ip.ip[0]
            found.setdefault(adapter.name, []).append(address)
    return [
        Device(name, tuple(addresses), _is_up(name, bool(addresses)))
        for name, addresses in list(found.items())[:DEVICES_MAX]
    ]


def _is_up(name: str, has_address: bool) -> bool:
    """By its flags; elsewhere than on Linux, an interface with an address counts as up."""
    if not sys.platform.startswith("linux"):
        return has_address
    import fcntl

    request = struct.pack("16sH14s", name.encode()[:15], 0, b"")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request)
        except OSError:
            return has_address
    return bool(struct.unpack_from("H", answer, 16)[0] & _IFF_UP)


def multicast_trouble(address: str) -> str:
    """Why a datagram to the mDNS group does not come back on this IPv4 interface; empty if so.

    On a port of its own, so that no mDNS responder hears it, and with a TTL of 0.
    """
    token = secrets.token_bytes(16)
    interface = socket.inet_aton(address)
    try:
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as hearing,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as speaking,
        ):
            hearing.bind(("" if os.name == "nt" else MDNS_GROUP, 0))
            membership = socket.inet_aton(MDNS_GROUP) + interface
            hearing.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
            speaking.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, interface)
            speaking.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 0)
            speaking.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
            speaking.sendto(token, (MDNS_GROUP, hearing.getsockname()[1]))
            return "" if _hears(hearing, token) else "what was sent did not come back"
    except OSError as error:
        return (error.strerror or str(error)).lower()


def _hears(hearing: socket.socket, token: bytes) -> bool:
    deadline = time.monotonic() + MULTICAST_S
    while (left_s := deadline - time.monotonic()) > 0:
        hearing.settimeout(left_s)
        try:
            if hearing.recv(64) == token:
                return True
        except TimeoutError:
            break
    return False


class DialAnswer(StrEnum):
    """Who answers at an address."""

    OURS = "ours"
    """A door that opens with our mesh secret."""
    FOREIGN = "foreign"
    """ZeroMQ, and the door stays shut: another mesh."""
    OTHER = "other"
    """It speaks, and not our protocol."""
    SILENT = "silent"
    """It takes the connection and says nothing."""
    OPEN = "open"
    """It takes the connection; without our secret no more can be told."""
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    DROPPED = "dropped"
    """Nothing came back in time: a firewall, or nobody there."""
    UNKNOWN = "unknown"
    """No such host name."""


def knock(address: str, door: tuple[bytes, bytes] | None) -> DialAnswer:
    """Who answers at `host:port`. A node of our mesh does not count this as an intruder."""
    from meshagent.core.model.network_addresses import parse_address

    host, port = parse_address(address)
    try:
        known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return DialAnswer.UNKNOWN
    family, _, _, _, target = known[0]
    # The door first: a bare connection that ends without a word counts as a stranger there.
    if door is not None and _opens(str(target[0]), port, door):
        return DialAnswer.OURS
    return _connect(family, target, door is not None)


def _opens(host: str, port: int, door: tuple[bytes, bytes]) -> bool:
    """Whether the handshake succeeds with our mesh's key; then says goodbye as a member would."""
    import zmq
    from nacl.public import PrivateKey

    from meshagent.core.model.network_addresses import format_address
    from meshagent.core.wire.codec import encode
    from meshagent.core.wire.frames import Bye
    from meshagent.transports.limits import LinkLimits
    from meshagent.transports.zmq.monitor import DIALLING_EVENTS, Monitor, dialled_end
    from meshagent.transports.zmq.sockets import Keys, open_dealer

    own = PrivateKey.generate()  # an agent's own key would look like a second node of that agent
    with zmq.Context() as context:
        keys = Keys(*door, bytes(own.public_key), bytes(own))
        dealer = open_dealer(context, keys, LinkLimits(connect_s=CONNECT_S))
        monitor = Monitor(context, "knock", dealer, DIALLING_EVENTS, 16)
        ends: list[str] = []
        try:
            dealer.connect(f"tcp://{format_address(host, port)}")
            if monitor.socket.poll(int(DOOR_S * 1000)):
                monitor.read(lambda event, _: ends.append(dialled_end(event, opened=False)))
            if opened := ends[:1] == [""]:
                dealer.send_multipart(encode(Bye("doctor")), zmq.NOBLOCK)
        except zmq.ZMQError:
            opened = False
        monitor.close()
        dealer.close(linger=PARTING_MS if opened else 0)
    return opened


def _connect(family: int, target: Any, has_door: bool) -> DialAnswer:
    """A plain connection, for the reason that the system gives and the first bytes."""
    deadline = time.monotonic() + CONNECT_S
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(CONNECT_S)
            connection.connect(target)
            if not has_door:
                return DialAnswer.OPEN
            return _greeting(connection, deadline)
    except TimeoutError:
        return DialAnswer.DROPPED
    except OSError as error:
        refused = error.errno in (errno.ECONNREFUSED, errno.ECONNRESET)
        return DialAnswer.REFUSED if refused else DialAnswer.UNREACHABLE


def _greeting(connection: socket.socket, deadline: float) -> DialAnswer:
    first = b""
    with contextlib.suppress(OSError):
        while len(first) < _ZMTP_SIGNATURE_BYTES:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            more = connection.recv(_ZMTP_SIGNATURE_BYTES - len(first))
            if not more:
                break
            first += more
    if not first:
        return DialAnswer.SILENT
    is_zmtp = len(first) == _ZMTP_SIGNATURE_BYTES and first[0] == 0xFF and first[-1] == 0x7F
    return DialAnswer.FOREIGN if is_zmtp else DialAnswer.OTHER


# -- what kind of machine this is -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What stands between this machine and its network."""

    wsl: bool = False
    container: str = ""
    macos: bool = False


def surroundings() -> Surroundings:
    """By the marks that WSL, containers and macOS leave."""
    wsl = "microsoft" in platform.release().lower()
    return Surroundings(wsl, _container(os.environ), sys.platform == "darwin")


def _container(environ: Mapping[str, str]) -> str:
    for mark, kind in (("/.dockerenv", "Docker"), ("/run/.containerenv", "Podman")):
        if os.path.exists(mark):
            return kind
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return "Kubernetes"
    return environ.get("container", "")
