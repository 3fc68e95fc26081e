"""Who a node is, and what it says of itself. Decides what of a person's words others are shown."""

from __future__ import annotations

from dataclasses import dataclass

from meshagent.core.model.identity import Identity, MeshSecret
from meshagent.core.model.presence import Presence
from meshagent.core.model.records import STATUS_CHARACTERS_MAX, Record
from meshagent.errors import UsageError

__all__ = ["Profile", "first_record", "own_presence", "own_status"]

RUN_SHIFT = 32  # an incarnation is the durable run number and a counter within the run


@dataclass(frozen=True, slots=True)
class Profile:
    """What is known of a node before it runs."""

    identity: Identity
    secret: MeshSecret
    mesh_name: str
    role: str
    capabilities: tuple[str, ...]
    host: str
    version: str


def first_record(profile: Profile, run: int, started_ms: int, addresses: tuple[str, ...]) -> Record:
    """What a node says of itself when it starts."""
    identity = profile.identity
    return Record(
        identity.agent, identity.key, run << RUN_SHIFT, started_ms, False, profile.role,
        profile.capabilities, addresses, profile.host, Presence.IDLE, "", profile.version,
    )  # fmt: skip


def own_presence(word: str | None) -> Presence | None:
    """The presence that a person names; None leaves it as it is."""
    try:
        return None if word is None else Presence(word)
    except ValueError:
        raise UsageError(
            f"{word!r} is not a presence.",
            hint=f"Choose one of {', '.join(each.value for each in Presence)}.",
        ) from None


def own_status(text: str | None) -> str | None:
    """A status as others are shown it: one printable line."""
    if text is None:
        return None
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line[:STATUS_CHARACTERS_MAX]
