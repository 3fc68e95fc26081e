"""The agents that live in a mesh folder: who each is, and its key (DESIGN 12).

Decides how an agent's identity is kept; never derives one: ids and seeds are passed in. Invariant:
a folder under its final name holds a whole agent.toml and agent.key, and agent.key never changes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshagent.core.model.peers import AgentId, check_agent_id, is_agent_id
from meshagent.errors import LimitReached, StorageError
from meshagent.storage.folders.files import (
    make_private_folder,
    mapped_errors,
    place_folder,
    write_new,
    write_private,
)
from meshagent.storage.folders.key_files import format_key, read_key
from meshagent.storage.folders.mesh_folder import MeshFolder
from meshagent.storage.folders.settings import AgentSettings, format_agent, parse_agent
from meshagent.storage.folders.toml_files import read_text

__all__ = ["AgentFolder", "AgentInfo", "create_agent", "list_agents"]

AGENTS_MAX = (
    1024  # per mesh folder: a folder that holds more has a leak, and listing must stay fast
)
KEY_KIND = "agentkey1"


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """Who an agent is. The seed is in no repr."""

    agent: AgentId
    name: str
    role: str
    capabilities: tuple[str, ...]
    seed: bytes = field(repr=False)


class AgentFolder:
    """The files of one agent; the folder's name is the agent's id."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warnings: list[str] = []
        """What was put right while reading, for the person; each is one sentence."""

    def __repr__(self) -> str:
        return f"AgentFolder({str(self.path)!r})"

    @property
    def agent(self) -> AgentId:
        return AgentId(self.path.name)

    @property
    def info_file(self) -> Path:
        return self.path / "agent.toml"

    @property
    def key_file(self) -> Path:
        return self.path / "agent.key"

    @property
    def database(self) -> Path:
        return self.path / "mesh.db"

    @property
    def log_file(self) -> Path:
        return self.path / "node.log"

    @property
    def lock_file(self) -> Path:
        return self.path / "lock"

    def read(self) -> AgentInfo:
        """Who this agent is; a CorruptFile or ConfigError names the file and the way out."""
        said = parse_agent(read_text(self.info_file), self.info_file)
        seed, warnings = read_key(self.key_file, KEY_KIND, self._repair())
        self.warnings.extend(warnings)
        return AgentInfo(self.agent, said.name, said.role, said.capabilities, seed)

    def write_info(self, name: str, role: str, capabilities: Sequence[str]) -> None:
        """Replace agent.toml (an agent that resumes may have other capabilities)."""
        said = AgentSettings(name, role, tuple(capabilities))
        write_private(self.info_file, format_agent(said).encode())

    def _repair(self) -> str:
        return (
            f"Restore it from a backup, or remove the folder {self.path} to start afresh as a new "
            "agent."
        )


def list_agents(mesh: MeshFolder) -> list[AgentFolder]:
    """The agents of this mesh on this machine, by id; whatever else lies there is ignored."""
    with mapped_errors(mesh.agents, "list"):
        try:
            with os.scandir(mesh.agents) as entries:
                agents = (entry.name for entry in entries if _is_agent(entry))
                names = sorted(itertools.islice(agents, AGENTS_MAX))
        except FileNotFoundError:
            return []
    return [AgentFolder(mesh.agents / name) for name in names]


def _is_agent(entry: os.DirEntry[str]) -> bool:
    return is_agent_id(entry.name) and entry.is_dir()


def create_agent(
    mesh: MeshFolder,
    agent_id: str,
    seed: bytes,
    name: str,
    role: str,
    capabilities: Sequence[str] = (),
) -> AgentFolder:
    """Make the folder of a new agent, durably and in one step."""
    check_agent_id(agent_id)
    text = format_agent(AgentSettings(name, role, tuple(capabilities))).encode()
    if len(list_agents(mesh)) >= AGENTS_MAX:
        raise LimitReached(
            f"{mesh.agents} holds {AGENTS_MAX} agents, which is the limit.",
            hint="Remove the folders of agents that you no longer need.",
            limit=AGENTS_MAX,
        )
    make_private_folder(mesh.agents)
    folder = AgentFolder(mesh.agents / agent_id)

    def fill(temporary: Path) -> None:
        write_new(temporary / "agent.toml", text)
        write_new(temporary / "agent.key", format_key(KEY_KIND, seed))

    if not place_folder(folder.path, fill):
        raise StorageError(
            f"The agent {agent_id} exists already in {mesh.agents}.",
            hint="Resume it, or choose another name with --name.",
            path=str(folder.path),
        )
    return folder
