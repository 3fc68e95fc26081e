"""Whom to probe next. Never sends anything.

Turns alternate between the member that follows us on a ring and a shuffled list of all. Because of
the ring every member has one prober that probes it every second turn, so a silent crash is noticed
within a fixed time and not only on average. The shuffled list covers a prober that fails.
"""

from __future__ import annotations

import random
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from meshagent.core.model.peers import AgentId

__all__ = ["ProbeOrder"]


@dataclass(slots=True)
class ProbeOrder:
    """The members worth probing: everyone who has neither left nor gone."""

    me: AgentId
    rng: random.Random
    _ring: list[AgentId] = field(default_factory=list)
    _round: list[AgentId] = field(default_factory=list)
    _urgent: list[AgentId] = field(default_factory=list)
    _turn: int = 0

    def __len__(self) -> int:
        return len(self._ring)

    def __contains__(self, agent: AgentId) -> bool:
        at = self._after(agent) - 1
        return at >= 0 and self._ring[at] == agent

    def add(self, agent: AgentId) -> None:
        """`agent` is worth probing from now on."""
        if agent not in self:
            insort(self._ring, agent, key=_place)
            self._round.insert(self.rng.randrange(len(self._round) + 1), agent)

    def fill(self, agents: Iterable[AgentId]) -> None:
        """As `add` for each, on an empty order."""
        assert not self._ring, "a ring that is in use"
        self._ring = sorted(agents, key=_place)

    def remove(self, agent: AgentId) -> None:
        """`agent` is not worth probing any more."""
        if agent in self:
            del self._ring[self._after(agent) - 1]
            if agent in self._round:  # or one that comes and goes would fill the round
                self._round.remove(agent)

    def hurry(self, agent: AgentId) -> None:
        """Probe `agent` at the next turn."""
        if agent in self and agent not in self._urgent:
            self._urgent.append(agent)

    def next(self) -> AgentId | None:
        """Whom to probe this turn."""
        while self._urgent:
            agent = self._urgent.pop(0)
            if agent in self:
                return agent
        if not self._ring:
            return None
        self._turn += 1
        if self._turn % 2:
            return self._ring[self._after(self.me) % len(self._ring)]
        return self._next_in_round()

    def sample(
        self,
        count: int,
        without: AgentId | None = None,
        fit: Callable[[AgentId], bool] | None = None,
    ) -> list[AgentId]:
        """Up to `count` different members at random, of those that are fit."""
        if fit is not None:
            chosen = [agent for agent in self._ring if agent != without and fit(agent)]
            return self.rng.sample(chosen, min(count, len(chosen)))
        if len(self._ring) <= count + 1:
            chosen = [agent for agent in self._ring if agent != without]
            self.rng.shuffle(chosen)
            return chosen[:count]
        picked = self.rng.sample(self._ring, count + 1)
        return [agent for agent in picked if agent != without][:count]

    def _next_in_round(self) -> AgentId | None:
        while True:
            if not self._round:
                self._round = self._ring.copy()
                self.rng.shuffle(self._round)
            agent = self._round.pop()
            if agent in self:
                return agent

    def _after(self, agent: AgentId) -> int:
        return bisect_right(self._ring, _place(agent), key=_place)


def _place(agent: AgentId) -> str:
    # The fingerprint spreads agents evenly, and all members compute the same ring. It is computed
    # on demand: stored, it would take more memory than everything else about a member.
    return agent[-8:] + agent
