"""The formulas of membership and redialling, as pure functions, and the local-health score.

From SWIM (Das et al.) and Lifeguard (Dadgar et al.): suspicion shrinks as independent peers agree,
and a node that is itself slow doubts itself before it doubts others.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

__all__ = ["LocalHealth", "backoff_s", "gossip_transmits", "suspicion_s"]

AGREED_CUT = 0.25  # a machine that compiles is silent for two seconds: with more it is buried
REFERENCE_MEMBERS = 50  # up to here the suspicion time does not grow: the LAN promise is 5 s


def suspicion_s(members: int, agreeing: int, needed: int, longest_s: float) -> float:
    """How long a suspect has to answer, from the first accusation on.

    It starts at `longest_s` and falls to three quarters of it, logarithmically, as `agreeing`
    further members come to the same view, `needed` of them being enough. Beyond 50 members it
    grows with the logarithm of the mesh, since word takes longer to travel.
    """
    longest = longest_s * max(1.0, math.log10(max(members, 1)) / math.log10(REFERENCE_MEMBERS))
    if needed <= 0:
        return longest
    agreed = min(agreeing, needed)
    return longest - longest * AGREED_CUT * math.log(agreed + 1) / math.log(needed + 1)


def gossip_transmits(members: int, multiplier: int) -> int:
    """How often one update is passed on by each member."""
    return multiplier * max(1, math.ceil(math.log10(members + 1)))


def backoff_s(failures: int, first_s: float, longest_s: float, rng: random.Random) -> float:
    """When to dial again after that many failures in a row: doubling, capped, jittered by half."""
    return min(longest_s, first_s * 2.0 ** min(failures, 20)) * rng.uniform(0.5, 1.0)


@dataclass(slots=True)
class LocalHealth:
    """How much this node doubts itself: 0 is well, `worst` stretches its timeouts most."""

    worst: int = 8
    score: int = 0

    def note(self, delta: int) -> None:
        """A probe answered is -1; a stall, a refutation, a probe nobody helped with is +1."""
        self.score = max(0, min(self.worst, self.score + delta))

    def stretch(self, seconds: float) -> float:
        """`seconds` as this node should count them in its present health."""
        return seconds * (self.score + 1)
