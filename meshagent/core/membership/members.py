"""What we know of each member, how two views are compared, and the knobs of membership.

Decides who is listed, never in which state. Invariants: within one incarnation
LEFT > GONE > SUSPECT > ALIVE; the table is limited, and only members that are gone or have left
make room for others.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshagent.core.membership.probe_order import ProbeOrder
from meshagent.core.model.peers import AgentId, Peer, PeerState
from meshagent.core.model.records import Record, Signed
from meshagent.core.wire.frames import MEMBERS_MAX

__all__ = [
    "LAN",
    "RANK",
    "Digest",
    "Member",
    "MemberTable",
    "MembershipConfig",
    "digest_of",
    "lacking",
]

Digest = tuple[tuple[str, int, int], ...]
RANK = {PeerState.ALIVE: 0, PeerState.SUSPECT: 1, PeerState.GONE: 2, PeerState.LEFT: 3}


@dataclass(frozen=True, slots=True)
class MembershipConfig:
    """The knobs, each with its trade-off. The default is the LAN preset."""

    probe_interval_s: float = 0.5
    """Time between probes. Shorter finds a silent crash sooner and costs idle CPU."""
    probe_timeout_s: float = 0.4
    """Then others are asked to probe. Shorter asks in vain when a machine is busy."""
    probe_fail_s: float = 1.0
    """Then the member is suspected. Also how long a frame from it outweighs accusations."""
    helpers: int = 3
    """Members asked to probe for us. More find a way round a bad path, and cost traffic."""
    suspicion_s: float = 2.8
    """How long a suspect may take to answer. Shorter is a faster `gone` and more false ones."""
    agreeing: int = 3
    """Further accusers that shorten the suspicion time to three quarters."""
    gossip_interval_s: float = 0.2
    gossip_fanout: int = 3
    gossip_multiplier: int = 4
    """Each update is passed on multiplier x log10(members) times by each member."""
    sync_interval_s: float = 30.0
    """Time between comparisons with a random member, which find what gossip missed."""
    forget_s: float = 24 * 3600.0
    """How long a member that is gone stays listed."""


LAN = MembershipConfig()


@dataclass(slots=True)
class Member:
    """What we know of another agent."""

    signed: Signed
    record: Record
    state: PeerState
    heard_at: float | None = None
    accusers: dict[AgentId, bytes] | None = None
    suspected_at: float = 0.0
    changed_at: float = 0.0
    met: bool = False
    """Whether there ever was a link between it and us."""

    def peer(self) -> Peer:
        """The view of it that leaves the core."""
        record = self.record
        return Peer(
            record.agent, record.name, record.role, self.state, record.presence, record.status,
            record.capabilities, record.addresses, record.host, self.heard_at, record.version,
        )  # fmt: skip

    def proofs(self) -> list[bytes]:
        """The signed statements that prove the state we see it in."""
        return [self.signed.data, *(self.accusers or {}).values()]


class MemberTable:
    """Every other agent that we know of."""

    def __init__(self, me: AgentId, rng: random.Random) -> None:
        self.order = ProbeOrder(me, rng)
        self._members: dict[AgentId, Member] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[AgentId]:
        return iter(self._members)

    def __contains__(self, agent: AgentId) -> bool:
        return agent in self._members

    def __getitem__(self, agent: AgentId) -> Member:
        return self._members[agent]

    def get(self, agent: AgentId) -> Member | None:
        """The member with this id."""
        return self._members.get(agent)

    def items(self) -> Iterable[tuple[AgentId, Member]]:
        """Every id with its member."""
        return self._members.items()

    @property
    def living(self) -> int:
        """How many are alive or suspected."""
        return len(self.order)

    @property
    def is_full(self) -> bool:
        """Whether there is no room, and nobody who is gone or has left to make some."""
        return len(self) >= MEMBERS_MAX - 1 and self.living == len(self)

    def add(self, member: Member) -> None:
        """List a new member, instead of the one that is gone for longest when the table is full."""
        if len(self) >= MEMBERS_MAX - 1:
            idle = [each for each in self._members if each not in self.order]
            del self._members[min(idle, key=lambda agent: self._members[agent].changed_at)]
        self._members[member.record.agent] = member

    def fill(self, members: Iterable[Member]) -> None:
        """List all of these as alive, in an empty table."""
        assert not self._members, "a mesh that has begun"
        self._members = {each.record.agent: each for each in members}
        assert len(self) < MEMBERS_MAX, "more than a node keeps"
        self.order.fill(self._members)

    def set_state(self, member: Member, state: PeerState, now: float) -> None:
        """The member is in this state from now on."""
        member.state, member.changed_at = state, now
        if state in (PeerState.ALIVE, PeerState.SUSPECT):
            self.order.add(member.record.agent)
        else:
            self.order.remove(member.record.agent)

    def forget(self, before: float) -> None:
        """Drop members that are gone or have left since before this time."""
        if self.living == len(self):
            return
        for agent, member in list(self._members.items()):
            if member.changed_at < before and agent not in self.order:
                del self._members[agent]


def digest_of(me: Record, members: MemberTable) -> Digest:
    """All members we know, as ids, incarnations and ranks."""
    known = ((agent, m.record.incarnation, RANK[m.state]) for agent, m in members.items())
    return ((me.agent, me.incarnation, RANK[PeerState.ALIVE]), *known)


def lacking(digest: Digest, peer: AgentId, members: MemberTable) -> list[bytes]:
    """The signed statements that the sender of this digest lacks or sees differently."""
    theirs = {agent: (incarnation, rank) for agent, incarnation, rank in digest}
    missing: list[bytes] = []
    for agent, member in members.items():
        known = theirs.get(agent, (-1, 0))
        if agent == peer:
            if known[0] < member.record.incarnation:
                # It lost its count (a deleted database) and must go beyond its last incarnation.
                missing.append(member.signed.data)
        elif known < (member.record.incarnation, RANK[member.state]):
            missing += member.proofs()
    return missing
