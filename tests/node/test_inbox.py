"""Following an inbox: nothing is left out at a page's end, nor between a look and the wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from node.made import BOB, drop, node, run, take

from meshagent.core.model.rows import InState
from meshagent.node import inbox
from meshagent.node.driver import Driver
from meshagent.node.inbox import follow_inbox
from meshagent.storage.mail.memory_store import MemoryStore

PAGE = 4


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "PAGE_ROWS", PAGE)


class Follower:
    """What somebody who follows the inbox has read."""

    def __init__(self, driver: Driver, after: int = 0, unread: bool = False) -> None:
        self.ids: list[str] = []
        self.pages: list[int] = []
        self._pages = follow_inbox(driver.store, driver.changes, after, unread=unread)
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for page in self._pages:
            self.ids += [entry.id for entry in page]
            self.pages.append(len(page))

    async def read(self, count: int) -> list[str]:
        """Until it has read so many, and a moment longer: it may have read too many."""
        while len(self.ids) < count and not self.task.done():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        return self.ids


def names(count: int) -> list[str]:
    return [f"m{number}" for number in range(count)]


@pytest.mark.parametrize("count", [0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE + 1])
def test_a_backlog_is_read_to_its_end_however_its_pages_fall(count: int) -> None:
    async def script(driver: Driver, store: MemoryStore) -> None:
        if count:
            assert await take(driver, drop(*names(count)))
        follower = Follower(driver)
        assert await follower.read(count) == names(count)
        assert max(follower.pages, default=0) <= PAGE
        assert not follower.task.done(), "it waits for more"
        assert await take(driver, drop("next", first=count + 1))
        assert await follower.read(count + 1) == [*names(count), "next"]

    run(MemoryStore(), script)


def test_mail_that_comes_between_the_look_and_the_wait_is_not_missed() -> None:
    async def script(driver: Driver, store: MemoryStore) -> None:
        look, looks = store.inbox, 0

        async def slow(after: int, limit: int, *, unread: bool = False) -> Any:
            nonlocal looks
            looks += 1
            found = await look(after, limit, unread=unread)
            if looks == 1:
                assert await take(driver, drop("meanwhile"))  # and nothing comes after it
            return found

        store.inbox = slow  # type: ignore[method-assign,assignment]
        assert await Follower(driver).read(1) == ["meanwhile"]

    run(MemoryStore(), script)


def test_only_what_comes_behind_a_position_is_read_and_only_what_is_unread() -> None:
    async def script(driver: Driver, store: MemoryStore) -> None:
        assert await take(driver, drop(*names(3)))
        behind = (await store.inbox(0, 1))[0].position
        assert await Follower(driver, behind).read(2) == ["m1", "m2"]
        await driver.keep([InState(BOB.agent, "m1", "done", 0, 5)])
        assert await Follower(driver, unread=True).read(2) == ["m0", "m2"]

    run(MemoryStore(), script)


def test_who_follows_hears_when_the_node_ends_and_who_comes_later_too() -> None:
    async def whole() -> None:
        store = MemoryStore()
        driver = node(store)
        await driver.start("127.0.0.1", [0])
        assert await take(driver, drop("m"))
        follower = Follower(driver)
        await follower.read(1)
        await driver.stop()
        async with asyncio.timeout(5):
            await follower.task
            late = Follower(driver)
            await late.task
        assert late.ids == []

    asyncio.run(whole())


def test_one_who_stops_reading_leaves_nothing_behind() -> None:
    async def script(driver: Driver, store: MemoryStore) -> None:
        follower = Follower(driver)
        await follower.read(0)
        follower.task.cancel()
        await asyncio.gather(follower.task, return_exceptions=True)
        await follower._pages.aclose()
        assert not driver.changes._at_end

    run(MemoryStore(), script)
