"""How long does one durable message take, from `send` to delivered?

200 bytes, one at a time, both sides synced. Floor: two fdatasyncs and one CURVE round trip.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

from meshagent.bench.answers import Answer, Headline
from meshagent.bench.contestants import takes_part
from meshagent.bench.floors import RoundTripFloor
from meshagent.bench.harness import Setting, interleave, percentile, ratio_of, spreads_of
from meshagent.bench.pair import MeshPair

__all__ = ["measure"]

SIZE = 200
P50_TO_FLOOR_BAR = 1.8
P99_TO_P50_BAR = 5.0
OURS, FLOOR = "meshagent", "floor: 2 fdatasync + CURVE round trip"
Rounds = dict[str, Callable[[], list[float]]]


@dataclass(frozen=True, slots=True)
class LatencyAmount:
    """How much is measured."""

    rounds: int
    messages: int


AMOUNTS = {
    "tiny": LatencyAmount(1, 5),
    "quick": LatencyAmount(5, 150),
    "full": LatencyAmount(15, 500),
}


def measure(setting: Setting) -> Answer:
    """p50 and p99 of each contestant, and the ratios."""
    amount, answer = AMOUNTS[setting.extent], Answer()
    answer.leave_out("ask/reply that is not durable", "meshagent has none in this version")
    with ExitStack() as stack:
        cases = _cases(setting, answer, stack, amount.messages)
        samples = interleave(cases, amount.rounds, 1, setting.folder)
    rounds = {
        name: [
            {"p50_ms": percentile(each, 0.5), "p99_ms": percentile(each, 0.99)} for each in taken
        ]
        for name, taken in samples.items()
    }
    answer.cases = {name: spreads_of(each) for name, each in rounds.items()}
    p50 = {name: [each["p50_ms"] for each in taken] for name, taken in rounds.items()}
    p99 = [each["p99_ms"] for each in rounds[OURS]]
    answer.headlines = [
        Headline(
            "latency.p50_to_floor", ratio_of(p50[OURS], p50[FLOOR]), "lower", bar=P50_TO_FLOOR_BAR
        ),
        Headline("latency.p99_to_p50", ratio_of(p99, p50[OURS]), "lower", bar=P99_TO_P50_BAR),
        *(
            Headline(f"latency.p50_to_{_key(name)}", ratio_of(p50[OURS], p50[name]), "lower")
            for name in cases
            if name not in (OURS, FLOOR)
        ),
    ]
    return answer


def _key(case: str) -> str:
    return case.replace(" ", "_")


def _cases(setting: Setting, answer: Answer, stack: ExitStack, count: int) -> Rounds:
    pair = stack.enter_context(MeshPair(setting.folder / "mesh"))
    floor = stack.enter_context(closing(RoundTripFloor(setting.folder)))

    def ours() -> list[float]:
        taken = list(pair.ask("latencies", count=count, size=SIZE))
        pair.settle()
        return taken

    cases: Rounds = {
        OURS: ours,
        FLOOR: lambda: floor.latencies(count, SIZE),
    }
    if takes_part("nats", setting, answer):
        from meshagent.bench.contestants.nats import JetStream

        for name, always in (("nats sync always", True), ("nats default", False)):
            server = stack.enter_context(
                closing(JetStream(setting.folder / name.replace(" ", "-"), sync_always=always))
            )
            cases[name] = partial(server.latencies, count, SIZE)
    if takes_part("http", setting, answer):
        from meshagent.bench.contestants.http import Http

        http = stack.enter_context(closing(Http(setting.folder / "http")))
        cases["http synced"] = lambda: http.latencies(count, SIZE, synced=True)
        cases["http not synced"] = lambda: http.latencies(count, SIZE, synced=False)
    return cases
