"""A wire between agents that a test can watch, hold up and cut: a SOCKS proxy on loopback.

Nodes that are started with `DIAL_THROUGH` dial every address through it, whichever side dials, so
that all that passes between them is counted. It never looks into what passes.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable

__all__ = ["DIAL_THROUGH", "Wire"]

READ_BYTES = 64 * 1024
ACCEPTED = b"\x05\x00\x00\x01\x00\x00\x00\x00\x00\x00"

# Run first in a node's process: libzmq can dial through a proxy, our transport just never does.
DIAL_THROUGH = """
import zmq
from meshagent.transports.zmq import transport
opened = transport.open_dealer
def open_dealer(*arguments):
    dealer = opened(*arguments)
    dealer.setsockopt_string(zmq.SOCKS_PROXY, {address!r})
    return dealer
transport.open_dealer = open_dealer
"""


class Wire:
    """Everything that is dialled through it, and how many bytes have passed, both ways."""

    def __init__(self) -> None:
        self.moved = 0
        self._limit: int | None = None
        self._news = threading.Condition()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._start(self._accept)

    @property
    def change(self) -> str:
        """What makes a node use it."""
        host, port = self._listener.getsockname()
        return DIAL_THROUGH.format(address=f"{host}:{port}")

    def hold_at(self, total: int | None) -> None:
        """Let no more pass when `total` bytes have; with None let everything pass."""
        with self._news:
            self._limit = total
            self._news.notify_all()

    def wait_for(self, total: int, within: float) -> None:
        """Until so many bytes have passed."""
        with self._news:
            passed = self._news.wait_for(lambda: self.moved >= total, within)
        assert passed, f"{self.moved} of {total} bytes passed in {within} s"

    def cut(self) -> None:
        """End every connection, without a word to either side; new ones are let through."""
        with self._news:
            cut, self._open = self._open, set()
            self._news.notify_all()
        for each in cut:
            with contextlib.suppress(OSError):
                # A reset rather than an end: what is on its way is lost.
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hold_at(None)
        deadline = time.monotonic() + 10.0
        for thread in self._threads:
            self.cut()
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive()

    def _start(self, work: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._connect, near)

    def _connect(self, near: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            near.settimeout(10.0)
            methods = _exactly(near, 2)[1]
            _exactly(near, methods)
            near.sendall(b"\x05\x00")
            far = self._dial(near)
            near.settimeout(None)
            with self._news:
                self._open |= {near, far}
            with far:
                back = self._start(self._relay, far, near)
                self._relay(near, far)
                back.join()
        near.close()

    def _dial(self, near: socket.socket) -> socket.socket:
        kind = _exactly(near, 4)[3]
        host = _exactly(near, {1: 4, 4: 16}[kind])
        (port,) = struct.unpack("!H", _exactly(near, 2))
        family = {1: socket.AF_INET, 4: socket.AF_INET6}[kind]
        # Also where nobody listens, and then it hangs up: libzmq aborts the whole process when a
        # proxy refuses (4.3.5, "Bad file descriptor" in epoll.cpp), and none of ours ever does.
        near.sendall(ACCEPTED)
        return socket.create_connection((socket.inet_ntop(family, host), port))

    def _relay(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(READ_BYTES):
                self._pass(len(data), source)
                target.sendall(data)
        with self._news:
            self._open -= {source, target}
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _pass(self, count: int, source: socket.socket) -> None:
        with self._news:
            self.moved += count
            self._news.notify_all()
            self._news.wait_for(
                lambda: self._limit is None or self.moved < self._limit or source not in self._open
            )
            if source not in self._open:
                raise ConnectionAbortedError


def _exactly(source: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = source.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data
