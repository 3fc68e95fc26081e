"""What does a backlog cost: messages for an absent peer, then its return?

Live and replayed messages are the same, between the same two agents, so the ratio of their rates
is the figure. The drain is counted from the recipient's start as a process to the sender's last
acknowledgement, and separately from the moment at which it has joined.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

from meshagent.bench.answers import Answer, Headline
from meshagent.bench.harness import Setting, ratio_of, spread_of, spreads_of
from meshagent.bench.pair import MeshPair

__all__ = ["measure"]

SIZE = 200
COROUTINES = 500
REPLAY_TO_LIVE_BARS = {100_000: 0.8}  # a shorter one is mostly the greeting and a first read
AMOUNTS = {"tiny": (1, (50,)), "quick": (1, (10_000,)), "full": (3, (10_000, 100_000))}
"""Rounds, and the backlog's sizes."""
LIVE_SHARE = 5  # of a backlog, so many times fewer are sent live: enough for a rate
LIVE_MAX = 10_000


def measure(setting: Setting) -> Answer:
    """Rates, memory and the ratio, for each size of backlog."""
    answer = Answer()
    rounds, sizes = AMOUNTS[setting.extent]
    for size in sizes:
        figures = []
        for number in range(rounds):
            with ExitStack() as stack:
                folder = setting.folder / f"replay-{size}-{number}"
                figures.append(_round(stack.enter_context(MeshPair(folder)), size))
        answer.cases[f"meshagent, {size} messages"] = spreads_of(figures)
        live = [each["live_per_s"] for each in figures]
        replayed = [each["replay_per_s"] for each in figures]
        answer.headlines.append(
            Headline(
                f"replay.{size}_to_live",
                ratio_of(replayed, live),
                "higher",
                bar=REPLAY_TO_LIVE_BARS.get(size),
            )
        )
        for who in ("sender", "recipient"):
            name = f"{who}_grew_mib"
            grown = spread_of([each[name] for each in figures])
            answer.headlines.append(Headline(f"replay.{size}_{name}", grown, "lower", unit="MiB"))
    return answer


def _round(pair: MeshPair, messages: int) -> dict[str, float]:
    live = max(1, min(messages // LIVE_SHARE, LIVE_MAX))
    warm = max(1, live // LIVE_SHARE)
    pair.ask("burst", count=warm, size=SIZE, coroutines=COROUTINES)
    live_s = pair.ask("burst", count=live, size=SIZE, coroutines=COROUTINES)
    pair.recipient_leaves()
    before = pair.sender.ask("memory")
    queued_s = pair.ask("queue", count=messages, size=SIZE, coroutines=COROUTINES)
    began = time.monotonic()
    pair.recipient_returns()
    joined, fresh = time.monotonic(), pair.recipient.ask("memory")
    ended = pair.sender.ask("drained")
    return {
        "live_per_s": live / live_s,
        "queued_per_s": messages / queued_s,
        "replay_per_s": messages / max(ended - joined, 1e-6),
        "start_to_drained_s": ended - began,
        "sender_grew_mib": pair.sender.ask("memory") - before,
        "recipient_grew_mib": pair.recipient.ask("memory") - fresh,
    }
