"""The line for people who wait: true figures, and nothing left behind."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from meshagent.cli import progress
from meshagent.cli.progress import ProgressLine, progress_text

MIB = 1024 * 1024


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its only entry is the time."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    terminal = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=terminal))
    monkeypatch.setenv("COLUMNS", "120")
    return terminal


@pytest.mark.parametrize(
    ("done", "total", "moved", "seconds", "text"),
    [
        (5 * MIB, 10 * MIB, 5 * MIB, 5.0, "50%  5.0 MiB of 10 MiB  1.0 MiB/s  5 s left"),
        (99 * MIB, 100 * MIB, 99 * MIB, 1.0, "99%  99 MiB of 100 MiB  99 MiB/s  1 s left"),
        (10 * MIB, 10 * MIB, 5 * MIB, 5.0, "100%  10 MiB of 10 MiB  1.0 MiB/s"),
        (0, 10 * MIB, 0, 0.0, "0%  0 B of 10 MiB  0 B/s"),
        (5 * MIB, None, 5 * MIB, 5.0, "x  5.0 MiB  1.0 MiB/s"),
    ],
)
def test_the_figures(done: int, total: int | None, moved: int, seconds: float, text: str) -> None:
    assert progress_text("x", done, total, moved, seconds).endswith(text)


def test_what_was_here_before_does_not_count_as_speed(
    clock: list[float], terminal: Terminal
) -> None:
    with ProgressLine("Fetching") as line:
        line.update(0, 1000 * MIB)  # nothing is known yet
        clock[0] += 0.5
        line.update(400 * MIB, 1000 * MIB)  # it goes on where it was left
        clock[0] += 1.0
        line.update(500 * MIB, 1000 * MIB)
    assert "100 MiB/s  5 s left" in terminal.getvalue()


def test_what_does_not_last_draws_nothing(clock: list[float], terminal: Terminal) -> None:
    with ProgressLine("Reading") as line:
        for _ in range(6):
            line.update(1, 2)
            clock[0] += 0.1
    assert terminal.getvalue() == ""


def test_a_word_is_said_once_beside_the_line_and_stays(
    clock: list[float], terminal: Terminal
) -> None:
    with ProgressLine("Fetching") as line:
        line.update(1, 2)
        clock[0] += 1.0
        line.update(1, 2)
        for _ in range(3):
            line.say("x waits: the disk is full.")
    assert terminal.getvalue().endswith("\r\x1b[Kx waits: the disk is full.\n")
    assert terminal.getvalue().count("waits") == 1


def test_a_word_is_said_in_a_pipe_too_but_not_to_who_wants_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ProgressLine("Fetching") as line:
        line.say("x waits.")
    with ProgressLine("Fetching", quiet=True) as line:
        line.say("y waits.")
    assert capsys.readouterr().err == "x waits.\n"
