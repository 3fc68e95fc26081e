"""Which accepted connection an inbound link belongs to. Reads no frame and no event itself.

libzmq names an inbound connection by its file descriptor, in two streams that are read apart:
the monitor (accepted, disconnected) and the frames (first frame). Descriptors are reused, so a
frame's descriptor alone does not say whether its sender still lives.

One thread of libzmq makes all of it, so for one connection the order is: accepted, frames,
disconnected. The owner reads the monitor to its end after a first frame and before `claim`, and
calls `take_lost` only when the frames are read to their end. Then:
- the connection of a first frame is always among the unclaimed ones of its descriptor;
- when there is only one, it is that one; when there are several, nobody can tell which: their
  links share them, and are lost when the last of them is gone.
Invariant: a disconnect never ends the link of a later connection.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

from meshagent.core.model.peers import LinkId

__all__ = ["AcceptedConnection", "InboundConnections", "shut_down"]


@dataclass(eq=False, slots=True)
class AcceptedConnection:
    """One accepted connection. `claimed` after its first frame; `link` if it is certain which."""

    descriptor: int
    ends: object
    claimed: bool = False
    gone: bool = False
    link: LinkId | None = None


@dataclass(eq=False, slots=True)
class SharedDescriptor:
    """Connections on one descriptor and their links, where nobody can tell which is whose."""

    connections: list[AcceptedConnection] = field(default_factory=list)
    links: list[LinkId] = field(default_factory=list)


class InboundConnections:
    """Every accepted connection until it is gone and its frames are read."""

    def __init__(self) -> None:
        self._live: dict[int, AcceptedConnection] = {}
        self._unclaimed: dict[AcceptedConnection, None] = {}
        self._shared: dict[int, SharedDescriptor] = {}
        self._disconnected: list[AcceptedConnection] = []

    def accepted(self, descriptor: int) -> None:
        """A connection came; nothing is known about who it is."""
        self.disconnected(descriptor)  # in case that event was lost
        connection = AcceptedConnection(descriptor, _ends_of(descriptor))
        self._live[descriptor] = connection
        self._unclaimed[connection] = None

    def disconnected(self, descriptor: int) -> None:
        """The newest connection on this descriptor is gone; its frames may be unread."""
        connection = self._live.pop(descriptor, None)
        if connection is not None:
            connection.gone = True
            self._disconnected.append(connection)

    def claim(self, descriptor: int, link: LinkId) -> AcceptedConnection | None:
        """The connection this link's first frame came from; None when that can't be told."""
        candidates = [each for each in self._unclaimed if each.descriptor == descriptor]
        for each in candidates:
            each.claimed = True
            del self._unclaimed[each]
        shared = self._shared.get(descriptor)
        if shared is None and len(candidates) <= 1:
            for each in candidates:
                each.link = link
            return candidates[0] if candidates else None
        shared = self._shared.setdefault(descriptor, SharedDescriptor())
        shared.connections += candidates
        shared.links.append(link)
        return None

    @property
    def has_disconnected(self) -> bool:
        """Whether `take_lost` would return something."""
        return bool(self._disconnected)

    def take_lost(self) -> tuple[list[LinkId], int]:
        """Links whose connection is gone, and how many connections ended without a frame."""
        gone, self._disconnected = self._disconnected, []
        for connection in gone:
            self._unclaimed.pop(connection, None)
        lost = [each.link for each in gone if each.link is not None]
        for descriptor, shared in list(self._shared.items()):
            if all(each.gone for each in shared.connections):
                lost += self._shared.pop(descriptor).links
        return lost, sum(not each.claimed for each in gone)

    def silent(self) -> Iterator[AcceptedConnection]:
        """Connections that live and have not sent a frame, the oldest first."""
        return (each for each in self._unclaimed if not each.gone)

    def __len__(self) -> int:
        return len(self._unclaimed)


def shut_down(connection: AcceptedConnection) -> None:
    """Close the connection behind libzmq, which has no call for that and sees it as lost.

    The addresses of both ends are compared with those when it was accepted: a descriptor that was
    reused meanwhile is left alone.
    """
    if connection.ends is None:
        return
    with contextlib.suppress(OSError), _socket_on(connection.descriptor) as opened:
        if (opened.getsockname(), opened.getpeername()) == connection.ends:
            opened.shutdown(socket.SHUT_RDWR)


def _ends_of(descriptor: int) -> object:
    with contextlib.suppress(OSError), _socket_on(descriptor) as connection:
        return (connection.getsockname(), connection.getpeername())
    return None


@contextlib.contextmanager
def _socket_on(descriptor: int) -> Iterator[socket.socket]:
    """A socket on a copy of the descriptor: closing it leaves libzmq's own untouched."""
    copy = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with connection:
        yield connection
