"""What all benchmarks share: interleaved rounds, a median with its spread, facts of the machine.

Measures nothing by itself. Invariant: in each round every case runs once, in an order that turns,
so that a machine that grows slower is unfair to nobody.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Spread", "interleave", "machine_facts", "spread_of"]


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure as it came out of several rounds: never one number alone."""

    median: float
    low: float
    high: float
    rounds: int

    def __format__(self, how: str) -> str:
        return f"{self.median:{how}} ({self.low:{how}}–{self.high:{how}})"  # noqa: RUF001

    def as_json(self) -> dict[str, Any]:
        """For a document with stable keys."""
        return asdict(self)


def spread_of(values: Sequence[float]) -> Spread:
    """Median, smallest and largest."""
    return Spread(statistics.median(values), min(values), max(values), len(values))


def interleave(cases: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every case in every round; the figures of a case are in the order of the rounds."""
    figures: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    for turn in range(rounds):
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            figures[name].append(cases[name]())
    return figures


def machine_facts() -> dict[str, Any]:
    """What a reader needs to judge a figure."""
    import zmq

    from meshagent import __version__

    return {
        "meshagent": __version__,
        "python": platform.python_version(),
        "libzmq": zmq.zmq_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_before": os.getloadavg()[0],
        "editable_install": _is_editable(),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _is_editable() -> bool:
    """An editable install finds its modules more slowly, at every start of the interpreter."""
    return any(name.startswith("__editable__") for name in sys.modules)
