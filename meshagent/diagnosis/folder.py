"""Verdicts on what is on disk: the mesh, its key, settings, agents, registry, room and privacy.

Reads files and never writes one: where a `join` would close a key file to others, this says so.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshagent.diagnosis.finding import Finding, few, note, ok, problem, span
from meshagent.discovery.registry import FILES_MAX, RegistryEntry, read_entry
from meshagent.errors import MeshError
from meshagent.storage.folders.agent_lock import AgentLock
from meshagent.storage.folders.agents import KEY_KIND as AGENT_KEY_KIND
from meshagent.storage.folders.agents import AgentFolder
from meshagent.storage.folders.files import read_bounded
from meshagent.storage.folders.key_files import KEY_FILE_BYTES_MAX, format_key
from meshagent.storage.folders.mesh_folder import FOLDER_NAME, MeshFolder, find_mesh, personal_mesh
from meshagent.storage.folders.mounts import is_network_filesystem

__all__ = [
    "AgentFacts",
    "KeyFacts",
    "check_agent",
    "check_clock",
    "check_filesystem",
    "check_key",
    "check_place",
    "check_registry_entry",
    "check_room",
    "check_runtime_folder",
    "check_settings",
    "look_at_agent",
    "look_at_key",
    "read_registry_files",
]

FREE_BYTES_MIN = 100 * 1024 * 1024  # an eager attachment's limit (DESIGN 10)
SOCKET_PATH_CHARACTERS_MAX = 103  # macOS allows 104 bytes with the final zero, Linux 108
SOCKET_NAME_CHARACTERS = 30  # "/", 24 hexadecimal digits, ".sock"
CLOCK_AHEAD_MAX_S = 60.0  # a file's time and the clock may differ by a little on a shared folder
YEAR_MIN = 2025  # when this was written: an earlier clock has lost its battery


# -- where the mesh is ----------------------------------------------------------------------------


def check_place(
    start: Path, chosen: Path | None, environ: Mapping[str, str]
) -> tuple[MeshFolder | None, Finding]:
    """The mesh that a command here would use, without making one."""
    named = find_mesh(start, chosen, environ)
    mesh = MeshFolder(named or personal_mesh(environ))
    if mesh.exists:
        kind = "" if named else "The personal mesh, since there is none upward from here: "
        return mesh, ok("mesh", f"{kind}{mesh.path}")
    clones = [mesh] if named else [MeshFolder(p / FOLDER_NAME) for p in (start, *start.parents)]
    for clone in clones:
        if os.path.lexists(clone.settings_file):
            return None, problem(
                "mesh",
                f"{clone.path} has mesh.toml and no mesh.key, as a fresh clone of a project has.",
                "Get the project's key by an invite: meshagent join --role tester --invite -",
            )
    if named is not None:
        return None, problem(
            "mesh",
            f"There is no mesh in {mesh.path}{_why_hidden(mesh.path)}.",
            f"Make one: meshagent init {mesh.path.parent}",
        )
    return None, note(
        "mesh",
        f"There is no mesh upward from {start}, and no personal one yet.",
        "Make one for this project: meshagent init   (or just join: meshagent join --role tester)",
    )


def _why_hidden(path: Path) -> str:
    closed = path.is_dir() and not os.access(path, os.R_OK | os.X_OK)
    return ", or this user may not look into it" if closed else ""


def check_settings(mesh: MeshFolder) -> Finding:
    """Whether mesh.toml can be read, and every value in it used."""
    try:
        settings = mesh.read_settings()
    except MeshError as error:
        return problem("settings", error.message, error.hint)
    return ok("settings", f"mesh {settings.name!r}, discovery {settings.discovery}")


# -- keys -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """A key file as it lies there. The key is in no repr."""

    path: Path
    mode: int = 0o600
    ours: bool = True
    trouble: str = ""
    key: bytes | None = field(default=None, repr=False)


def look_at_key(path: Path, kind: str) -> KeyFacts:
    """Read a key file and leave its mode as it is, unlike `read_key`."""
    try:
        status = path.lstat()
        data = read_bounded(path, KEY_FILE_BYTES_MAX, follow_links=False).strip()
    except OSError as error:
        return KeyFacts(path, trouble=f"it can't be read ({error.strerror})")
    except MeshError as error:
        return KeyFacts(path, trouble=error.message.rpartition(": ")[2].rstrip("."))
    mode, ours = stat.S_IMODE(status.st_mode), status.st_uid == os.geteuid()
    try:
        key = bytes.fromhex(data.decode("ascii").partition(":")[2])
        whole = len(key) == 32 and data == format_key(kind, key).strip()
    except ValueError:
        whole = False
    if not whole:
        words = "it is damaged" if data else "it is empty"
        return KeyFacts(path, mode, ours, trouble=words)
    return KeyFacts(path, mode, ours, key=key)


def check_key(facts: KeyFacts) -> Finding:
    """Whether the mesh secret is whole, and nobody else's to read."""
    if facts.trouble:
        return problem(
            "key",
            f"{facts.path} is no use: {facts.trouble}.",
            "Restore mesh.key from a backup or from another machine of this mesh; or remove it "
            "and take a new invite.",
        )
    if facts.mode & 0o077 and not facts.ours:
        return problem(
            "key",
            f"{facts.path} can be read by other users and belongs to one of them.",
            "Use a mesh folder of your own: 'meshagent init', or --dir.",
        )
    if facts.mode & 0o077:
        return _open_key("key", facts.path, facts.mode)
    return ok("key", "mesh.key is whole and private", detail=True)


def _open_key(check: str, path: Path, mode: int) -> Finding:
    return note(
        check,
        f"{path} can be read by other users of this machine (mode {mode:04o}).",
        f"The next join closes it; or now: chmod 600 {path}",
    )


# -- agents ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """An agent in the mesh folder. `pid` is its node's: 0 when unknown, None when none runs."""

    agent: str
    pid: int | None = None
    trouble: str = ""
    hint: str = ""
    listed: bool = False
    """Whether its running node has a registry file by which sessions find it."""
    key: KeyFacts | None = None


def look_at_agent(folder: AgentFolder, listed: frozenset[str]) -> AgentFacts:
    """Read an agent's files and see whether its lock is held."""
    key = look_at_key(folder.key_file, AGENT_KEY_KIND)
    trouble, hint = "", ""
    if key.trouble:
        trouble = f"{folder.key_file} is no use: {key.trouble}."
        hint = f"Restore it from a backup, or remove the folder {folder.path}."
    elif not key.mode & 0o077:  # reading a wider one would change its mode
        try:
            info = folder.read()
            trouble, hint = _whose_key(folder, info.name, info.seed)
        except MeshError as error:
            trouble, hint = error.message, error.hint
    try:
        pid = AgentLock(folder.lock_file).holder()
    except MeshError as error:
        pid, trouble, hint = None, trouble or error.message, hint or error.hint
    return AgentFacts(folder.agent, pid, trouble, hint, folder.agent in listed, key)


def _whose_key(folder: AgentFolder, name: str, seed: bytes) -> tuple[str, str]:
    from meshagent.core.model.identity import Identity

    identity = Identity(name, seed)
    if identity.agent == folder.agent:
        return "", ""
    return (
        f"{folder.key_file} holds the key of {identity.agent}, not of {folder.agent}.",
        f"Put the right key file back, or rename the folder to {identity.agent}.",
    )


def check_agent(facts: AgentFacts) -> Finding:
    """Whether an agent of this folder could run, or does."""
    if facts.trouble:
        return problem("agents", facts.trouble, facts.hint)
    if facts.key is not None and facts.key.mode & 0o077:
        return _open_key("agents", facts.key.path, facts.key.mode)
    if facts.pid is None:
        return ok("agents", f"{facts.agent} does not run now", detail=True)
    if not facts.listed:
        who = f"a process (pid {facts.pid})" if facts.pid else "some process"
        return problem(
            "agents",
            f"{facts.agent} is held by {who}, and the registry does not list it: no command finds "
            "it.",
            f"If it has just started, look again; otherwise end it (kill {facts.pid}) and join.",
        )
    return ok("agents", f"{facts.agent} runs (pid {facts.pid})", detail=True)


# -- the registry ---------------------------------------------------------------------------------


def read_registry_files(folder: Path) -> list[tuple[Path, RegistryEntry | str]]:
    """Each file of the registry, and what it says or why it says nothing."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))
    except OSError:
        return []
    paths = [folder / name for name in names if not name.startswith(".")][:FILES_MAX]
    return [(path, read_entry(path)) for path in paths]


def check_registry_entry(
    path: Path, entry: RegistryEntry | str, tag: str, now: float
) -> Finding | None:
    """What is odd about a file of the registry; None for a node of ours that runs here."""
    if isinstance(entry, str):
        return note(
            "registry",
            f"{path} is ignored: {_IGNORED.get(entry, entry)}.",
            "No node wrote it like that; remove it.",
        )
    if tag and entry.mesh != tag:
        return problem(
            "registry",
            f"{path.name} is of another mesh: {entry.agent} joined with another secret than "
            "mesh.key holds now.",
            f"Join again with it: kill {entry.pid}, or remove {path} if nothing runs.",
        )
    age = span(now - entry.heartbeat)
    if not entry.is_running(now):
        return note(
            "registry",
            f"{path.name} is stale: the node of {entry.agent} (pid {entry.pid}) has ended without "
            f"leaving; its last sign is {age} old.",
            "Harmless: the next node to run removes it.",
        )
    if not entry.is_local():
        return note(
            "registry",
            f"{entry.agent} runs on another machine, or in another container, that shares this "
            f"folder; its last sign is {age} old.",
            "Commands here can't attach to it; as a peer it is reached over the network.",
        )
    return None


_IGNORED = {
    "addresses": "its addresses are not addresses",
    "fields": "fields are missing or too long",
    "gone": "it went away just now",
    "id": "its name is not that of the agent in it",
    "not JSON": "it is not JSON",
    "not a file": "it is not a regular file",
    "owner": "it belongs to another user",
    "pid": "its process id is not one",
    "size": "it is too large",
    "unreadable": "it can't be read",
}


# -- room, privacy, time --------------------------------------------------------------------------


def check_room(mesh: MeshFolder, free_bytes: int | None, writable: bool) -> Finding:
    """Whether a node can write here."""
    if not writable:
        return problem(
            "folder",
            f"{mesh.path} can't be written by this user, so no agent can run from it.",
            "Make it writable, or use another one with --dir.",
        )
    if free_bytes is not None and free_bytes < FREE_BYTES_MIN:
        return problem(
            "folder",
            f"Only {free_bytes // (1024 * 1024)} MB are free where {mesh.path} is.",
            "Free some space: messages and attachments are refused when the disk is full.",
        )
    free = "" if free_bytes is None else f", {free_bytes // (1024 * 1024):,} MB free"
    return ok("folder", f"can be written{free}", detail=True)


def free_bytes(path: Path) -> int | None:
    """What this user may still write there; None when nobody can tell."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def check_filesystem(path: Path, kind: str) -> Finding | None:
    """A mesh on another machine's disk: locks and the database can't be trusted there."""
    if not is_network_filesystem(kind):
        return None
    return problem(
        "folder",
        f"{path} is on a network filesystem ({kind}), where the database can't be trusted.",
        "Keep the mesh folder on a local disk, and let other machines in with 'meshagent invite'.",
    )


def check_runtime_folder(folder: Path, status: os.stat_result | None, user: int) -> Finding:
    """Whether sessions' sockets have a private place with a short enough name."""
    if len(str(folder)) + SOCKET_NAME_CHARACTERS > SOCKET_PATH_CHARACTERS_MAX:
        return problem(
            "runtime",
            f"The path of {folder} is too long for a socket.",
            "Set XDG_RUNTIME_DIR to a shorter one.",
        )
    if status is None:
        return ok("runtime", f"{folder} will be made for sessions' sockets", detail=True)
    private = stat.S_ISDIR(status.st_mode) and not stat.S_IMODE(status.st_mode) & 0o077
    if not private or status.st_uid != user:
        return problem(
            "runtime",
            f"{folder} is not a private folder of yours, so no session could trust it.",
            "Remove it, or set XDG_RUNTIME_DIR to a folder of your own.",
        )
    return ok("runtime", f"sessions' sockets are in {folder}, private", detail=True)


def check_clock(now: float, heartbeats: Sequence[tuple[str, float]], year: int) -> Finding:
    """Whether the clock can be right: messages expire, and files age, by it."""
    if year < YEAR_MIN:
        return problem("clock", f"The clock says it is {year}.", "Set the time of this machine.")
    ahead = [agent for agent, beat in heartbeats if beat > now + CLOCK_AHEAD_MAX_S]
    if ahead:
        return problem(
            "clock",
            f"The registry has signs of life from the future ({few(ahead)}): this clock is behind, "
            "or another machine's is ahead.",
            "Set the time of both machines, best from the network (NTP).",
        )
    return ok("clock", "plausible", detail=True)
