"""Whom to probe: everyone, within a bound."""

from __future__ import annotations

import random

import pytest

from meshagent.core.membership.probe_order import ProbeOrder
from meshagent.core.model.peers import AgentId

ME = AgentId("me-mmmmmmmm")


def agents(count: int) -> list[AgentId]:
    """Ids whose fingerprints lie all around the ring, whatever the names before them."""
    rng = random.Random(count)
    letters = "0123456789abcdefghjkmnpqrstvwxyz"
    return [
        AgentId(f"{rng.choice('abyz')}-{''.join(rng.choices(letters, k=8))}") for _ in range(count)
    ]


def order_of(members: list[AgentId], seed: int = 1) -> ProbeOrder:
    order = ProbeOrder(ME, random.Random(seed))
    for agent in members:
        order.add(agent)
    return order


def successor(members: list[AgentId]) -> AgentId:
    ring = sorted(members, key=lambda agent: agent[-8:])
    return next((each for each in ring if each[-8:] > ME[-8:]), ring[0])


def test_nobody_is_probed_where_nobody_is() -> None:
    assert order_of([]).next() is None


@pytest.mark.parametrize("count", [1, 2, 3, 10, 50])
def test_the_successor_on_the_ring_is_probed_at_every_second_turn(count: int) -> None:
    members = agents(count)
    order = order_of(members)
    turns = [order.next() for _ in range(40)]
    assert set(turns[0::2]) == {successor(members)}


@pytest.mark.parametrize("count", [1, 2, 3, 10, 50])
@pytest.mark.parametrize("seed", range(5))
def test_everyone_is_probed_within_2n_turns(count: int, seed: int) -> None:
    members = agents(count)
    order = order_of(members, seed)
    for _ in range(3):
        assert {order.next() for _ in range(2 * count)} == set(members)


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_an_order_that_was_filled_at_once_is_as_one_that_grew(count: int) -> None:
    members = agents(count)
    filled = ProbeOrder(ME, random.Random(1))
    filled.fill(members)
    grown = order_of(members)
    assert len(filled) == len(grown) == count
    for agent in members:  # a ring out of order would not find all of them
        assert agent in filled
    turns = [filled.next() for _ in range(2 * count)]
    assert set(turns[0::2]) <= {successor(members) if members else None}
    assert sorted(turns[1::2]) == sorted(members)


def test_all_members_agree_on_the_ring_so_everyone_has_one_prober() -> None:
    everyone = agents(20)
    probed = set()
    for me in everyone:
        order = ProbeOrder(me, random.Random(1))
        for other in everyone:
            if other != me:
                order.add(other)
        probed.add(order.next())
    assert probed == set(everyone)


def test_who_is_removed_is_not_probed_again() -> None:
    members = agents(10)
    order = order_of(members)
    order.hurry(members[0])
    order.remove(members[0])
    assert members[0] not in order
    assert len(order) == 9
    assert members[0] not in {order.next() for _ in range(60)}
    assert members[0] not in order.sample(50)


def test_reason_for_doubt_comes_first_and_once() -> None:
    members = agents(10)
    order = order_of(members)
    order.hurry(members[7])
    order.hurry(members[7])
    order.hurry(AgentId("stranger-00000000"))
    assert order.next() == members[7]
    assert order.next() == successor(members)


def test_a_member_that_comes_and_goes_leaves_nothing_behind() -> None:
    members = agents(5)
    order = order_of(members)
    for _ in range(10_000):
        order.remove(members[0])
        order.add(members[0])
        order.hurry(members[0])
    turns = [order.next() for _ in range(21)]
    assert turns[0] == members[0]  # once: the hurry is over
    assert set(turns[1::2]) == {successor(members)}
    assert sorted(turns[2:12:2]) == sorted(turns[12:22:2]) == sorted(members)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 30])
def test_a_sample_is_of_different_members_without_the_excluded(count: int) -> None:
    members = agents(count)
    order = order_of(members)
    for without in (None, *members[:2]):
        eligible = set(members) - {without}
        for _ in range(20):
            sample = order.sample(3, without=without)
            assert len(sample) == len(set(sample)) == min(3, len(eligible))
            assert set(sample) <= eligible
