"""Several processes at once, and processes that die at every single step of what they do."""

from __future__ import annotations

import io
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from storage.blobs.blob_files import (
    LATER,
    assert_sound,
    blobs_in,
    files_in,
    noise,
    pieces,
    read_all,
    sha,
)

from meshagent.storage.blobs.errors import Held, NotHeld
from meshagent.storage.blobs.store import CHUNK_BYTES, BlobStore

pytestmark = pytest.mark.process

DATA = noise(3 * CHUNK_BYTES + 100)
SHA = sha(DATA)
STEPS = (
    "close", "fchmod", "fsync", "ftruncate", "link", "mkdir", "open", "posix_fallocate", "pwrite",
    "rename", "unlink", "utime", "write",
)  # fmt: skip
STEPS_MAX = 200

START = """
import io, os, sys, time
from pathlib import Path
from storage.blobs.blob_files import *
from meshagent.storage.blobs.store import BlobStore, CHUNK_BYTES
from meshagent.storage.blobs.errors import *

store = BlobStore(Path(sys.argv[1]))
data = noise(20 * CHUNK_BYTES + 100)
sys.stdin.readline()
"""


def start(root: Path, script: str, count: int) -> list[subprocess.Popen[str]]:
    """Processes that wait until all are ready."""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    command = [sys.executable, "-c", START + script, str(root)]
    started = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/", env=environ
        )
        for _ in range(count)
    ]
    for each in started:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    return started


def said_by(started: list[subprocess.Popen[str]]) -> list[str]:
    said = [each.communicate(timeout=60)[0].strip() for each in started]
    assert [each.returncode for each in started] == [0] * len(started)
    return said


def die_at(step: int, act: Callable[[], object]) -> bool:
    """Do it in a process that is killed before its nth call of the system; whether it was."""
    child = os.fork()
    if child == 0:
        calls = itertools.count(1)
        for name in STEPS:
            setattr(os, name, _dying(getattr(os, name), calls, step))
        try:
            act()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


def _dying(
    real: Callable[..., object], calls: itertools.count[int], step: int
) -> Callable[..., object]:
    def call(*arguments: object, **named: object) -> object:
        if next(calls) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)

    return call


def steps(tmp_path: Path, act: Callable[[BlobStore], object]) -> Iterator[BlobStore]:
    """A store for every step at which the act can be killed, after it was killed there."""
    for step in range(1, STEPS_MAX):
        store = BlobStore(tmp_path / str(step) / "blobs")
        store.root.parent.mkdir()
        if not die_at(step, partial(act, store)):
            assert step > 10, "nothing was killed"
            return
        yield store
    raise AssertionError("it never came to its end")


def pull(store: BlobStore) -> int:
    """Receive what is missing; how many bytes that was."""
    try:
        transfer = store.begin(SHA, len(DATA))
    except Held:
        return 0
    with transfer:
        first = transfer.received
        for chunk in pieces(DATA)[-(-first // CHUNK_BYTES) :]:
            transfer.write(chunk)
        transfer.finish()
    return len(DATA) - first


def assert_tidy_after_a_sweep(store: BlobStore) -> None:
    store.sweep(time.time() + 600)  # the dead hold no locks
    left = [each for each in files_in(store.root) if not each.startswith("partial/")]
    assert left == blobs_in(store)


def test_a_put_that_is_killed_anywhere_leaves_a_whole_blob_or_none(tmp_path: Path) -> None:
    for store in steps(tmp_path, lambda store: store.put(io.BytesIO(DATA))):
        assert_sound(store)
        assert_tidy_after_a_sweep(store)
        store.put(io.BytesIO(DATA))
        assert read_all(store, SHA) == DATA
        assert files_in(store.root) == blobs_in(store)


def test_a_transfer_that_is_killed_anywhere_goes_on_and_moves_nothing_twice(
    tmp_path: Path,
) -> None:
    moved = []
    for store in steps(tmp_path, pull):
        assert_sound(store)
        moved.append(pull(store))
        assert read_all(store, SHA) == DATA
        store.sweep()
        assert files_in(store.root) == blobs_in(store)
    assert moved == sorted(moved, reverse=True)  # the later it died, the less was left to do
    assert moved[0] == len(DATA)
    assert moved[-1] == 0


def test_keep_and_release_and_sweep_may_be_killed_anywhere(tmp_path: Path) -> None:
    later = time.time() + LATER

    def act(store: BlobStore) -> None:
        holder = store.root.parent / "holder"
        store.put(io.BytesIO(DATA))
        store.put(io.BytesIO(b"unneeded"))
        store.keep(SHA, holder)
        store.keep(sha(b"unneeded"), holder)
        store.release(holder, {SHA}, later)
        store.sweep(later)

    for store in steps(tmp_path, act):
        holder = store.root.parent / "holder"
        assert_sound(store)
        needed = (holder / SHA.hex()).exists()
        store.sweep(later)
        if needed:
            assert read_all(store, SHA) == DATA
        store.release(holder, {SHA}, later)
        store.sweep(later)
        assert len(files_in(store.root)) == needed
        try:
            store.keep(SHA, holder)
        except NotHeld:
            assert not needed


def test_a_blob_that_is_damaged_is_never_taken_for_sound_when_verify_is_killed(
    tmp_path: Path,
) -> None:
    def act(store: BlobStore) -> None:
        store.put(io.BytesIO(DATA))
        store.path(SHA).write_bytes(b"damaged")
        store.verify(SHA)

    for store in steps(tmp_path, act):
        if store.holds(SHA):
            assert store.verify(SHA) is store.holds(SHA)
        store.put(io.BytesIO(DATA))
        assert store.verify(SHA)


def test_ten_processes_store_the_same_file_once(tmp_path: Path) -> None:
    root = tmp_path / "blobs"
    script = "print(store.put(io.BytesIO(data)).sha256 == sha(data))"
    assert said_by(start(root, script, 10)) == ["True"] * 10
    store = BlobStore(root)
    assert len(files_in(root)) == 1
    assert_sound(store)


def test_two_processes_pull_the_same_blob_once(tmp_path: Path) -> None:
    root = tmp_path / "blobs"
    script = """
moved = 0
while True:
    try:
        with store.begin(sha(data), len(data)) as partial:
            for chunk in pieces(data)[partial.received // CHUNK_BYTES :]:
                partial.write(chunk)
                moved += len(chunk)
            partial.finish()
    except Busy:
        time.sleep(0.01)
    except Held:
        break
print(moved)
"""
    said = [int(each) for each in said_by(start(root, script, 4))]
    assert sorted(said) == [0, 0, 0, 20 * CHUNK_BYTES + 100]
    assert len(files_in(root)) == 1
    assert_sound(BlobStore(root))


def test_what_was_kept_survives_sweepers_that_know_no_grace(tmp_path: Path) -> None:
    """Blobs are stored, kept, let go and swept by five processes at once, without any grace."""
    root = tmp_path / "blobs"
    script = """
blobs = [noise(5_000, seed) for seed in range(4)]
holder = Path(sys.argv[1]).with_name(f"holder-{os.getpid()}")
kept = failed = 0
for turn in range(150):
    blob = blobs[(turn * 7 + os.getpid()) % 4]
    store.put(io.BytesIO(blob))
    try:
        store.keep(sha(blob), holder)
    except NotHeld:
        failed += 1  # swept in between, which an hour of grace prevents
    else:
        kept += 1
        store.sweep(time.time() + 30, grace_s=-60)
        assert (holder / sha(blob).hex()).read_bytes() == blob
        store.keep(sha(blob), holder)
        assert (holder / sha(blob).hex()).read_bytes() == blob
    store.release(holder, set(), time.time() + 30, grace_s=-60)
print(kept > 0)
"""
    assert said_by(start(root, script, 5)) == ["True"] * 5
    assert_sound(BlobStore(root))


def test_a_puller_that_is_killed_frees_its_lock_at_once(tmp_path: Path) -> None:
    root = tmp_path / "blobs"
    script = """
partial = store.begin(sha(data), len(data))
partial.write(data[: 7 * CHUNK_BYTES])
print("there", flush=True)
time.sleep(60)
"""
    (process,) = start(root, script, 1)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
    finally:
        process.kill()
        process.communicate()
    data = noise(20 * CHUNK_BYTES + 100)
    with BlobStore(root).begin(sha(data), len(data)) as transfer:
        assert transfer.received == 7 * CHUNK_BYTES
