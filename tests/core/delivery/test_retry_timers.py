"""Who is due next: always what a look at everyone would find."""

from __future__ import annotations

import random

from meshagent.core.delivery.retry_timers import STALE_MAX, Timers
from meshagent.core.model.peers import AgentId

PEERS = [AgentId(f"n{at}") for at in range(9)]


def test_the_earliest_is_what_a_look_at_all_would_find() -> None:
    for seed in range(200):
        rng, timers = random.Random(seed), Timers()
        slow: dict[AgentId, float] = {}
        now = 0.0
        for _ in range(200):
            peer, at = rng.choice(PEERS), rng.choice([None, now, now + rng.randint(0, 5)])
            timers.set(peer, at)
            slow.pop(peer, None)
            if at is not None:
                slow[peer] = at
            if rng.random() < 0.2:
                now += rng.randint(0, 3)
                due = {peer for peer, at in slow.items() if at <= now}
                times = [slow[peer] for peer in timers.reached(now) if due]
                assert times == sorted(slow[peer] for peer in due)
                for peer in due:
                    del slow[peer]
            assert timers.earliest() == min(slow.values(), default=None)


def test_a_time_that_was_taken_away_can_be_set_again() -> None:
    timers = Timers()
    for _ in range(2):
        timers.set(PEERS[0], 1.0)
        assert timers.earliest() == 1.0
        timers.set(PEERS[0], None)
        assert timers.earliest() is None


def test_one_that_sets_its_time_again_while_it_is_due_is_not_due_twice() -> None:
    timers = Timers()
    timers.set(PEERS[0], 1.0)
    seen = []
    for peer in timers.reached(1.0):
        seen.append(peer)
        timers.set(peer, 2.0)
    assert (seen, timers.earliest()) == ([PEERS[0]], 2.0)


def test_times_that_change_all_the_time_take_no_more_memory() -> None:
    timers = Timers()
    for at in range(10_000):
        timers.set(PEERS[at % 3], 1e6 - at if at % 2 else 1e6 + at)
    assert len(timers._heap) <= 2 * len(PEERS) + STALE_MAX + 1
