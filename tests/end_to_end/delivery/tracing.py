"""strace on a node that runs: delays its system calls, or writes down which it makes, in order."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from end_to_end.processes.harness import Node, wait_until

__all__ = ["require_strace", "traced"]


def require_strace() -> None:
    """Skip the test where there is no strace; in CI there must be one."""
    if shutil.which("strace") is None:
        why = "the command `strace` is not installed"
        if os.environ.get("CI") == "true":
            pytest.fail(f"This test must run in CI, but {why}.")
        pytest.skip(why)


@contextlib.contextmanager
def traced(node: Node, system_calls: str, *options: str, into: str = "/dev/null") -> Iterator[None]:
    """strace holds all threads of this node while the block runs; `into` is complete behind it."""
    tracer = subprocess.Popen(
        ["strace", "-f", "-qq", "-p", str(node.pid), "-o", into,
         "-e", f"trace={system_calls}", *options],
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        threads = list(Path(f"/proc/{node.pid}/task").glob("*/status"))
        held = f"TracerPid:\t{tracer.pid}"
        wait_until(
            lambda: all(held in each.read_text() for each in threads), "strace to hold the node"
        )
        yield
    finally:
        tracer.terminate()
        tracer.wait(10)
