"""`bench --check`: verdicts on made-up figures. Nothing is measured here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from meshagent.bench import QUESTIONS, guard, suite
from meshagent.bench.answers import RATIO, Headline
from meshagent.bench.harness import spread_of
from meshagent.cli.bench import command

MACHINE = {
    **dict.fromkeys(("python", "libzmq", "sqlite", "system", "processor", "disk"), "x"),
    "meshagent": "9.9",
    "filesystem": "ext4",
    "cores": 2,
    "load_before": 0.0,
    "editable_install": False,
}


def headline(name: str, value: float, better: str, unit: str = RATIO) -> dict[str, Any]:
    return Headline(name, spread_of([value]), better, unit=unit).as_json()  # type: ignore[arg-type]


def report(*headlines: dict[str, Any], failed: str | None = None) -> dict[str, Any]:
    part = {
        "seconds": 0.1, "failed": failed, "cases": {}, "headlines": list(headlines), "left_out": [],
    }  # fmt: skip
    return {"machine": MACHINE, "extent": "tiny", "questions": {"latency": part}}


RECORDED = {
    "margins": {"default": 1.5, "latency.p99_to_p50": 3.0, "startup": 1.2},
    "releases": {
        "0.1": {"ratios": {"latency.p50_to_floor": {"median": 100.0, "better": "lower"}}},
        "0.2": {
            "ratios": {
                "latency.p50_to_floor": {"median": 2.0, "better": "lower"},
                "latency.p99_to_p50": {"median": 2.0, "better": "lower"},
                "latency.speed": {"median": 6.0, "better": "higher"},
                "startup.join_to_bare": {"median": 6.0, "better": "lower"},
            }
        },
    },
}


def worse(*headlines: dict[str, Any]) -> set[str]:
    _, comparisons = guard.compare(report(*headlines), RECORDED)
    return {each.name for each in comparisons if each.worse}


def test_a_ratio_may_be_worse_by_its_margin_and_not_by_more() -> None:
    assert not worse(headline("latency.p50_to_floor", 3.0, "lower"))
    assert worse(headline("latency.p50_to_floor", 3.1, "lower")) == {"latency.p50_to_floor"}
    assert not worse(headline("latency.speed", 4.0, "higher"))
    assert worse(headline("latency.speed", 3.9, "higher")) == {"latency.speed"}


def test_a_better_ratio_is_never_worse() -> None:
    assert not worse(
        headline("latency.p50_to_floor", 0.1, "lower"), headline("latency.speed", 99.0, "higher")
    )


def test_the_margin_is_the_ratios_own_else_its_questions_else_the_common_one() -> None:
    margins = RECORDED["margins"]
    assert guard.margin_for("latency.p99_to_p50", margins) == 3.0
    assert guard.margin_for("startup.join_to_bare", margins) == 1.2
    assert guard.margin_for("latency.p50_to_floor", margins) == 1.5


def test_the_newest_release_counts() -> None:
    release, _ = guard.compare(report(), RECORDED)
    assert release == "0.2"


def test_what_was_not_measured_is_missing_and_what_was_not_asked_is_not_mentioned() -> None:
    _, comparisons = guard.compare(report(headline("latency.speed", 6.0, "higher")), RECORDED)
    assert {each.name: each.now for each in comparisons} == {
        "latency.p50_to_floor": None,
        "latency.p99_to_p50": None,
        "latency.speed": 6.0,
    }
    assert not any(each.worse for each in comparisons)


def test_only_ratios_are_recorded_never_times(tmp_path: Path) -> None:
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps({"margins": {"default": 2.0}, "releases": {}}))
    made = report(headline("latency.p50_to_floor", 2.0, "lower"), headline("l.s", 1, "lower", "s"))
    guard.record(made, path)
    recorded = guard.read(path)
    assert set(recorded["releases"]["9.9"]["ratios"]) == {"latency.p50_to_floor"}
    _, (same,) = guard.compare(made, recorded)
    assert not same.worse


def test_recording_one_question_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps(RECORDED | {"releases": {"9.9": RECORDED["releases"]["0.2"]}}))  # type: ignore[index]
    guard.record(report(headline("latency.speed", 7.0, "higher")), path)
    ratios = guard.read(path)["releases"]["9.9"]["ratios"]
    assert ratios["latency.speed"]["median"] == 7.0
    assert ratios["startup.join_to_bare"]["median"] == 6.0


def test_the_shipped_record_can_be_read_and_names_its_margins() -> None:
    recorded = guard.read()
    assert recorded["margins"]["default"] > 1
    names = {name.partition(".")[0] for name in recorded["margins"]} - {"default"}
    assert names <= set(QUESTIONS)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def run(made: dict[str, Any], *words: str, recorded: Any = RECORDED) -> Result:
        monkeypatch.setattr(suite, "ask_all", lambda *_: made)
        monkeypatch.setattr(guard, "read", lambda: recorded)
        return CliRunner().invoke(command, ["--dir", str(tmp_path), "latency", *words])

    return run


def test_check_exits_1_with_a_table_when_a_ratio_is_worse(run: Any) -> None:
    ran = run(report(headline("latency.p50_to_floor", 3.1, "lower")), "--check")
    assert ran.exit_code == 1
    (line,) = (each for each in ran.stdout.splitlines() if "latency.p50_to_floor" in each)
    assert line.split() == ["latency.p50_to_floor", "2", "3.1", "1.5", "x", "worse"]


def test_check_exits_0_within_the_margin_and_without_check_nothing_is_compared(run: Any) -> None:
    assert run(report(headline("latency.p50_to_floor", 2.9, "lower")), "--check").exit_code == 0
    assert run(report(headline("latency.p50_to_floor", 3.1, "lower"))).exit_code == 0


def test_a_check_that_could_compare_nothing_does_not_pass(run: Any) -> None:
    assert run(report(), "--check").exit_code == 1
    empty = {"margins": {"default": 2.0}, "releases": {}}
    ran = run(report(headline("latency.speed", 1.0, "higher")), "--check", recorded=empty)
    assert ran.exit_code == 1
    assert "nothing to compare" in ran.stdout


def test_check_is_part_of_the_json(run: Any) -> None:
    made = report(headline("latency.speed", 1.0, "higher"))
    ran = run(made, "--check", "--json")
    told = json.loads(ran.stdout)["check"]
    assert ran.exit_code == 1
    assert told["release"] == "0.2"
    assert [each["name"] for each in told["ratios"] if each["worse"]] == ["latency.speed"]


def test_a_question_that_failed_is_shown_and_exits_1(run: Any) -> None:
    ran = run(report(failed="ChildFailed: it has ended"))
    assert ran.exit_code == 1
    assert "failed: ChildFailed: it has ended" in ran.stdout


def test_a_bar_that_is_missed_says_so(run: Any) -> None:
    missed = Headline("latency.p50_to_floor", spread_of([1.9]), "lower", bar=1.8).as_json()
    ran = run(report(missed))
    assert ran.exit_code == 0
    (line,) = (each for each in ran.stdout.splitlines() if "p50 to floor" in each)
    assert line.split()[-1] == "miss"
