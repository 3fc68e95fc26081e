"""A mesh in a folder of its own, commands run there, and nodes that never outlive the test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMAND_S = 20


@dataclass(frozen=True)
class Started:
    agent: str
    pid: int
    address: str


class Place:
    """Projects, and a user's folders, away from this user's own."""

    def __init__(self, root: Path, runtime: str) -> None:
        self.root = root
        self.project = root / "project"
        self.project.mkdir()
        self.started: list[Started] = []
        self.environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(root / "home"),
            "LANG": "C.UTF-8",
            "MESHAGENT_LISTEN": "127.0.0.1",
            "XDG_DATA_HOME": str(root / "data"),
            "XDG_RUNTIME_DIR": runtime,
        }

    @property
    def mesh(self) -> Path:
        return self.project / ".meshagent"

    def run(
        self,
        *words: str,
        at: Path | None = None,
        before: tuple[str, ...] = (),
        text: str | None = None,
        **environ: str,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*before, sys.executable, "-P", "-m", "meshagent", *words],
            cwd=at or self.project,
            env={**self.environ, **environ},
            timeout=COMMAND_S,
            input=text,
            capture_output=True,
            text=True,
        )

    def doctor(self, *words: str, **options: Any) -> list[dict[str, str]]:
        done = self.run("doctor", "--json", *words, **options)
        assert done.stderr == ""
        findings: list[dict[str, str]] = json.loads(done.stdout)
        assert done.returncode == int(any(each["state"] == "problem" for each in findings))
        assert all(list(each) == ["check", "state", "text", "hint"] for each in findings)
        return findings

    def init(self, at: Path | None = None) -> None:
        (at or self.project).mkdir(exist_ok=True)
        assert self.run("init", "-q", at=at).returncode == 0

    def join(
        self, role: str, *words: str, at: Path | None = None, text: str | None = None
    ) -> Started:
        done = self.run("join", "--role", role, "--detach", "--json", *words, at=at, text=text)
        assert done.returncode == 0, done.stderr
        joined = json.loads(done.stdout)
        self.started.append(Started(joined["agent"], joined["pid"], joined["addresses"][0]))
        return self.started[-1]

    def end_all(self) -> None:
        for each in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)


def matching(findings: list[dict[str, str]], check: str, state: str) -> str:
    """The texts and hints of one kind, in one."""
    wanted = [each for each in findings if (each["check"], each["state"]) == (check, state)]
    return "\n".join(f"{each['text']} {each['hint']}" for each in wanted)


def eventually(holds: Callable[[], object], patience_s: float = 10.0) -> None:
    deadline = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.1)
