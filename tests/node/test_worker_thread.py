"""A thread for blocking work: done in order, told once, and never more after the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from meshagent.errors import StorageError
from meshagent.node.worker_thread import WorkerThread


def with_hands(script: Callable[[WorkerThread], Awaitable[None]]) -> list[dict[str, Any]]:
    """Runs it; returns what reached the loop's exception handler."""
    faults: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, about: faults.append(about))
        hands = WorkerThread("hands-in-test")
        try:
            await script(hands)
        finally:
            await hands.close()

    asyncio.run(asyncio.wait_for(run(), 10))
    assert "hands-in-test" not in {each.name for each in threading.enumerate()}
    return faults


def test_work_is_done_in_another_thread_in_order_and_told_in_the_loops() -> None:
    async def script(hands: WorkerThread) -> None:
        done: list[tuple[int, Any, Exception | None, bool]] = []
        here = threading.get_ident()

        def told(number: int) -> Callable[[Any, Exception | None], None]:
            return lambda result, error: done.append(
                (number, result, error, threading.get_ident() == here)
            )

        for number in range(1_000):
            hands.do(lambda number=number: (number, threading.get_ident()), told(number))
        await hands.ask(int)
        assert [number for number, *_ in done] == list(range(1_000))
        for number, (what, where), error, in_loop in done:
            assert what == number
            assert where != here
            assert error is None
            assert in_loop

    assert with_hands(script) == []


def test_a_job_that_fails_is_told_why_and_the_next_one_is_done() -> None:
    async def script(hands: WorkerThread) -> None:
        def fail() -> None:
            raise OSError("no")

        with pytest.raises(OSError, match="no"):
            await hands.ask(fail)
        assert await hands.ask(lambda: 7) == 7

    assert with_hands(script) == []


def test_who_takes_an_answer_badly_does_not_keep_it_from_the_others() -> None:
    async def script(hands: WorkerThread) -> None:
        heard: list[int] = []
        began = threading.Event()

        def bad(result: Any, error: Exception | None) -> None:
            raise KeyError("hostile")

        hands.do(lambda: began.wait(5), lambda result, error: None)
        hands.do(int, bad)
        for number in range(3):
            hands.do(int, lambda result, error, number=number: heard.append(number))
        began.set()
        await hands.ask(int)
        assert heard == [0, 1, 2]

    (fault,) = with_hands(script)
    assert isinstance(fault["exception"], KeyError)


def test_who_gives_up_waiting_disturbs_nobody() -> None:
    async def script(hands: WorkerThread) -> None:
        go = threading.Event()
        waiting = asyncio.create_task(hands.ask(lambda: go.wait(5)))
        await asyncio.sleep(0)
        waiting.cancel()
        go.set()
        assert await hands.ask(lambda: 1) == 1

    assert with_hands(script) == []


def test_what_waits_at_the_end_is_done_and_not_told() -> None:
    done: list[int] = []
    told: list[int] = []

    async def run() -> None:
        hands = WorkerThread("hands-in-test")
        for number in range(100):
            hands.do(
                lambda number=number: done.append(number),
                lambda result, error, number=number: told.append(number),
            )
        await hands.close()
        await asyncio.sleep(0)

    asyncio.run(run())
    assert done == list(range(100))
    assert told == []


def test_who_asks_when_it_ends_or_later_is_told_and_waits_for_nothing() -> None:
    async def script(hands: WorkerThread) -> None:
        gate = threading.Event()
        asked = asyncio.create_task(hands.ask(gate.wait))
        await asyncio.sleep(0)
        closing = asyncio.create_task(hands.close())
        await asyncio.sleep(0)
        gate.set()
        with pytest.raises(StorageError, match="ended"):
            await asked
        await closing
        with pytest.raises(StorageError, match="ended"):
            await hands.ask(int)

    assert with_hands(script) == []
