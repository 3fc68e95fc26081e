"""Whom to dial, where, when again, and within which bounds."""

from __future__ import annotations

import random

import pytest

from meshagent.core.links.dialing import Dialing, DialingConfig
from meshagent.core.model.records import ADDRESSES_MAX

CONFIG = DialingConfig(targets_max=4)
A, B = "a-00000001", "b-00000002"


def dialing(config: DialingConfig = CONFIG) -> Dialing:
    return Dialing(random.Random(1), config)


def dialled(dials: Dialing, now: float) -> list[str]:
    return [address for _, address in dials.due(now)]


def fail_round(dials: Dialing, key: str) -> float:
    """Dial every address of the only target and let each fail; when that was."""
    now = dials.deadline()
    assert now is not None
    while dialled(dials, now):
        if dials.failed(key, now):
            return now
    raise AssertionError("the round never ended")


def test_what_answered_last_is_tried_first_and_loopback_last() -> None:
    dials = dialing()
    dials.want(A, ("127.0.0.1:1", "10.0.0.1:1", "10.0.0.2:1"), True, 0.0, 0.0)
    dials.answered(A, "10.0.0.2:1", A)
    order = []
    for turn in range(3):
        order += dialled(dials, turn * CONFIG.head_start_s)
    assert order == ["10.0.0.2:1", "10.0.0.1:1", "127.0.0.1:1"]


def test_each_address_has_a_head_start_over_the_next() -> None:
    dials = dialing()
    dials.want(A, ("one:1", "two:1"), True, 0.0, 0.0)
    assert dialled(dials, 0.0) == ["one:1"]
    assert dials.deadline() == CONFIG.head_start_s
    assert dialled(dials, CONFIG.head_start_s * 0.9) == []
    assert dialled(dials, CONFIG.head_start_s) == ["two:1"]


def test_an_address_that_fails_gives_way_to_the_next_at_once() -> None:
    dials = dialing()
    dials.want(A, ("one:1", "two:1"), True, 0.0, 0.0)
    assert dialled(dials, 0.0) == ["one:1"]
    assert dials.failed(A, 0.01) is False
    assert dialled(dials, 0.01) == ["two:1"]
    assert dials.failed(A, 0.02) is True


def test_a_round_under_way_is_not_begun_again() -> None:
    dials = dialing()
    dials.want(A, ("one:1",), True, 0.0, 0.0)
    assert dialled(dials, 0.0) == ["one:1"]
    assert [dialled(dials, now) for now in (0.2, 0.5, 5.0, 30.0)] == [[]] * 4


def test_pauses_grow_to_the_longest_and_no_further() -> None:
    dials = dialing()
    dials.want(A, ("one:1",), True, 0.0, 0.0)
    pauses = []
    for _ in range(30):
        at = fail_round(dials, A)
        deadline = dials.deadline()
        assert deadline is not None
        pauses.append(deadline - at)
    assert 0.2 <= pauses[0] <= 0.4
    assert max(pauses) <= CONFIG.longest_pause_s
    assert min(pauses[15:]) >= CONFIG.longest_pause_s / 2


def test_patience_delays_the_first_dial_only() -> None:
    dials = dialing()
    dials.want(A, ("one:1",), True, 0.0, 0.6)
    assert dialled(dials, 0.5) == []
    assert dialled(dials, 0.6) == ["one:1"]


def test_a_new_address_and_a_hurry_end_the_pause() -> None:
    dials = dialing()
    dials.want(A, ("one:1",), True, 0.0, 0.0)
    for _ in range(10):
        at = fail_round(dials, A)
    dials.want(A, ("two:1", "one:1"), True, at, 0.0)
    assert dialled(dials, at) == ["two:1"]
    dials.failed(A, at)
    dialled(dials, at)
    dials.failed(A, at)
    dials.hurry(A, at + 0.001)
    assert dialled(dials, at + 0.001) == ["two:1"]


def test_a_known_address_does_not_end_the_pause() -> None:
    dials = dialing()
    dials.want(A, ("one:1",), True, 0.0, 0.0)
    for _ in range(10):
        at = fail_round(dials, A)
    dials.want(A, ("one:1",), True, at, 0.0)
    assert dialled(dials, at) == []


def test_who_has_a_link_is_not_dialled_until_it_is_lost() -> None:
    dials = dialing()
    dials.want(A, ("one:1",), True, 0.0, 0.0)
    dials.linked(A)
    assert dials.deadline() is None
    assert dialled(dials, 100.0) == []
    dials.unlinked(A, 200.0)
    assert dialled(dials, 200.0) == ["one:1"]


def test_a_bare_address_rests_while_the_agent_found_there_is_linked() -> None:
    dials = dialing()
    dials.want("", ("one:1",), True, 0.0, 0.0)
    assert dialled(dials, 0.0) == ["one:1"]
    dials.answered("one:1", "one:1", A)
    dials.linked(A)
    assert dialled(dials, 100.0) == []
    dials.unlinked(A, 100.0)
    assert dialled(dials, 100.0) == ["one:1"]


@pytest.mark.parametrize(
    ("lasting", "longest_s"), [(True, CONFIG.longest_pause_s), (False, CONFIG.hint_pause_s)]
)
def test_who_never_answers_is_dialled_for_ever_and_more_rarely_if_only_hints_name_it(
    lasting: bool, longest_s: float
) -> None:
    dials = dialing()
    dials.want(A, ("one:1",), lasting, 0.0, 0.0)
    for _ in range(30):
        at = fail_round(dials, A)
    again_at = dials.deadline()
    assert again_at is not None
    assert longest_s / 2 <= again_at - at <= longest_s
    assert dialled(dials, again_at) == ["one:1"]


def test_targets_are_bounded_and_the_most_hopeless_gives_way() -> None:
    dials = dialing()
    dials.want(A, ("one:1",), False, 0.0, 0.0)
    fail_round(dials, A)
    for n in range(10):
        dials.want(f"n{n}-00000000", (f"10.0.0.{n}:1",), False, 0.0, 0.0)
        assert len(dials.targets) <= CONFIG.targets_max
    assert A not in dials.targets
    assert "n9-00000000" in dials.targets


def test_lasting_targets_are_never_pushed_out_by_hints() -> None:
    dials = dialing()
    lasting = [f"l{n}-00000000" for n in range(CONFIG.targets_max)]
    for key in lasting:
        dials.want(key, (f"{key}:1",), True, 0.0, 0.0)
    dials.want(B, ("two:1",), False, 0.0, 0.0)
    assert sorted(dials.targets) == lasting


@pytest.mark.parametrize("count", [ADDRESSES_MAX, ADDRESSES_MAX + 1, 1000])
def test_addresses_of_one_target_are_bounded_and_news_come_first(count: int) -> None:
    dials = dialing()
    for n in range(count):
        dials.want(A, (f"10.0.0.{n}:1",), True, 0.0, 0.0)
    addresses = dials.targets[A].addresses
    assert len(addresses) == ADDRESSES_MAX
    assert addresses[0] == f"10.0.0.{count - 1}:1"
