"""The feed of changes: who hears what, in which order, and that nobody harms another."""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import Any

import pytest

from meshagent.core.effects import CloneFound, Deliver, ReceiptChanged
from meshagent.core.model.message_states import MessageState
from meshagent.core.model.peers import AgentId
from meshagent.node import changes
from meshagent.node.changes import EVENT_KINDS, ChangeFeed, Event, Subscription

BOB = AgentId("bob-aaaaaaaa")


def receipt(ident: str) -> ReceiptChanged:
    return ReceiptChanged(BOB, [ident], MessageState.SENT, "")


CLONE = CloneFound(False, "elsewhere")


def feed() -> ChangeFeed:
    return ChangeFeed(logging.getLogger("test"))


def view(change: Any) -> list[dict[str, Any]]:
    """One event for each id; one for anything else."""
    return [{"id": each} for each in getattr(change, "ids", ["other"])]


async def heard(events: Subscription) -> list[Event]:
    """All that there is, up to the end."""
    return [event async for event in events]


def test_who_listens_hears_its_kind_in_order_while_the_block_runs() -> None:
    told: list[Any] = []
    one = feed()
    one.publish(receipt("before"))
    with one.listening(ReceiptChanged, told.append):
        one.publish(receipt("a"))
        one.publish(CLONE)
        one.publish(receipt("b"))
    one.publish(receipt("later"))
    assert told == [receipt("a"), receipt("b")]


def test_a_listener_that_fails_keeps_nothing_from_others(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Any] = []
    one = feed()

    def bad(change: object) -> None:
        raise ValueError("a program's own fault")

    one.listen(ReceiptChanged, bad)
    one.listen(ReceiptChanged, told.append)
    one.publish(receipt("a"))
    one.publish(receipt("b"))
    assert told == [receipt("a"), receipt("b")]
    assert "a program's own fault" in caplog.text


def test_one_that_stops_listening_while_it_is_told_takes_nobody_along() -> None:
    told: list[Any] = []
    one = feed()
    listening = one.listening(ReceiptChanged, lambda _: listening.__exit__(None, None, None))
    listening.__enter__()
    one.listen(ReceiptChanged, told.append)
    one.publish(receipt("a"))
    one.publish(receipt("b"))
    assert told == [receipt("a"), receipt("b")]


def test_a_subscriber_gets_the_kinds_it_asked_for_then_the_end() -> None:
    async def script() -> None:
        one = feed()
        with one.subscribe(view, ("receipt",)) as some, one.subscribe(view) as every:
            one.publish(ReceiptChanged(BOB, ["a", "b"], MessageState.SENT, ""))
            one.publish(CLONE)
            one.end()
            expected = [Event("receipt", {"id": "a"}), Event("receipt", {"id": "b"})]
            assert await heard(some) == expected
            assert await heard(every) == [*expected, Event("clone", {"id": "other"})]
        with one.subscribe(view) as late:
            assert await heard(late) == [], "a node that has ended says nothing more"

    asyncio.run(script())


def test_one_that_does_not_read_is_told_once_that_it_lagged_and_costs_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(changes, "WAITING_EVENTS_MAX", 3)

    async def script() -> None:
        one = feed()
        with one.subscribe(view) as slow, one.subscribe(view) as quick:
            read = []
            for number in range(5):
                one.publish(receipt(str(number)))
                read.append(await anext(aiter(quick)))
            one.end()
            told = await heard(slow)
        assert [event.data["id"] for event in read] == ["0", "1", "2", "3", "4"]
        assert told == [Event("lagged", {}), Event("receipt", {"id": "4"})]
        assert slow.lagged

    asyncio.run(script())


def test_every_kind_of_event_has_its_change() -> None:
    async def script() -> None:
        one = feed()
        with one.subscribe(view) as events:
            for change in EVENT_KINDS.values():
                made: Any = change(*range(len(inspect.signature(change).parameters)))
                one.publish(made if change is not ReceiptChanged else receipt("a"))
            one.end()
            assert [event.kind for event in await heard(events)] == list(EVENT_KINDS)

    asyncio.run(script())


def test_who_waits_for_mail_is_woken_by_it_and_by_the_end() -> None:
    async def script() -> None:
        one = feed()
        with one.waking(Deliver) as wake:
            one.publish(receipt("a"))
            assert not wake.is_set()
            one.publish(Deliver(BOB, ()))
            assert wake.is_set()
            wake.clear()
            one.end()
            assert wake.is_set()
        with one.waking(Deliver) as wake:
            assert wake.is_set()

    asyncio.run(script())


def test_who_has_gone_is_forgotten() -> None:
    one = feed()
    with one.subscribe(view), one.waking(Deliver):
        pass
    assert not one._at_end
    assert not any(one._listeners.values())
