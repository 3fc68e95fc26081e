"""The formulas, with their tables of cases beside."""

from __future__ import annotations

import random

import pytest

from meshagent.core.membership.lifeguard import (
    LocalHealth,
    backoff_s,
    gossip_transmits,
    suspicion_s,
)


@pytest.mark.parametrize(
    ("members", "agreeing", "needed", "expected"),
    [
        (2, 0, 0, 3.0),  # nobody else could agree: the full time
        (3, 0, 1, 3.0),
        (3, 1, 1, 2.25),  # all that could agree do: three quarters
        (10, 0, 3, 3.0),
        (10, 1, 3, 2.625),  # logarithmic: the first to agree counts most
        (10, 2, 3, 2.4056391),
        (10, 3, 3, 2.25),
        (10, 9, 3, 2.25),  # never below that, whoever joins in
        (50, 0, 3, 3.0),  # up to here the LAN promise holds
        (51, 0, 3, 3.0151860),
        (500, 0, 3, 4.7657757),  # beyond, word takes longer to travel
        (500, 3, 3, 3.5743318),
        (2500, 0, 3, 6.0),
        (1, 0, 0, 3.0),
        (0, 0, 0, 3.0),
    ],
)
def test_suspicion_shrinks_as_others_agree(
    members: int, agreeing: int, needed: int, expected: float
) -> None:
    assert suspicion_s(members, agreeing, needed, 3.0) == pytest.approx(expected)


def test_more_agreement_never_means_more_patience() -> None:
    for members in (2, 3, 10, 1000):
        times = [suspicion_s(members, agreeing, 3, 3.0) for agreeing in range(6)]
        assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(
    ("members", "expected"), [(1, 4), (2, 4), (9, 4), (10, 8), (99, 8), (100, 12), (4096, 16)]
)
def test_updates_are_passed_on_more_often_in_larger_meshes(members: int, expected: int) -> None:
    assert gossip_transmits(members, 4) == expected


@pytest.mark.parametrize(
    ("failures", "low", "high"),
    [
        (0, 0.1, 0.2),
        (1, 0.2, 0.4),
        (2, 0.4, 0.8),
        (5, 3.2, 6.4),
        (8, 25.6, 51.2),
        (9, 30.0, 60.0),
        (20, 30.0, 60.0),
        (10**9, 30.0, 60.0),  # no overflow, however long somebody is away
    ],
)
def test_backoff_doubles_is_capped_and_jittered_by_half(
    failures: int, low: float, high: float
) -> None:
    rng = random.Random(failures)
    pauses = [backoff_s(failures, 0.2, 60.0, rng) for _ in range(200)]
    assert low <= min(pauses) < max(pauses) <= high
    assert max(pauses) - min(pauses) > (high - low) * 0.9


def test_local_health_stretches_time_within_bounds() -> None:
    health = LocalHealth(worst=3)
    assert health.stretch(2.0) == 2.0
    health.note(+1)
    assert health.stretch(2.0) == 4.0
    health.note(+100)
    assert health.stretch(2.0) == 8.0
    health.note(-1)
    assert health.stretch(2.0) == 6.0
    health.note(-100)
    assert health.stretch(2.0) == 2.0
