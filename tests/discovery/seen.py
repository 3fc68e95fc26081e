"""What a discovery reported, and how a test waits for it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from meshagent.core.model.peers import Candidate
from meshagent.core.ports import Announcement

DEADLINE_S = 10.0


class Seen(list[Candidate]):
    """The `found` callback of a test: a list of candidates that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._more = asyncio.Event()

    def __call__(self, candidate: Candidate) -> None:
        self.append(candidate)
        self._more.set()

    def has(self, other: Announcement, times: int = 1) -> bool:
        """Whether `other`'s first address was reported, so many times."""
        return sum(other.addresses[0] in candidate.addresses for candidate in self) >= times

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds`, looking at each report."""
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                self._more.clear()
                await self._more.wait()

    async def until_has(self, other: Announcement, times: int = 1) -> None:
        await self.until(lambda: self.has(other, times))


async def eventually(holds: Callable[[], bool]) -> None:
    """Wait for a state that nobody reports, such as a kernel resource."""
    async with asyncio.timeout(DEADLINE_S):
        while not holds():  # noqa: ASYNC110 - nobody would set an event
            await asyncio.sleep(0.01)


def fresh_tag() -> str:
    """A mesh of this test's own: another test run may share the loopback interface."""
    return os.urandom(8).hex()


def announcement(name: str, mesh: str, port: int = 4711, run: str = "") -> Announcement:
    """An agent on loopback; names in one test differ by their first letter."""
    agent = f"{name}-{name[0] * 8}"
    return Announcement(agent, mesh, run or os.urandom(8).hex(), (f"127.0.0.1:{port}",))
