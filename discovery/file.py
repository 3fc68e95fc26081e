"""The registry: a folder with one file per running node. Decides which files are stale.

Never locks: a file is written under a temporary name, synced and renamed. Invariant: our own file
is written before the others are read, so of two nodes that start together one sees the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from meshagent.core.model.peers import Candidate
from meshagent.core.ports import Announcement
from meshagent.discovery.folder_watch import FolderWatch
from meshagent.discovery.registry import (
    ADDRESSES_MAX,
    FILE_BYTES_MAX,
    FILES_MAX,
    HEARTBEAT_INTERVAL_S,
    RegistryEntry,
    process_start,
    read_entry,
    read_registry,
    scan_registry,
    this_host,
)
from meshagent.errors import LimitReached, MeshError, StorageError

__all__ = ["FileDiscovery", "RegistryEntry", "read_registry"]

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
POLL_INTERVAL_S = 2.0  # where the folder can't be watched
FORGOTTEN_AGE_S = 3600.0  # another host's file, or a leftover of a crash, that nobody touched


class FileDiscovery:
    """Keeps this node's file in `folder` and reports the others of its mesh.

    `extra` goes into the file as it is: the node says there how its sessions reach it.
    """

    name = "file"

    def __init__(self, folder: Path, extra: Mapping[str, object] | None = None) -> None:
        self.ignored: Counter[str] = Counter()
        """How many files were not reported, by reason; a file counts again at each reading."""
        self._folder = folder
        self._extra = dict(extra or {})
        self._me: Announcement | None = None
        self._found: Callable[[Candidate], None] | None = None
        self._started = ""
        self._problem = "not started"
        self._known: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._changed = asyncio.Event()
        self._watch: FolderWatch | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def path(self) -> Path:
        """This node's own file."""
        assert self._me is not None, "started first"
        return self._folder / f"{self._me.agent}.json"

    async def start(self, me: Announcement, found: Callable[[Candidate], None]) -> None:
        """Write our file, then report who is there; raises StorageError, or LimitReached
        when there is no room, if it can't be written."""
        assert self._found is None, "started once"
        self._me, self._found = me, found
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            self._make_folder()
            before = read_entry(self.path)  # a copy of this agent may be running: see `_report`
            self._write()
            _remove_leftovers(self._folder)
        except OSError as error:
            self._found = None
            raise _storage_error(self._folder, error) from error
        if isinstance(before, RegistryEntry) and before.is_running():
            self._report(before)
        self._read_all()
        self._watch = FolderWatch(self._folder, self._changed.set)
        self._task = asyncio.create_task(self._run(), name="registry-keeper")

    async def update(self, me: Announcement) -> None:
        """Write our file anew; a failure shows in `health` and is tried again."""
        self._me = me
        self._rewrite()

    def health(self) -> str:
        """`ok`, or why others can't find our file."""
        return self._problem or "ok"

    async def close(self) -> None:
        """Remove our file, if it is still ours, and end the watch."""
        self._found = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._me is not None and self._is_ours(read_entry(self.path)):
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._problem = "closed"
        if self._watch is not None:
            await self._watch.stop()
        self._task, self._watch = None, None

    # ---- our own file ------------------------------------------------------------------------

    def _make_folder(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):  # a folder that is not ours to close
            self._folder.chmod(0o700)

    def _content(self) -> bytes:
        assert self._me is not None
        ours = {
            "agent": self._me.agent,
            "mesh": self._me.mesh_tag,
            "run": self._me.run,
            "addresses": list(self._me.addresses[:ADDRESSES_MAX]),
            "pid": os.getpid(),
            "process_start": process_start(os.getpid()),
            "host": this_host(),
            "started": self._started,
        }
        content = json.dumps({**self._extra, **ours}, indent=1).encode()
        assert len(content) <= FILE_BYTES_MAX, "what the node adds must stay small"
        return content

    def _write(self) -> None:
        assert self._me is not None
        digest = hashlib.sha256(self._me.run.encode()).hexdigest()[:16]
        aside = self._folder / f".{self._me.agent}.{digest}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
        descriptor = os.open(aside, flags, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(self._content())
                file.flush()
                os.fsync(file.fileno())
            aside.replace(self.path)
        except OSError:
            with contextlib.suppress(OSError):  # on a full disk half a file is in everybody's way
                aside.unlink()
            raise
        self._problem = ""

    def _rewrite(self) -> None:
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)  # not its parents: the mesh may be gone
            self._write()
        except OSError as error:
            self._problem = f"{self.path} can't be written: {error.strerror or error}"

    def _is_ours(self, entry: RegistryEntry | str) -> bool:
        assert self._me is not None
        return isinstance(entry, RegistryEntry) and entry.run == self._me.run

    # ---- the others' -------------------------------------------------------------------------

    async def _run(self) -> None:
        """Read when files came or went, or at intervals without a watch; send heartbeats."""
        assert self._watch is not None
        beat_at = time.monotonic() + HEARTBEAT_INTERVAL_S
        while True:
            left_s = max(0.0, beat_at - time.monotonic())
            wait_s = left_s if self._watch.watching else min(left_s, POLL_INTERVAL_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            # Reading for nothing is not free: fifty nodes that read fifty files wake fifty watches.
            due = self._changed.is_set() or not self._watch.watching
            self._changed.clear()
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + HEARTBEAT_INTERVAL_S
                try:
                    os.utime(self.path)
                except OSError:  # gone: `_read_all` writes it again
                    due = True
            if due:
                self._read_all()

    def _read_all(self) -> None:
        """Read every file: report news, forget the gone, prune the dead, restore our own."""
        assert self._me is not None
        entries = scan_registry(self._folder, self.ignored)
        running = [entry for entry in entries if self._is_current(entry)]
        for agent in self._known.keys() - {entry.agent for entry in running}:
            del self._known[agent]
        for entry in running:
            self._report(entry)
        if not any(entry.agent == self._me.agent for entry in running):
            self._rewrite()

    def _is_current(self, entry: RegistryEntry) -> bool:
        if entry.is_running():
            return True
        self.ignored["stale"] += 1
        if entry.is_local() or time.time() - entry.heartbeat > FORGOTTEN_AGE_S:
            _prune(entry)
        return False

    def _report(self, entry: RegistryEntry) -> None:
        """Report an entry that is news. Our own name with another run is a copy of this agent."""
        assert self._me is not None
        if self._found is None or self._is_ours(entry):
            return
        if entry.mesh != self._me.mesh_tag:
            self.ignored["mesh"] += 1
        elif self._known.get(entry.agent) != (entry.run, entry.addresses):
            self._known[entry.agent] = (entry.run, entry.addresses)
            self._found(Candidate(entry.agent, entry.addresses, self.name))


def _prune(entry: RegistryEntry) -> None:
    """Remove a dead node's file, unless a living one has taken its place in the meantime."""
    now = read_entry(entry.path)
    if isinstance(now, RegistryEntry) and now.run == entry.run:
        with contextlib.suppress(OSError):
            entry.path.unlink()


def _remove_leftovers(folder: Path) -> None:
    """Remove temporary files of nodes that died while writing."""
    for path in islice(folder.glob(".*.tmp"), FILES_MAX):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > FORGOTTEN_AGE_S:
                path.unlink()


def _storage_error(folder: Path, error: OSError) -> MeshError:
    kind = LimitReached if error.errno in NO_ROOM else StorageError
    return kind(
        f"The registry {folder} can't be written: {error.strerror or error}.",
        hint="Check its owner and the free space, or name another mesh folder with --dir.",
        path=str(folder),
    )
