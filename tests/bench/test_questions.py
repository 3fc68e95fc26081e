"""Every question runs from end to end, at a size at which its figures say nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshagent.bench import CONTESTANTS, QUESTIONS, discovery, guard, scale
from meshagent.bench.agent import features
from meshagent.bench.contestants import HOW_TO_GET, why_not
from meshagent.bench.discovery import why_no_namespace
from meshagent.bench.suite import ask

pytestmark = pytest.mark.process

COMMAND = (sys.executable, "-P", "-m", "meshagent", "bench")
ATTACHES = {"bulk", "interference"}
TAKES_PART = {
    "nats": ("latency", "throughput"),
    "http": ("latency", "bulk"),
    "zenoh": ("discovery",),
    "pyre": ("discovery",),
    "scp": ("bulk",),
}


def children_naming(folder: Path) -> list[str]:
    """Processes that still have the folder in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if os.fsencode(folder) in words and path.parent.name != str(os.getpid()):
            found.append(words.decode(errors="replace"))
    return found


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that a question must leave as it found it, with nobody running in it."""
    yield tmp_path
    assert list(tmp_path.iterdir()) == []
    assert children_naming(tmp_path) == []


def check_shape(part: dict[str, Any]) -> None:
    assert set(part) == {"seconds", "failed", "cases", "headlines", "left_out"}
    for figures in part["cases"].values():
        for spread in figures.values():
            assert set(spread) == {"median", "low", "high", "rounds"}
            assert spread["low"] <= spread["median"] <= spread["high"]
    for each in part["headlines"]:
        assert set(each) == {
            "name", "median", "low", "high", "rounds", "unit", "better", "bar", "verdict",
        }  # fmt: skip
        assert each["better"] in ("lower", "higher")
        assert (each["verdict"] == "") is (each["bar"] is None)


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_without_any_contestant(question: str, disk: Path) -> None:
    part = ask(question, "tiny", disk, frozenset())
    assert part["failed"] is None
    check_shape(part)
    left_out = {each["what"]: each["reason"] for each in part["left_out"]}
    if question in ATTACHES and "attach" not in features():
        assert left_out["meshagent"] == "attachments are not in this version"
    else:
        assert any(case for case in part["cases"])
        assert part["headlines"] or question == "scale"
    for name in (name for name, questions in TAKES_PART.items() if question in questions):
        assert "--compare" in left_out[name]
    assert all(each["name"].startswith(f"{question}.") for each in part["headlines"])


@pytest.mark.parametrize("name", CONTESTANTS)
def test_a_contestant_takes_part_where_it_is_installed(name: str, disk: Path) -> None:
    reason = why_not(name)
    if reason:
        pytest.skip(reason)
    if name in ("zenoh", "pyre") and why_no_namespace():
        pytest.skip(why_no_namespace())
    for question in TAKES_PART[name]:
        part = ask(question, "tiny", disk, frozenset({name}))
        assert part["failed"] is None
        left_out = {each["what"]: each["reason"] for each in part["left_out"]}
        if "privilege separation directory" in left_out.get(name, ""):
            pytest.skip(left_out[name])  # Debian makes it when the service is first started
        assert any(case.startswith(name) for case in part["cases"])
        assert name not in left_out


def test_a_mesh_too_large_for_the_memory_is_left_out_with_the_amount(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale, "AMOUNTS", {"tiny": scale.ScaleAmount((), 0.0, 0.0, (10, 10_000))})
    monkeypatch.setattr(scale, "_available_bytes", lambda: 2 * scale.GIB)
    part = ask("scale", "tiny", disk, frozenset())
    assert list(part["cases"]) == ["10 nodes, simulated"]
    left_out = {each["what"]: each["reason"] for each in part["left_out"]}
    assert left_out["10000 nodes that keep 4095 others each, simulated"] == (
        "it takes 6.9 GiB of memory, and 2.0 are free"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is a guess")
def test_the_memory_that_is_free_is_what_the_kernel_says() -> None:
    everything = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < scale._available_bytes() < everything


def test_a_contestant_that_is_missing_is_named_with_the_way_to_get_it(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONTESTANTS, "http", ("no-such-distribution",))
    part = ask("bulk", "tiny", disk, frozenset({"http"}))
    (reason,) = (each["reason"] for each in part["left_out"] if each["what"] == "http")
    assert reason == f"no-such-distribution is not installed: {HOW_TO_GET}"
    assert not any(case.startswith("http") for case in part["cases"])


def test_without_a_namespace_nobody_multicasts_but_our_own_nodes_on_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may not run is left out with the reason; nothing is measured here."""
    asked: list[list[str]] = []

    def rounds(_: object, others: list[str]) -> dict[str, list[dict[str, float]]]:
        asked.append(others)
        return {
            case: [{discovery.FIRST: 1.0}]
            for case in (discovery.FILE, discovery.MDNS, discovery.BARE)
        }

    monkeypatch.setattr(discovery, "why_no_namespace", lambda: "none can be made")
    monkeypatch.setattr(discovery, "takes_part", lambda *_: True)
    monkeypatch.setattr(discovery, "_rounds", rounds)
    part = ask("discovery", "tiny", tmp_path, frozenset({"zenoh", "pyre"}))
    assert part["failed"] is None
    assert asked == [[]]
    assert {each["what"]: each["reason"] for each in part["left_out"]} == dict.fromkeys(
        ("zenoh", "pyre"), "it multicasts, and none can be made"
    )


def test_a_question_that_fails_says_so_and_stops_no_other(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshagent.bench import latency

    monkeypatch.setattr(latency, "MeshPair", lambda *_: 1 / 0)
    part = ask("latency", "tiny", disk, frozenset())
    assert part["failed"] == "ZeroDivisionError: division by zero"
    check_shape(part)


def run(disk: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "XDG_DATA_HOME": str(disk / "none"), "MESHAGENT_LISTEN": "127.0.0.1"}
    return subprocess.run(
        [*COMMAND, *words], cwd=disk, env=environ, capture_output=True, text=True, timeout=100
    )


def test_the_command_prints_one_document_and_keeps_notices_apart(disk: Path) -> None:
    ran = run(disk, "latency", "bulk", "--tiny", "--json", "--compare", "")
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert set(report) == {"machine", "extent", "questions"}
    assert list(report["questions"]) == ["latency", "bulk"]
    assert report["machine"]["disk"] == str(disk)
    assert report["machine"]["filesystem"]
    assert ran.stderr.startswith("latency: ")
    for part in report["questions"].values():
        check_shape(part)
    release, _ = guard.compare(report, {"margins": {"default": 9.0}, "releases": {}})
    assert release is None


def test_an_unknown_contestant_or_question_is_a_usage_error(disk: Path) -> None:
    for words in (["--compare", "rabbits"], ["beauty"]):
        ran = run(disk, *words)
        assert (ran.returncode, ran.stdout) == (2, "")
        assert words[-1] in ran.stderr


_HELP = """
import sys
from meshagent.cli import main
try:
    main(["bench", "--help"])
except SystemExit as done:
    assert done.code == 0
print(*{name.split(".")[0] for name in sys.modules})
print(*(name for name in sys.modules if name.startswith("meshagent.bench")))
"""


def test_help_loads_no_library_and_no_question(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-P", "-c", _HELP],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    *_, modules, ours = ran.stdout.splitlines()
    heavy = {"aiohttp", "apsw", "asyncio", "matplotlib", "msgpack", "nacl", "nats", "rich", "zmq"}
    assert not heavy & set(modules.split())
    assert ours == "meshagent.bench"


def test_plots_are_drawn_or_it_says_how_to_get_them(disk: Path, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("plots")
    words = ("bulk", "--tiny", "--compare", "", "--plot", str(folder))
    ran = run(disk, *words)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert ran.returncode == 2
        assert HOW_TO_GET in ran.stderr
    else:
        assert ran.returncode == 0, ran.stderr
        assert (folder / "bulk.svg").read_text().startswith("<?xml")
