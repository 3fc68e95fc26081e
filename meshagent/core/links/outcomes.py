"""What the links engine tells the other engines, as frozen values beside its effects."""

from __future__ import annotations

from dataclasses import dataclass

from meshagent.core.effects import Effect
from meshagent.core.model.peers import AgentId

__all__ = ["LinkDown", "LinkReplaced", "LinkUp", "Outcome", "Unreachable"]


@dataclass(frozen=True, slots=True)
class LinkUp:
    """This agent can be sent to; `record` is what it says of itself."""

    agent: AgentId
    record: bytes
    dialled: bool


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The last link to this agent is gone."""

    agent: AgentId


@dataclass(frozen=True, slots=True)
class LinkReplaced:
    """The link in use is gone with all frames on it; another is used."""

    agent: AgentId


@dataclass(frozen=True, slots=True)
class Unreachable:
    """Nobody listens at any address of this agent."""

    agent: AgentId


Outcome = Effect | LinkUp | LinkDown | LinkReplaced | Unreachable
