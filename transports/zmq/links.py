"""What the ZeroMQ transport knows of each link. Decides nothing.

Invariant: a Dialled link has at most one DealerConnection, and whoever removes it closes it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import zmq

from meshagent.core.model.peers import LinkId
from meshagent.transports.limits import DIALLED_DESCRIPTORS, INBOUND_DESCRIPTORS
from meshagent.transports.zmq.inbound_connections import AcceptedConnection
from meshagent.transports.zmq.monitor import Monitor
from meshagent.transports.zmq.reader import FrameReader, SocketReader

__all__ = ["DealerConnection", "Dialled", "Inbound"]


@dataclass(eq=False, slots=True)
class DealerConnection:
    """The sockets of one attempt to connect, and their readers; the first reads frames."""

    dealer: zmq.Socket[bytes]
    monitor: Monitor
    frames: FrameReader
    readers: list[SocketReader] = field(default_factory=list)

    def close(self, linger_ms: int) -> None:
        """Close the sockets; frames that were sent get `linger_ms` to leave."""
        for reader in self.readers:
            reader.close()
        self.monitor.close()
        self.dealer.close(linger=linger_ms)


@dataclass(eq=False, slots=True)
class Dialled:
    """A link that we dial: opened when its handshake is done, ending once `end` says why."""

    link: LinkId
    deadline: float
    opened: bool = False
    end: str = ""
    connection: DealerConnection | None = None
    untried: list[tuple[str, int]] = field(default_factory=list)
    resolving: asyncio.Task[None] | None = None
    cost = DIALLED_DESCRIPTORS


@dataclass(eq=False, slots=True)
class Inbound:
    """A link that another agent dialled: known by its routing id, from its first frame on."""

    link: LinkId
    route: bytes
    connection: AcceptedConnection | None
    cost = INBOUND_DESCRIPTORS
