"""A disk that takes ten seconds for a write or a sync: its node stays alive to everyone.

strace delays the node's own system calls, so this is the shipped node on a disk that stalls.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from end_to_end.delivery.post import Post
from end_to_end.processes.harness import Node, wait_until

pytestmark = pytest.mark.process

STALL_S = 10.0
SYSTEM_CALLS = "fdatasync,pwrite64"


@pytest.fixture(autouse=True)
def _strace_allowed() -> None:
    if shutil.which("strace") is None:
        why = "the command `strace` is not installed"
        if os.environ.get("CI") == "true":
            pytest.fail(f"This test must run in CI, but {why}.")
        pytest.skip(why)


@contextlib.contextmanager
def stalled(node: Node) -> Iterator[None]:
    """Each write and sync of this node takes so long from now on."""
    delay_us = int(STALL_S * 1_000_000)
    tracer = subprocess.Popen(
        ["strace", "-f", "-qq", "-p", str(node.pid), "-o", "/dev/null",
         "-e", f"trace={SYSTEM_CALLS}", "-e", f"inject={SYSTEM_CALLS}:delay_enter={delay_us}"],
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        status = Path(f"/proc/{node.pid}/status")
        held = f"TracerPid:\t{tracer.pid}"
        wait_until(lambda: held in status.read_text(), "strace to hold the node")
        yield
    finally:
        tracer.terminate()
        tracer.wait(10)


def test_a_commit_that_stalls_for_ten_seconds_makes_nobody_suspect(post: Post) -> None:
    slow, quick = post.start("tester"), post.start("backend")
    for one, other in ((slow, quick), (quick, slow)):
        one.wait_for_peer(other.agent, "alive")
    post.send(quick.agent, slow.agent, "while the disk is quick")
    post.wait_for_texts(slow.agent, ["while the disk is quick"])
    with stalled(slow):
        began = time.monotonic()
        ident = post.send(quick.agent, slow.agent, "while it stalls")[0]
        # The stalled node answers sessions and its peers meanwhile; nothing is acknowledged.
        while time.monotonic() < began + STALL_S - 2:
            assert post.ask(slow.agent, "peers")["peers"][0]["state"] == "alive"
            assert post.state(quick.agent, ident) == "sent"
            time.sleep(0.5)
        post.wait_for_state(quick.agent, ident, "delivered")
        assert time.monotonic() - began > STALL_S / 2, "the disk did not stall"
    for one, other in ((slow, quick), (quick, slow)):
        states = {each["state"] for each in one.peer_events(other.agent)}
        assert states == {"alive"}, one.told()
