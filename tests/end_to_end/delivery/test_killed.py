"""kill -9 at any moment: what was accepted is in the other's inbox exactly once, in order."""

from __future__ import annotations

import pytest
from end_to_end.delivery.ordeal import Account, Ordeal
from end_to_end.delivery.post import Post

pytestmark = pytest.mark.process

SEED = 20261
COUNT = 2000  # each way
KILLS = 20
SETTLE_S = 30.0

# A receiver that answers first and writes later: what the product must never be.
ACKS_BEFORE_COMMIT = """
import asyncio
from meshagent.storage.mail.sqlite_store import SqliteStore

begin = SqliteStore.begin

def later(self, rows, then):
    loop = asyncio.get_running_loop()
    loop.call_soon(then, None)
    loop.call_later(2.0, lambda: begin(self, rows, lambda error: None))  # after its death

SqliteStore.begin = later
"""


@pytest.mark.timeout(180)
def test_nothing_is_lost_doubled_or_reordered_by_twenty_kills(post: Post) -> None:
    ordeal = Ordeal(post, SEED, COUNT, KILLS)
    one, two = ordeal.start("tester"), ordeal.start("backend")
    ordeal.run([(one, two), (two, one)], {one: "tester", two: "backend"})
    ordeal.settle(SETTLE_S)
    assert ordeal.killed >= KILLS
    for account in ordeal.accounts.values():
        assert len(account.accepted) >= COUNT
    assert ordeal.faults() == []


def test_a_receiver_that_acks_before_it_commits_is_found_out(post: Post) -> None:
    """The test of the test above: the same account finds what this mutant loses."""
    ordeal = Ordeal(post, SEED, count=400, kills=6)
    writer, reader = ordeal.start("tester"), ordeal.start("backend", ACKS_BEFORE_COMMIT)
    ordeal.run([(writer, reader)], {reader: "backend"}, ACKS_BEFORE_COMMIT)
    ordeal.settle(SETTLE_S)
    faults = ordeal.faults()
    assert [each for each in faults if "was accepted and is not there" in each]


def test_the_account_sees_every_kind_of_fault() -> None:
    account = Account({"a": 0, "b": 1, "c": 2}, {3}, 4)
    sound = [{"id": each, "text": str(at)} for at, each in enumerate("abc")]
    assert account.faults(sound) == []
    assert account.faults([*sound, {"id": "d", "text": "3"}]) == []
    assert account.faults(sound[:2])
    assert account.faults([*sound, sound[0]])
    assert account.faults(sound[::-1])
    assert account.faults([*sound, {"id": "e", "text": "9"}])
