"""A disk that takes ten seconds for a write or a sync: its node stays alive to everyone.

strace delays the node's own system calls, so this is the shipped node on a disk that stalls.
"""

from __future__ import annotations

import time

import pytest
from end_to_end.delivery.post import Post
from end_to_end.delivery.tracing import require_strace, traced

pytestmark = pytest.mark.process

STALL_S = 10.0
STALL_US = int(STALL_S * 1_000_000)
SYSTEM_CALLS = "fdatasync,pwrite64"


@pytest.fixture(autouse=True)
def _strace_allowed() -> None:
    require_strace()


def test_a_commit_that_stalls_for_ten_seconds_makes_nobody_suspect(post: Post) -> None:
    slow, quick = post.start("tester"), post.start("backend")
    for one, other in ((slow, quick), (quick, slow)):
        one.wait_for_peer(other.agent, "alive")
    post.send(quick.agent, slow.agent, "while the disk is quick")
    post.wait_for_texts(slow.agent, ["while the disk is quick"])
    with traced(slow, SYSTEM_CALLS, "-e", f"inject={SYSTEM_CALLS}:delay_enter={STALL_US}"):
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
