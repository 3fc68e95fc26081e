"""How long a suspect has to answer, and what is passed on about it."""

from __future__ import annotations

import math
import random

import pytest
from core.made import MESH_ID, identity, word_of

from meshagent.core.membership.gossip import GossipQueue
from meshagent.core.membership.members import LAN, Member, MemberTable
from meshagent.core.membership.suspicion import Suspicion
from meshagent.core.model.identity import Identity
from meshagent.core.model.peers import PeerState
from meshagent.core.model.records import Accusation, Record, Signed, sign_accusation

ME, ANN, BEN, CAT, DAN = (identity(name) for name in ("me", "ann", "ben", "cat", "dan"))


def member_of(who: Identity) -> Member:
    word = word_of(who)
    assert isinstance(word.statement, Record)
    return Member(word, word.statement, PeerState.GONE)


def accused_by(accuser: Identity) -> Signed:
    said = Accusation(ANN.agent, 1 << 32, PeerState.SUSPECT, accuser.agent)
    return sign_accusation(said, accuser, MESH_ID)


@pytest.fixture
def members() -> MemberTable:
    table = MemberTable(ME.agent, random.Random(1))
    for who in (ANN, BEN, CAT, DAN):
        member = member_of(who)
        table.add(member)
        table.set_state(member, PeerState.ALIVE, 0.0)
    return table


@pytest.fixture
def gossip() -> GossipQueue:
    return GossipQueue()


@pytest.fixture
def suspicion(members: MemberTable, gossip: GossipQueue) -> Suspicion:
    return Suspicion(members, gossip, LAN, 0.0)


def test_a_suspect_has_its_whole_time(members: MemberTable, suspicion: Suspicion) -> None:
    ann = members[ANN.agent]
    assert suspicion.deadline() == math.inf
    assert suspicion.add(ann, accused_by(BEN), 10.0)
    assert suspicion.deadline() == pytest.approx(10.0 + LAN.suspicion_s)
    assert suspicion.due(suspicion.deadline() - 0.001) == []
    assert suspicion.due(suspicion.deadline()) == [ann]


def test_the_same_accuser_counts_once(members: MemberTable, suspicion: Suspicion) -> None:
    ann = members[ANN.agent]
    suspicion.add(ann, accused_by(BEN), 10.0)
    before = suspicion.deadline()
    assert not suspicion.add(ann, accused_by(BEN), 11.0)
    assert suspicion.deadline() == before
    assert suspicion.add(ann, accused_by(CAT), 11.0)
    assert suspicion.deadline() < before


def test_the_time_follows_how_many_members_there_are(
    members: MemberTable, suspicion: Suspicion
) -> None:
    ann = members[ANN.agent]
    for accuser in (BEN, CAT):
        suspicion.add(ann, accused_by(accuser), 10.0)
    before = suspicion.deadline()
    members.set_state(members[DAN.agent], PeerState.LEFT, 10.5)
    assert suspicion.deadline() < before, "fewer are left that could agree"


def test_our_own_stall_gives_every_suspect_its_whole_time_again(
    members: MemberTable, suspicion: Suspicion
) -> None:
    suspicion.add(members[ANN.agent], accused_by(BEN), 10.0)
    suspicion.restart(50.0)
    assert suspicion.due(50.0) == []
    assert suspicion.deadline() == pytest.approx(50.0 + LAN.suspicion_s)


def test_nothing_is_passed_on_about_a_member_that_is_cleared(
    members: MemberTable, suspicion: Suspicion, gossip: GossipQueue
) -> None:
    suspicion.add(members[ANN.agent], accused_by(BEN), 10.0)
    assert len(gossip) == 1
    suspicion.clear(members[ANN.agent])
    assert (len(gossip), suspicion.agents(), suspicion.deadline()) == (0, [], math.inf)


def test_of_a_member_that_is_gone_one_statement_is_passed_on(
    members: MemberTable, suspicion: Suspicion, gossip: GossipQueue
) -> None:
    for accuser in (BEN, CAT):
        suspicion.add(members[ANN.agent], accused_by(accuser), 10.0)
    suspicion.conclude(members[ANN.agent], ME.agent, accused_by(ME))
    assert gossip.take(9) == (accused_by(ME).data,)
    assert ANN.agent not in suspicion
