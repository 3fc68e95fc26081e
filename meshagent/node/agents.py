"""Which agent a `join` runs as: resumed when it is free, a second one when it is not.

Never starts a node. Invariant: who gets an agent from here holds its lock.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

from meshagent.core.model.identity import SEED_BYTES, Identity
from meshagent.core.model.peers import check_agent_id, check_name
from meshagent.errors import AlreadyRunning, CorruptFile, MeshError, NoSuchPeer
from meshagent.storage.folders.agent_lock import AgentLock
from meshagent.storage.folders.agents import AgentFolder, AgentInfo, create_agent, list_agents
from meshagent.storage.folders.mesh_folder import MeshFolder

__all__ = ["LockedAgent", "check_words", "take_agent"]


@dataclass(slots=True)
class LockedAgent:
    """An agent that is ours to run."""

    folder: AgentFolder
    info: AgentInfo
    identity: Identity
    lock: AgentLock
    resumed: bool

    def forget(self) -> None:
        """Undo its making: the join failed, and nobody has heard of this agent."""
        assert self.lock.held, "who resumes it meanwhile would lose its folder"
        shutil.rmtree(self.folder.path, ignore_errors=True)


def check_words(role: str, name: str | None, capabilities: tuple[str, ...]) -> None:
    """A UsageError when one of them can't be used."""
    check_name(role, "role")
    for text, field in ((name or role, "name"), *((each, "capability") for each in capabilities)):
        check_name(text, field)


def take_agent(
    mesh: MeshFolder,
    role: str,
    name: str | None,
    capabilities: tuple[str, ...],
    wanted: str | None = None,
) -> LockedAgent:
    """The agent to run, locked. `wanted` (an id) insists on one; else role and name choose."""
    check_words(role, name, capabilities)
    if wanted is not None:
        return _take_this(mesh, wanted)
    for folder in sorted(list_agents(mesh), key=_last_used, reverse=True):
        try:
            taken = _take_if(folder, role, name)
        except MeshError:
            # One agent's damaged file must not keep the others from joining; and a folder may
            # vanish while we look, when another process undoes a join that failed.
            if _name_of(folder) != (name or role) or not folder.path.exists():
                continue
            raise
        if taken is not None:
            if capabilities and capabilities != taken.info.capabilities:
                folder.write_info(taken.info.name, role, capabilities)
                taken.info = folder.read()
            return taken
    return _make(mesh, role, name or role, capabilities)


def _take_if(folder: AgentFolder, role: str, name: str | None) -> LockedAgent | None:
    info = folder.read()
    if info.role != role or (name is not None and info.name != name):
        return None
    return _try(folder, info)


def _name_of(folder: AgentFolder) -> str:
    return folder.agent.rpartition("-")[0]


def _take_this(mesh: MeshFolder, wanted: str) -> LockedAgent:
    check_agent_id(wanted)
    folder = next((each for each in list_agents(mesh) if each.agent == wanted), None)
    if folder is None:
        known = ", ".join(each.agent for each in list_agents(mesh)) or "none yet"
        raise NoSuchPeer(
            f"There is no agent {wanted} in {mesh.agents}.", hint=f"Agents here: {known}."
        )
    taken = _try(folder, folder.read())
    if taken is None:
        pid = AgentLock(folder.lock_file).holder()
        raise AlreadyRunning(
            f"The agent {wanted} is running already (pid {pid}).",
            hint=f"End it with: meshagent leave --as {wanted}",
            agent=wanted,
            pid=pid,
        )
    return taken


def _try(folder: AgentFolder, info: AgentInfo) -> LockedAgent | None:
    identity = Identity(info.name, info.seed)
    if identity.agent != folder.agent:
        raise CorruptFile(
            f"{folder.key_file} holds the key of {identity.agent}, not of {folder.agent}.",
            hint=f"Put the right key file back, or rename the folder to {identity.agent}.",
        )
    lock = AgentLock(folder.lock_file)
    return LockedAgent(folder, info, identity, lock, True) if lock.acquire() else None


def _make(mesh: MeshFolder, role: str, name: str, capabilities: tuple[str, ...]) -> LockedAgent:
    while True:
        seed = os.urandom(SEED_BYTES)
        identity = Identity(name, seed)
        folder = create_agent(mesh, identity.agent, seed, name, role, capabilities)
        taken = _try(folder, folder.read())
        if taken is not None:  # else another join found it first and resumes it: make one more
            taken.resumed = False
            return taken


def _last_used(folder: AgentFolder) -> tuple[bool, float]:
    """One that was cut off, whose lock still names its process, comes back before one that left."""
    try:
        found = folder.lock_file.stat()
    except OSError:
        return False, 0.0
    return found.st_size > 0, found.st_mtime
