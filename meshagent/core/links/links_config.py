"""The knobs of links, each with its trade-off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshagent.core.links.dialing import DialingConfig
from meshagent.core.links.handshake import FEATURES

__all__ = ["LinksConfig"]


@dataclass(frozen=True, slots=True)
class LinksConfig:
    """How long each step of a link may take."""

    handshake_s: float = 5.0
    """A link whose handshake is not complete by then is closed."""
    check_s: float = 1.0
    """How long an older run of an agent may take to prove that it still runs."""
    smaller_id_dials_s: float = 0.6
    """When two agents learn of each other at once, the larger id dials this much later."""
    settled_s: float = 10.0
    """Two agents that dial each other at once are done by then. A second link that comes later
    means that the first is dead at the other end, whatever our own kernel believes."""
    dialing: DialingConfig = field(default_factory=DialingConfig)
    features: Mapping[str, int] = field(default_factory=lambda: FEATURES)
    """What we offer beyond the protocol's version, each with the newest form of it we know."""
