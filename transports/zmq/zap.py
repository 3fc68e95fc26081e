"""Who may come in: the ZAP handler of one transport. Never sees a frame or an agent's name.

CURVE has already proved that the caller holds the mesh secret; the door says no to keys that
misbehaved, to a source that comes too often, and to everybody when there is no room.
Invariant: no answer is an open door. With the handler gone libzmq lets nobody in, because the
ROUTER enforces its ZAP domain.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

import zmq

from meshagent.transports.limits import LinkLimits
from meshagent.transports.zmq.reader import SocketReader

__all__ = ["DOMAIN", "Door"]

log = logging.getLogger(__name__)

DOMAIN = b"meshagent"
ENDPOINT = "inproc://zeromq.zap.01"
VERSION = b"1.0"
REQUEST_PARTS = 7  # version, request id, domain, address, routing id, mechanism, CURVE key
TURN_REQUESTS_MAX = 64  # about 1 ms of answers before the loop's other work


class Door:
    """Answers libzmq's question about each CURVE client: come in as this key, or stay out."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        loop: asyncio.AbstractEventLoop,
        limits: LinkLimits,
        refused: Counter[str],
        has_room: Callable[[], bool],
    ) -> None:
        self.turned_away = 0
        self._refused = refused
        self._loop = loop
        self._limits = limits
        self._has_room = has_room
        self._denied: dict[bytes, float] = {}
        self._admissions: Counter[bytes] = Counter()
        self._window_ends = 0.0
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        self.reader = SocketReader(loop, self._socket, self._read_requests)

    def deny(self, curve_key: bytes, seconds: float) -> None:
        """Turn this key away for a while."""
        now = self._loop.time()
        self._denied = {key: until for key, until in self._denied.items() if until > now}
        self._denied[curve_key] = now + seconds
        if len(self._denied) > self._limits.denied_max:
            del self._denied[min(self._denied, key=self._denied.__getitem__)]

    def close(self) -> None:
        """Nobody comes in from now on."""
        self.reader.close()
        self._socket.close(linger=0)

    def _read_requests(self, _: bool) -> bool:
        for _turn in range(TURN_REQUESTS_MAX):
            try:
                request = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._socket.send_multipart(self._answer(request), zmq.NOBLOCK)
        return True

    def _answer(self, request: list[bytes]) -> list[bytes]:
        number = request[1] if len(request) > 1 else b""
        try:
            refusal = self._judge(request)
        except Exception:  # a bug of ours must neither open the door nor stop the answers
            log.exception("The door could not judge a caller.")
            refusal = "error"
        if refusal:
            self._refused[refusal] += 1
            self.turned_away += 1
            return [VERSION, number, b"400", b"", b"", b""]
        return [VERSION, number, b"200", b"", request[6].hex().encode(), b""]

    def _judge(self, request: list[bytes]) -> str:
        """Why this caller stays out; empty to let it in."""
        if len(request) != REQUEST_PARTS or request[0] != VERSION or request[2] != DOMAIN:
            return "mechanism"
        source, mechanism, key = request[3], request[5], request[6]
        if mechanism != b"CURVE" or len(key) != 32:
            return "mechanism"
        now = self._loop.time()
        if self._denied.get(key, now) > now:
            return "denied"
        if not self._has_room():
            return "limit"
        return "" if self._count_source(source, now) else "source"

    def _count_source(self, source: bytes, now: float) -> bool:
        if now >= self._window_ends or len(self._admissions) >= self._limits.sources_max:
            self._admissions.clear()
            self._window_ends = now + self._limits.source_window_s
        self._admissions[source] += 1
        return self._admissions[source] <= self._limits.source_admissions_max
