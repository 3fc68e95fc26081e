"""A local network in memory, with faults from a seed. Never touches a socket, a file or a clock.

Invariant: a candidate reaches only open members with the same mesh tag and another run, and the
same seed gives the same drops, duplicates and order.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

from meshagent.core.model.peers import Candidate
from meshagent.core.ports import Announcement

__all__ = ["MemoryDiscovery", "MemoryLan"]


class MemoryLan:
    """What announcements travel over; shared by all `MemoryDiscovery` of one test.

    `drop` and `duplicate` are probabilities for each delivery. With `shuffle` the deliveries of
    one turn of the loop arrive in any order.
    """

    def __init__(
        self, seed: int = 0, *, drop: float = 0.0, duplicate: float = 0.0, shuffle: bool = False
    ) -> None:
        self.drop = drop
        self.duplicate = duplicate
        self.shuffle = shuffle
        self._random = random.Random(seed)
        self._members: list[MemoryDiscovery] = []
        self._waiting: list[tuple[MemoryDiscovery, Announcement]] = []

    def heal(self) -> None:
        """End the faults and let everyone announce again, as real responders do when asked."""
        self.drop, self.duplicate, self.shuffle = 0.0, 0.0, False
        for member in self._members:
            self._announce(member)

    def _join(self, member: MemoryDiscovery) -> None:
        for other in self._members:
            self._post(member, other.me)
        self._members.append(member)
        self._announce(member)

    def _leave(self, member: MemoryDiscovery) -> None:
        if member in self._members:
            self._members.remove(member)

    def _announce(self, member: MemoryDiscovery) -> None:
        for other in self._members:
            if other is not member:
                self._post(other, member.me)

    def _post(self, to: MemoryDiscovery, announcement: Announcement) -> None:
        if self._random.random() < self.drop:
            return
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._deliver)
        copies = 2 if self._random.random() < self.duplicate else 1
        self._waiting += [(to, announcement)] * copies

    def _deliver(self) -> None:
        batch, self._waiting = self._waiting, []
        if self.shuffle:
            self._random.shuffle(batch)
        for member, announcement in batch:
            member._hear(announcement)


class MemoryDiscovery:
    """One node's place on a `MemoryLan`."""

    name = "memory"

    def __init__(self, lan: MemoryLan) -> None:
        self.ignored: Counter[str] = Counter()
        self._lan = lan
        self._me: Announcement | None = None
        self._found: Callable[[Candidate], None] | None = None

    @property
    def me(self) -> Announcement:
        """What this node announces now."""
        assert self._me is not None, "started first"
        return self._me

    async def start(self, me: Announcement, found: Callable[[Candidate], None]) -> None:
        """Join the network: others hear of us and we of them in the loop's next turn."""
        self._me, self._found = me, found
        self._lan._join(self)

    async def update(self, me: Announcement) -> None:
        """Announce again with what changed."""
        self._me = me
        self._lan._announce(self)

    def health(self) -> str:
        """Always `ok`: its faults are the test's own."""
        return "ok"

    async def close(self) -> None:
        """Leave the network; nothing is reported afterwards, not even what is on its way."""
        self._lan._leave(self)
        self._found = None

    def _hear(self, other: Announcement) -> None:
        ours = other.agent == self.me.agent and other.run == self.me.run
        if self._found is None or ours or other.mesh_tag != self.me.mesh_tag:
            return
        self._found(Candidate(other.agent, other.addresses, self.name))
