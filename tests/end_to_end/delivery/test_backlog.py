"""A long queue for an absent peer costs no time and no memory, and drains in order."""

from __future__ import annotations

import statistics
import time

import psutil
import pytest
from end_to_end.delivery.post import Post, texts
from end_to_end.processes.harness import wait_until

pytestmark = pytest.mark.process

EDGE = 500
SLOWER_MAX = 3.0
GROWTH_BYTES_MAX = 48 * 1024 * 1024  # the store's page cache and its log, not the messages
BODY = "x" * 1000


LONG = [pytest.mark.long, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ("elsewhere", 2_000),
        pytest.param("here", 2_000, marks=LONG),
        pytest.param("here", 20_000, marks=LONG),
        pytest.param("elsewhere", 20_000, marks=LONG),
    ],
)
def test_a_backlog_slows_nothing_stays_on_disk_and_drains_in_order(
    post: Post, where: str, count: int
) -> None:
    sender = post.start("tester")
    folder = post.folder if where == "here" else post.elsewhere
    absent = post.make_agent("backend", folder).agent
    process = psutil.Process(sender.pid)
    times = []
    with post.session(sender.agent) as session:
        for number in range(count):
            if number == EDGE:
                before = process.memory_info().rss
            started = time.perf_counter()
            session.ask("send", to=absent, text=f"{number} {BODY}")
            times.append(time.perf_counter() - started)
    growth = process.memory_info().rss - before
    first, last = statistics.median(times[:EDGE]), statistics.median(times[-EDGE:])
    assert last <= SLOWER_MAX * first, (first, last)
    assert growth < GROWTH_BYTES_MAX
    assert post.ask(sender.agent, "status")["outbox"]["queued"] == count

    back = post.join("backend") if where == "here" else post.join_elsewhere("backend", sender)
    back.joined  # noqa: B018 - waits
    started = time.monotonic()
    wait_until(lambda: post.ask(absent, "status")["inbox"]["unread"] == count, "the drain", 120.0)
    rate = count / (time.monotonic() - started)
    came = [int(each.split()[0]) for each in texts(post.inbox(absent))]
    assert came == list(range(count))
    growth = process.memory_info().rss - before
    assert growth < GROWTH_BYTES_MAX + 32 * 1024 * 1024  # and one window for a linked peer
    print(f"{count} {where}: {first * 1e3:.2f} ms, {last * 1e3:.2f} ms, {rate:.0f}/s, {growth:,} B")
