"""What sessions hand in: at once when it comes alone, together when it does not, and in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from node.made import BOB, EVE, ME, Quick
from node.made import run as run_node

from meshagent.core.model.messages import INLINE_BYTES_MAX, parse_body
from meshagent.core.model.peers import AgentId
from meshagent.core.model.rows import InState, OutBatch, OutRow, Row, singly
from meshagent.errors import MeshError, UsageError
from meshagent.node.driver import Driver
from meshagent.node.submitting import BATCH_MAX, Submissions


class Counting(Quick):
    """As quick as a disk can be, and notes what each commit held."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[list[str]] = []
        self.rows: dict[str, OutRow] = {}

    def begin(self, rows: Sequence[Row], then: Callable[[MeshError | None], None]) -> None:
        new = {row.id: row for row in singly(rows) if isinstance(row, OutRow)}
        self.made.append(list(new))
        self.rows |= new
        super().begin(rows, then)


def run(
    script: Callable[[Submissions, Counting], Coroutine[Any, Any, None]],
) -> None:
    async def with_node(driver: Driver, store: Counting) -> None:
        store.made.clear()
        await script(Submissions(driver, lambda attached, peer: attached), store)

    run_node(Counting(), with_node)


async def at_disk(store: Counting) -> None:
    """Until a commit is under way at a store that is held."""
    while not store.waiting:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0)


def test_a_message_that_comes_alone_is_handed_to_the_disk_before_the_call_returns() -> None:
    async def script(submissions: Submissions, store: Counting) -> None:
        for number in range(1, 4):
            assert submissions.hand_in([BOB.agent], ["alone"]).done()
            assert len(store.made) == number
            await asyncio.sleep(0)  # until the loop has come round

    run(script)


@pytest.mark.parametrize("is_slow", [False, True])
def test_many_that_come_together_share_a_commit_and_keep_their_order(is_slow: bool) -> None:
    async def script(submissions: Submissions, store: Counting) -> None:
        if is_slow:
            store.hold()
        handed_in = [submissions.hand_in([BOB.agent], [str(number)]) for number in range(100)]
        if is_slow:
            await at_disk(store)
            store.let_go()
        receipts = await asyncio.gather(*handed_in)
        assert [len(each) for each in store.made] == [1, 99]
        ids = [ident for each in store.made for ident in each]
        assert ids == [receipt.id for (receipt,) in receipts]
        assert [parse_body(store.rows[each].body).text for each in ids] == list(
            map(str, range(100))
        )

    run(script)


def test_one_who_gave_up_before_its_turn_came_sends_nothing() -> None:
    async def script(submissions: Submissions, store: Counting) -> None:
        store.hold()
        handed_in = [submissions.hand_in([BOB.agent], [str(number)]) for number in range(3)]
        handed_in[1].cancel()
        await at_disk(store)
        store.let_go()
        await asyncio.gather(handed_in[0], handed_in[2])
        assert [parse_body(row.body).text for row in store.rows.values()] == ["0", "2"]

    run(script)


def test_a_crowd_beyond_the_largest_batch_is_taken_in_order_and_whole() -> None:
    async def script(submissions: Submissions, store: Counting) -> None:
        store.hold()
        count = 2 * BATCH_MAX + 5
        handed_in = [submissions.hand_in([BOB.agent], [str(number)]) for number in range(count)]
        await at_disk(store)
        store.let_go()
        await asyncio.gather(*handed_in)
        texts = [parse_body(row.body).text for row in store.rows.values()]
        assert texts == list(map(str, range(count)))

    run(script)


@pytest.mark.parametrize(("recipients", "texts"), [([BOB.agent], []), ([], ["text"])])
def test_nothing_for_anybody_is_kept_as_nothing(
    recipients: list[AgentId], texts: list[str]
) -> None:
    async def script(submissions: Submissions, store: Counting) -> None:
        assert list(await submissions.hand_in(recipients, texts)) == []
        assert not store.rows

    run(script)


def test_a_receipt_and_what_it_tells_of_are_kept_in_one_commit() -> None:
    async def script(submissions: Submissions, store: Counting) -> None:
        kept: list[list[type]] = []
        begin = store.begin

        def note(rows: Sequence[Row], then: Callable[[MeshError | None], None]) -> None:
            kept.append([type(row) for row in rows])
            begin(rows, then)

        store.begin = note  # type: ignore[method-assign]
        news = {"id": "m", "state": "done"}
        await submissions.tell(BOB.agent, news, InState(BOB.agent, "m", "done", 0, 5))
        assert kept == [[InState, OutBatch]]
        ((told,),) = [store.rows.values()]
        message = parse_body(told.body)
        assert (message.kind, message.data) == ("receipt", news)

    run(script)


@pytest.mark.parametrize(
    "wrong", [{"recipients": [ME.agent], "texts": ["x"]}, {"kind": "receipt"}], ids=["me", "kind"]
)
def test_what_a_session_must_not_say_is_refused_at_once(wrong: dict[str, Any]) -> None:
    async def script(submissions: Submissions, store: Counting) -> None:
        with pytest.raises(UsageError):
            submissions.hand_in(**({"recipients": [BOB.agent], "texts": ["x"]} | wrong))
        assert not store.made

    run(script)


def test_each_of_a_mixed_crowd_gets_receipts_for_what_it_handed_in_and_for_nothing_else() -> None:
    async def script(submissions: Submissions, store: Counting) -> None:
        bob, eve = BOB.agent, EVE.agent
        store.hold()
        crowd = [
            submissions.hand_in([bob], ["first"]),  # whose commit makes a crowd of the rest
            submissions.hand_in([bob], ["plain"], data=[1], kind="note"),
            submissions.hand_in([bob, eve], ["a", "b"], thread="t"),
            submissions.hand_in([eve], [], reply_to="r"),
            submissions.hand_in([eve], ["soon over"], ttl_s=60, reply_to="r"),
        ]
        await at_disk(store)
        store.let_go()
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
        store.hold()
        submissions.hand_in(bob, ["first"])  # whose commit makes a crowd of the rest
        crowd = [submissions.hand_in(bob, [text]) for text in ("before", wrong, "behind")]
        await at_disk(store)
        store.let_go()
        before, failed, behind = await asyncio.gather(*crowd, return_exceptions=True)
        assert isinstance(failed, MeshError)
        for kept, text in ((before, "before"), (behind, "behind")):
            assert not isinstance(kept, BaseException)
            (receipt,) = kept
            assert parse_body(store.rows[receipt.id].body).text == text
        assert len(store.rows) == 3

    run(script)
