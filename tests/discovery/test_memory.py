"""The in-memory network's faults: from a seed, and gone when healed."""

from __future__ import annotations

import asyncio

import pytest
from discovery.seen import Seen, announcement

from meshagent.discovery.memory import MemoryDiscovery, MemoryLan


def _meet(lan: MemoryLan, heal: bool = False) -> list[list[str]]:
    """Who each of six saw, in order."""

    async def main() -> list[list[str]]:
        members = [announcement(name, "mesh", run=name) for name in "abcdef"]
        reports = []
        for me in members:
            reports.append(Seen())
            await MemoryDiscovery(lan).start(me, reports[-1])
        await asyncio.sleep(0)
        if heal:
            lan.heal()
            await asyncio.sleep(0)
        return [[candidate.agent for candidate in seen] for seen in reports]

    return asyncio.run(main())


@pytest.mark.parametrize("seed", range(5))
def test_the_same_seed_gives_the_same_faults(seed: int) -> None:
    once, again = (MemoryLan(seed, drop=0.3, duplicate=0.3, shuffle=True) for _ in range(2))
    assert _meet(once) == _meet(again)


def test_each_fault_happens() -> None:
    whole = _meet(MemoryLan())
    assert all(len(agents) == 5 for agents in whole)
    assert sum(map(len, _meet(MemoryLan(1, drop=0.5)))) < 30
    assert sum(map(len, _meet(MemoryLan(1, duplicate=0.5)))) > 30
    shuffled = _meet(MemoryLan(1, shuffle=True))
    assert shuffled != whole
    assert [sorted(agents) for agents in shuffled] == [sorted(agents) for agents in whole]


def test_after_healing_everyone_has_seen_everyone() -> None:
    assert all(len(set(agents)) == 5 for agents in _meet(MemoryLan(drop=1.0), heal=True))


def test_what_is_on_its_way_is_not_reported_after_close() -> None:
    async def main() -> None:
        lan, saw = MemoryLan(), Seen()
        leaver = MemoryDiscovery(lan)
        await leaver.start(announcement("alice", "mesh"), saw)
        await MemoryDiscovery(lan).start(announcement("bob", "mesh"), Seen())
        await leaver.close()
        await asyncio.sleep(0)
        assert not saw

    asyncio.run(main())
