"""Reads ZeroMQ sockets from an asyncio loop, through their FD. Never blocks, never decodes a frame.

The FD of libzmq is edge-triggered: it becomes readable once, and any call on the socket may consume
that edge. So whoever uses the socket otherwise calls `check` afterwards, and so does a slow timer.
Invariant: after `read` has returned True, or an edge was consumed, a run is scheduled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq

from meshagent.transports.limits import LinkLimits

__all__ = ["FrameReader", "ReceivedFrame", "SocketReader", "has_frames"]

log = logging.getLogger(__name__)

VIEWED_BYTES_MIN = 64 * 1024  # below it a copy is cheaper than what a view brings along
_READABLE, _NOW = int(zmq.POLLIN), int(zmq.NOBLOCK)
SKIPPED_PARTS_MAX = 4096  # parts of a refused frame that are dropped in one turn: about 1 ms


def has_frames(source: zmq.Socket[bytes]) -> bool:
    """Whether something waits to be read. Reading an option through pyzmq takes twice as long, and
    an exception that says so ten times."""
    return bool(zmq.zmq_poll([(source, _READABLE)], 0))


class SocketReader:
    """Calls `read` when the socket may have something; `read` returns True if it left some.

    Its argument says whether the FD was readable: then there is something, most likely.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        source: zmq.Socket[bytes],
        read: Callable[[bool], bool],
    ) -> None:
        self._loop = loop
        self._source = source
        self._read_waiting = read
        self._scheduled = False
        self._closed = False
        self._fd = int(source.getsockopt(zmq.FD))
        loop.add_reader(self._fd, self._run, True)
        self.schedule()  # libzmq signals only what comes after a read that found nothing

    def schedule(self) -> None:
        """Read in the next turn of the loop, once however often this is called."""
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._run_scheduled)

    def check(self) -> None:
        """Schedule a read if the socket has something that no edge will report."""
        if not self._scheduled and not self._closed and has_frames(self._source):
            self.schedule()

    def close(self) -> None:
        """Stop reading; the socket is closed by its owner, afterwards."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)

    def _run_scheduled(self) -> None:
        self._scheduled = False
        if not self._closed:
            self._run(False)

    def _run(self, readable: bool) -> None:
        # Set meanwhile, so that a send does not check the socket: `read` does that at its end.
        due, self._scheduled = self._scheduled, True
        left = True
        try:
            left = self._read_waiting(readable)
        except zmq.ZMQError:
            left = False
            if not self._closed:
                log.exception("A socket could not be read.")
        finally:
            self._scheduled = due
            if left:
                self.schedule()


class ReceivedFrame:
    """One frame as it came: no `route` on a dialled link, no `refusal` when within the limits."""

    __slots__ = ("first", "parts", "refusal", "route", "size")

    def __init__(self, route: bytes, first: zmq.Frame) -> None:
        self.route = route
        self.first = first
        self.parts: list[bytes | memoryview] = [first.bytes]
        self.size = len(self.parts[0])
        self.refusal = ""


class FrameReader:
    """Reads one frame at a time from a socket, within the limits on parts and bytes."""

    def __init__(self, source: zmq.Socket[bytes], limits: LinkLimits, *, routed: bool) -> None:
        self._source, self._recv = source, source.recv
        self._limits = limits
        self._routed = routed
        self.skipping = False

    def read(self, *, expected: bool = False) -> ReceivedFrame | None:
        """The next frame; None when there is none, or while a refused one is being skipped.

        `expected`: most likely there is one. Then the socket is not asked first, which is faster
        if there is one and slower if there is none.
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
        received = ReceivedFrame(route, frame)
        if frame.more:
            self._read_more(frame, received)
        elif received.size > self._limits.frame_bytes_max:
            received.refusal = "oversize"
        return received

    def _read_more(self, frame: zmq.Frame, received: ReceivedFrame) -> None:
        while frame.more and not received.refusal:
            frame = self._recv(_NOW, copy=False)
            # A large part is not copied: the view keeps libzmq's memory until it is released.
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
