"""Links over ZeroMQ with CURVE: one ROUTER that is dialled, one DEALER for each link we dial.

Decides who is behind an inbound frame and when a link has ended; never what a frame means.
Nothing is shared between transports: each has its own context, so many fit in one process.
Invariant: an inbound frame is handed on only under the link whose authenticated key opened it,
and the events of a link are opened, received…, closed, in this order, each at most where it fits.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import resource
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import zmq
from zmq.backend import Socket

from meshagent.core.model.peers import LinkId
from meshagent.core.ports import LinkEvents
from meshagent.errors import LocalProtocolError, PortBusy
from meshagent.transports import addresses
from meshagent.transports.limits import (
    DIALLED_DESCRIPTORS,
    INBOUND_DESCRIPTORS,
    LinkLimits,
    descriptors_for_links,
)
from meshagent.transports.link_events import tell
from meshagent.transports.zmq.inbound_connections import InboundConnections, cut_off
from meshagent.transports.zmq.links import Dialled, DialledSockets, Inbound
from meshagent.transports.zmq.monitor import DIALLING_EVENTS, LISTENING_EVENTS, Monitor, dialled_end
from meshagent.transports.zmq.reader import FrameReader, Received, SocketReader, has_frames
from meshagent.transports.zmq.sockets import (
    Keys,
    bind,
    is_route,
    mesh_error,
    open_dealer,
    open_router,
)
from meshagent.transports.zmq.yielding import CpuYield
from meshagent.transports.zmq.zap import Door

__all__ = ["ZmqTransport"]

log = logging.getLogger(__name__)

HEAP_KEPT_BYTES = 4 * 1024 * 1024
"""A block of this size is freed when we start: from it glibc learns to keep what is as small for
the next one, where it would else return the memory of each large part to the system and ask for
it anew, 256 page faults for a MiB."""

_MORE, _LAST = int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.NOBLOCK)  # made once: a part each costs

_send_part = Socket.send  # pyzmq's own beneath what it adds for sockets of other kinds

TICK_S = 1.0
"""The safety tick: an edge that was missed, against all reasoning, costs a second."""


class ZmqTransport:
    """The Transport that carries a mesh over TCP. All keys are 32 raw bytes."""

    def __init__(
        self,
        door_public: bytes,
        door_secret: bytes,
        curve_public: bytes,
        curve_secret: bytes,
        limits: LinkLimits | None = None,
    ) -> None:
        self.refused: Counter[str] = Counter()
        self._keys = Keys(door_public, door_secret, curve_public, curve_secret)
        self._limits = limits or LinkLimits()
        self._numbers = itertools.count(1)
        self._links: dict[LinkId, Dialled | Inbound] = {}
        self._routes: dict[bytes, Inbound] = {}
        self._forgotten: dict[bytes, None] = {}
        self._arrivals = InboundConnections()
        self._give_way = CpuYield()
        self._drains: list[SocketReader] = []
        self._descriptors = 0
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        soft = soft if soft != resource.RLIM_INFINITY else 1 << 20
        self._descriptors_max = descriptors_for_links(soft)
        self._strangers_max = min(self._limits.strangers_max, soft // 8)
        self._host = ""
        self._port = 0
        self._ipv6 = False
        self._running = False

    # The life of the transport

    async def start(self, listen: str, port: int, events: LinkEvents) -> tuple[str, ...]:
        """Listen at a host or IP address ("" or "*" for all) and a port (0 for any free one)."""
        host = listen
        if not addresses.is_wildcard(listen):
            hosts = await addresses.resolve(listen.strip("[]"), port)
            if not hosts:
                raise PortBusy(
                    f"{listen!r} is not an address of this machine.",
                    hint="Choose an interface's address with --listen, or leave it out.",
                )
            host = hosts[0]
        self._events = events
        self._loop = asyncio.get_running_loop()
        bytearray(HEAP_KEPT_BYTES)  # taken, and freed at once
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        try:
            self._open()
            self._port, self._ipv6 = bind(self._router, host, port)
        except zmq.ZMQError as error:
            for drain in self._drains:
                drain.close()
            self._context.destroy(linger=0)
            raise mesh_error(error, addresses.format_address(host or "*", port)) from error
        self._host = host
        self._running = True
        self._timer = self._loop.call_later(TICK_S, self._tick)
        return self.addresses()

    def _open(self) -> None:
        limits = self._limits
        # Three sockets for each dialled link; the default of 1023 would be the hidden limit.
        self._context.set(zmq.MAX_SOCKETS, 3 * limits.links_max + 16)
        # The door stands before anybody can knock: with no handler libzmq would not ask.
        self._door = Door(self._context, self._loop, limits, self.refused, self._has_room)
        self._drains.append(self._door.drain)
        self._router = open_router(self._context, self._keys, limits)
        self._monitor = Monitor(
            self._context, "router", self._router, LISTENING_EVENTS, limits.monitor_events_max
        )
        self._reader = FrameReader(self._router, limits, routed=True)
        self._frames = SocketReader(self._loop, self._router, self._take_inbound)
        self._drains.append(self._frames)
        self._drains.append(SocketReader(self._loop, self._monitor.socket, self._take_arrivals))

    def addresses(self) -> tuple[str, ...]:
        """Where others may dial us now: interfaces come and go, so ask again."""
        hosts = [self._host]
        if addresses.is_wildcard(self._host):
            most = self._limits.addresses_max
            hosts = addresses.interface_addresses(ipv6=self._ipv6, most=most)
        return tuple(addresses.format_address(host, self._port) for host in hosts)

    async def close(self) -> None:
        """Close every link and socket; frames sent just now get `parting_s` to leave."""
        if not self._running:
            return
        self._running = False
        self._timer.cancel()
        linger_ms = int(self._limits.parting_s * 1000)
        for entry in list(self._links.values()):
            self._remove(entry, linger_ms)
        for drain in self._drains:
            drain.close()
        self._monitor.close()
        self._router.close(linger=linger_ms)
        self._door.close()
        self._drains.clear()
        # In a thread of its own, which ends here: the loop's pool would keep one for ever.
        with ThreadPoolExecutor(1, "meshagent-close") as pool:
            await self._loop.run_in_executor(pool, self._context.term)

    def deny(self, curve_key: bytes, seconds: float) -> None:
        """Turn away new links of this agent for a while; those it has are closed by the owner."""
        self._door.deny(curve_key, seconds)

    # What the owner does to links

    def dial(self, address: str) -> LinkId:
        """Begin to connect; nothing is raised for an address that can't be reached or read."""
        if not self._running:
            raise LocalProtocolError("The transport is not running.", hint="Start it first.")
        patience_s = self._limits.connect_s + self._limits.handshake_s
        entry = Dialled(LinkId(next(self._numbers)), self._loop.time() + patience_s)
        target = addresses.parse_address(address)
        has_room = self._has_room(DIALLED_DESCRIPTORS)
        self._add(entry)
        if not has_room:
            self._end_soon(entry.link, "limit")
        elif target is None:
            self._end_soon(entry.link, "refused")
        elif (host := addresses.literal(target[0])) is not None:
            entry.untried = [(host, target[1])]
            self._attempt(entry)
        else:
            entry.resolving = self._loop.create_task(self._resolve(entry, *target))
        return entry.link

    def send(self, link: LinkId, parts: Sequence[bytes | memoryview]) -> bool:
        """Hand one frame to libzmq; False when the link is not open, full or gone."""
        entry = self._links.get(link)
        self._check_frame(parts)
        if isinstance(entry, Inbound):
            sent = _send(self._router, (entry.route, *parts))
            self._give_way()
            self._frames.look()
            return sent
        if entry is None or entry.line is None or not entry.opened or entry.end:
            return False
        sent = _send(entry.line.dealer, parts)
        self._give_way()
        entry.line.drains[0].look()
        return sent

    def close_link(self, link: LinkId) -> None:
        """Forget the link at once; its last frames get `parting_s` to leave, then it is cut."""
        entry = self._links.get(link)
        if entry is not None:
            self._remove(entry, int(self._limits.parting_s * 1000))

    def _check_frame(self, parts: Sequence[bytes | memoryview]) -> None:
        size = sum(map(len, parts))
        if not 0 < len(parts) <= self._limits.frame_parts_max:
            raise LocalProtocolError(f"A frame of {len(parts)} parts can't be sent.")
        if size > self._limits.frame_bytes_max:
            raise LocalProtocolError(f"A frame of {size} bytes is too large to be sent.")

    # Tables

    def _has_room(self, cost: int = INBOUND_DESCRIPTORS) -> bool:
        enough = self._descriptors + cost <= self._descriptors_max
        return enough and len(self._links) < self._limits.links_max

    def _add(self, entry: Dialled | Inbound) -> None:
        self._links[entry.link] = entry
        self._descriptors += entry.cost
        if isinstance(entry, Inbound):
            self._routes[entry.route] = entry

    def _remove(self, entry: Dialled | Inbound, linger_ms: int) -> None:
        """Out of every table, its sockets closed; no event follows."""
        del self._links[entry.link]
        self._descriptors -= entry.cost
        if isinstance(entry, Inbound):
            del self._routes[entry.route]
            self._forget(entry.route)
            if entry.arrival is not None:
                entry.arrival.link = None
                if self._running and not entry.arrival.gone:
                    self._loop.call_later(linger_ms / 1000, cut_off, entry.arrival)
            return
        if entry.resolving is not None:
            entry.resolving.cancel()
        if entry.line is not None:
            entry.line.close(linger_ms)
            entry.line = None

    def _forget(self, route: bytes) -> None:
        self._forgotten[route] = None
        if len(self._forgotten) > self._limits.forgotten_max:
            del self._forgotten[next(iter(self._forgotten))]

    # Events: only ever from the loop, never from inside dial, send or close_link

    def _end_soon(self, link: LinkId, reason: str) -> None:
        self._loop.call_soon(self._end, link, reason)

    def _end(self, link: LinkId, reason: str) -> None:
        entry = self._links.get(link)
        if entry is not None:
            self._remove(entry, 0)
            tell(self.refused, self._events.link_closed, link, reason)

    def _opened(self, entry: Dialled | Inbound, curve_key: bytes | None) -> None:
        if not tell(self.refused, self._events.link_opened, entry.link, curve_key):
            self._end(entry.link, "closed")

    def _received(self, entry: Dialled | Inbound, received: Received) -> None:
        if received.refusal:
            self.refused[received.refusal] += 1
            self._end(entry.link, "closed")
        elif not tell(self.refused, self._events.link_received, entry.link, received.parts):
            self._end(entry.link, "closed")

    # Dialled links

    async def _resolve(self, entry: Dialled, host: str, port: int) -> None:
        hosts = await addresses.resolve(host, port)
        entry.resolving = None
        entry.untried = [(host, port) for host in hosts[: self._limits.attempts_max]]
        self._attempt(entry)

    def _attempt(self, entry: Dialled) -> None:
        """Connect to the next address; called from dial too, hence no event from here."""
        if not entry.untried:
            self._end_soon(entry.link, "refused")
            return
        host, port = entry.untried.pop(0)
        try:
            entry.line = self._connect(entry, host, port)
        except zmq.ZMQError as error:
            log.warning("Dialling failed: %s", mesh_error(error, host))
            self._end_soon(entry.link, "refused")

    def _connect(self, entry: Dialled, host: str, port: int) -> DialledSockets:
        limits = self._limits
        dealer = open_dealer(self._context, self._keys, limits)
        try:
            name = f"{entry.link}-{len(entry.untried)}"
            monitor = Monitor(
                self._context, name, dealer, DIALLING_EVENTS, limits.monitor_events_max
            )
        except zmq.ZMQError:
            dealer.close(linger=0)
            raise
        line = DialledSockets(dealer, monitor, FrameReader(dealer, limits, routed=False))

        line.drains = [
            SocketReader(self._loop, dealer, partial(self._take_dialled, entry, line)),
            SocketReader(self._loop, monitor.socket, lambda _: self._take_events(entry, line)),
        ]
        try:
            dealer.connect(f"tcp://{addresses.format_address(host, port)}")
        except zmq.ZMQError:
            line.close(0)
            raise
        return line

    def _read_events(self, entry: Dialled, line: DialledSockets) -> None:
        def happened(event: int, value: int) -> None:
            if entry.line is line and not entry.end:
                self._dialled_event(entry, event)

        line.monitor.drain(happened)

    def _take_events(self, entry: Dialled, line: DialledSockets) -> bool:
        """What the monitor has, and then every frame that came before an end of which it tells."""
        self._read_events(entry, line)
        return entry.line is line and bool(entry.end) and self._take_dialled(entry, line, False)

    def _take_dialled(self, entry: Dialled, line: DialledSockets, expected: bool) -> bool:
        """Frames, as many as a turn may have; or the one that is expected, so that who waited for
        it goes on before more is read. Whether some are left."""
        expected = expected and entry.opened
        frames, size = self._limits.turn_frames_max, self._limits.turn_bytes_max
        while entry.line is line and frames > 0 and size > 0:
            received = line.reader.read(expected=expected)
            if received is None:
                return self._dialled_read(entry, line)
            if not entry.opened:  # the frame overtook the event, which libzmq made before it
                self._read_events(entry, line)
            if entry.line is line:
                self._received(entry, received)
            if expected and entry.line is line:
                return has_frames(line.dealer) or self._dialled_read(entry, line)
            frames, size = frames - 1, size - received.size
        return entry.line is line

    def _dialled_read(self, entry: Dialled, line: DialledSockets) -> bool:
        """Every frame that is here has been handed on; False, unless one is in the middle."""
        if entry.end and not line.reader.skipping:
            self._dialled_ended(entry, line)
        return line.reader.skipping

    def _dialled_event(self, entry: Dialled, event: int) -> None:
        entry.end = dialled_end(event, opened=entry.opened)
        if not entry.end and not entry.opened:
            entry.opened = True
            self._opened(entry, None)

    def _dialled_ended(self, entry: Dialled, line: DialledSockets) -> None:
        """Every frame that came before the end has been handed on."""
        if entry.end == "refused" and entry.untried:
            line.close(0)
            entry.end, entry.line = "", None
            self._attempt(entry)
        else:
            self._end(entry.link, entry.end)

    # Inbound links

    def _take_arrivals(self, _: bool) -> bool:
        """What the monitor has, and then every frame that came before the ends it tells of."""
        self._read_monitor()
        return self._take_inbound(False)

    def _take_inbound(self, expected: bool) -> bool:
        """As `_take_dialled`."""
        frames, size = self._limits.turn_frames_max, self._limits.turn_bytes_max
        while self._running and frames > 0 and size > 0:
            received = self._reader.read(expected=expected)
            if received is None:
                return self._reader.skipping or self._settle()
            entry = self._routes.get(received.route) or self._admit(received)
            if entry is not None:
                self._received(entry, received)
            if expected and self._running:
                return has_frames(self._router) or self._reader.skipping or self._settle()
            frames, size = frames - 1, size - received.size
        return self._running

    def _read_monitor(self) -> None:
        self._monitor.drain(self._inbound_event)
        crowd = len(self._arrivals) - self._strangers_max
        for arrival in itertools.islice(self._arrivals.strangers(), max(crowd, 0)):
            cut_off(arrival)

    def _inbound_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._arrivals.accepted(value)
        else:
            self._arrivals.disconnected(value)

    def _admit(self, received: Received) -> Inbound | None:
        """The new link of a first frame, or None when its sender is turned away."""
        if received.route in self._forgotten:
            self.refused["forgotten"] += 1
            return None
        self._read_monitor()  # its arrival is in there by now: see arrivals.py
        link = LinkId(next(self._numbers))
        arrival = self._arrivals.claim(int(received.first.get(zmq.SRCFD)), link)
        refusal = self._refusal(received)
        if refusal:
            self.refused[refusal] += 1
            self._forget(received.route)
            if arrival is not None:
                cut_off(arrival)
            return None
        entry = Inbound(link, received.route, arrival)
        self._add(entry)
        self._opened(entry, bytes.fromhex(str(received.first.get("User-Id"))))
        return self._routes.get(received.route)

    def _refusal(self, received: Received) -> str:
        if not is_route(received.route):
            return "routing id"
        return "" if self._has_room() else "limit"

    def _settle(self) -> bool:
        """All frames are read: now the ends that the monitor told of may be told on. Whoever hears
        of one may use the socket, so True: somebody has to look again."""
        if not self._arrivals.has_departed:
            return False
        lost, silent = self._arrivals.settle()
        known = min(silent, self._door.turned_away)  # counted by their reason already
        self._door.turned_away -= known
        if silent > known:
            self.refused["outsider"] += silent - known
        for link in lost:
            self._end(link, "lost")
        return bool(lost)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)
        now = self._loop.time()
        drains = list(self._drains)
        for entry in list(self._links.values()):
            if isinstance(entry, Dialled):
                drains.extend(entry.line.drains if entry.line else ())
                if not entry.opened and now > entry.deadline:
                    self._end_soon(entry.link, "refused")
        for drain in drains:
            drain.look()


def _send(through: zmq.Socket[bytes], parts: Sequence[bytes | memoryview]) -> bool:
    """libzmq refuses a frame at its first part or takes it whole."""
    try:
        for part in parts[:-1]:
            _send_part(through, part, _MORE)
        _send_part(through, parts[-1], _LAST)
    except zmq.ZMQError as error:
        if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
            log.warning("A frame could not be sent: %s", error)
        return False
    return True
