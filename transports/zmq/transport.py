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

from meshagent.core.model.network_addresses import (
    format_address,
    ip_literal,
    is_address,
    parse_address,
)
from meshagent.core.model.peers import LinkId
from meshagent.core.ports import LinkEvents
from meshagent.errors import LocalProtocolError, PortBusy
from meshagent.transports.addresses import interface_addresses, is_wildcard, resolve
from meshagent.transports.limits import (
    DIALLED_DESCRIPTORS,
    INBOUND_DESCRIPTORS,
    LinkLimits,
    descriptors_for_links,
)
from meshagent.transports.link_events import notify_owner
from meshagent.transports.zmq.cpu_yield import CpuYield
from meshagent.transports.zmq.inbound_connections import InboundConnections, shut_down
from meshagent.transports.zmq.links import DealerConnection, Dialled, Inbound
from meshagent.transports.zmq.monitor import DIALLING_EVENTS, LISTENING_EVENTS, Monitor, dialled_end
from meshagent.transports.zmq.reader import FrameReader, ReceivedFrame, SocketReader, has_frames
from meshagent.transports.zmq.sockets import (
    Keys,
    bind,
    is_route,
    mesh_error,
    open_context,
    open_dealer,
    open_router,
    send_frame,
)
from meshagent.transports.zmq.zap import Door

__all__ = ["ZmqTransport"]

log = logging.getLogger(__name__)

TICK_S = 1.0  # every socket is checked this often, in case an edge was missed after all


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
        self._inbound = InboundConnections()
        self._yield_cpu = CpuYield()
        self._readers: list[SocketReader] = []
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
        if not is_wildcard(listen):
            hosts = await resolve(listen.strip("[]"), port)
            if not hosts:
                raise PortBusy(
                    f"{listen!r} is not an address of this machine.",
                    hint="Choose an interface's address with --listen, or leave it out.",
                )
            host = hosts[0]
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._context = open_context(self._limits)
        try:
            self._open()
            self._port, self._ipv6 = bind(self._router, host, port)
        except zmq.ZMQError as error:
            for reader in self._readers:
                reader.close()
            self._context.destroy(linger=0)
            raise mesh_error(error, format_address(host or "*", port)) from error
        self._host = host
        self._running = True
        self._timer = self._loop.call_later(TICK_S, self._tick)
        return self.addresses()

    def _open(self) -> None:
        limits = self._limits
        # The ZAP handler comes before the ROUTER: without one libzmq would not ask.
        self._door = Door(self._context, self._loop, limits, self.refused, self._has_room)
        self._readers.append(self._door.reader)
        self._router = open_router(self._context, self._keys, limits)
        self._monitor = Monitor(
            self._context, "router", self._router, LISTENING_EVENTS, limits.monitor_events_max
        )
        self._reader = FrameReader(self._router, limits, routed=True)
        self._frames = SocketReader(self._loop, self._router, self._read_inbound)
        self._readers.append(self._frames)
        self._readers.append(SocketReader(self._loop, self._monitor.socket, self._read_accepted))

    def addresses(self) -> tuple[str, ...]:
        """Where others may dial us now: interfaces come and go, so ask again."""
        hosts = [self._host]
        if is_wildcard(self._host):
            most = self._limits.addresses_max
            hosts = interface_addresses(ipv6=self._ipv6, most=most)
        return tuple(format_address(host, self._port) for host in hosts)

    async def close(self) -> None:
        """Close every link and socket; frames sent just now get `parting_s` to leave."""
        if not self._running:
            return
        self._running = False
        self._timer.cancel()
        linger_ms = int(self._limits.parting_s * 1000)
        for entry in list(self._links.values()):
            self._remove(entry, linger_ms)
        for reader in self._readers:
            reader.close()
        self._monitor.close()
        self._router.close(linger=linger_ms)
        self._door.close()
        self._readers.clear()
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
        has_room = self._has_room(DIALLED_DESCRIPTORS)
        self._add(entry)
        if not has_room:
            self._end_soon(entry.link, "limit")
        elif not is_address(address):
            self._end_soon(entry.link, "refused")
        else:
            name, port = parse_address(address)
            if (host := ip_literal(name)) is not None:
                entry.untried = [(host, port)]
                self._attempt(entry)
            else:
                entry.resolving = self._loop.create_task(self._resolve(entry, name, port))
        return entry.link

    def send(self, link: LinkId, parts: Sequence[bytes | memoryview]) -> bool:
        """Hand one frame to libzmq; False when the link is not open, full or gone."""
        entry = self._links.get(link)
        self._limits.check_frame(parts)
        if isinstance(entry, Inbound):
            sent = send_frame(self._router, (entry.route, *parts))
            self._yield_cpu()
            self._frames.check()
            return sent
        if entry is None or entry.connection is None or not entry.opened or entry.end:
            return False
        sent = send_frame(entry.connection.dealer, parts)
        self._yield_cpu()
        entry.connection.readers[0].check()
        return sent

    def close_link(self, link: LinkId) -> None:
        """Forget the link at once; its last frames get `parting_s` to leave, then it is closed."""
        entry = self._links.get(link)
        if entry is not None:
            self._remove(entry, int(self._limits.parting_s * 1000))

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
        """Remove it from every table and close its sockets; no event follows."""
        del self._links[entry.link]
        self._descriptors -= entry.cost
        if isinstance(entry, Inbound):
            del self._routes[entry.route]
            self._forget(entry.route)
            if entry.connection is not None:
                entry.connection.link = None
                if self._running and not entry.connection.gone:
                    self._loop.call_later(linger_ms / 1000, shut_down, entry.connection)
            return
        if entry.resolving is not None:
            entry.resolving.cancel()
        if entry.connection is not None:
            entry.connection.close(linger_ms)
            entry.connection = None

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
            notify_owner(self.refused, self._events.link_closed, link, reason)

    def _opened(self, entry: Dialled | Inbound, curve_key: bytes | None) -> None:
        if not notify_owner(self.refused, self._events.link_opened, entry.link, curve_key):
            self._end(entry.link, "closed")

    def _received(self, entry: Dialled | Inbound, received: ReceivedFrame) -> None:
        if received.refusal:
            self.refused[received.refusal] += 1
            self._end(entry.link, "closed")
        elif not notify_owner(self.refused, self._events.link_received, entry.link, received.parts):
            self._end(entry.link, "closed")

    # Dialled links

    async def _resolve(self, entry: Dialled, host: str, port: int) -> None:
        hosts = await resolve(host, port)
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
            entry.connection = self._connect(entry, host, port)
        except zmq.ZMQError as error:
            log.warning("Dialling failed: %s", mesh_error(error, host))
            self._end_soon(entry.link, "refused")

    def _connect(self, entry: Dialled, host: str, port: int) -> DealerConnection:
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
        connection = DealerConnection(dealer, monitor, FrameReader(dealer, limits, routed=False))

        connection.readers = [
            SocketReader(self._loop, dealer, partial(self._read_dialled, entry, connection)),
            SocketReader(self._loop, monitor.socket, partial(self._read_end, entry, connection)),
        ]
        try:
            dealer.connect(f"tcp://{format_address(host, port)}")
        except zmq.ZMQError:
            connection.close(0)
            raise
        return connection

    def _read_events(self, entry: Dialled, connection: DealerConnection) -> None:
        def happened(event: int, value: int) -> None:
            if entry.connection is connection and not entry.end:
                self._dialled_event(entry, event)

        connection.monitor.read(happened)

    def _read_end(self, entry: Dialled, connection: DealerConnection, _: bool) -> bool:
        """Read the monitor, and all frames that came before an end that it reports."""
        self._read_events(entry, connection)
        if entry.connection is not connection or not entry.end:
            return False
        return self._read_dialled(entry, connection, False)

    def _read_dialled(self, entry: Dialled, connection: DealerConnection, expected: bool) -> bool:
        """Read the frames of one turn; True when some are left.

        Only one when it is expected: whoever waited for it continues before more is read.
        """
        expected = expected and entry.opened
        frames, size = self._limits.turn_frames_max, self._limits.turn_bytes_max
        while entry.connection is connection and frames > 0 and size > 0:
            received = connection.frames.read(expected=expected)
            if received is None:
                return self._dialled_all_read(entry, connection)
            if not entry.opened:  # libzmq made the event first, and it comes on another socket
                self._read_events(entry, connection)
            if entry.connection is connection:
                self._received(entry, received)
            if expected and entry.connection is connection:
                return has_frames(connection.dealer) or self._dialled_all_read(entry, connection)
            frames, size = frames - 1, size - received.size
        return entry.connection is connection

    def _dialled_all_read(self, entry: Dialled, connection: DealerConnection) -> bool:
        """All frames that are here are handed on; True while one is being skipped."""
        if entry.end and not connection.frames.skipping:
            self._dialled_ended(entry, connection)
        return connection.frames.skipping

    def _dialled_event(self, entry: Dialled, event: int) -> None:
        entry.end = dialled_end(event, opened=entry.opened)
        if not entry.end and not entry.opened:
            entry.opened = True
            self._opened(entry, None)

    def _dialled_ended(self, entry: Dialled, connection: DealerConnection) -> None:
        """All frames that came before the end are handed on."""
        if entry.end == "refused" and entry.untried:
            connection.close(0)
            entry.end, entry.connection = "", None
            self._attempt(entry)
        else:
            self._end(entry.link, entry.end)

    # Inbound links

    def _read_accepted(self, _: bool) -> bool:
        """Read the monitor, and all frames that came before the ends that it reports."""
        self._read_monitor()
        return self._read_inbound(False)

    def _read_inbound(self, expected: bool) -> bool:
        """As `_read_dialled`."""
        frames, size = self._limits.turn_frames_max, self._limits.turn_bytes_max
        while self._running and frames > 0 and size > 0:
            received = self._reader.read(expected=expected)
            if received is None:
                return self._reader.skipping or self._end_lost()
            entry = self._routes.get(received.route) or self._admit(received)
            if entry is not None:
                self._received(entry, received)
            if expected and self._running:
                return has_frames(self._router) or self._reader.skipping or self._end_lost()
            frames, size = frames - 1, size - received.size
        return self._running

    def _read_monitor(self) -> None:
        self._monitor.read(self._inbound_event)
        excess = len(self._inbound) - self._strangers_max
        for connection in itertools.islice(self._inbound.silent(), max(excess, 0)):
            shut_down(connection)

    def _inbound_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._inbound.accepted(value)
        else:
            self._inbound.disconnected(value)

    def _admit(self, received: ReceivedFrame) -> Inbound | None:
        """The new link of a first frame; None when it is refused."""
        if received.route in self._forgotten:
            self.refused["forgotten"] += 1
            return None
        self._read_monitor()  # by now it names the connection: see inbound_connections.py
        link = LinkId(next(self._numbers))
        connection = self._inbound.claim(int(received.first.get(zmq.SRCFD)), link)
        refusal = "" if self._has_room() else "limit"
        if not is_route(received.route):
            refusal = "routing id"
        if refusal:
            self.refused[refusal] += 1
            self._forget(received.route)
            if connection is not None:
                shut_down(connection)
            return None
        entry = Inbound(link, received.route, connection)
        self._add(entry)
        self._opened(entry, bytes.fromhex(str(received.first.get("User-Id"))))
        return self._routes.get(received.route)

    def _end_lost(self) -> bool:
        """All frames are read, so links whose connection is gone end now. True when there are
        some: their owner may use the socket, so it must be checked again."""
        if not self._inbound.has_disconnected:
            return False
        lost, silent = self._inbound.take_lost()
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
        readers = list(self._readers)
        for entry in list(self._links.values()):
            if isinstance(entry, Dialled):
                readers.extend(entry.connection.readers if entry.connection else ())
                if not entry.opened and now > entry.deadline:
                    self._end_soon(entry.link, "refused")
        for reader in readers:
            reader.check()
