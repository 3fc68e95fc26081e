"""Has a ratio become worse since it was recorded? Compares ratios, never times.

Pure but for `read` and `record`, which know the file. Invariant: what was measured on one side only
is neither better nor worse, and is said to be missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshagent.bench.answers import RATIO

__all__ = ["Comparison", "compare", "margin_for", "read", "record"]

RECORDED = Path(__file__).with_name("recorded.json")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One ratio, then and now."""

    name: str
    recorded: float
    now: float | None
    margin: float
    better: str

    @property
    def worse(self) -> bool:
        """By more than the margin."""
        if self.now is None:
            return False
        if self.better == "lower":
            return self.now > self.recorded * self.margin
        return self.now < self.recorded / self.margin

    def as_json(self) -> dict[str, Any]:
        """For a document with stable keys."""
        return {**asdict(self), "worse": self.worse}


def compare(
    report: Mapping[str, Any], recorded: Mapping[str, Any]
) -> tuple[str | None, list[Comparison]]:
    """The newest release recorded, and each of its ratios next to this report's."""
    if not recorded["releases"]:
        return None, []
    release = list(recorded["releases"])[-1]
    now = _ratios(report)
    return release, [
        Comparison(
            name,
            then["median"],
            now[name]["median"] if name in now else None,
            margin_for(name, recorded["margins"]),
            then["better"],
        )
        for name, then in recorded["releases"][release]["ratios"].items()
        if name.partition(".")[0] in report["questions"]
    ]


def margin_for(name: str, margins: Mapping[str, float]) -> float:
    """The ratio's own, else its question's, else the one for all."""
    return margins.get(name) or margins.get(name.partition(".")[0]) or margins["default"]


def read(path: Path = RECORDED) -> dict[str, Any]:
    """What was recorded."""
    recorded: dict[str, Any] = json.loads(path.read_text())
    return recorded


def record(report: Mapping[str, Any], path: Path = RECORDED) -> Path:
    """Write this report's ratios down as this release's; those of other questions stay."""
    recorded = read(path)
    release = report["machine"]["meshagent"]
    before = recorded["releases"].pop(release, {"ratios": {}})
    recorded["releases"][release] = {
        "recorded_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "extent": report["extent"],
        "cores": report["machine"]["cores"],
        "ratios": before["ratios"] | _ratios(report),
    }
    path.write_text(json.dumps(recorded, indent=2) + "\n")
    return path


def _ratios(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        each["name"]: {"median": round(each["median"], 4), "better": each["better"]}
        for part in report["questions"].values()
        for each in part["headlines"]
        if each["unit"] == RATIO
    }
