"""What every Discovery promises, asked of all four.

A static list announces nothing and hears nothing: where a promise is about announcing, the test
says what static does instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from discovery.seen import Seen, announcement, eventually, fresh_tag

from meshagent.core.ports import Announcement, Discovery
from meshagent.discovery.file import FileDiscovery
from meshagent.discovery.mdns.source import MdnsDiscovery
from meshagent.discovery.memory import MemoryDiscovery, MemoryLan
from meshagent.discovery.static import StaticDiscovery


class Network:
    """Makes discoveries that can reach each other, and closes them."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.announces = kind != "static"
        self._kind, self._folder, self._lan = kind, folder, MemoryLan()
        self._open: list[Discovery] = []

    def make(self, *peers: Announcement) -> Discovery:
        """A discovery that may come to know `peers`; only static is told of them beforehand."""
        made: dict[str, Callable[[], Discovery]] = {
            "mdns": lambda: MdnsDiscovery(["127.0.0.1"]),
            "file": lambda: FileDiscovery(self._folder),
            "memory": lambda: MemoryDiscovery(self._lan),
            "static": lambda: StaticDiscovery([peer.addresses[0] for peer in peers]),
        }
        self._open.append(made[self._kind]())
        return self._open[-1]

    async def close(self) -> None:
        await asyncio.gather(*(discovery.close() for discovery in self._open))


@pytest.fixture(params=["mdns", "file", "memory", "static"])
def network(request: pytest.FixtureRequest, tmp_path: Path) -> Network:
    return Network(request.param, tmp_path / "registry")


def run(network: Network, main: Callable[[], Coroutine[None, None, None]]) -> None:
    async def whole() -> None:
        try:
            await main()
        finally:
            await network.close()

    asyncio.run(whole())


@pytest.fixture
def alice() -> Announcement:
    return announcement("alice", fresh_tag(), 5001)


@pytest.fixture
def bob(alice: Announcement) -> Announcement:
    return announcement("bob", alice.mesh_tag, 5002)


@pytest.fixture
def carol(alice: Announcement) -> Announcement:
    return announcement("carol", alice.mesh_tag, 5003)


def test_each_finds_the_other_whoever_starts_first(
    network: Network, alice: Announcement, bob: Announcement
) -> None:
    async def main() -> None:
        alice_saw, bob_saw = Seen(), Seen()
        await network.make(bob).start(alice, alice_saw)
        await network.make(alice).start(bob, bob_saw)
        await alice_saw.until_has(bob)
        await bob_saw.until_has(alice)
        assert {it.agent for it in alice_saw} == ({bob.agent} if network.announces else {""})

    run(network, main)


def test_two_that_start_together_find_each_other(
    network: Network, alice: Announcement, bob: Announcement
) -> None:
    async def main() -> None:
        alice_saw, bob_saw = Seen(), Seen()
        await asyncio.gather(
            network.make(bob).start(alice, alice_saw), network.make(alice).start(bob, bob_saw)
        )
        await alice_saw.until_has(bob)
        await bob_saw.until_has(alice)

    run(network, main)


def test_own_announcement_is_not_reported(
    network: Network, alice: Announcement, bob: Announcement
) -> None:
    async def main() -> None:
        saw = Seen()
        await network.make(alice, bob).start(alice, saw)
        await network.make().start(bob, Seen())
        await saw.until_has(bob)
        assert not saw.has(alice)

    run(network, main)


def test_a_copy_of_this_agent_is_reported(network: Network, alice: Announcement) -> None:
    copy = replace(alice, run=os.urandom(8).hex(), addresses=("127.0.0.1:5009",))

    async def main() -> None:
        alice_saw, copy_saw = Seen(), Seen()
        await network.make(copy).start(alice, alice_saw)
        await network.make(alice).start(copy, copy_saw)
        await alice_saw.until_has(copy)
        await copy_saw.until_has(alice)

    run(network, main)


def test_another_mesh_is_not_reported(
    network: Network, alice: Announcement, bob: Announcement, carol: Announcement
) -> None:
    stranger = replace(bob, mesh_tag=fresh_tag())

    async def main() -> None:
        saw = Seen()
        await network.make().start(stranger, Seen())
        # A person who names an address gets it reported: static knows no tags.
        peers = (carol,) if network.announces else (carol, stranger)
        await network.make(*peers).start(alice, saw)
        await network.make().start(carol, Seen())
        await saw.until_has(carol)
        assert saw.has(stranger) is not network.announces

    run(network, main)


def test_update_announces_the_new_addresses(
    network: Network, alice: Announcement, bob: Announcement, carol: Announcement
) -> None:
    moved = replace(bob, addresses=("127.0.0.1:6002",))

    async def main() -> None:
        saw = Seen()
        await network.make(bob, carol).start(alice, saw)
        mover = network.make()
        await mover.start(bob, Seen())
        await saw.until_has(bob)
        await mover.update(moved)
        if network.announces:
            await saw.until_has(moved)
        else:  # nobody hears a static list change, and that is no error
            await saw.until_has(carol)
            assert not saw.has(moved)

    run(network, main)


def test_who_closed_is_not_found_by_a_newcomer(
    network: Network, alice: Announcement, bob: Announcement, carol: Announcement
) -> None:
    async def main() -> None:
        leaver = network.make()
        await leaver.start(bob, Seen())
        await network.make().start(alice, Seen())
        await leaver.close()
        saw = Seen()
        # What a person named stays named: static reports the address of a leaver too.
        peers = (alice,) if network.announces else (alice, bob)
        await network.make(*peers).start(carol, saw)
        await saw.until_has(alice)
        assert saw.has(bob) is not network.announces

    run(network, main)


def test_who_comes_back_is_reported_again(
    network: Network, alice: Announcement, bob: Announcement
) -> None:
    async def main() -> None:
        saw = Seen()
        await network.make(bob).start(alice, saw)
        for times in (1, 2):
            returning = network.make()
            await returning.start(replace(bob, run=f"run-{times}"), Seen())
            # Static reports an address once: it can't know that anyone left or came back.
            await saw.until_has(bob, times if network.announces else 1)
            await returning.close()

    run(network, main)


def test_nothing_is_reported_after_close(
    network: Network, alice: Announcement, bob: Announcement, carol: Announcement
) -> None:
    async def main() -> None:
        closed_saw, open_saw = Seen(), Seen()
        closed = network.make(bob)
        await closed.start(alice, closed_saw)
        await closed.close()
        before = len(closed_saw)
        await network.make(bob).start(carol, open_saw)
        await network.make().start(bob, Seen())
        await open_saw.until_has(bob)
        assert len(closed_saw) == before

    run(network, main)


def test_start_waits_for_nothing(network: Network, alice: Announcement) -> None:
    async def main() -> None:
        starting = network.make().start(alice, Seen())
        with pytest.raises(StopIteration):  # it ran to its end without giving way once
            starting.send(None)

    run(network, main)


def test_close_leaves_no_task_thread_or_descriptor(
    network: Network, alice: Announcement, bob: Announcement
) -> None:
    async def main() -> None:
        before, threads = await _settled(), threading.enumerate()
        await _meet_and_part(network, alice, bob)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert threading.enumerate() == threads
        await eventually(lambda: _resources() == before)  # watchfiles' thread ends on its own

    run(network, main)


def test_close_right_after_start_leaves_nothing(network: Network, alice: Announcement) -> None:
    async def main() -> None:
        before = await _settled()
        discovery = network.make()
        await discovery.start(alice, Seen())
        await discovery.close()
        await discovery.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await eventually(lambda: _resources() == before)

    run(network, main)


def test_health_is_ok_while_it_runs(network: Network, alice: Announcement) -> None:
    async def main() -> None:
        discovery = network.make()
        await discovery.start(alice, Seen())
        assert discovery.health() == "ok"

    run(network, main)


async def _meet_and_part(network: Network, one: Announcement, other: Announcement) -> None:
    first, second, saw = network.make(other), network.make(one), Seen()
    await first.start(one, saw)
    await second.start(other, Seen())
    await saw.until_has(other)
    await first.close()
    await second.close()


async def _settled() -> tuple[int, int]:
    """The resources once the native threads of an earlier test have ended."""
    await eventually(lambda: not any(name.startswith("notify-rs") for name in _thread_names()))
    return _resources()


def _thread_names() -> Iterator[str]:
    """Native ones too: watchfiles' ends by itself, a moment after its watch was let go."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended since
            yield (thread / "comm").read_text()


def _resources() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
