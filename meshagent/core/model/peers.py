"""The words of DESIGN as values. Never touches a clock, a socket or a disk."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NewType

from meshagent.core.model.presence import Presence
from meshagent.errors import UsageError

__all__ = [
    "AgentId",
    "Candidate",
    "LinkId",
    "Peer",
    "PeerState",
    "check_agent_id",
    "check_name",
    "is_agent_id",
    "veil",
]

AgentId = NewType("AgentId", str)
LinkId = NewType("LinkId", int)

NAME_CHARACTERS_MAX = 32  # fits a DNS label together with the fingerprint and a run suffix
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}\Z")
_AGENT_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}-[0-9a-hjkmnp-tv-z]{8}\Z")


class PeerState(StrEnum):
    """How this agent sees another. Only traffic makes a peer ALIVE."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    GONE = "gone"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A hint from discovery that an agent may be reachable at these `host:port` addresses.

    `agent` is empty when only an address is known (`--peer`).
    """

    agent: str
    addresses: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True)
class Peer:
    """Another agent as this one sees it now. `last_heard` is on the engine's clock."""

    agent: AgentId
    name: str
    role: str
    state: PeerState
    presence: Presence | str
    status: str
    capabilities: tuple[str, ...]
    addresses: tuple[str, ...]
    host: str
    last_heard: float | None
    version: str


def veil(agent: AgentId) -> AgentId:
    """The id as outsiders may see it: a name is often a role, and a role is for members."""
    return AgentId(f"agent-{agent[-8:]}")


@lru_cache(maxsize=1024)
def is_agent_id(text: str) -> bool:
    """Whether `text` is written like an agent id; says nothing about whether it exists."""
    return _AGENT_ID.match(text) is not None


def check_agent_id(text: str) -> AgentId:
    """`text` as an agent id, or a UsageError that says how one looks."""
    if not is_agent_id(text):
        raise UsageError(
            f"{text!r} is not an agent id.",
            hint="An id looks like tester-k3f9a2qd; 'meshagent peers' lists them.",
        )
    return AgentId(text)


def check_name(text: str, field: str) -> str:
    """`text` if it may be a role, a name or a capability; otherwise a UsageError."""
    if not _NAME.match(text):
        raise UsageError(
            f"The {field} {text!r} can't be used: it may hold up to {NAME_CHARACTERS_MAX} small "
            "letters, digits, '.', '_' and '-', and begins with a letter or digit.",
            hint=f"Try {_suggest_name(text)!r}.",
        )
    return text


def _suggest_name(text: str) -> str:
    plain = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")
    return plain[:NAME_CHARACTERS_MAX] or "tester"
