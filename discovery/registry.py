"""The registry's files as they are read: one for each running node. Only the standard library.

Never writes, watches or waits: the CLI reads it synchronously. Invariant: no file, however
hostile, raises, blocks or costs more than `FILE_BYTES_MAX`; it is counted and left out.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import stat
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshagent.core.model.network_addresses import is_address
from meshagent.core.model.peers import is_agent_id

__all__ = [
    "RegistryEntry",
    "process_start",
    "read_entry",
    "read_registry",
    "scan_registry",
    "this_host",
]

ADDRESSES_MAX = 16
FILE_BYTES_MAX = 64 * 1024  # ours takes less than 1 KiB; the rest is for what the node adds
FILES_MAX = 1024
FIELD_CHARACTERS_MAX = 256  # of mesh, run, host, started
HEARTBEAT_INTERVAL_S = 30.0
HEARTBEAT_AGE_MAX_S = 100.0  # three heartbeats and a slow disk
PID_MAX = 2**31 - 1

TEXT_FIELDS = ("agent", "host", "mesh", "run", "started")
FIELDS = (*TEXT_FIELDS, "addresses", "pid", "process_start")


@dataclass(frozen=True, slots=True)
class RegistryEntry:
    """One node as its file tells. `heartbeat` is the file's time; `extra` is the node's own."""

    agent: str
    mesh: str
    run: str
    addresses: tuple[str, ...]
    pid: int
    process_start: int | None
    host: str
    started: str
    heartbeat: float
    extra: Mapping[str, object]
    path: Path

    def is_local(self) -> bool:
        """Whether its pid means something here: same machine, boot and pid namespace."""
        return self.host == this_host() and os.name == "posix"

    def is_running(self, now: float | None = None) -> bool:
        """On this host: its very process lives. Elsewhere: its heartbeat is recent."""
        if self.is_local():
            return _is_process(self.pid, self.process_start)
        return (time.time() if now is None else now) - self.heartbeat < HEARTBEAT_AGE_MAX_S


def read_registry(folder: Path) -> list[RegistryEntry]:
    """Every well-formed entry, running or not, by agent id; none when there is no folder."""
    return scan_registry(folder, Counter())


def scan_registry(folder: Path, ignored: Counter[str]) -> list[RegistryEntry]:
    """As `read_registry`, and counts in `ignored` what was left out, by reason."""
    entries = []
    for looked, path in enumerate(_json_files(folder)):
        if looked >= FILES_MAX:
            ignored["files"] += 1
            break
        verdict = read_entry(path)
        if isinstance(verdict, RegistryEntry):
            entries.append(verdict)
        else:
            ignored[verdict] += 1
    return sorted(entries, key=lambda entry: entry.agent)


def read_entry(path: Path) -> RegistryEntry | str:
    """The entry in one file, or the reason to ignore it."""
    # O_NONBLOCK: opening a FIFO must not wait for a writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        return "gone"
    except OSError:
        return "unreadable"
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return "not a file"
        if status.st_uid not in (os.geteuid(), path.parent.stat().st_uid):
            return "owner"
        if status.st_size > FILE_BYTES_MAX:
            return "size"
        return _parse(os.read(descriptor, FILE_BYTES_MAX), path, status.st_mtime)
    except OSError:
        return "unreadable"
    finally:
        os.close(descriptor)


def process_start(pid: int) -> int | None:
    """When the process started, in clock ticks since boot: tells a reused pid. Linux only."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else None


@functools.cache
def this_host() -> str:
    """Names the machine, its boot and this pid namespace: where a pid means one process."""
    parts = [_text("/etc/machine-id"), _text("/proc/sys/kernel/random/boot_id")]
    try:
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        import uuid

        parts.append(f"{uuid.getnode():x}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _json_files(folder: Path) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(".json") and not entry.name.startswith("."):
                    yield folder / entry.name
    except OSError:
        return


def _parse(data: bytes, path: Path, heartbeat: float) -> RegistryEntry | str:
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError):
        return "not JSON"
    if not isinstance(raw, dict):
        return "fields"
    texts = {name: raw[name] for name in TEXT_FIELDS if _is_text(raw.get(name))}
    if len(texts) < len(TEXT_FIELDS):
        return "fields"
    if not is_agent_id(texts["agent"]) or path.name != f"{texts['agent']}.json":
        return "id"
    pid, start, addresses = raw.get("pid", 0), raw.get("process_start"), raw.get("addresses")
    if not _is_number(pid, 1, PID_MAX) or not (start is None or _is_number(start, 0, 2**63)):
        return "pid"
    if not isinstance(addresses, list) or len(addresses) > ADDRESSES_MAX:
        return "addresses"
    if not all(isinstance(address, str) and is_address(address) for address in addresses):
        return "addresses"
    return RegistryEntry(
        **texts,
        addresses=tuple(addresses),
        pid=pid,
        process_start=start,
        heartbeat=heartbeat,
        extra={key: value for key, value in raw.items() if key not in FIELDS},
        path=path,
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= FIELD_CHARACTERS_MAX


def _is_number(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_process(pid: int, start: int | None) -> bool:
    if sys.platform.startswith("linux"):
        fields = _stat_fields(pid)
        if fields is not None:
            alive = fields[0] not in ("Z", "X")  # dead, though nobody has asked for its exit code
            return alive and (start is None or int(fields[19]) == start)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # it exists and is another user's
    return True


def _stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat from the third on: the second may hold anything."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields if len(fields) > 19 else None


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except (OSError, ValueError):
        return ""
