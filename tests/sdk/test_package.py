"""Importing meshagent does nothing, and every public name is there."""

from __future__ import annotations

import subprocess
import sys

import meshagent

HEAVY = {
    "apsw", "asyncio", "click", "msgpack", "nacl", "pydantic", "rich", "watchfiles",
    "zeroconf", "zmq",
}  # fmt: skip

_LOOK = """
import os, sys, threading
before = (len(os.listdir("/proc/self/fd")), sorted(os.listdir(".")), threading.active_count())
import meshagent
after = (len(os.listdir("/proc/self/fd")), sorted(os.listdir(".")), threading.active_count())
assert before == after, (before, after)
print(*{name.split(".")[0] for name in sys.modules})
"""


def test_importing_has_no_side_effects() -> None:
    ran = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", _LOOK],
        capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    assert ran.stderr == ""
    assert not HEAVY & set(ran.stdout.split())


def test_every_public_name_resolves_and_no_other_does() -> None:
    for name in meshagent.__all__:
        assert getattr(meshagent, name) is not None
    assert not hasattr(meshagent, "leave")
    assert sorted(meshagent.__all__) == sorted(set(meshagent.__all__))


def test_a_join_that_is_not_entered_does_nothing() -> None:
    assert meshagent.join(role="NOT A ROLE")
