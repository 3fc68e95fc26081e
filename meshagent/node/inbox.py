"""Following an inbox: all that is there, then each message as it comes. The one loop for that.

The SDK's iterator, the control socket's stream and the live view read through this. Invariants:
every message beyond the starting position is given once and in order, however many there are; one
that comes between a look and the wait is not missed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from meshagent.core.effects import Deliver
from meshagent.core.model.rows import InEntry
from meshagent.core.ports import Store
from meshagent.node.changes import ChangeFeed

__all__ = ["PAGE_ROWS", "follow_inbox"]

PAGE_ROWS = 200  # read from disk at once


async def follow_inbox(
    store: Store, changes: ChangeFeed, after: int = 0, *, unread: bool = False
) -> AsyncGenerator[Sequence[InEntry], None]:
    """Pages of the inbox beyond a position, and on, until the node ends.

    With `unread`, only what is neither done nor parked.
    """
    with changes.waking(Deliver) as mail_came:
        while True:
            mail_came.clear()  # before the look: what comes while we look wakes us again
            if changes.has_ended:
                return
            while page := await store.inbox(after, PAGE_ROWS, unread=unread):
                after = page[-1].position
                yield page
            await mail_came.wait()
