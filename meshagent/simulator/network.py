"""Connections between simulated nodes: dialled at addresses, delayed, lost, reordered, cut.

Never looks into frames. Invariant: with no fault set, a connection keeps order and loses nothing,
as TCP does; every dial ends in `opened` or `closed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from meshagent.core.model.peers import LinkId
from meshagent.simulator.world import World

__all__ = ["Endpoint", "Faults", "Network"]

CONNECT_TIMEOUT_S = 3.0
KNOCK_AGAIN_S = 1.0  # as a kernel does that hears nothing


class Endpoint(Protocol):
    """A simulated node as the network sees it."""

    name: str
    door: bytes
    curve_public: bytes

    def link_opened(self, link: LinkId, curve_key: bytes | None) -> None: ...
    def link_received(self, link: LinkId, parts: Sequence[bytes | memoryview]) -> None: ...
    def link_closed(self, link: LinkId, reason: str) -> None: ...


@dataclass(slots=True)
class Faults:
    """What goes wrong. Shares are per frame, delays in seconds."""

    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    full: float = 0.0
    """A link does not take the frame, and its owner is told so."""
    delay_s: tuple[float, float] = (0.0005, 0.003)


NO_FAULTS = Faults()


@dataclass(slots=True)
class _SimulatedEnd:
    owner: Endpoint
    link: LinkId
    other: _SimulatedEnd | None = None
    arrives_at: float = 0.0
    open: bool = True


class Network:
    """Who listens where, and every connection."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.faults = NO_FAULTS
        self.payload_byte_s = 0.0
        """How long a byte behind the header of a frame holds up what comes after it on its link."""
        self.frames = 0
        self._listening: dict[str, Endpoint] = {}
        self._ends: dict[tuple[str, LinkId], _SimulatedEnd] = {}
        self._cut: set[tuple[str, str]] = set()
        self._sound: set[frozenset[str]] = set()
        self._links = 0

    # -- faults -------------------------------------------------------------------------------

    def cut(self, source: str, to: str) -> None:
        """Nothing travels from `source` to `to` any more; neither side is told."""
        if frozenset((source, to)) not in self._sound:
            self._cut.add((source, to))

    def mend(self, one: str, other: str) -> None:
        """The path between the two works again, both ways."""
        self._cut -= {(one, other), (other, one)}

    def mend_for_good(self, one: str, other: str) -> None:
        """From now on nothing goes wrong between the two, whatever happens to others."""
        self.mend(one, other)
        self._sound.add(frozenset((one, other)))

    def heal(self) -> None:
        """All paths work again and nothing else goes wrong."""
        self._cut.clear()
        self.faults = NO_FAULTS

    def break_links(self, one: str, other: str, unseen_by: str = "") -> int:
        """Every connection between the two ends, with what is on it; how many there were.

        One who does not see it goes on to send into nothing.
        """
        ends = [
            each
            for each in self._ends.values()
            if each.other is not None
            and (each.owner.name, each.other.owner.name) in ((one, other), (other, one))
        ]
        for end in ends:
            if end.owner.name != unseen_by:
                self._give_up(end, "lost")
        return len(ends) // 2

    # -- what a node does ---------------------------------------------------------------------

    def listen(self, address: str, owner: Endpoint) -> None:
        """`owner` can be dialled at `address`."""
        self._listening[address] = owner

    def dial(self, owner: Endpoint, address: str) -> LinkId:
        """Begin to connect."""
        end = _SimulatedEnd(owner, self._next_link())
        self._ends[owner.name, end.link] = end
        self.world.plan(self._delay(), self._knock, end, address, self.world.now)
        return end.link

    def send(self, owner: Endpoint, link: LinkId, parts: Sequence[bytes | memoryview]) -> bool:
        """Put a frame on the way."""
        end = self._ends.get((owner.name, link))
        if end is None or not end.open or end.other is None:
            return False
        names = (owner.name, end.other.owner.name)
        faults = NO_FAULTS if frozenset(names) in self._sound else self.faults
        rng = self.world.rng
        if rng.random() < faults.full:
            return False
        self.frames += 1
        if names in self._cut or rng.random() < faults.loss:
            return True
        takes_s = self.payload_byte_s * sum(map(len, parts[1:])) if len(parts) > 1 else 0.0
        for _ in range(2 if rng.random() < faults.duplicate else 1):
            at = self.world.now + rng.uniform(*faults.delay_s) + takes_s
            if rng.random() >= faults.reorder:
                at = max(at, end.arrives_at + takes_s)
                end.arrives_at = at
            self.world.plan(at - self.world.now, self._arrive, end.other, parts)
        return True

    def close_link(self, owner: Endpoint, link: LinkId) -> None:
        """The owner closes: the other side notices, if anything can reach it."""
        end = self._ends.pop((owner.name, link), None)
        if end is not None:
            end.open = False
            self._tell_other(end, "lost")

    def vanish(self, owner: Endpoint, *, silently: bool) -> None:
        """The owner's process ends: its kernel closes connections, or the machine lost power."""
        for address in [at for at, who in self._listening.items() if who is owner]:
            del self._listening[address]
        for key in [each for each in self._ends if each[0] == owner.name]:
            end = self._ends.pop(key)
            end.open = False
            if not silently:
                self._tell_other(end, "lost")

    # -- how it travels -----------------------------------------------------------------------

    def _knock(self, end: _SimulatedEnd, address: str, since: float) -> None:
        if not end.open:
            return
        owner = self._listening.get(address)
        names = (end.owner.name, owner.name if owner else "")
        if owner is not None and (names in self._cut or names[::-1] in self._cut):
            if self.world.now - since >= CONNECT_TIMEOUT_S:
                self._give_up(end, "refused")
            else:
                self.world.plan(KNOCK_AGAIN_S, self._knock, end, address, since)
            return
        if owner is None:
            self._give_up(end, "refused")
            return
        if owner.door != end.owner.door:
            self._give_up(end, "handshake")
            return
        other = _SimulatedEnd(owner, self._next_link(), end)
        end.other = other
        self._ends[owner.name, other.link] = other
        owner.link_opened(other.link, end.owner.curve_public)
        end.owner.link_opened(end.link, None)

    def _give_up(self, end: _SimulatedEnd, reason: str) -> None:
        if end.open:
            end.open = False
            self._ends.pop((end.owner.name, end.link), None)
            end.owner.link_closed(end.link, reason)

    def _arrive(self, end: _SimulatedEnd, parts: Sequence[bytes | memoryview]) -> None:
        if end.open and (end.owner.name, end.link) in self._ends:
            end.owner.link_received(end.link, parts)

    def _tell_other(self, end: _SimulatedEnd, reason: str) -> None:
        if end.other is not None and (end.owner.name, end.other.owner.name) not in self._cut:
            after = max(self._delay(), end.arrives_at - self.world.now)
            self.world.plan(after, self._give_up, end.other, reason)

    def _delay(self) -> float:
        return self.world.rng.uniform(*self.faults.delay_s)

    def _next_link(self) -> LinkId:
        self._links += 1
        return LinkId(self._links)
