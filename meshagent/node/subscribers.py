"""Who wants to hear of changes. Invariant: a subscriber that does not read costs a bounded queue.

When its queue is full a subscriber is told once that it lagged, and everything it missed is
dropped: it takes a new snapshot. So a stalled session never slows the node.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["Event", "Subscribers", "Subscription"]

WAITING_EVENTS_MAX = 1024  # a mesh of 1,000 changing at once still fits


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened: `kind` is peer, clone, mail, receipt or lagged; `data` its JSON form."""

    kind: str
    data: dict[str, Any]


class Subscription:
    """One subscriber's queue."""

    def __init__(self, kinds: frozenset[str] | None = None) -> None:
        self._queue: asyncio.Queue[Event | None] = asyncio.Queue()
        self._kinds = kinds
        self.lagged = False

    def put(self, event: Event | None) -> None:
        """Called by the node; never waits."""
        if event is not None and self._kinds is not None and event.kind not in self._kinds:
            return
        if self._queue.qsize() >= WAITING_EVENTS_MAX and event is not None:
            while not self._queue.empty():
                self._queue.get_nowait()
            self.lagged = True
            event = Event("lagged", {})
        self._queue.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while (event := await self._queue.get()) is not None:
            yield event


class Subscribers:
    """All who listen."""

    def __init__(self) -> None:
        self._all: set[Subscription] = set()
        self._closed = False

    @contextmanager
    def subscribe(self, kinds: frozenset[str] | None = None) -> Iterator[Subscription]:
        """Events (of these kinds) from now on, until the block ends or the node does."""
        subscription = Subscription(kinds)
        if self._closed:
            subscription.put(None)
        self._all.add(subscription)
        try:
            yield subscription
        finally:
            self._all.discard(subscription)

    def __bool__(self) -> bool:
        """Whether anybody listens: what nobody hears need not be said."""
        return bool(self._all)

    def tell(self, event: Event) -> None:
        """Pass an event to everyone."""
        for subscription in list(self._all):
            subscription.put(event)

    def close(self) -> None:
        """No event follows: every subscription ends."""
        self._closed = True
        for subscription in list(self._all):
            subscription.put(None)
