"""Fifty commands at the same moment, and one that never ends: nobody sees a lock."""

from __future__ import annotations

import json

import pytest
from end_to_end.delivery.post import Post
from end_to_end.processes.harness import finish, wait_until

pytestmark = pytest.mark.process

CALLS = 50
LARGE = "x" * 400_000
WAL_BYTES_MAX = 9 * 1024 * 1024  # 8 MiB is what the store lets a burst leave, and one message


def test_fifty_commands_and_a_follower_all_succeed_and_the_log_stays_small(post: Post) -> None:
    sender, backend = post.start("tester"), post.start("backend")
    sender.wait_for_peer(backend.agent, "alive")
    (first,) = post.send(sender.agent, backend.agent, "the first")
    post.wait_for_state(sender.agent, first, "delivered")
    follower, followed = post.follow(backend.agent)
    wait_until(followed, "the follower to show what is there")

    kinds = [
        ("send", "backend", "-", "--as", sender.agent, "--json"),
        ("inbox", "--as", backend.agent, "--limit", "3", "--json"),
        ("log", "--search", "first", "--as", backend.agent, "--json"),
        ("read", first, "--as", backend.agent, "--json"),
        ("outbox", "--all", "--limit", "3", "--as", sender.agent, "--json"),
    ]
    calls = []
    largest = 0
    wal = post.folder.agents / backend.agent / "mesh.db-wal"
    for number in range(CALLS):
        arguments = kinds[0] if number % 2 else kinds[number // 2 % len(kinds)]
        calls.append(post.command(*arguments, stdin=-1))
    sent = set()
    for number, call in enumerate(calls):
        ran = finish(call, f"{number} {LARGE}")
        assert (ran.code, ran.err) == (0, ""), ran.err
        if isinstance(ran.json, dict) and "elapsed_ms" in ran.json:
            sent.add(ran.json["id"])
        largest = max(largest, wal.stat().st_size)
    assert len(sent) > CALLS // 2
    assert largest < WAL_BYTES_MAX

    def shown() -> set[str]:
        return {json.loads(line)["id"] for line in followed()[1:]}

    wait_until(lambda: shown() >= sent, "the follower to have shown all")
    lines = followed()
    assert [each["id"] for each in json.loads(lines[0])] == [first]
    assert len(lines) == 1 + len(sent)
    assert follower.poll() is None
    follower.kill()
    follower.wait()
    assert "locked" not in "".join(line for line in lines if len(line) < 1000)
    for agent in (sender.agent, backend.agent):
        log = (post.folder.agents / agent / "node.log").read_text()
        assert "locked" not in log
        assert "ERROR" not in log


def test_a_follower_sees_a_whole_backlog_drain(post: Post) -> None:
    """More at once than a subscriber's queue holds: it reads on from its place."""
    count = 1200
    sender, backend = post.start("tester"), post.start("backend")
    agent = backend.agent
    sender.wait_for_peer(agent, "alive")
    post.leave(backend)
    post.send(sender.agent, agent, *[f"{number}" for number in range(count)])
    back = post.start("backend")
    follower, followed = post.follow(agent)
    wait_until(
        lambda: post.ask(agent, "status")["inbox"]["unread"] == count, "the backlog to drain"
    )

    def shown() -> list[str]:
        first, *lines = followed() or ["[]"]
        return [each["text"] for each in [*json.loads(first), *map(json.loads, lines)]]

    wait_until(lambda: len(shown()) >= 50 and shown()[-1] == f"{count - 1}", "the last one")
    assert follower.poll() is None
    follower.kill()
    follower.wait()
    numbers = list(map(int, shown()))
    assert numbers == list(range(numbers[0], count))
    assert back.process.poll() is None
