"""What a question yields: each case's figures, the headlines with their bars, who was left out.

Values only; measures and prints nothing. Invariant: a headline in `RATIO` has no unit, so that it
may be compared with another machine's; every other one belongs to this machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from meshagent.bench.harness import Spread

__all__ = ["RATIO", "Answer", "Headline", "LeftOut"]

RATIO = "x"
Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Somebody or something that was not measured, and why."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class Headline:
    """A figure that a reader came for, beside the bar that it was to reach."""

    name: str
    """Stable: `recorded.json` knows it by this."""
    spread: Spread
    better: Better
    unit: str = RATIO
    bar: float | None = None

    @property
    def verdict(self) -> str:
        """`pass` or `miss`, by the median; empty where no bar was set."""
        if self.bar is None:
            return ""
        good = (
            self.spread.median <= self.bar
            if self.better == "lower"
            else self.spread.median >= self.bar
        )
        return "pass" if good else "miss"

    def as_json(self) -> dict[str, Any]:
        """For a document with stable keys."""
        return {
            "name": self.name,
            **self.spread.as_json(),
            "unit": self.unit,
            "better": self.better,
            "bar": self.bar,
            "verdict": self.verdict,
        }


@dataclass(slots=True)
class Answer:
    """All that was found on one question."""

    cases: dict[str, dict[str, Spread]] = field(default_factory=dict)
    headlines: list[Headline] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def leave_out(self, what: str, reason: str) -> None:
        """Say that it was not measured."""
        self.left_out.append(LeftOut(what, reason))

    def as_json(self) -> dict[str, Any]:
        """For a document with stable keys."""
        return {
            "cases": {
                case: {name: spread.as_json() for name, spread in figures.items()}
                for case, figures in self.cases.items()
            },
            "headlines": [each.as_json() for each in self.headlines],
            "left_out": [{"what": each.what, "reason": each.reason} for each in self.left_out],
        }
