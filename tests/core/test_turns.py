"""The rule of turns: what goes at once, what waits for which rows, what a failure takes along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshagent.core.effects import Effect, Load
from meshagent.core.model.peers import AgentId
from meshagent.core.model.rows import Delivered, Row
from meshagent.core.turns import NOTHING, Turn, TurnQueue, join_turns

PEER = AgentId("bob-aaaaaaaa")


def effect(number: int) -> Effect:
    return Load(PEER, number, 1)


def row(number: int) -> Row:
    return Delivered(PEER, number, number, 0)


FREE, ANSWER, LATER = effect(1), effect(2), effect(3)
ROW, OTHER_ROW, NOTE = row(1), row(2), row(3)


def kept(answer: Effect = ANSWER, rows: Sequence[Row] = (ROW,)) -> Turn:
    return Turn((), rows, [answer])


def begun() -> TurnQueue:
    """A queue with a commit under way, on which ANSWER rests."""
    queue = TurnQueue()
    queue.add(kept())
    assert queue.next_commit() == [ROW]
    return queue


# -- what goes at once ----------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [(), (OTHER_ROW,)], ids=["alone", "with rows"])
@pytest.mark.parametrize("may_wait", [False, True])
def test_what_is_free_goes_at_once_whatever_is_under_way(
    rows: Sequence[Row], may_wait: bool
) -> None:
    for queue in (TurnQueue(), begun()):
        assert list(queue.add(Turn([FREE], rows, (), may_wait))) == [FREE]


def test_what_rests_on_rows_that_are_all_durable_goes_at_once_behind_what_is_free() -> None:
    queue = TurnQueue()
    assert list(queue.add(Turn([FREE], (), [ANSWER]))) == [FREE, ANSWER]
    queue = begun()
    queue.committed()
    assert list(queue.add(Turn(after=[LATER]))) == [LATER]


# -- what waits, and for what ---------------------------------------------------------------------


def test_what_rests_on_rows_waits_for_them() -> None:
    queue = TurnQueue()
    assert list(queue.add(kept())) == []
    assert queue.next_commit() == [ROW]
    assert queue.committed() == [ANSWER]
    assert queue.is_idle


def test_what_rests_on_rows_without_having_any_waits_for_the_commit_under_way() -> None:
    queue = begun()
    assert list(queue.add(Turn(after=[LATER]))) == []
    assert queue.committed() == [ANSWER, LATER]


def test_what_rests_on_rows_without_having_any_waits_for_those_that_wait_too() -> None:
    queue = begun()
    queue.add(kept(effect(4), [OTHER_ROW]))
    assert list(queue.add(Turn(after=[LATER]))) == []
    assert queue.committed() == [ANSWER]
    assert queue.next_commit() == [OTHER_ROW]
    assert queue.committed() == [effect(4), LATER]


def test_rows_that_come_while_a_commit_is_under_way_are_the_next_one_in_their_order() -> None:
    queue = begun()
    queue.add(kept(LATER, [OTHER_ROW]))
    queue.add(kept(effect(4), [NOTE]))
    assert queue.next_commit() is None, "one at a time"
    assert queue.committed() == [ANSWER]
    assert queue.next_commit() == [OTHER_ROW, NOTE]
    assert queue.committed() == [LATER, effect(4)]


# -- notes ----------------------------------------------------------------------------------------


def test_notes_wait_for_the_next_commit_and_keep_their_place_in_it() -> None:
    queue = TurnQueue()
    assert list(queue.add(Turn((), [NOTE], [LATER], may_wait=True))) == []
    assert (queue.next_commit(), queue.has_notes, queue.is_idle) == (None, True, False)
    queue.add(kept())
    assert not queue.has_notes, "they go along now"
    assert queue.next_commit() == [NOTE, ROW]
    assert queue.committed() == [LATER, ANSWER]


def test_notes_are_committed_when_they_are_hurried() -> None:
    queue = TurnQueue()
    queue.hurry()
    queue.add(Turn((), [NOTE], [LATER], may_wait=True))
    assert queue.next_commit() is None, "there was nothing to hurry then"
    queue.hurry()
    assert queue.next_commit() == [NOTE]
    assert queue.committed() == [LATER]


def test_notes_behind_a_commit_do_not_follow_it_by_themselves() -> None:
    queue = begun()
    queue.add(Turn((), [NOTE], (), may_wait=True))
    queue.committed()
    assert (queue.next_commit(), queue.has_notes) == (None, True)


def test_who_waits_for_all_that_was_decided_hurries_notes() -> None:
    queue = TurnQueue()
    queue.add(Turn((), [NOTE], (), may_wait=True))
    assert list(queue.add(Turn(after=[ANSWER]))) == []
    assert queue.next_commit() == [NOTE]
    assert queue.committed() == [ANSWER]


# -- failure --------------------------------------------------------------------------------------


def test_a_failed_commit_takes_along_all_that_rested_on_it_or_came_later() -> None:
    queue = begun()
    queue.add(Turn(after=[FREE]))
    queue.add(kept(LATER, [OTHER_ROW]))
    queue.add(Turn((), [NOTE], [effect(4)], may_wait=True))
    assert queue.failed() == [ANSWER, FREE, LATER, effect(4)]
    assert queue.is_idle
    assert (queue.next_commit(), queue.has_notes) == (None, False), "later rows are dropped too"
    queue.add(kept(effect(5), [OTHER_ROW]))
    assert queue.next_commit() == [OTHER_ROW]
    assert queue.committed() == [effect(5)], "nothing of before comes back"


def test_what_waits_can_be_given_up_before_its_commit_began() -> None:
    queue = TurnQueue()
    queue.add(kept())
    assert queue.failed() == [ANSWER]
    assert (queue.is_idle, queue.next_commit()) == (True, None)


# -- turns put together ---------------------------------------------------------------------------


def test_turns_put_together_keep_the_order_within_each_part() -> None:
    first, second = Turn([FREE], [ROW], [ANSWER]), Turn([LATER], [OTHER_ROW], [effect(4)])
    assert join_turns([first, NOTHING, second]) == Turn(
        [FREE, LATER], [ROW, OTHER_ROW], [ANSWER, effect(4)]
    )
    assert join_turns([NOTHING, first]) == first
    assert join_turns([]) == join_turns([NOTHING, NOTHING]) == NOTHING


@pytest.mark.parametrize(
    ("other", "may_wait"),
    [
        (Turn([FREE]), True),
        (Turn((), [OTHER_ROW], (), may_wait=True), True),
        (Turn((), (), [ANSWER], may_wait=True), True),
        (Turn((), [OTHER_ROW]), False),
        (Turn((), (), [ANSWER]), False),
    ],
    ids=["free", "a note", "patient", "a row", "an answer"],
)
def test_notes_may_wait_unless_something_beside_them_is_in_a_hurry(
    other: Turn, may_wait: bool
) -> None:
    note = Turn((), [NOTE], (), may_wait=True)
    assert join_turns([note, other]).may_wait == join_turns([other, note]).may_wait == may_wait


# -- against the plainest model -------------------------------------------------------------------


@dataclass
class Model:
    """Every row and effect by number: an effect goes when so many rows are durable, no sooner and
    no later."""

    rows: list[Row] = field(default_factory=list)
    waiting: list[tuple[int, Effect]] = field(default_factory=list)
    durable: int = 0
    at_disk: int | None = None
    hurried: int = 0
    """All rows up to here are to be committed without waiting for others."""

    def add(self, turn: Turn) -> list[Effect]:
        self.rows += turn.rows
        self.waiting += [(len(self.rows), each) for each in turn.after]
        if (turn.rows and not turn.may_wait) or (turn.after and not turn.rows):
            self.hurry()
        return [*turn.free, *self.ready()]

    def hurry(self) -> None:
        self.hurried = len(self.rows)

    def ready(self) -> list[Effect]:
        gone = [each for need, each in self.waiting if need <= self.durable]
        self.waiting = [each for each in self.waiting if each[0] > self.durable]
        return gone

    def next_commit(self) -> list[Row] | None:
        if self.at_disk is not None or self.hurried <= self.durable:
            return None
        self.at_disk = len(self.rows)
        return self.rows[self.durable :]

    def committed(self) -> list[Effect]:
        assert self.at_disk is not None
        self.durable, self.at_disk = self.at_disk, None
        return self.ready()

    def failed(self) -> list[Effect]:
        lost = [each for _, each in self.waiting]
        del self.rows[self.durable :]
        self.waiting, self.at_disk, self.hurried = [], None, self.durable
        return lost


turns = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2), st.booleans())
steps = st.lists(turns | st.sampled_from(["hurry", "commit", "committed", "failed"]), max_size=40)


@given(steps)
def test_the_queue_gives_out_what_the_plainest_model_gives_out_and_at_the_same_moment(
    script: list[tuple[int, int, int, bool] | str],
) -> None:
    queue, model, numbers = TurnQueue(), Model(), iter(range(10_000))
    for step in script:
        match step:
            case (free, rows, after, may_wait):
                turn = Turn(
                    [effect(next(numbers)) for _ in range(free)],
                    [row(next(numbers)) for _ in range(rows)],
                    [effect(next(numbers)) for _ in range(after)],
                    may_wait,
                )
                assert list(queue.add(turn)) == model.add(turn)
            case "hurry":
                queue.hurry()
                model.hurry()
            case "commit":
                assert queue.next_commit() == model.next_commit()
            case "committed" if queue.is_committing:
                assert queue.committed() == model.committed()
            case "failed":
                assert queue.failed() == model.failed()
        assert queue.is_committing == (model.at_disk is not None)
        assert queue.is_idle == (model.durable == len(model.rows))
        waits = (model.at_disk or model.durable) < len(model.rows)
        is_due = model.hurried > (model.at_disk or model.durable)
        assert queue.has_notes == (waits and not is_due)
