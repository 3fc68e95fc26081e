"""What is held about each member, how it is compared, and the knobs of membership.

Pure values. Invariant: within one incarnation LEFT > GONE > SUSPECT > ALIVE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshagent.core.model.peers import AgentId, Peer, PeerState
from meshagent.core.model.records import Record, Signed

__all__ = ["LAN", "RANK", "Digest", "Member", "MembershipConfig", "digest_of", "lacking"]

Digest = tuple[tuple[str, int, int], ...]
RANK = {PeerState.ALIVE: 0, PeerState.SUSPECT: 1, PeerState.GONE: 2, PeerState.LEFT: 3}


@dataclass(frozen=True, slots=True)
class MembershipConfig:
    """The knobs, each with its trade-off. The default is the LAN preset."""

    probe_interval_s: float = 0.5
    """One probe per turn: shorter finds a silent crash sooner and costs idle CPU."""
    probe_timeout_s: float = 0.4
    """Then others are asked to try: shorter asks in vain when a machine is busy."""
    probe_fail_s: float = 1.0
    """Then the member is suspected; also how long having heard from it outweighs accusations."""
    helpers: int = 3
    """Members asked to probe for us: more find a way round a bad path, at more traffic."""
    suspicion_s: float = 2.8
    """How long a suspect may take to answer: shorter is a faster `gone` and more false ones."""
    agreeing: int = 3
    """Further accusers that halve the suspicion time."""
    gossip_interval_s: float = 0.2
    gossip_fanout: int = 3
    gossip_multiplier: int = 4
    """Each update is passed on multiplier x log10(members) times by each member."""
    sync_interval_s: float = 30.0
    """Comparing notes with a random member catches what gossip missed."""
    forget_s: float = 24 * 3600.0
    """A member that is gone is listed that long."""


LAN = MembershipConfig()


@dataclass(slots=True)
class Member:
    """What we hold about another agent."""

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
        """The signed words that support the state we see it in."""
        return [self.signed.data, *(self.accusers or {}).values()]


def digest_of(me: Record, members: Mapping[AgentId, Member]) -> Digest:
    """All we know, as ids, incarnations and ranks."""
    known = ((agent, m.record.incarnation, RANK[m.state]) for agent, m in members.items())
    return ((me.agent, me.incarnation, RANK[PeerState.ALIVE]), *known)


def lacking(digest: Digest, peer: AgentId, members: Mapping[AgentId, Member]) -> list[bytes]:
    """The signed words that `peer`, who sent this digest, lacks or sees otherwise."""
    theirs = {agent: (incarnation, rank) for agent, incarnation, rank in digest}
    missing: list[bytes] = []
    for agent, member in members.items():
        known = theirs.get(agent, (-1, 0))
        if agent == peer:
            if known[0] < member.record.incarnation:
                # It lost its count (a deleted database) and must pass what it once said.
                missing.append(member.signed.data)
        elif known < (member.record.incarnation, RANK[member.state]):
            missing += member.proofs()
    return missing
