"""Whom a person means: an id, a unique prefix, a name, `@role`, `@all`, `any:role`.

Pure. Never invents a recipient: who can't be told apart is listed, who is not known is suggested.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from meshagent.core.model.peers import AgentId, is_agent_id
from meshagent.errors import AmbiguousPeer, NoSuchPeer

__all__ = ["KnownAgent", "resolve"]

_RANK = {"alive": 0, "suspect": 1, "gone": 2, "left": 3}


@dataclass(frozen=True, slots=True)
class KnownAgent:
    """An agent that can be addressed; `state` is empty when it was never met."""

    agent: AgentId
    role: str
    state: str

    @property
    def name(self) -> str:
        """The part of the id before the fingerprint."""
        return self.agent[:-9]


def resolve(text: str, known: Sequence[KnownAgent], me: AgentId) -> list[AgentId]:
    """The agents that `text` means, never ourselves by a group's name."""
    if text.startswith(("@", "any:")):
        return _group(text, [each for each in known if each.agent != me])
    for matching in (
        [each for each in known if each.agent == text],
        [each for each in known if each.name == text],
        [each for each in known if text and each.agent.startswith(text)],
        [each for each in known if text and each.role == text],
    ):
        if len(matching) > 1:
            matching = [each for each in matching if each.agent != me]
        if len(matching) == 1:
            return [matching[0].agent]
        if matching:
            raise _ambiguous(text, matching)
    if is_agent_id(text):
        return [AgentId(text)]
    raise _unknown(text, known)


def _group(text: str, known: Sequence[KnownAgent]) -> list[AgentId]:
    one = text.startswith("any:")
    role = text.removeprefix("any:") if one else text[1:]
    members = [each for each in known if role and role in (each.role, "all")]
    if not members:
        raise NoSuchPeer(
            f"Nobody has the role {role!r}." if role != "all" else "Nobody else is known here.",
            hint=_suggest(role, sorted({each.role for each in known if each.role})),
        )
    members.sort(key=lambda each: (_RANK.get(each.state, 4), each.agent))
    return [each.agent for each in (members[:1] if one else members)]


def _ambiguous(text: str, matching: Sequence[KnownAgent]) -> AmbiguousPeer:
    here = sorted(matching, key=lambda each: (_RANK.get(each.state, 4), each.agent))
    ids = ", ".join(f"{each.agent} ({each.state or 'never met'})" for each in here[:8])
    return AmbiguousPeer(
        f"{text!r} may be any of {len(matching)}: {ids}.",
        hint=f"Use an id, '@{text}' for all of them, or 'any:{text}' for one.",
    )


def _unknown(text: str, known: Sequence[KnownAgent]) -> NoSuchPeer:
    names = sorted({each.name for each in known} | {each.role for each in known if each.role})
    return NoSuchPeer(f"Nobody here is called {text!r}.", hint=_suggest(text, names))


def _suggest(text: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(text, names, n=1, cutoff=0.5)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Known: {', '.join(names[:12])}." if names else "See who is here: meshagent peers"
