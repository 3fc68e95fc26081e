"""What was found damaged on disk, and who is told of it.

Decides what of it is news. Never touches the disk itself, nor what is damaged: the store has set
it aside. Invariant: each damage that is found while this node runs, its start included, is logged
and published once; what earlier runs have found is known, and not told again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from meshagent.core.ports import Damage
from meshagent.errors import MeshError
from meshagent.node.views import damage_view

if TYPE_CHECKING:
    from meshagent.node.driver import Driver

__all__ = ["DamageWatch", "damage_text"]

LOOK_S = 2.0  # a number in memory is looked at; a person need not hear of decay sooner
FOUND_MAX = 100  # of the newest, for those who listen later


class DamageWatch:
    """The damage in one node's store."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._began = datetime.now(UTC).isoformat(timespec="seconds")
        self._last = 0
        """The number of the last that was told."""
        self._seen = 0
        self.known: Sequence[Damage] = ()
        """All that the store has set aside, oldest first."""
        self.found: deque[Damage] = deque(maxlen=FOUND_MAX)
        """What was found since the node started."""

    async def look(self) -> None:
        """Read what the store has set aside, and tell what is new. May raise MeshError."""
        driver = self._driver
        self._seen = driver.store.damage_found  # before reading: what comes meanwhile is read again
        self.known = await driver.store.damage()
        for damage in self.known:
            if damage.number > self._last and damage.found_at >= self._began:
                self.found.append(damage)
                driver.log.warning("%s", damage_text(damage_view(damage)))
                driver.changes.publish(damage)
        self._last = max((each.number for each in self.known), default=0)

    async def watch(self) -> None:
        """Look whenever the store has found something, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._driver.store.damage_found != self._seen:
                try:
                    await self.look()
                except MeshError as error:  # it is looked at again in a while
                    self._driver.log.warning("what is damaged was not read: %s", error)


def damage_text(damage: Mapping[str, str]) -> str:
    """What is damaged, and why, as part of a sentence."""
    origin, peer, ident = damage["origin"], damage["peer"], damage["message_id"]
    if ident:
        way = {"outbox": "to", "inbox": "from"}.get(origin, "to or from")
        what = f"a message {way} {peer or 'somebody'} ({ident})"
    else:
        what = "a part of the commit log" if origin == "log" else f"a row of the table {origin!r}"
        what += f" about {peer}" if peer else ""
    return f"{what} was damaged on disk and set aside: {damage['reason']}"
