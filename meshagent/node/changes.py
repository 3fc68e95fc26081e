"""The one feed of changes: whatever happens in a node is told here, once and in order.

Receipts, followers of the inbox, watchers of transfers, sessions and programs all hear of it here.
Decides nothing about what a change means. Invariants: a listener that fails or a subscriber that
does not read harms nobody else; a subscriber costs a bounded queue. When that is full the
subscriber is told once that it lagged, and all that it missed is dropped: it takes a new snapshot.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from meshagent.core.effects import BlobProgress, CloneFound, Deliver, PeerChanged, ReceiptChanged
from meshagent.core.ports import Damage

__all__ = ["EVENT_KINDS", "ChangeFeed", "Event", "Subscription"]

WAITING_EVENTS_MAX = 1024  # a mesh of 1,000 changing at once still fits

EVENT_KINDS: dict[str, type] = {
    "peer": PeerChanged,
    "clone": CloneFound,
    "mail": Deliver,
    "receipt": ReceiptChanged,
    "progress": BlobProgress,
    "damage": Damage,
}
"""What a subscriber may ask for, and the change that it is."""

Hear = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened: `kind` is one of EVENT_KINDS or `lagged`; `data` is its JSON form."""

    kind: str
    data: dict[str, Any]


class Subscription:
    """One subscriber's queue of events."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Event | None] = asyncio.Queue()
        self.lagged = False

    def put(self, event: Event | None) -> None:
        """Called by the feed; never waits. None ends the subscription."""
        if self._queue.qsize() >= WAITING_EVENTS_MAX and event is not None:
            while not self._queue.empty():
                self._queue.get_nowait()
            self.lagged = True
            event = Event("lagged", {})
        self._queue.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while (event := await self._queue.get()) is not None:
            yield event


class ChangeFeed:
    """Who listens to what, in one node."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._listeners: dict[type, list[Hear]] = {}
        self._at_end: list[Callable[[], None]] = []
        self.has_ended = False
        """The node has ended: no change follows."""

    def publish(self, change: Any) -> None:
        """Tell everyone who listens to this kind of change."""
        for hear in tuple(self._listeners.get(type(change), ())):
            try:
                hear(change)
            except Exception:  # a program's own fault: the node goes on without it
                self._log.exception("a listener failed")

    @contextmanager
    def listening(self, kind: type, hear: Hear) -> Iterator[None]:
        """Call `hear` for each change of this kind while the block runs."""
        heard_by = self._listeners.setdefault(kind, [])
        heard_by.append(hear)
        try:
            yield
        finally:
            heard_by.remove(hear)

    def listen(self, kind: type, hear: Hear) -> None:
        """Call `hear` for each change of this kind from now on."""
        self._listeners.setdefault(kind, []).append(hear)

    @contextmanager
    def waking(self, kind: type) -> Iterator[asyncio.Event]:
        """An event that each change of this kind sets, and the node's end too."""
        wake = asyncio.Event()
        self._at_end.append(wake.set)
        if self.has_ended:
            wake.set()
        try:
            with self.listening(kind, lambda _: wake.set()):
                yield wake
        finally:
            self._at_end.remove(wake.set)

    @contextmanager
    def subscribe(
        self, view: Callable[[Any], list[dict[str, Any]]], kinds: Collection[str] = EVENT_KINDS
    ) -> Iterator[Subscription]:
        """Events of these kinds, in the form that `view` gives them, until the node ends."""
        subscription = Subscription()

        def end() -> None:
            subscription.put(None)

        if self.has_ended:
            end()
        self._at_end.append(end)
        with ExitStack() as stack:
            stack.callback(self._at_end.remove, end)
            for kind in kinds:

                def hear(change: Any, kind: str = kind) -> None:
                    for data in view(change):
                        subscription.put(Event(kind, data))

                stack.enter_context(self.listening(EVENT_KINDS[kind], hear))
            yield subscription

    def end(self) -> None:
        """No change follows: everyone who waits for one hears that."""
        self.has_ended = True
        for told in tuple(self._at_end):
            told()
