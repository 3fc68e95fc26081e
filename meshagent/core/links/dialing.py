"""Whom to dial, at which address, and when to try again. Never connects.

A target is an agent, or a bare address that somebody named. Its addresses are tried one after the
other with a short head start each, as in RFC 8305: the first that answers wins, and a dead one
costs little time. When all have failed, the target pauses, longer each time.
Invariant: at most one round is under way per target, and the number of targets is limited.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from meshagent.core.membership.lifeguard import backoff_s
from meshagent.core.model.records import ADDRESSES_MAX

__all__ = ["DialTarget", "Dialing", "DialingConfig"]


@dataclass(frozen=True, slots=True)
class DialingConfig:
    """The knobs of redialling."""

    head_start_s: float = 0.2
    """The next address is tried this much later. Shorter makes more needless connections."""
    first_pause_s: float = 0.2
    longest_pause_s: float = 60.0
    """A peer that returns dials us. This limits the wait for a peer that can't."""
    again_s: float = 1.0
    """A hint that names no new address ends a pause at most this often: anyone can send hints."""
    hint_pause_s: float = 600.0
    """The same for an agent known only from hints, which may be false. It is never given up: its
    hint comes once, and who opens a firewall an hour later must be found all the same."""
    targets_max: int = 4096
    """When there are more, the one known only from hints that failed most often is forgotten."""


@dataclass(slots=True)
class DialTarget:
    """An agent or address that we want a link to."""

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
        """The addresses in the order to try: the last that answered first, loopback last."""
        return sorted(self.addresses, key=lambda each: (each != self.good, _is_loopback(each)))


class Dialing:
    """The targets, and when each that has no link is due."""

    def __init__(self, rng: random.Random, config: DialingConfig) -> None:
        self.targets: dict[str, DialTarget] = {}
        self._due: dict[str, DialTarget] = {}
        self._rng, self._config = rng, config

    def want(
        self, agent: str, addresses: tuple[str, ...], lasting: bool, now: float, wait_s: float
    ) -> None:
        """`agent` may be at these addresses; a new address is tried soon."""
        if not agent and not lasting and (known := self._at(addresses)) is not None:
            self._renew(known, addresses, now, wait_s)
            return
        key = agent or addresses[0]
        target = self.targets.get(key)
        if target is None:
            if len(self.targets) >= self._config.targets_max and not self._evict():
                return
            target = self.targets[key] = DialTarget(key, agent, [], lasting, now + wait_s)
            self._due[key] = target
        target.lasting = target.lasting or lasting
        self._renew(target, addresses, now, wait_s)

    def moved_out(self, key: str, address: str, now: float) -> None:
        """Another agent answers at this address now: dial it as a bare address to find out who."""
        target = self.targets.get(key)
        if target is not None and target.agent and address in target.addresses:
            target.addresses.remove(address)
            self.want("", (address,), False, now, 0.0)

    def _at(self, addresses: tuple[str, ...]) -> DialTarget | None:
        """The target that already has one of these addresses."""
        there = set(addresses)
        return next((t for t in self.targets.values() if not there.isdisjoint(t.addresses)), None)

    def _renew(
        self, target: DialTarget, addresses: tuple[str, ...], now: float, wait_s: float
    ) -> None:
        news = [each for each in addresses if each not in target.addresses]
        if news:
            target.addresses = [*news, *target.addresses][:ADDRESSES_MAX]
        if news or now - target.tried_at >= self._config.again_s:
            self.hurry(target.key, now + wait_s)

    def hurry(self, key: str, when: float) -> None:
        """The target is likely to answer: forget its failures and dial it by `when`."""
        target = self.targets.get(key)
        if target is not None:
            target.failures = 0
            target.next_at = min(target.next_at, when)

    def drop(self, key: str) -> None:
        """Stop dialling this target."""
        self.targets.pop(key, None)
        self._due.pop(key, None)

    def linked(self, agent: str) -> None:
        """`agent` has a link: do not dial its targets."""
        for target in self._of(agent):
            target.trying, target.untried = 0, []
            self._due.pop(target.key, None)

    def unlinked(self, agent: str, now: float) -> None:
        """`agent` lost its last link: its targets are due now."""
        for target in self._of(agent):
            self._due[target.key] = target
            target.failures, target.trying, target.untried = 0, 0, []
            target.next_at = now

    def due(self, now: float) -> list[tuple[DialTarget, str]]:
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
        """One address did not answer. True when it was the last one of the round."""
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
        config = self._config
        longest_s = config.longest_pause_s if target.lasting else config.hint_pause_s
        pause_s = backoff_s(target.failures, config.first_pause_s, longest_s, self._rng)
        target.next_at = now + pause_s
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

    def _of(self, agent: str) -> list[DialTarget]:
        return [each for each in self.targets.values() if agent in (each.agent, each.last_agent)]

    def _evict(self) -> bool:
        idle = [each for each in self.targets.values() if not each.lasting]
        if not idle:
            return False
        self.drop(max(idle, key=lambda each: each.failures).key)
        return True


def _is_loopback(address: str) -> bool:
    return address.startswith(("127.", "[::1]", "localhost:"))
