"""How long a start takes: import, help and join, beside a bare interpreter in the same rounds.

    python -m meshagent.bench.startup [--rounds N] [--json]

Runs on loopback in a temporary mesh; touches nothing of the user's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshagent.bench.harness import interleave, machine_facts, spread_of
from meshagent.bench.nodes import MESHAGENT, NodeProcesses

__all__ = ["main", "measure"]

ROUNDS = 15
BARE = "bare interpreter"


def measure(rounds: int) -> dict[str, Any]:
    """Seconds and ratios for each way of starting."""
    facts = machine_facts()
    with NodeProcesses() as nodes:
        project = nodes.init("startup")
        cases = _cases(nodes, project)
        for case in cases.values():
            case()  # once unmeasured: bytecode and disk caches are as they usually are
        figures = interleave(cases, rounds)
    ratios = {
        name: [value / bare for value, bare in zip(values, figures[BARE], strict=True)]
        for name, values in figures.items()
    }
    return {
        "machine": facts,
        "startup": {
            name: {
                "seconds": spread_of(values).as_json(),
                "ratio_to_bare": spread_of(ratios[name]).as_json(),
            }
            for name, values in figures.items()
        },
    }


def _cases(nodes: NodeProcesses, project: Path) -> dict[str, Callable[[], float]]:
    def run(*words: str) -> Callable[[], float]:
        def timed() -> float:
            begin = time.perf_counter()
            subprocess.run(words, check=True, capture_output=True, cwd=project, env=nodes.environ())
            return time.perf_counter() - begin

        return timed

    def join() -> float:
        node = nodes.join(project, "starter", "--discovery", "file")
        nodes.end(node)
        return node.joined_after_s

    return {
        BARE: run(sys.executable, "-P", "-c", "pass"),
        "import meshagent": run(sys.executable, "-P", "-c", "import meshagent"),
        "meshagent --help": run(*MESHAGENT, "--help"),
        "join until joined": join,
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m meshagent.bench.startup")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    report = measure(options.rounds)
    if options.json:
        print(json.dumps(report))
        return
    for name, figures in report["startup"].items():
        seconds, ratio = figures["seconds"], figures["ratio_to_bare"]
        print(
            f"{name:<20}{seconds['median'] * 1000:8.1f} ms "
            f"({seconds['low'] * 1000:.1f} to {seconds['high'] * 1000:.1f})"
            f"{ratio['median']:8.2f} x bare"
        )


if __name__ == "__main__":
    main()
