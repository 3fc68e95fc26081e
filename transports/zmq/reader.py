"""Reads a ZeroMQ socket from an asyncio loop, through its FD. Never blocks, never looks inside.

libzmq's FD is edge-triggered: it speaks once, and any call on the socket may eat the edge. So
whoever uses the socket otherwise calls `look` afterwards, and so does a slow tick.
Invariant: after `take` has returned True, or an edge was eaten, a run is scheduled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq

from meshagent.transports.limits import LinkLimits

__all__ = ["FrameReader", "Received", "SocketReader", "has_frames"]

log = logging.getLogger(__name__)

VIEWED_BYTES_MIN = 64 * 1024  # below it a copy is cheaper than what a view brings along
_READABLE, _NOW = int(zmq.POLLIN), int(zmq.NOBLOCK)
SKIPPED_PARTS_MAX = 4096  # parts of a refused frame that are dropped in one turn: about 1 ms


def has_frames(source: zmq.Socket[bytes]) -> bool:
    """Whether something waits to be read. pyzmq takes twice as long to look at an option, and ten
    times for an exception that says so."""
    return bool(zmq.zmq_poll([(source, _READABLE)], 0))


class SocketReader:
    """Calls `take` when the socket may have something; `take` returns True if it left some.

    Its argument says whether the socket has spoken: then there is something, most likely.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        source: zmq.Socket[bytes],
        take: Callable[[bool], bool],
    ) -> None:
        self._loop = loop
        self._source = source
        self._take = take
        self._due = False
        self._closed = False
        self._fd = int(source.getsockopt(zmq.FD))
        loop.add_reader(self._fd, self._run, True)
        self.poke()  # libzmq speaks only of what comes after somebody has looked in vain

    def poke(self) -> None:
        """Read again soon, once however often this is called in a turn."""
        if not self._due and not self._closed:
            self._due = True
            self._loop.call_soon(self._again)

    def look(self) -> None:
        """Poke if the socket has something that no edge will tell us about."""
        if not self._due and not self._closed and has_frames(self._source):
            self.poke()

    def close(self) -> None:
        """Stop reading; the socket is closed by its owner, afterwards."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)

    def _again(self) -> None:
        self._due = False
        if not self._closed:
            self._run(False)

    def _run(self, spoke: bool) -> None:
        due, self._due = self._due, True  # whoever sends meanwhile need not look: `take` does, last
        left = True
        try:
            left = self._take(spoke)
        except zmq.ZMQError:
            left = False
            if not self._closed:
                log.exception("A socket could not be read.")
        finally:
            self._due = due
            if left:
                self.poke()


class Received:
    """One frame as it came: no `route` on a dialled link, no `refusal` when within bounds."""

    __slots__ = ("first", "parts", "refusal", "route", "size")

    def __init__(self, route: bytes, first: zmq.Frame) -> None:
        self.route = route
        self.first = first
        self.parts: list[bytes | memoryview] = [first.bytes]
        self.size = len(self.parts[0])
        self.refusal = ""


class FrameReader:
    """Takes one frame at a time from a socket, within the bounds on parts and bytes."""

    def __init__(self, source: zmq.Socket[bytes], limits: LinkLimits, *, routed: bool) -> None:
        self._source, self._recv = source, source.recv
        self._limits = limits
        self._routed = routed
        self.skipping = False

    def read(self, *, expected: bool = False) -> Received | None:
        """The next frame; None when there is none, or while a refused one is being skipped.

        `expected`: most likely there is one. Then it is not asked for, which takes a while; if
        there is none after all, to hear that takes longer.
        """
        if self.skipping and not self._skip():
            return None
        if not expected and not has_frames(self._source):
            return None
        try:
            route = self._recv(_NOW) if self._routed else b""
            # Not copied at first: a Frame knows whether more follows, which saves a library
            # call for each part (370 against 210 thousand frames/s), and who sent it.
            frame = self._recv(_NOW, copy=False)
        except zmq.Again:
            return None
        received = Received(route, frame)
        if frame.more:
            self._read_more(frame, received)
        elif received.size > self._limits.frame_bytes_max:
            received.refusal = "oversize"
        return received

    def _read_more(self, frame: zmq.Frame, received: Received) -> None:
        while frame.more and not received.refusal:
            frame = self._recv(_NOW, copy=False)
            # A large part is not copied at all: the view keeps libzmq's memory until it is let go.
            part = frame.buffer if len(frame) >= VIEWED_BYTES_MIN else frame.bytes
            received.parts.append(part)
            received.size += len(part)
            if len(received.parts) > self._limits.frame_parts_max:
                received.refusal = "parts"
            elif received.size > self._limits.frame_bytes_max:
                break
        if received.size > self._limits.frame_bytes_max:
            received.refusal = "oversize"
        self.skipping = frame.more

    def _skip(self) -> bool:
        """Drop the rest of a refused frame; False when the turn is over before its end."""
        for _ in range(SKIPPED_PARTS_MAX):
            if not self._recv(_NOW, copy=False).more:
                self.skipping = False
                return True
        return False
