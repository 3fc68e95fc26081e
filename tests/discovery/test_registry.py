"""The registry: what is believed of a file, and what becomes of it."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path

import pytest
from discovery.seen import Seen, announcement, eventually
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshagent.core.ports import Announcement
from meshagent.discovery import file as file_module
from meshagent.discovery import folder_watch, registry
from meshagent.discovery.file import FileDiscovery, RegistryEntry, read_registry
from meshagent.errors import StorageError

ALICE = announcement("alice", "mesh", 5001)
BOB = announcement("bob", "mesh", 5002)

Body = Callable[[FileDiscovery, Seen], Coroutine[None, None, None]]


def with_alice(folder: Path, body: Body, extra: dict[str, object] | None = None) -> None:
    """Run `body` while alice's node is in the registry."""

    async def main() -> None:
        discovery, saw = FileDiscovery(folder, extra), Seen()
        try:
            await discovery.start(ALICE, saw)
            await body(discovery, saw)
        finally:
            await discovery.close()

    asyncio.run(main())


async def only_look(discovery: FileDiscovery, saw: Seen) -> None:
    """The scan at start is all that the test needs."""


def write(folder: Path, who: Announcement, **changes: object) -> Path:
    """A file such as `who`'s node would write from this process."""
    folder.mkdir(exist_ok=True)
    content = {
        "agent": who.agent,
        "mesh": who.mesh_tag,
        "run": who.run,
        "addresses": list(who.addresses),
        "pid": os.getpid(),
        "process_start": registry.process_start(os.getpid()),
        "host": registry.this_host(),
        "started": "2026-01-01T00:00:00+00:00",
        **changes,
    }
    path = folder / f"{who.agent}.json"
    path.write_text(json.dumps(content))
    return path


def dead_pid() -> int:
    """The pid of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_the_file_is_private_and_tells_what_the_node_adds(tmp_path: Path) -> None:
    folder = tmp_path / "mesh" / "registry"

    async def body(discovery: FileDiscovery, saw: Seen) -> None:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(discovery.path.stat().st_mode) == 0o600
        (entry,) = read_registry(folder)
        assert (entry.agent, entry.run, entry.addresses) == (
            ALICE.agent,
            ALICE.run,
            ALICE.addresses,
        )
        assert entry.extra == {"control": "/run/x.sock"}
        assert entry.is_running()

    with_alice(folder, body, {"control": "/run/x.sock", "run": "an extra can't replace ours"})
    assert read_registry(folder) == []
    assert list(folder.iterdir()) == []


def test_a_dead_nodes_file_is_pruned_and_not_reported(tmp_path: Path) -> None:
    stale = write(tmp_path, BOB, pid=dead_pid())

    async def body(discovery: FileDiscovery, saw: Seen) -> None:
        assert not saw
        assert not stale.exists()
        assert discovery.ignored["stale"] == 1

    with_alice(tmp_path, body)


def test_a_reused_pid_is_not_taken_for_the_node(tmp_path: Path) -> None:
    start = registry.process_start(os.getpid())
    assert start is not None
    write(tmp_path, BOB, process_start=start - 1)
    (entry,) = read_registry(tmp_path)
    assert not entry.is_running()
    write(tmp_path, BOB, process_start=start)
    (entry,) = read_registry(tmp_path)
    assert entry.is_running()


def test_a_zombie_is_not_running(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    write(tmp_path, BOB, pid=child.pid, process_start=registry.process_start(child.pid))
    (entry,) = read_registry(tmp_path)
    assert not entry.is_running()
    child.wait()


def test_on_another_host_only_the_heartbeat_counts(tmp_path: Path) -> None:
    path = write(tmp_path, BOB, host="elsewhere", pid=dead_pid())
    (entry,) = read_registry(tmp_path)
    assert entry.is_running()
    assert not entry.is_running(now=entry.heartbeat + registry.HEARTBEAT_AGE_MAX_S)
    os.utime(path, (0, 0))
    with_alice(tmp_path, only_look)
    assert not path.exists()


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _symlink(path: Path) -> None:
    target = write(path.parent / "aside", BOB)
    path.symlink_to(target)


def _big(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(100 * 1024 * 1024)


def _padded(path: Path) -> None:
    with write(path.parent, BOB).open("a") as file:
        file.write(" " * registry.FILE_BYTES_MAX)


def _other_agent(path: Path) -> None:
    write(path.parent, announcement("carol", "mesh")).rename(path)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "fifo": _fifo,
    "symlink": _symlink,
    "big": _big,
    "padded": _padded,
    "other agent's": _other_agent,
    "folder": lambda path: path.mkdir(),
    "empty": lambda path: path.write_bytes(b""),
    "binary": lambda path: path.write_bytes(os.urandom(1000)),
    "list": lambda path: path.write_text("[]"),
    "deep": lambda path: path.write_text("[" * 60_000),
    "long number": lambda path: path.write_text("9" * 60_000),
    "pid": lambda path: write(path.parent, BOB, pid=True),
    "negative pid": lambda path: write(path.parent, BOB, pid=-1),
    "huge pid": lambda path: write(path.parent, BOB, pid=2**40),
    "start": lambda path: write(path.parent, BOB, process_start="x"),
    "run": lambda path: write(path.parent, BOB, run=None),
    "mesh": lambda path: write(path.parent, BOB, mesh="x" * 1000),
    "address": lambda path: write(path.parent, BOB, addresses=["box:0"]),
    "addresses": lambda path: write(path.parent, BOB, addresses=["box:1"] * 17),
    "addresses' type": lambda path: write(path.parent, BOB, addresses={"box:1": 1}),
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_counted_and_left_out(
    tmp_path: Path, hostile: Callable[[Path], object]
) -> None:
    hostile(tmp_path / f"{BOB.agent}.json")
    ignored: Counter[str] = Counter()
    assert registry.scan_registry(tmp_path, ignored) == []
    assert ignored.total() == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_strangers_file_in_our_folder_is_left_out(tmp_path: Path) -> None:
    os.chown(write(tmp_path, BOB), 12345, 12345)
    assert read_registry(tmp_path) == []


@given(
    changes=st.dictionaries(
        st.sampled_from(registry.FIELDS),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
            lambda inner: st.lists(inner, max_size=3),
            max_leaves=5,
        ),
    )
)
@settings(
    max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_wrong_types_never_raise(tmp_path: Path, changes: dict[str, object]) -> None:
    path = write(tmp_path, BOB, **changes)
    verdict = registry.read_entry(path)
    if isinstance(verdict, RegistryEntry):
        verdict.is_running()


def test_only_so_many_files_are_looked_at(tmp_path: Path) -> None:
    for number in range(registry.FILES_MAX + 10):
        (tmp_path / f"{number}.json").touch()
    ignored: Counter[str] = Counter()
    assert registry.scan_registry(tmp_path, ignored) == []
    assert ignored == {"not JSON": registry.FILES_MAX, "files": 1}


def test_a_folder_that_can_not_be_written_is_explained(tmp_path: Path) -> None:
    (tmp_path / "mesh").write_text("a file where the folder should be")
    with pytest.raises(StorageError) as refusal:
        with_alice(tmp_path / "mesh" / "registry", only_look)
    assert "registry" in refusal.value.message
    assert "--dir" in refusal.value.hint


def test_our_file_is_restored_when_someone_deletes_it(tmp_path: Path) -> None:
    async def body(discovery: FileDiscovery, saw: Seen) -> None:
        discovery.path.unlink()
        await eventually(discovery.path.exists)

    with_alice(tmp_path, body)


def test_a_copys_file_is_not_removed_on_close(tmp_path: Path) -> None:
    copy = replace(ALICE, run="another", addresses=("127.0.0.1:5009",))

    async def body(discovery: FileDiscovery, saw: Seen) -> None:
        write(tmp_path / "aside", copy).rename(discovery.path)
        await saw.until_has(copy)

    with_alice(tmp_path, body)
    assert [entry.run for entry in read_registry(tmp_path)] == ["another"]


def test_a_heartbeat_renews_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_module, "HEARTBEAT_INTERVAL_S", 0.02)

    async def body(discovery: FileDiscovery, saw: Seen) -> None:
        os.utime(discovery.path, (0, 0))
        await eventually(lambda: discovery.path.stat().st_mtime > 0)

    with_alice(tmp_path, body)


def test_without_a_watch_the_folder_is_polled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object) -> None:
        raise OSError("inotify watch limit reached")

    monkeypatch.setattr(folder_watch.FolderWatch, "_watch", refuse)
    monkeypatch.setattr(file_module, "POLL_INTERVAL_S", 0.02)

    async def body(discovery: FileDiscovery, saw: Seen) -> None:
        write(tmp_path / "aside", BOB).rename(tmp_path / f"{BOB.agent}.json")
        await saw.until_has(BOB)

    with_alice(tmp_path, body)


def test_our_file_is_written_before_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that of two that start together at least one sees the other, without any watch."""
    written: list[bool] = []
    scan = registry.scan_registry

    def noting(folder: Path, ignored: Counter[str]) -> list[RegistryEntry]:
        written.append((folder / f"{ALICE.agent}.json").exists())
        return scan(folder, ignored)

    monkeypatch.setattr(file_module, "scan_registry", noting)
    with_alice(tmp_path, only_look)
    assert written[0]


@pytest.mark.process
def test_reading_the_registry_loads_nothing_heavy() -> None:
    code = (
        "import sys, meshagent.discovery.registry as r, pathlib;"
        "r.read_registry(pathlib.Path('/nowhere'));"
        "print({'asyncio', 'ifaddr', 'watchfiles', 'zeroconf'} & set(sys.modules));"
        "import meshagent.discovery.file, meshagent.discovery.mdns.source;"
        "import meshagent.discovery.static;"
        "print({'ifaddr', 'watchfiles', 'zeroconf'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["set()", "set()"]
