"""How our ZeroMQ sockets are set up and written to, and what their errors mean. Never reads one.

Invariant: a socket made here does not outlive its close (LINGER), never beats by itself
(libzmq 4.3.5 can abort in its own heartbeats), and connects once: dialling again is the core's.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import zmq
from zmq.backend import Socket

from meshagent.core.model.network_addresses import format_address
from meshagent.errors import LimitReached, MeshError, PortBusy, TransportError
from meshagent.transports.addresses import is_wildcard
from meshagent.transports.limits import LinkLimits
from meshagent.transports.zmq.zap import DOMAIN

__all__ = [
    "Keys",
    "bind",
    "is_route",
    "mesh_error",
    "open_context",
    "open_dealer",
    "open_router",
    "send_frame",
]

log = logging.getLogger(__name__)

_MORE, _LAST = int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.NOBLOCK)  # computed once: it is slow
_send_part = Socket.send  # of pyzmq's backend, without what pyzmq adds for other sockets

HEAP_KEPT_BYTES = 4 * 1024 * 1024
"""Once a block of this size was freed, glibc keeps smaller blocks for later allocations. Without it
the memory of each large part goes back to the system: 256 page faults for a MiB."""

ROUTE_BYTES = 16
"""Our routing ids: random, one per link, known to the two ends only. See `is_route`."""

NEVER_MS = 24 * 3600 * 1000
"""Not -1: libzmq then drops what the other side sent before it went and we had not read. The
DEALER is closed as soon as its link ends, so that it never comes to a second attempt."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Raw CURVE keys: the door's pair, derived from the mesh secret, and the agent's own."""

    door_public: bytes
    door_secret: bytes
    own_public: bytes
    own_secret: bytes

    def __post_init__(self) -> None:
        keys = (self.door_public, self.door_secret, self.own_public, self.own_secret)
        assert all(len(key) == 32 for key in keys), "CURVE keys are 32 raw bytes"

    def __repr__(self) -> str:  # the door's key is the mesh secret in another form
        return "Keys(…)"


def is_route(route: bytes) -> bool:
    """Whether a routing id is written like ours.

    libzmq numbers peers that bring no id from a constant (0x6b8b4567), and lets another peer
    bring that very number beforehand: both then share one id, and one speaks and hears as the
    other. A random id of 128 bits can't be foreseen, and libzmq ignores whoever repeats it.
    """
    return len(route) == ROUTE_BYTES and route[0] != 0


def open_context(limits: LinkLimits) -> zmq.Context[zmq.Socket[bytes]]:
    """A context with room for all links."""
    bytearray(HEAP_KEPT_BYTES)  # allocated, and freed at once
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    # Three sockets for each dialled link; the default of 1023 would be a hidden limit.
    context.set(zmq.MAX_SOCKETS, 3 * limits.links_max + 16)
    return context


def open_router(
    context: zmq.Context[zmq.Socket[bytes]], keys: Keys, limits: LinkLimits
) -> zmq.Socket[bytes]:
    """The listening socket, not yet bound: the door's key, and ZAP enforced."""
    router = _open(context, zmq.ROUTER, limits)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.BACKLOG, limits.backlog)
    router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    router.setsockopt(zmq.CURVE_SERVER, 1)
    router.setsockopt(zmq.CURVE_PUBLICKEY, keys.door_public)
    router.setsockopt(zmq.CURVE_SECRETKEY, keys.door_secret)
    return router


def open_dealer(
    context: zmq.Context[zmq.Socket[bytes]], keys: Keys, limits: LinkLimits
) -> zmq.Socket[bytes]:
    """The socket of one dialled link, not yet connected."""
    dealer = _open(context, zmq.DEALER, limits)
    dealer.setsockopt(zmq.ROUTING_ID, b"\x01" + os.urandom(ROUTE_BYTES - 1))
    dealer.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
    dealer.setsockopt(zmq.CONNECT_TIMEOUT, int(limits.connect_s * 1000))
    dealer.setsockopt(zmq.CURVE_SERVERKEY, keys.door_public)
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.own_public)
    dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.own_secret)
    dealer.setsockopt(zmq.IPV6, 1)
    return dealer


def _open(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, limits: LinkLimits
) -> zmq.Socket[bytes]:
    opened = context.socket(kind)
    opened.setsockopt(zmq.LINGER, 0)
    opened.setsockopt(zmq.HEARTBEAT_IVL, 0)
    opened.setsockopt(zmq.HANDSHAKE_IVL, int(limits.handshake_s * 1000))
    opened.setsockopt(zmq.MAXMSGSIZE, limits.frame_bytes_max + limits.frame_bytes_margin)
    opened.setsockopt(zmq.SNDHWM, limits.queue_frames_max)
    opened.setsockopt(zmq.RCVHWM, limits.queue_frames_max)
    # The kernel notices a host that vanished; the core's probes are faster and come first.
    opened.setsockopt(zmq.TCP_KEEPALIVE, 1)
    opened.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    opened.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    opened.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    return opened


def bind(router: zmq.Socket[bytes], host: str, port: int) -> tuple[int, bool]:
    """Listen at an IP literal or everywhere; the port, and whether IPv6 is served too."""
    if is_wildcard(host):
        if socket.has_ipv6:
            try:
                return _bind(router, "::", port, ipv6=True), True
            except zmq.ZMQError as error:
                if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.ENODEV):
                    raise
        return _bind(router, "0.0.0.0", port, ipv6=False), False  # noqa: S104 (asked for)
    ipv6 = ":" in host
    return _bind(router, host, port, ipv6=ipv6), ipv6


def _bind(router: zmq.Socket[bytes], host: str, port: int, *, ipv6: bool) -> int:
    router.setsockopt(zmq.IPV6, int(ipv6))
    router.bind(f"tcp://{format_address(host, port)}")
    endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
    return int(endpoint.rstrip("\0").rpartition(":")[2])


def send_frame(through: zmq.Socket[bytes], parts: Sequence[bytes | memoryview]) -> bool:
    """Hand a frame to libzmq, which refuses it at its first part or takes all of it."""
    try:
        for part in parts[:-1]:
            _send_part(through, part, _MORE)
        _send_part(through, parts[-1], _LAST)
    except zmq.ZMQError as error:
        if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
            log.warning("A frame could not be sent: %s", error)
        return False
    return True


def mesh_error(error: zmq.ZMQError, address: str) -> MeshError:
    """Every libzmq error that can reach a user, in our words."""
    number, detail = error.errno, str(error)
    hint = "Choose another with --listen, or port 0 for any free one."
    if number == errno.EADDRINUSE:
        return PortBusy(f"Another program listens at {address}.", hint=hint, address=address)
    if number in (errno.EADDRNOTAVAIL, errno.ENODEV, errno.EINVAL):
        return PortBusy(f"{address} is not an address of this machine.", hint=hint, address=address)
    if number in (errno.EACCES, errno.EPERM):
        return PortBusy(
            f"This user may not listen at {address} (ports below 1024 are reserved).",
            hint=hint,
            address=address,
        )
    if number in (errno.EMFILE, errno.ENFILE):
        return LimitReached(
            "This process can't open any more files or sockets.",
            hint="Raise the limit (ulimit -n) or close something.",
        )
    return TransportError(f"The network socket at {address} failed: {detail}.", errno=number)
