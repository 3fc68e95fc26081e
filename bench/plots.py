"""The report as pictures: one SVG for each question, drawn by matplotlib where it is installed.

Draws what the report holds, and measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshagent.bench.contestants import HOW_TO_GET
from meshagent.errors import UsageError

__all__ = ["check_plots", "draw"]

INCHES_WIDE = 9.0
INCHES_A_CASE = 0.35
INCHES_A_PLOT = 1.0
LOG_FROM = 20.0  # times between the smallest and the largest: on a line the small one would vanish
OURS, FLOOR, OTHERS = "tab:blue", "tab:gray", "tab:orange"


def check_plots() -> None:
    """Before anything is measured: can they be drawn?"""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError(
            "Plots need matplotlib, which is not installed.", hint=f"{HOW_TO_GET}."
        ) from None


def draw(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """The files written."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _draw(question, part["cases"], folder / f"{question}.svg")
        for question, part in report["questions"].items()
        if part["cases"]
    ]


def _draw(question: str, cases: Mapping[str, Any], path: Path) -> Path:
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for figures in cases.values() for name in figures))
    having = {name: [case for case in cases if name in cases[case]] for name in names}
    heights = [INCHES_A_PLOT + INCHES_A_CASE * len(having[name]) for name in names]
    figure = Figure(figsize=(INCHES_WIDE, sum(heights)), layout="constrained")
    figure.suptitle(f"meshagent bench {question}")
    axes = figure.subplots(len(names), 1, squeeze=False, height_ratios=heights)
    for name, (axis,) in zip(names, axes, strict=True):
        _bars(axis, name, {case: cases[case][name] for case in having[name]})
    figure.savefig(path, format="svg")
    return path


def _bars(axis: Any, name: str, figures: Mapping[str, Any]) -> None:
    medians = [each["median"] for each in figures.values()]
    below = [each["median"] - each["low"] for each in figures.values()]
    above = [each["high"] - each["median"] for each in figures.values()]
    axis.barh(
        list(figures), medians, xerr=[below, above], color=[_colour(each) for each in figures]
    )
    axis.invert_yaxis()
    axis.set_xlabel(name.replace("_", " "))
    if min(medians) > 0 and max(medians) / min(medians) > LOG_FROM:
        axis.set_xscale("log")


def _colour(case: str) -> str:
    if case.startswith("floor"):
        return FLOOR
    return OTHERS if case.startswith(("nats", "http", "zenoh", "pyre", "scp")) else OURS
