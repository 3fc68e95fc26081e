"""The events of a ZeroMQ socket's connections. Never decides what follows from them.

Invariant: events come out in the order in which libzmq's thread made them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import zmq

from meshagent.transports.zmq.reader import has_frames

__all__ = ["DIALLING_EVENTS", "LISTENING_EVENTS", "Monitor", "dialled_end"]

LISTENING_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
"""On the ROUTER, whose monitor a stranger can fill: only what carries a descriptor."""

HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

DIALLING_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | HANDSHAKE_FAILED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
)

_EVENT = struct.Struct("=HI")


def dialled_end(event: int, *, opened: bool) -> str:
    """Why a dialled link ends with this event; empty when it does not."""
    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
        return ""
    if event & HANDSHAKE_FAILED:
        return "handshake"
    if opened:
        return "lost"
    # Disconnected between connecting and the end of the handshake: the door did not open.
    return "handshake" if event == zmq.EVENT_DISCONNECTED else "refused"


class Monitor:
    """The events of one socket, read without waiting."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], name: str, watched: zmq.Socket[bytes],
        events: int, events_max: int,
    ) -> None:  # fmt: skip
        endpoint = f"inproc://monitor-{name}"
        self._watched = watched
        watched.monitor(endpoint, events)
        self.socket = context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, events_max)
        self.socket.connect(endpoint)

    def read(self, happened: Callable[[int, int], None]) -> None:
        """Pass on every waiting event with its value; RCVHWM limits how many there can be."""
        recv = self.socket.recv
        while not self.socket.closed and has_frames(self.socket):
            frame = recv(zmq.NOBLOCK, copy=False)
            event, value = _EVENT.unpack(frame.bytes)
            while frame.more:
                frame = recv(zmq.NOBLOCK, copy=False)
            happened(event, value)

    def close(self) -> None:
        """Stop watching; call it before the watched socket is closed.

        The order matters. libzmq's thread waits for ever in an event that has no reader, and
        holds the lock that stopping needs while it waits: so make room, stop, then stop reading.
        """
        self.read(lambda event, value: None)
        self._watched.disable_monitor()
        self.socket.close(linger=0)
