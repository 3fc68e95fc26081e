"""What the ZeroMQ transport keeps of each link. Holds; the transport decides.

Invariant: a Dialled link has at most one DialledSockets, and whoever takes it away closes it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import zmq

from meshagent.core.model.peers import LinkId
from meshagent.transports.limits import DIALLED_DESCRIPTORS, INBOUND_DESCRIPTORS
from meshagent.transports.zmq.inbound_connections import InboundConnection
from meshagent.transports.zmq.monitor import Monitor
from meshagent.transports.zmq.reader import FrameReader, SocketReader

__all__ = ["Dialled", "DialledSockets", "Inbound"]


@dataclass(eq=False, slots=True)
class DialledSockets:
    """The sockets of one attempt to connect, and how to read them."""

    dealer: zmq.Socket[bytes]
    monitor: Monitor
    reader: FrameReader
    drains: list[SocketReader] = field(default_factory=list)

    def close(self, linger_ms: int) -> None:
        for drain in self.drains:
            drain.close()
        self.monitor.close()
        self.dealer.close(linger=linger_ms)


@dataclass(eq=False, slots=True)
class Dialled:
    """A link that we dial: opened when its handshake is done, ending once `end` says why."""

    link: LinkId
    deadline: float
    opened: bool = False
    end: str = ""
    line: DialledSockets | None = None
    untried: list[tuple[str, int]] = field(default_factory=list)
    resolving: asyncio.Task[None] | None = None
    cost = DIALLED_DESCRIPTORS


@dataclass(eq=False, slots=True)
class Inbound:
    """A link that another agent dialled: known by its routing id, from its first frame on."""

    link: LinkId
    route: bytes
    arrival: InboundConnection | None
    cost = INBOUND_DESCRIPTORS
