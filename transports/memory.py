"""Links inside one process, with faults on demand: for tests, simulations and examples.

Behaves as the real transport does, bounds included, and needs no socket, key or thread. Decides
by its seed alone what is delayed or broken. Time is the event loop's, so a loop with a virtual
clock makes the whole network run at its speed.
Invariant: with the same seed and the same calls, the same events come in the same order.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from meshagent.core.model.peers import LinkId
from meshagent.core.ports import LinkEvents
from meshagent.errors import LocalProtocolError, PortBusy
from meshagent.transports.limits import LinkLimits
from meshagent.transports.link_events import notify_owner

__all__ = ["MemoryNetwork", "MemoryTransport"]


class MemoryNetwork:
    """Who listens where, and what is wrong with the wires between them."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.delay_s = (0.0, 0.0)
        """How long a frame travels: between these two, evenly; order on a link is kept."""
        self.loss = 0.0
        """The chance that a frame breaks the link it is sent on. Frames alone are never lost."""
        self.refusing: set[str] = set()
        """Addresses at which nobody answers, whoever listens there."""
        self._listeners: dict[str, MemoryTransport] = {}
        self._cuts: set[tuple[str, str]] = set()
        self._ports = itertools.count(49152)  # the first port that is nobody's

    def cut(self, a: str, b: str, *, one_way: bool = False) -> None:
        """Nothing gets from address `a` to `b` (nor back): frames wait on the wire, dials fail."""
        self._cuts |= {(a, b)} if one_way else {(a, b), (b, a)}

    def heal(self) -> None:
        """Every cut is mended; what waited on the wires goes on."""
        self._cuts.clear()
        for transport in list(self._listeners.values()):
            transport._resume()

    def break_links(self, a: str, b: str) -> None:
        """Every connection between the two addresses breaks; both sides lose it."""
        for transport in (self._listeners.get(a), self._listeners.get(b)):
            for end in transport._all_ends() if transport else ():
                if {end.owner.address, end.far.owner.address if end.far else ""} == {a, b}:
                    end.snap()

    def _listen(self, transport: MemoryTransport, host: str, port: int) -> str:
        address = f"{host}:{port or next(self._ports)}"
        if address in self._listeners:
            raise PortBusy(f"Another node listens at {address}.", hint="Use port 0.")
        self._listeners[address] = transport
        return address

    def _is_cut(self, a: str, b: str) -> bool:
        return (a, b) in self._cuts

    def _delay(self) -> float:
        low, high = self.delay_s
        return self.random.uniform(low, high) if high > 0 else 0.0


@dataclass(eq=False, slots=True)
class _LinkEnd:
    """One end of a connection, and the frames on their way to it. None is the other's goodbye."""

    owner: MemoryTransport
    link: LinkId | None = None
    curve_key: bytes | None = None
    opened: bool = False
    far: _LinkEnd | None = None
    coming: deque[tuple[float, tuple[bytes | memoryview, ...] | None]] = field(
        default_factory=deque
    )
    due: bool = False

    def push(self, parts: tuple[bytes | memoryview, ...] | None) -> None:
        arrives_at = self.owner._loop.time() + self.owner.network._delay()
        self.coming.append((arrives_at, parts))
        self.schedule()

    def schedule(self) -> None:
        if self.coming and not self.due and not self._is_cut():
            self.due = True
            self.owner._at(self.coming[0][0], self._arrive)

    def _arrive(self) -> None:
        self.due = False
        if self.coming and not self._is_cut():
            _, parts = self.coming.popleft()
            self.owner._take(self, parts)
            self.schedule()

    def _is_cut(self) -> bool:
        far = self.far.owner.address if self.far else ""
        return self.owner.network._is_cut(far, self.owner.address)

    def snap(self) -> None:
        """The connection breaks: what was on its way is gone with it."""
        for end in (self, self.far):
            if end is not None:
                end.coming.clear()
                end.owner._soon(partial(end.owner._end, end, "lost"))


class MemoryTransport:
    """A Transport on a MemoryNetwork. `door` stands for the mesh secret: equal ones meet."""

    def __init__(
        self,
        network: MemoryNetwork,
        curve_public: bytes,
        door: bytes,
        limits: LinkLimits | None = None,
    ) -> None:
        self.refused: Counter[str] = Counter()
        self.network = network
        self.address = ""
        self._curve_public = curve_public
        self._door = door
        self._limits = limits or LinkLimits()
        self._numbers = itertools.count(1)
        self._links: dict[LinkId, _LinkEnd] = {}
        self._silent: dict[_LinkEnd, None] = {}  # inbound, without a first frame yet
        self._denied: dict[bytes, float] = {}
        self._running = False

    async def start(self, listen: str, port: int, events: LinkEvents) -> tuple[str, ...]:
        """Listen at any name; "" or "*" is `memory`."""
        self._loop = asyncio.get_running_loop()
        self._events = events
        host = listen if listen not in ("", "*") else "memory"
        self.address = self.network._listen(self, host, port)
        self._running = True
        return self.addresses()

    def addresses(self) -> tuple[str, ...]:
        """Where others may dial us."""
        return (self.address,)

    def deny(self, curve_key: bytes, seconds: float) -> None:
        """Turn away new links of this agent for a while."""
        self._denied[curve_key] = self._loop.time() + seconds

    def dial(self, address: str) -> LinkId:
        """Begin to connect to the transport at `address`."""
        if not self._running:
            raise LocalProtocolError("The transport is not running.", hint="Start it first.")
        end = _LinkEnd(self)
        full = len(self._links) >= self._limits.links_max
        link = self._register(end)
        if full:
            self._soon(partial(self._end, end, "limit"))
        else:
            self._at(self._loop.time() + self.network._delay(), partial(self._knock, end, address))
        return link

    def send(self, link: LinkId, parts: Sequence[bytes | memoryview]) -> bool:
        """Put one frame on the wire; False when the link is not open, full or gone."""
        self._limits.check_frame(parts)
        end = self._links.get(link)
        if end is None or not end.opened or end.far is None:
            return False
        if len(end.far.coming) >= self._limits.queue_frames_max:
            return False
        if self.network.loss and self.network.random.random() < self.network.loss:
            end.snap()
        else:
            end.far.push(tuple(parts))
        return True

    def close_link(self, link: LinkId) -> None:
        """Forget the link; the other side loses it after the frames already sent."""
        end = self._links.get(link)
        if end is not None:
            self._remove(end)

    async def close(self) -> None:
        """Close every link and stop listening."""
        if self._running:
            self._running = False
            del self.network._listeners[self.address]
            for end in self._all_ends():
                self._remove(end)

    def _all_ends(self) -> list[_LinkEnd]:
        return [*self._links.values(), *self._silent]

    def _register(self, end: _LinkEnd) -> LinkId:
        end.link = LinkId(next(self._numbers))
        self._links[end.link] = end
        return end.link

    def _remove(self, end: _LinkEnd) -> None:
        if end.link is not None:
            self._links.pop(end.link, None)
        self._silent.pop(end, None)
        far, end.far, end.opened = end.far, None, False
        end.coming.clear()
        if far is not None and far.far is end:
            far.push(None)

    def _end(self, end: _LinkEnd, reason: str) -> None:
        known = end.link in self._links
        self._remove(end)
        if known and end.link is not None:
            notify_owner(self.refused, self._events.link_closed, end.link, reason)

    def _soon(self, act: Callable[[], None]) -> None:
        self._loop.call_soon(lambda: act() if self._running else None)

    def _at(self, when: float, act: Callable[[], None]) -> None:
        if when <= self._loop.time():
            self._soon(act)
        else:
            self._loop.call_at(when, lambda: act() if self._running else None)

    def _resume(self) -> None:
        for end in self._all_ends():
            if end.far is not None:
                end.schedule()

    def _knock(self, end: _LinkEnd, address: str) -> None:
        network = self.network
        target = network._listeners.get(address)
        if end.link not in self._links:
            return
        if network._is_cut(self.address, address) or network._is_cut(address, self.address):
            late = self._loop.time() + self._limits.connect_s
            self._at(late, partial(self._end, end, "refused"))
        elif target is None or address in network.refusing:
            self._end(end, "refused")
        elif refusal := target._refusal(self):
            target.refused[refusal] += 1
            self._end(end, "handshake")
        else:
            end.far = _LinkEnd(target, curve_key=self._curve_public, far=end)
            target._silent[end.far] = None
            end.opened = True
            if not notify_owner(self.refused, self._events.link_opened, end.link, None):
                self._end(end, "closed")

    def _refusal(self, caller: MemoryTransport) -> str:
        if caller._door != self._door:
            return "outsider"
        if self._denied.get(caller._curve_public, 0.0) > self._loop.time():
            return "denied"
        return "limit" if len(self._links) >= self._limits.links_max else ""

    def _take(self, end: _LinkEnd, parts: tuple[bytes | memoryview, ...] | None) -> None:
        """A frame has arrived, or the goodbye."""
        if parts is None:
            end.far = None
            if end in self._silent:
                self.refused["outsider"] += 1  # it never sent a frame: as the real one counts
            self._end(end, "lost")
            return
        if end in self._silent and not self._admit(end):
            return
        if end.link in self._links and not notify_owner(
            self.refused, self._events.link_received, end.link, list(parts)
        ):
            self._end(end, "closed")

    def _admit(self, end: _LinkEnd) -> bool:
        if len(self._links) >= self._limits.links_max:
            self.refused["limit"] += 1
            self._remove(end)
            return False
        del self._silent[end]
        end.opened = True
        link = self._register(end)
        if not notify_owner(self.refused, self._events.link_opened, link, end.curve_key):
            self._end(end, "closed")
        return end.link in self._links
