"""Does a large attachment delay the texts beside it?

Latency of texts while an attachment is on its way to the same peer, as a ratio to the same pair's
latency when nothing else happens.
"""

from __future__ import annotations

from meshagent.bench.agent import features
from meshagent.bench.answers import Answer, Headline
from meshagent.bench.bulk import MIB, blob_path, new_file
from meshagent.bench.harness import (
    Setting,
    interleave,
    percentile,
    ratio_of,
    spreads_of,
)
from meshagent.bench.pair import MeshPair

__all__ = ["measure"]

SIZE = 200
IDLE, BESIDE = "idle", "beside an attachment"
AMOUNTS = {"tiny": (1, 5, 1), "quick": (3, 200, 100), "full": (7, 500, 512)}
"""Rounds, messages of an idle round, MiB of the attachment."""


def measure(setting: Setting) -> Answer:
    """p50 and p99 of both, and the ratios."""
    answer = Answer()
    if "attach" not in features():
        answer.leave_out("meshagent", "attachments are not in this version")
        return answer
    rounds, messages, mib = AMOUNTS[setting.extent]
    with MeshPair(setting.folder / "mesh") as pair:

        def idle() -> list[float]:
            return list(pair.ask("latencies", count=messages, size=SIZE))

        def beside() -> list[float]:
            path = new_file(setting.folder, mib * MIB)
            arrives = str(blob_path(pair.there, path))
            taken = list(pair.ask("texts_beside", path=str(path), arrives=arrives, size=SIZE))
            path.unlink()
            return taken

        samples = interleave({IDLE: idle, BESIDE: beside}, rounds, warm_up=1)
    figures = {
        name: [
            {"p50_ms": percentile(each, 0.5), "p99_ms": percentile(each, 0.99)} for each in taken
        ]
        for name, taken in samples.items()
    }
    answer.cases = {name: spreads_of(taken) for name, taken in figures.items()}
    answer.headlines = [
        Headline(
            f"interference.{name}_to_idle",
            ratio_of(
                [each[f"{name}_ms"] for each in figures[BESIDE]],
                [each[f"{name}_ms"] for each in figures[IDLE]],
            ),
            "lower",
        )
        for name in ("p50", "p99")
    ]
    return answer
