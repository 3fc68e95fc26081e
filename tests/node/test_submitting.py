"""What sessions hand in: at once when it comes alone, together when it does not, and in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from node.test_driver import BOB, EVE, node

from meshagent.core.model.messages import INLINE_BYTES_MAX, parse_body
from meshagent.core.model.peers import LinkId
from meshagent.core.model.rows import OutRow, Row, singly
from meshagent.errors import MeshError
from meshagent.node.submitting import Submissions
from meshagent.storage.mail.memory_store import MemoryStore


class Counting(MemoryStore):
    """As quick as a disk can be: every commit is made before the call returns."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[list[str]] = []
        self.rows: dict[str, OutRow] = {}

    def begin(self, rows: Sequence[Row], then: Callable[[MeshError | None], None]) -> None:
        new = {row.id: row for row in singly(rows) if isinstance(row, OutRow)}
        self.made.append(list(new))
        self.rows |= new
        then(None)


def run(script: Callable[[Submissions, Counting], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        store = Counting()
        driver = node(store)
        async with asyncio.timeout(20):
            await driver.start("127.0.0.1", [0])
            try:
                store.made.clear()
                await script(Submissions(driver, lambda attached, peer: attached), store)
            finally:
                await driver.stop()

    asyncio.run(whole())


async def next_moment(submissions: Submissions) -> None:
    """Until the driver knows that the loop has come round."""
    driver = submissions._driver
    before = driver.moment
    while driver.moment == before:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0)


def test_a_message_that_comes_alone_is_durable_before_the_loop_comes_round() -> None:
    async def script(submissions: Submissions, store: Counting) -> None:
        for number in range(1, 4):
            assert submissions.hand_in([BOB.agent], ["alone"]).done()
            assert len(store.made) == number
            await next_moment(submissions)

    run(script)


def test_a_frame_that_came_shows_that_the_loop_has_come_round() -> None:
    async def script(submissions: Submissions, store: Counting) -> None:
        assert submissions.hand_in([BOB.agent], ["alone"]).done()
        submissions._driver.link_received(LinkId(1), [b"whatever it is"])
        assert submissions.hand_in([BOB.agent], ["alone again"]).done()
        assert [len(each) for each in store.made] == [1, 1]

    run(script)


def test_many_that_come_together_share_a_commit_and_keep_their_order() -> None:
    async def script(submissions: Submissions, store: Counting) -> None:
        receipts = await asyncio.gather(
            *(submissions.hand_in([BOB.agent], [str(number)]) for number in range(100))
        )
        assert [len(each) for each in store.made] == [1, 99]
        assert [ident for each in store.made for ident in each] == [
            receipt.id for (receipt,) in receipts
        ]
        store.made.clear()
        again = [submissions.hand_in([BOB.agent], [str(number)]) for number in range(100)]
        assert store.made == [], "they did not come alone before"
        await asyncio.gather(*again)
        assert [len(each) for each in store.made] == [100]

    run(script)


def test_each_of_a_mixed_crowd_gets_receipts_for_what_it_handed_in_and_for_nothing_else() -> None:
    async def script(submissions: Submissions, store: Counting) -> None:
        bob, eve = BOB.agent, EVE.agent
        crowd = [
            submissions.hand_in(
                [bob], ["first"]
            ),  # which comes alone, and makes a crowd of the rest
            submissions.hand_in([bob], ["plain"], data=[1], kind="note"),
            submissions.hand_in([bob, eve], ["a", "b"], thread="t"),
            submissions.hand_in([eve], [], reply_to="r"),
            submissions.hand_in([eve], ["soon over"], ttl_s=60, reply_to="r"),
        ]
        receipts = await asyncio.gather(*crowd)
        found = []
        for of_one in receipts:
            messages = [parse_body(store.rows[each.id].body) for each in of_one]
            found.append([
                (each.to, m.text, m.data, m.kind, m.thread, m.reply_to, bool(m.expires_ms))
                for each, m in zip(of_one, messages, strict=True)
            ])  # fmt: skip
            assert [each.id for each in of_one] == [m.id for m in messages]
        assert found == [
            [(bob, "first", None, "text", "", "", False)],
            [(bob, "plain", (1,), "note", "", "", False)],
            [(to, text, None, "text", "t", "", False) for to in (bob, eve) for text in "ab"],
            [],
            [(eve, "soon over", None, "text", "", "r", True)],
        ]
        assert [len(each) for each in store.made] == [1, 6]

    run(script)


def test_one_who_sends_without_a_pause_lets_others_go_on() -> None:
    async def script(submissions: Submissions, store: Counting) -> None:
        passed = 0

        async def others() -> None:
            nonlocal passed
            while True:
                passed += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(others())
        for _ in range(100):
            await submissions.hand_in([BOB.agent], ["more"])
        beside.cancel()
        assert passed >= 50

    run(script)


@pytest.mark.parametrize(
    "wrong", ["\ud800", "x" * (INLINE_BYTES_MAX + 1), 7], ids=["no text", "too long", "a number"]
)
def test_one_that_can_t_be_sent_takes_nobody_of_its_crowd_along(wrong: Any) -> None:
    async def script(submissions: Submissions, store: Counting) -> None:
        bob = [BOB.agent]
        submissions.hand_in(bob, ["first"])  # which comes alone, and makes a crowd of the rest
        crowd = [submissions.hand_in(bob, [text]) for text in ("before", wrong, "behind")]
        before, failed, behind = await asyncio.gather(*crowd, return_exceptions=True)
        assert isinstance(failed, MeshError)
        for kept, text in ((before, "before"), (behind, "behind")):
            assert not isinstance(kept, BaseException)
            (receipt,) = kept
            assert parse_body(store.rows[receipt.id].body).text == text
        assert len(store.rows) == 3

    run(script)
