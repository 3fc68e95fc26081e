"""When the loop waits for a commit: while the disk is quick, and half of its time at the most."""

from __future__ import annotations

import pytest

from meshagent.storage.log.wait_policy import QUICK_S, WAIT_S, WaitPolicy

Q = QUICK_S / 4
QUICK = [Q] * 4


@pytest.mark.parametrize(
    ("took", "allowed"),
    [
        ([], False),  # nothing is known of the disk
        (QUICK, True),
        ([2 * QUICK_S] * 9, False),
        ([*QUICK, 1.0], True),  # one slow commit is nobody's fault,
        ([*QUICK, *[1.0] * 9], False),  # but many are
        ([*QUICK, *[1.0] * 99, *QUICK], True),
        # A busy loop keeps the thread waiting, most often: what was quick counts more.
        ([*QUICK, *[1.0, 1.0, Q] * 9], True),
    ],
)
def test_the_loop_waits_while_commits_are_quick(took: list[float], allowed: bool) -> None:
    policy = WaitPolicy()
    for each in took:
        policy.committed(each)
    assert policy.allows(0.0) is allowed


def test_a_wait_that_ran_out_is_the_last_until_commits_are_quick_again() -> None:
    policy = WaitPolicy()
    for _ in range(99):
        policy.committed(Q)
    policy.waited(1.0, 1.0 + WAIT_S, ran_out=True)
    assert not policy.allows(99.0)
    policy.committed(Q)
    assert not policy.allows(99.0), "one may have been luck"
    for each in QUICK:
        policy.committed(each)
    assert policy.allows(99.0)


def test_half_of_the_time_is_not_waited() -> None:
    """So that a burst shares one sync."""
    policy = WaitPolicy()
    for each in QUICK:
        policy.committed(each)
    policy.waited(1.0, 1.001, ran_out=False)
    assert not policy.allows(1.0015)
    assert policy.allows(1.0021)
