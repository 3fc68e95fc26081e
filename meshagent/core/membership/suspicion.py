"""Who is suspected, by whom, and when a suspect's time to answer is up. Never sends anything.

A suspect has longer when few agree that it does not answer, and less when several do.
Invariant: an accusation waits in the gossip queue only while it counts.
"""

from __future__ import annotations

import math

from meshagent.core.membership.gossip import GossipQueue
from meshagent.core.membership.lifeguard import suspicion_s
from meshagent.core.membership.members import Member, MembershipConfig, MemberTable
from meshagent.core.model.peers import AgentId
from meshagent.core.model.records import Accusation, Signed

__all__ = ["Suspicion"]


class Suspicion:
    """The members that are suspected."""

    def __init__(
        self, members: MemberTable, gossip: GossipQueue, config: MembershipConfig, now: float
    ) -> None:
        self._members, self._gossip, self._config = members, gossip, config
        self._suspects: dict[AgentId, Member] = {}
        self._not_before = now
        self._verdict_at = math.inf
        self._planned_for = 0  # how many living members `_verdict_at` was computed for

    def __contains__(self, agent: AgentId) -> bool:
        return agent in self._suspects

    def agents(self) -> list[AgentId]:
        """Everyone who is suspected, the longest first."""
        return list(self._suspects)

    def add(self, member: Member, word: Signed, now: float) -> bool:
        """Count an accusation; False when it adds nothing."""
        accusation = word.statement
        assert isinstance(accusation, Accusation)
        if member.accusers is None:
            member.accusers = {}
            member.suspected_at = now
        if accusation.accuser in member.accusers or len(member.accusers) > self._config.agreeing:
            return False
        member.accusers[accusation.accuser] = word.data
        agent = member.record.agent
        self._gossip.put(f"{agent} by {accusation.accuser}", word.data)
        self._suspects[agent] = member
        self._verdict_at = min(self._verdict_at, self._ends_at(member))
        return True

    def clear(self, member: Member) -> None:
        """Nobody's accusation counts any more."""
        if member.accusers is not None:
            self._drop(member)
            member.accusers = None

    def conclude(self, member: Member, accuser: AgentId, word: Signed) -> None:
        """The member is gone: this one statement replaces all accusations."""
        self._drop(member)
        member.accusers = {accuser: word.data}
        self._gossip.put(f"{member.record.agent} by gone", word.data)

    def restart(self, now: float) -> None:
        """We were stalled ourselves: give every suspect its whole time again."""
        for member in self._suspects.values():
            member.suspected_at = now
        self._not_before = now + self._config.probe_fail_s
        self._plan()

    def due(self, now: float) -> list[Member]:
        """The suspects whose time is up."""
        if now < self.deadline():
            return []
        due = [each for each in self._suspects.values() if now >= self._ends_at(each)]
        self._planned_for = -1  # the caller concludes these: plan again afterwards
        return due

    def deadline(self) -> float:
        """When the first suspect's time may be up."""
        if not self._suspects:
            return math.inf
        if self._planned_for != self._members.living:
            self._plan()
        return self._verdict_at

    def _plan(self) -> None:
        self._planned_for = self._members.living
        self._verdict_at = min(map(self._ends_at, self._suspects.values()), default=math.inf)

    def _ends_at(self, member: Member) -> float:
        members = self._members.living + 1
        needed = min(self._config.agreeing, max(0, members - 2))
        agreeing = len(member.accusers or ()) - 1
        wait_s = suspicion_s(members, agreeing, needed, self._config.suspicion_s)
        return max(member.suspected_at + wait_s, self._not_before)

    def _drop(self, member: Member) -> None:
        agent = member.record.agent
        self._suspects.pop(agent, None)
        self._gossip.drop(f"{agent} by ")
