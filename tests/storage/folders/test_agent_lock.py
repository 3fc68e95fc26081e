"""An agent runs once, and a process that died does not run it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshagent.errors import StorageError
from meshagent.storage.folders import agent_lock as module
from meshagent.storage.folders.agent_lock import AgentLock

HOLD = """
import subprocess, sys
from pathlib import Path
from meshagent.storage.folders.agent_lock import AgentLock
lock = AgentLock(Path(sys.argv[1]))
print(lock.acquire(), flush=True)
if len(sys.argv) > 2:  # a child that outlives us, with every descriptor that it may inherit
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    print(child.pid, flush=True)
sys.stdin.read()
"""


def hold_elsewhere(path: Path, *more: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), *more],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    with process:
        process.wait()


def test_one_lock_at_a_time_even_within_a_process(tmp_path: Path) -> None:
    first, second = AgentLock(tmp_path / "lock"), AgentLock(tmp_path / "lock")
    assert first.acquire()
    assert not second.acquire()
    assert (first.holder(), second.holder()) == (os.getpid(), os.getpid())
    first.release()
    first.release()
    assert second.holder() is None
    assert second.acquire()
    second.release()


def test_a_lock_that_nobody_made_is_free(tmp_path: Path) -> None:
    assert AgentLock(tmp_path / "lock").holder() is None
    assert not (tmp_path / "lock").exists()


def test_looking_at_a_lock_never_keeps_another_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = AgentLock(tmp_path / "lock")
    lock.path.touch()
    with lock.path.open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)  # what `holder` holds for an instant
        assert lock.holder() is None
        monkeypatch.setattr(module.time, "sleep", lambda _: fcntl.flock(looking, fcntl.LOCK_UN))
        assert lock.acquire()
        lock.release()


def test_a_lock_whose_file_was_replaced_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replaced(descriptor: int) -> bool:
        (tmp_path / "lock").unlink()
        (tmp_path / "lock").touch()
        return True

    monkeypatch.setattr(module, "_lock", replaced)
    assert not AgentLock(tmp_path / "lock").acquire()


def test_a_lock_that_can_not_be_made_says_why(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="does not exist"):
        AgentLock(tmp_path / "no" / "lock").acquire()


@pytest.mark.process
def test_a_lock_held_by_a_killed_process_is_free(tmp_path: Path) -> None:
    lock = AgentLock(tmp_path / "lock")
    process = hold_elsewhere(lock.path)
    assert lock.holder() == process.pid
    assert not lock.acquire()
    kill(process)
    assert lock.holder() is None
    assert lock.acquire()
    assert lock.holder() == os.getpid()
    lock.release()


@pytest.mark.process
def test_a_child_that_outlives_its_node_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = AgentLock(tmp_path / "lock")
    process = hold_elsewhere(lock.path, "with a child")
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        kill(process)
        os.kill(child, 0)
        assert lock.acquire()
        lock.release()
    finally:
        os.kill(child, 9)
