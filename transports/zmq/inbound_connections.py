"""Which accepted connection an inbound link is. Keeps books; the one system call is `cut_off`.

libzmq names an inbound connection by its file descriptor, in two streams that are read apart:
the monitor (accepted, disconnected) and the frames (first frame). Descriptors are reused, so a
frame's descriptor alone does not say whether its sender still lives.

All of it is made by one thread of libzmq, hence for one connection: accepted, then frames, then
disconnected. The owner reads the monitor to its end after a first frame and before `claim`, and
calls `settle` only when the frames are read to their end. Then:
- the connection of a first frame is always among the unclaimed ones of its descriptor;
- when it is the only one, it is that one; when there are several, nobody can tell which: their
  links share them, and are lost when the last of them is gone.
Invariant: a disconnect is never held against a link of a later connection.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

from meshagent.core.model.peers import LinkId

__all__ = ["InboundConnection", "InboundConnections", "cut_off"]


@dataclass(eq=False, slots=True)
class InboundConnection:
    """One accepted connection. `claimed` once a frame came from it, `link` if that is certain."""

    descriptor: int
    ends: object
    claimed: bool = False
    gone: bool = False
    link: LinkId | None = None


@dataclass(eq=False, slots=True)
class Shared:
    """Connections on one descriptor, and links that are theirs in an order nobody knows."""

    arrivals: list[InboundConnection] = field(default_factory=list)
    links: list[LinkId] = field(default_factory=list)


class InboundConnections:
    """Every accepted connection until it is gone and its frames are read."""

    def __init__(self) -> None:
        self._live: dict[int, InboundConnection] = {}
        self._unclaimed: dict[InboundConnection, None] = {}
        self._shared: dict[int, Shared] = {}
        self._departed: list[InboundConnection] = []

    def accepted(self, descriptor: int) -> None:
        """A connection came; nothing is known about who it is."""
        self.disconnected(descriptor)  # a disconnect that we were never told
        arrival = InboundConnection(descriptor, _ends_of(descriptor))
        self._live[descriptor] = arrival
        self._unclaimed[arrival] = None

    def disconnected(self, descriptor: int) -> None:
        """The newest connection on this descriptor is gone; its frames may be unread."""
        arrival = self._live.pop(descriptor, None)
        if arrival is not None:
            arrival.gone = True
            self._departed.append(arrival)

    def claim(self, descriptor: int, link: LinkId) -> InboundConnection | None:
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
        shared = self._shared.setdefault(descriptor, Shared())
        shared.arrivals += candidates
        shared.links.append(link)
        return None

    @property
    def has_departed(self) -> bool:
        """Whether `settle` has something to tell."""
        return bool(self._departed)

    def settle(self) -> tuple[list[LinkId], int]:
        """Links whose connection is gone, and how many went without ever sending a frame."""
        departed, self._departed = self._departed, []
        for arrival in departed:
            self._unclaimed.pop(arrival, None)
        lost = [each.link for each in departed if each.link is not None]
        for descriptor, shared in list(self._shared.items()):
            if all(each.gone for each in shared.arrivals):
                lost += self._shared.pop(descriptor).links
        return lost, sum(not each.claimed for each in departed)

    def strangers(self) -> Iterator[InboundConnection]:
        """Connections that live and have not sent a frame, the oldest first."""
        return (each for each in self._unclaimed if not each.gone)

    def __len__(self) -> int:
        return len(self._unclaimed)


def cut_off(arrival: InboundConnection) -> None:
    """Shut the connection down under libzmq, which has no call for that and sees it as lost.

    Both ends' addresses are compared with those at its arrival: a descriptor that has meanwhile
    become something else is left alone.
    """
    if arrival.ends is None:
        return
    with contextlib.suppress(OSError), _borrowed(arrival.descriptor) as connection:
        if (connection.getsockname(), connection.getpeername()) == arrival.ends:
            connection.shutdown(socket.SHUT_RDWR)


def _ends_of(descriptor: int) -> object:
    with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
        return (connection.getsockname(), connection.getpeername())
    return None


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """A socket on a copy of the descriptor: closing it leaves libzmq's own untouched."""
    copy = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with connection:
        yield connection
