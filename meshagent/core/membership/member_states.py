"""Which state each member is in: what we hear, what others say, and what follows from silence.

Never decides whom to probe or when. Invariants: a larger incarnation wins, and within one
LEFT > GONE > SUSPECT > ALIVE; only an agent itself makes a new incarnation; every statement is
checked against the key of the member that made it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

from meshagent.core.effects import Effect, PeerChanged, Send
from meshagent.core.membership.gossip import UPDATES_PER_FRAME_MAX, GossipQueue
from meshagent.core.membership.lifeguard import LocalHealth
from meshagent.core.membership.members import (
    Member,
    MembershipConfig,
    MemberTable,
    digest_of,
)
from meshagent.core.membership.own_record import OwnRecord
from meshagent.core.membership.suspicion import Suspicion
from meshagent.core.model.identity import Verify
from meshagent.core.model.peers import AgentId, PeerState
from meshagent.core.model.records import (
    Accusation,
    Record,
    Signed,
    UnknownUpdate,
    parse_update,
)
from meshagent.core.wire.frames import Gossip, Sync
from meshagent.errors import RemoteProtocolError

__all__ = ["MemberStates"]

NOTIFIED_MAX = 256  # accused members that are notified in one interval


class MemberStates:
    """Every member with its state."""

    def __init__(
        self,
        me: OwnRecord,
        gossip: GossipQueue,
        health: LocalHealth,
        mesh_id: bytes,
        verify: Verify,
        rng: random.Random,
        config: MembershipConfig,
        now: float,
    ) -> None:
        self.refused: Counter[str] = Counter()
        self.members = MemberTable(me.agent, rng)
        self.suspicion = Suspicion(self.members, gossip, config, now)
        self._me, self._gossip, self._health = me, gossip, health
        self._mesh_id, self._verify = mesh_id, verify
        self._config, self._rng = config, rng
        self._notify_after: dict[AgentId, float] = {}

    def acquaint(self, words: Iterable[Signed], now: float) -> None:
        """Begin with all of these as members that we have met. The caller has checked each."""
        members = []
        for word in words:
            record = word.statement
            assert isinstance(record, Record)
            alive = PeerState.ALIVE
            members.append(Member(word, record, alive, heard_at=now, changed_at=now, met=True))
        self.members.fill(members)

    def is_fresh(self, agent: AgentId, now: float) -> bool:
        """Whether we heard from `agent` a moment ago."""
        member = self.members.get(agent)
        heard_at = member.heard_at if member else None
        return heard_at is not None and now - heard_at < self._config.probe_fail_s

    # -- what we hear and conclude --------------------------------------------------------------

    def heard(self, agent: AgentId, now: float) -> list[Effect]:
        """Any frame came from this peer, so it is alive."""
        member = self.members.get(agent)
        if member is None:
            return []
        member.heard_at = now
        if member.state is PeerState.ALIVE or member.state is PeerState.LEFT:
            return []
        effects = self._notify(agent, list((member.accusers or {}).values()), now)
        if member.state is PeerState.GONE:
            effects.append(
                Send(agent, Sync(1, digest_of(self._me.record, self.members)))
            )  # we were apart: compare views
        self.suspicion.clear(member)
        return effects + self._set_state(member, PeerState.ALIVE, now)

    def accuse(self, member: Member, now: float) -> list[Effect]:
        """We got no answer from this member: suspect it, and say so."""
        if member.state not in (PeerState.ALIVE, PeerState.SUSPECT):
            return []
        if member.accusers and self._me.agent in member.accusers:
            return []
        return self._suspect(member, self._me.accuse(member.record, PeerState.SUSPECT), now)

    def give_up_suspects(self, now: float) -> list[Effect]:
        """Suspects whose time is up are gone."""
        effects: list[Effect] = []
        for member in self.suspicion.due(now):
            gone = self._me.accuse(member.record, PeerState.GONE)
            effects += self._mark_gone(member, gone, now)
        return effects

    def _suspect(self, member: Member, word: Signed, now: float) -> list[Effect]:
        if not self.suspicion.add(member, word, now):
            return []
        # A few members check every accusation, however many there are.
        if self._rng.random() < 3 * self._config.agreeing / max(1, self.members.living):
            self.members.order.hurry(member.record.agent)
        return self._set_state(member, PeerState.SUSPECT, now)

    def _mark_gone(self, member: Member, word: Signed, now: float) -> list[Effect]:
        self.suspicion.conclude(member, self._me.agent, word)
        return self._set_state(member, PeerState.GONE, now)

    def _notify(self, agent: AgentId, accusations: list[bytes], now: float) -> list[Effect]:
        """Tell the accused, so that it can refute; at most once per interval each."""
        if now < self._notify_after.get(agent, 0.0) or not accusations:
            return []
        if len(self._notify_after) >= NOTIFIED_MAX:
            self._notify_after.clear()
        self._notify_after[agent] = now + self._config.probe_fail_s
        return [Send(agent, Gossip(tuple(accusations[:UPDATES_PER_FRAME_MAX])))]

    def _set_state(self, member: Member, state: PeerState, now: float) -> list[Effect]:
        if member.state is state:
            return []
        self.members.set_state(member, state, now)
        return [PeerChanged(member.peer())]

    # -- what others say ----------------------------------------------------------------------

    def learn(self, updates: Iterable[bytes], source: AgentId, now: float) -> list[Effect]:
        """Take in records and accusations, in the form in which they travel."""
        effects: list[Effect] = []
        for data in updates:
            try:
                word = parse_update(data)
            except UnknownUpdate:
                continue
            except RemoteProtocolError:
                self.refused["malformed update"] += 1
                continue
            said = word.statement
            if isinstance(said, Record):
                if said.agent == self._me.agent:
                    self._learn_about_us(word, said)
                else:
                    effects += self._learn_record(word, said, source, now)
            elif said.subject == self._me.agent:
                self._accused_ourselves(word, said)
            else:
                effects += self._learn_accusation(word, said, now)
        return effects

    def _learn_about_us(self, word: Signed, record: Record) -> None:
        """A record of ours that we do not remember: an earlier run of this agent made it."""
        me = self._me
        news = record.incarnation >= me.record.incarnation and word.body != me.signed.body
        if news and record.key == me.record.key and self._is_genuine(word, record.key):
            self._health.note(+1)
            me.refute(record.incarnation)

    def _learn_record(
        self, word: Signed, record: Record, source: AgentId, now: float
    ) -> list[Effect]:
        member = self.members.get(record.agent)
        if member is not None and record.incarnation <= member.record.incarnation:
            return []
        if member is not None and record.key != member.record.key:
            self.refused["impostor"] += 1
            return []
        if member is None and self.members.is_full:  # checked before the signature, which is slow
            self.refused["members full"] += 1
            return []
        if not self._is_genuine(word, record.key):
            return []
        if member is None:
            member = Member(word, record, PeerState.GONE)
            self.members.add(member)
        member.signed, member.record = word, record
        if source == record.agent:
            member.heard_at = now
        self.suspicion.clear(member)
        self._gossip.put(f"{record.agent} record", word.data)
        state = PeerState.LEFT if record.left else PeerState.ALIVE
        self.members.set_state(member, state, now)
        return [PeerChanged(member.peer())]

    def _accused_ourselves(self, word: Signed, accusation: Accusation) -> None:
        """Refute it, whoever says so: that we are alive is the answer.

        It raises our incarnation by one at most: nobody else can name a larger one than ours.
        """
        incarnation = self._me.record.incarnation
        if accusation.incarnation == incarnation:
            if self._is_from_member(word, accusation):
                self._health.note(+1)
            self._me.refute(incarnation)
        elif accusation.incarnation < incarnation:
            self._me.repeat()

    def _learn_accusation(self, word: Signed, accusation: Accusation, now: float) -> list[Effect]:
        member = self.members.get(accusation.subject)
        if (
            member is None
            or accusation.incarnation != member.record.incarnation
            or member.state in (PeerState.GONE, PeerState.LEFT)
            or word.data in (member.accusers or {}).values()
            or not self._is_from_member(word, accusation)
        ):
            return []
        if self.is_fresh(accusation.subject, now):
            return self._notify(accusation.subject, [word.data], now)
        if accusation.state is PeerState.GONE:
            return self._mark_gone(member, word, now)
        return self._suspect(member, word, now)

    def _is_from_member(self, word: Signed, accusation: Accusation) -> bool:
        accuser = self.members.get(accusation.accuser)
        if accuser is not None:
            return self._is_genuine(word, accuser.record.key)
        if accusation.accuser != self._me.agent:  # our own statements come back all the time
            self.refused["unknown accuser"] += 1
        return False

    def _is_genuine(self, word: Signed, key: bytes) -> bool:
        if word.is_genuine(key, self._mesh_id, self._verify):
            return True
        self.refused["forged update"] += 1
        return False
