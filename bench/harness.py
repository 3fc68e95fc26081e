"""What all questions share: interleaved rounds, a median with its spread, facts of the machine.

Measures nothing by itself. Invariant: in each round every case runs once, in an order that turns,
so that a machine that grows slower is unfair to nobody; and a ratio is taken within a round.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

__all__ = [
    "Extent",
    "Setting",
    "Spread",
    "interleave",
    "machine_facts",
    "percentile",
    "ratio_of",
    "spread_of",
    "spreads_of",
    "sync_below",
]

Extent = Literal["tiny", "quick", "full"]
Round = TypeVar("Round")


@dataclass(frozen=True, slots=True)
class Setting:
    """How a question is to be asked."""

    extent: Extent
    folder: Path
    """An empty folder on the disk that is measured."""
    compare: frozenset[str]
    """The contestants that are wanted, installed or not."""


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


def spreads_of(rounds: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """The spread of each figure, over rounds that all took the same figures."""
    return {name: spread_of([each[name] for each in rounds]) for name in rounds[0]}


def ratio_of(above: Sequence[float], below: Sequence[float]) -> Spread:
    """The ratio within each round: what slowed one round slowed both sides of it."""
    return spread_of([over / under for over, under in zip(above, below, strict=True)])


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    assert values, "no values"
    assert 0 < share <= 1, share
    return sorted(values)[math.ceil(share * len(values)) - 1]


def interleave(
    cases: Mapping[str, Callable[[], Round]],
    rounds: int,
    warm_up: int = 0,
    folder: Path | None = None,
) -> dict[str, list[Round]]:
    """Run every case in every round; the figures of a case are in the order of the rounds.

    The first `warm_up` rounds run like the others, and what they yield is dropped. What a case has
    written below `folder` and not synced is synced before the next one begins, which would else
    wait for it with its own: that belongs to nobody's figure.
    """
    assert rounds > 0, rounds
    figures: dict[str, list[Round]] = {name: [] for name in cases}
    names = list(cases)
    for turn in range(warm_up + rounds):
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            figures[name].append(cases[name]())
            if folder is not None:
                sync_below(folder)
    return {name: values[warm_up:] for name, values in figures.items()}


def sync_below(folder: Path) -> None:
    """Every file in it, whoever wrote it."""
    for root, _, names in os.walk(folder):  # which passes over folders that go meanwhile
        for name in names:
            with contextlib.suppress(OSError):  # it has gone, or is a socket
                file = os.open(os.path.join(root, name), os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    os.fsync(file)
                finally:
                    os.close(file)


def machine_facts(folder: Path | None = None) -> dict[str, Any]:
    """What a reader needs to judge a figure."""
    import apsw
    import zmq

    from meshagent import __version__
    from meshagent.storage.folders.mounts import mounted_filesystem

    return {
        "meshagent": __version__,
        "python": platform.python_version(),
        "libzmq": zmq.zmq_version(),
        "sqlite": apsw.sqlite_lib_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_before": os.getloadavg()[0],
        "editable_install": _is_editable(),
        "disk": None if folder is None else str(folder),
        "filesystem": None if folder is None else mounted_filesystem(folder),
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
