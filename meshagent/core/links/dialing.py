"""Whom to dial, where, and when again. Never connects: it says which address is next.

Each target is an agent, or a bare address that somebody named. Its addresses are tried one after
the other with a short head start each (RFC 8305's way: the first that answers wins, and a dead
one delays nothing much); when all have failed the target rests, longer each time.
Invariant: at most one round is under way per target, and targets are bounded.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from meshagent.core.membership.lifeguard import backoff_s
from meshagent.core.model.records import ADDRESSES_MAX

__all__ = ["Dialing", "DialingConfig", "Target"]


@dataclass(frozen=True, slots=True)
class DialingConfig:
    """The knobs of redialling."""

    head_start_s: float = 0.2
    """The next address is tried this much later: shorter makes more needless connections."""
    first_pause_s: float = 0.2
    longest_pause_s: float = 60.0
    """A peer that returns dials us itself; this only bounds the wait where it can't."""
    again_s: float = 1.0
    """A hint that is no news renews hope at most this often: hints are free to send."""
    rounds_max: int = 8
    """An agent that nobody vouches for is forgotten after so many rounds without an answer."""
    targets_max: int = 4096


@dataclass(slots=True)
class Target:
    """Somebody we would like a link to."""

    key: str
    agent: str
    addresses: list[str]
    lasting: bool
    next_at: float
    failures: int = 0
    untried: list[str] = field(default_factory=list)
    trying: int = 0
    good: str = ""
    last_agent: str = ""
    tried_at: float = float("-inf")

    def in_order(self) -> list[str]:
        """The order to try them in: what answered last, then others, loopback at the end."""
        return sorted(self.addresses, key=lambda each: (each != self.good, _is_loopback(each)))


class Dialing:
    """The targets, and when each that has no link is due."""

    def __init__(self, rng: random.Random, config: DialingConfig) -> None:
        self.targets: dict[str, Target] = {}
        self._due: dict[str, Target] = {}
        self._rng, self._config = rng, config

    def want(
        self, agent: str, addresses: tuple[str, ...], lasting: bool, now: float, wait_s: float
    ) -> None:
        """Somebody says that `agent` may be at these addresses; a new address is tried soon."""
        if not agent and not lasting and (known := self._at(addresses)) is not None:
            self._renew(known, addresses, now, wait_s)
            return
        key = agent or addresses[0]
        target = self.targets.get(key)
        if target is None:
            if len(self.targets) >= self._config.targets_max and not self._evict():
                return
            target = self.targets[key] = Target(key, agent, [], lasting, now + wait_s)
            self._due[key] = target
        target.lasting = target.lasting or lasting
        self._renew(target, addresses, now, wait_s)

    def moved_out(self, key: str, address: str, now: float) -> None:
        """Somebody else answers there now: find out who."""
        target = self.targets.get(key)
        if target is not None and target.agent and address in target.addresses:
            target.addresses.remove(address)
            self.want("", (address,), False, now, 0.0)

    def _at(self, addresses: tuple[str, ...]) -> Target | None:
        """Whoever is thought to be at one of these already."""
        there = set(addresses)
        return next((t for t in self.targets.values() if not there.isdisjoint(t.addresses)), None)

    def _renew(self, target: Target, addresses: tuple[str, ...], now: float, wait_s: float) -> None:
        news = [each for each in addresses if each not in target.addresses]
        if news:
            target.addresses = [*news, *target.addresses][:ADDRESSES_MAX]
        if news or now - target.tried_at >= self._config.again_s:
            self.hurry(target.key, now + wait_s)

    def hurry(self, key: str, when: float) -> None:
        """There is reason to hope: forget the failures."""
        target = self.targets.get(key)
        if target is not None:
            target.failures = 0
            target.next_at = min(target.next_at, when)

    def drop(self, key: str) -> None:
        """Nobody wants this one any more."""
        self.targets.pop(key, None)
        self._due.pop(key, None)

    def linked(self, agent: str) -> None:
        """`agent` has a link: its targets rest."""
        for target in self._of(agent):
            target.trying, target.untried = 0, []
            self._due.pop(target.key, None)

    def unlinked(self, agent: str, now: float) -> None:
        """`agent` has no link any more: its targets are due again, at once."""
        for target in self._of(agent):
            self._due[target.key] = target
            target.failures, target.trying, target.untried = 0, 0, []
            target.next_at = now

    def due(self, now: float) -> list[tuple[Target, str]]:
        """The addresses to dial now, one per target."""
        chosen = []
        for target in list(self._due.values()):
            if now < target.next_at:
                continue
            if not target.untried and not target.trying:
                target.untried = target.in_order()
            if not target.untried:
                target.next_at = now + self._config.longest_pause_s
                continue
            target.trying += 1
            target.tried_at = now
            chosen.append((target, target.untried.pop(0)))
            target.next_at = now + self._config.head_start_s
        return chosen

    def failed(self, key: str, now: float) -> bool:
        """One address did not answer; True when it was the last one of the round."""
        target = self.targets.get(key)
        if target is None:
            return False
        target.trying = max(0, target.trying - 1)
        if target.untried:
            target.next_at = now
            return False
        if target.trying:
            return False
        target.failures += 1
        if target.failures > self._config.rounds_max and not target.lasting:
            self.drop(key)
        pause = backoff_s(
            target.failures, self._config.first_pause_s, self._config.longest_pause_s, self._rng
        )
        target.next_at = now + pause
        return True

    def answered(self, key: str, address: str, agent: str) -> None:
        """`agent` answered at this address: try it first next time."""
        target = self.targets.get(key)
        if target is not None:
            target.good, target.last_agent = address, agent
        known = self.targets.get(agent)
        if known is not None and address in known.addresses:
            known.good = address

    def deadline(self) -> float | None:
        """When the next target is due."""
        return min((each.next_at for each in self._due.values()), default=None)

    def _of(self, agent: str) -> list[Target]:
        return [each for each in self.targets.values() if agent in (each.agent, each.last_agent)]

    def _evict(self) -> bool:
        idle = [each for each in self.targets.values() if not each.lasting]
        if not idle:
            return False
        self.drop(max(idle, key=lambda each: each.failures).key)
        return True


def _is_loopback(address: str) -> bool:
    return address.startswith(("127.", "[::1]", "localhost:"))
