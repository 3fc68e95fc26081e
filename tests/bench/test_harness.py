"""The statistics and the order of rounds: pure."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from meshagent.bench.answers import Headline
from meshagent.bench.harness import interleave, percentile, ratio_of, spread_of, spreads_of


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([7.0], 0.5, 7.0),
        ([7.0], 0.99, 7.0),
        ([1.0, 2.0], 0.5, 1.0),
        ([1.0, 2.0], 0.51, 2.0),
        ([float(n) for n in range(1, 101)], 0.5, 50.0),
        ([float(n) for n in range(1, 101)], 0.99, 99.0),
        ([float(n) for n in range(1, 101)], 1.0, 100.0),
    ],
)
def test_a_percentile_is_a_value_that_was_measured(
    values: list[float], share: float, expected: float
) -> None:
    random.Random(1).shuffle(values)
    assert percentile(values, share) == expected


def test_a_spread_keeps_what_a_median_hides() -> None:
    spread = spread_of([5.0, 1.0, 100.0])
    assert (spread.median, spread.low, spread.high, spread.rounds) == (5.0, 1.0, 100.0, 3)


def test_each_figure_of_a_round_has_its_own_spread() -> None:
    spreads = spreads_of([{"p50": 1.0, "p99": 9.0}, {"p50": 3.0, "p99": 5.0}])
    assert spreads["p50"].median == 2.0
    assert (spreads["p99"].low, spreads["p99"].high) == (5.0, 9.0)


def test_a_ratio_is_taken_within_its_round() -> None:
    """A machine that was ten times slower in one round was so for both sides."""
    ratio = ratio_of([2.0, 20.0, 4.0], [1.0, 10.0, 1.0])
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 4.0)


def test_rounds_that_do_not_pair_up_are_our_bug() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratio_of([1.0, 2.0], [1.0])


def test_what_a_case_left_unsynced_is_synced_before_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    opened: dict[int, str] = {}
    real = os.open

    def seen(path: str, flags: int) -> int:
        file = real(path, flags)
        opened[file] = Path(path).name
        return file

    monkeypatch.setattr(os, "open", seen)
    monkeypatch.setattr(os, "fsync", lambda file: happened.append(f"synced {opened[file]}"))

    def case(name: str) -> None:
        (tmp_path / "below").mkdir(exist_ok=True)
        (tmp_path / "below" / name).write_text("left behind")
        happened.append(f"ran {name}")

    interleave({"a": lambda: case("a"), "b": lambda: case("b")}, 1, 0, tmp_path)
    assert happened[:3] == ["ran a", "synced a", "ran b"]
    assert set(happened[3:]) == {"synced a", "synced b"}


def test_every_case_runs_once_a_round_in_an_order_that_turns() -> None:
    ran: list[str] = []

    def case(name: str) -> float:
        ran.append(name)
        return float(len(ran))

    cases = {name: lambda name=name: case(name) for name in "abc"}
    figures = interleave(cases, rounds=3)
    assert "".join(ran) == "abcbcacab"
    assert figures == {"a": [1.0, 6.0, 8.0], "b": [2.0, 4.0, 9.0], "c": [3.0, 5.0, 7.0]}


def test_warm_up_runs_like_a_round_and_counts_as_none() -> None:
    ran: list[int] = []

    def case() -> int:
        ran.append(len(ran))
        return ran[-1]

    assert interleave({"only": case}, rounds=2, warm_up=3) == {"only": [3, 4]}
    assert ran == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("reached", "better", "bar", "verdict"),
    [
        (1.8, "lower", 1.8, "pass"),
        (1.9, "lower", 1.8, "miss"),
        (5.0, "higher", 5.0, "pass"),
        (4.9, "higher", 5.0, "miss"),
        (4.9, "higher", None, ""),
    ],
)
def test_a_bar_is_judged_by_the_median(
    reached: float, better: str, bar: float | None, verdict: str
) -> None:
    spread = spread_of([0.0, reached, 1000.0])
    assert Headline("a.b", spread, better, bar=bar).verdict == verdict  # type: ignore[arg-type]
