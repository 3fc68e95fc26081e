"""What does it cost when the recipient says `done` to each message?

Two pairs, alike but for a handler at one recipient that returns at once: each message is then
marked as done, durably, and its sender is told. Latency and throughput, as ratios to the pair
whose recipient says nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from meshagent.bench.answers import Answer, Headline
from meshagent.bench.harness import Setting, interleave, percentile, ratio_of, spread_of
from meshagent.bench.pair import MeshPair

__all__ = ["measure"]

SIZE = 200
COROUTINES = 500
P50_BAR, THROUGHPUT_BAR = 1.5, 2 / 3
QUIET, DONE = "nothing said", "done said"
AMOUNTS = {"tiny": (1, 5, 24), "quick": (5, 150, 4_000), "full": (9, 500, 8_000)}
"""Rounds, messages of a round one by one, messages of a burst."""


def measure(setting: Setting) -> Answer:
    """p50 of a message, and messages per second, of both pairs."""
    rounds, messages, burst = AMOUNTS[setting.extent]
    answer = Answer()
    with (
        MeshPair(setting.folder / "quiet") as quiet,
        MeshPair(setting.folder / "done") as done,
    ):
        done.recipient.ask("handle")
        pairs = {QUIET: quiet, DONE: done}
        lone = {name: partial(_p50, pair, messages) for name, pair in pairs.items()}
        p50 = interleave(lone, rounds, 1)
        many = {name: partial(_per_second, pair, burst) for name, pair in pairs.items()}
        per_s = interleave(many, rounds, 1)
    answer.cases = {
        name: {"p50_ms": spread_of(p50[name]), "per_s": spread_of(per_s[name])} for name in pairs
    }
    answer.headlines = [
        Headline("receipts.p50_to_quiet", ratio_of(p50[DONE], p50[QUIET]), "lower", bar=P50_BAR),
        Headline(
            "receipts.per_s_to_quiet", ratio_of(per_s[DONE], per_s[QUIET]), "higher",
            bar=THROUGHPUT_BAR,
        ),
    ]  # fmt: skip
    return answer


def _p50(pair: MeshPair, count: int) -> float:
    taken: list[Any] = list(pair.ask("latencies", count=count, size=SIZE))
    _settle(pair)
    return percentile(taken, 0.5)


def _per_second(pair: MeshPair, count: int) -> float:
    ask: Callable[[], float] = partial(
        pair.ask, "burst", count=count, size=SIZE, coroutines=COROUTINES
    )
    taken = count / ask()
    _settle(pair)
    return taken


def _settle(pair: MeshPair) -> None:
    """What is left to say must not burden whoever is next."""
    pair.recipient.ask("handled")
    pair.settle()
