"""What is passed on, how often, and that the queue is bounded."""

from __future__ import annotations

from meshagent.core.membership.gossip import UPDATES_PER_FRAME_MAX, GossipQueue


def test_each_update_is_passed_on_so_many_times_and_then_forgotten() -> None:
    queue = GossipQueue()
    queue.put("a record", b"a")
    assert [queue.take(3) for _ in range(5)] == [(b"a",), (b"a",), (b"a",), (), ()]
    assert len(queue) == 0


def test_a_newer_word_replaces_the_older_and_starts_afresh() -> None:
    queue = GossipQueue()
    queue.put("a record", b"old")
    assert queue.take(2) == (b"old",)
    queue.put("a record", b"new")
    assert [queue.take(2) for _ in range(3)] == [(b"new",), (b"new",), ()]


def test_topics_without_truth_are_dropped_and_others_kept() -> None:
    queue = GossipQueue()
    for topic in ("a by x", "a by y", "a record", "ab by x"):
        queue.put(topic, topic.encode())
    queue.drop("a by ")
    assert queue.take(1) == (b"a record", b"ab by x")


def test_a_frame_is_bounded_and_takes_the_least_often_sent_first() -> None:
    queue = GossipQueue()
    words = [b"%d" % n for n in range(UPDATES_PER_FRAME_MAX * 3)]
    for word in words:
        queue.put(word.decode(), word)
    first, second, third = queue.take(9), queue.take(9), queue.take(9)
    assert {len(first), len(second), len(third)} == {UPDATES_PER_FRAME_MAX}
    assert {*first, *second, *third} == set(words)
    queue.put("news", b"news")
    assert b"news" in queue.take(9)


def test_everything_waiting_is_taken_the_full_number_of_times() -> None:
    queue = GossipQueue()
    for n in range(200):
        queue.put(str(n), b"%d" % n)
    taken: list[bytes] = []
    while len(queue):
        taken += queue.take(4)
    assert all(taken.count(b"%d" % n) == 4 for n in range(200))
