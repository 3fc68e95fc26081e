"""The rules of state: whose word wins, who may say what, and that nobody is wronged."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from core.made import MESH_ID, OTHER_SECRET, accusation, identity, record_of, word_of

from meshagent.core.effects import Effect, PeerChanged, Send
from meshagent.core.membership import members as module
from meshagent.core.membership.engine import LAN, Membership
from meshagent.core.membership.gossip import UPDATES_PER_FRAME_MAX
from meshagent.core.membership.probes import RELAYS_MAX
from meshagent.core.model.identity import Identity, verify
from meshagent.core.model.peers import PeerState
from meshagent.core.model.presence import Presence
from meshagent.core.model.records import Accusation, Record, parse_update, sign_record
from meshagent.core.wire.codec import pack
from meshagent.core.wire.frames import Ack, Frame, Gossip, Nack, Ping, PingReq, Sync

ME, ANN, BEN, CAT = (identity(name) for name in ("me", "ann", "ben", "cat"))
STRANGER = identity("stranger")
FIRST = 1 << 32  # everyone's incarnation to begin with
LATE = 100.0  # long after anyone was heard
ALIVE, SUSPECT, GONE, LEFT = PeerState.ALIVE, PeerState.SUSPECT, PeerState.GONE, PeerState.LEFT


def engine_of(who: Identity, *known: Identity, now: float = 0.0, seed: int = 1) -> Membership:
    """`who`, that met the others at time `now`."""
    engine = Membership(record_of(who), who, MESH_ID, verify, random.Random(seed), now)
    for other in known:
        engine.connected(other.agent, word_of(other).data, False, now)
    return engine


def quiet(*known: Identity) -> Membership:
    """Our engine, at LATE, that heard from the others long ago and was never late itself."""
    engine = engine_of(ME, *known)
    engine._tick_at = LATE + 1000.0
    engine._sync_at = LATE + 1000.0
    engine.gossip.drop("")  # they met long ago: nobody is still passing that on
    return engine


def tell(
    engine: Membership, *updates: bytes, by: Identity = CAT, now: float = LATE
) -> list[Effect]:
    """`by` passes these on."""
    return engine.receive(Gossip(updates), by.agent, now)


def state(engine: Membership, who: Identity) -> PeerState | None:
    peer = engine.peer(who.agent)
    return peer.state if peer else None


def frames(effects: list[Effect], to: Identity | None = None) -> list[Frame]:
    return [
        each.frame
        for each in effects
        if isinstance(each, Send) and (to is None or each.to == to.agent)
    ]


def told(effects: list[Effect], to: Identity) -> list[Record | Accusation]:
    """What `to` is told."""
    return [
        parse_update(data).statement
        for frame in frames(effects, to)
        if isinstance(frame, Gossip | Ping | Ack)
        for data in frame.updates
    ]


def bring_to(engine: Membership, start: PeerState) -> None:
    """ANN at FIRST in this state, by BEN's word or her own."""
    if start in (SUSPECT, GONE):
        tell(engine, accusation(ANN, BEN, start))
    elif start is LEFT:
        tell(engine, word_of(ANN, left=True, incarnation=FIRST + 1).data)
    assert state(engine, ANN) is start


# -- whose word wins ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "word", "expected"),
    [
        (ALIVE, (ALIVE, 0), ALIVE),
        (ALIVE, (SUSPECT, 0), SUSPECT),
        (ALIVE, (GONE, 0), GONE),
        (SUSPECT, (ALIVE, 0), SUSPECT),  # only a larger incarnation refutes
        (SUSPECT, (GONE, 0), GONE),
        (GONE, (SUSPECT, 0), GONE),
        (GONE, (ALIVE, 0), GONE),
        (SUSPECT, (ALIVE, 1), ALIVE),
        (GONE, (ALIVE, 1), ALIVE),
        (GONE, (ALIVE, -1), GONE),
        (ALIVE, (SUSPECT, -1), ALIVE),  # an accusation is about one incarnation
        (ALIVE, (SUSPECT, 1), ALIVE),
        (ALIVE, (GONE, 1), ALIVE),
        (ALIVE, (GONE, -1), ALIVE),
        (ALIVE, (LEFT, 1), LEFT),
        (ALIVE, (LEFT, 0), ALIVE),
        (SUSPECT, (LEFT, 1), LEFT),
        (GONE, (LEFT, 1), LEFT),
        (LEFT, (SUSPECT, 1), LEFT),
        (LEFT, (GONE, 1), LEFT),
        (LEFT, (ALIVE, 1), LEFT),
        (LEFT, (ALIVE, 2), ALIVE),
    ],
)
def test_a_larger_incarnation_wins_and_within_one_the_worse_state(
    start: PeerState, word: tuple[PeerState, int], expected: PeerState
) -> None:
    engine = quiet(ANN, BEN, CAT)
    bring_to(engine, start)
    said, ahead = word
    if said in (ALIVE, LEFT):
        data = word_of(ANN, left=said is LEFT, incarnation=FIRST + ahead, status="new").data
    else:
        data = accusation(ANN, CAT, said, FIRST + ahead)
    tell(engine, data)
    assert state(engine, ANN) is expected


def test_incarnations_only_grow_whatever_the_order_of_news() -> None:
    words = [word_of(ANN, incarnation=FIRST + n, status=str(n)).data for n in range(8)]
    for seed in range(20):
        engine, seen = quiet(BEN), []
        shuffled = random.Random(seed).sample(words, len(words))
        for data in shuffled:
            tell(engine, data, by=BEN)
            peer = engine.peer(ANN.agent)
            assert peer is not None
            seen.append(int(peer.status))
        assert seen == sorted(seen)
        assert seen[-1] == 7


def test_news_are_reported_once_and_passed_on() -> None:
    engine = quiet(BEN)
    data = word_of(ANN, presence=Presence.WORKING, status="tests").data
    (change,) = [each for each in tell(engine, data, by=BEN) if isinstance(each, PeerChanged)]
    assert (change.peer.agent, change.peer.status) == (ANN.agent, "tests")
    assert not [each for each in tell(engine, data, by=BEN) if isinstance(each, PeerChanged)]
    passed_on = [
        each for frame in frames(engine.on_timer(LATE)) for each in getattr(frame, "updates", ())
    ]
    assert data in passed_on


# -- accusations ----------------------------------------------------------------------------------


def test_an_accusation_by_somebody_unknown_is_ignored() -> None:
    engine = quiet(ANN, CAT)
    tell(engine, accusation(ANN, STRANGER), accusation(ANN, STRANGER, GONE))
    assert state(engine, ANN) is ALIVE


def test_an_accusation_of_somebody_unknown_is_ignored() -> None:
    engine = quiet(ANN, CAT)
    tell(engine, accusation(STRANGER, ANN))
    assert state(engine, STRANGER) is None


@pytest.mark.parametrize("said", [SUSPECT, GONE])
def test_a_forged_accusation_is_counted_and_changes_nothing(said: PeerState) -> None:
    engine = quiet(ANN, BEN, CAT)
    tell(engine, accusation(ANN, BEN, said, signer=CAT))
    assert state(engine, ANN) is ALIVE
    assert engine.refused == {"forged update": 1}


def test_a_forged_record_is_counted_and_changes_nothing() -> None:
    engine = quiet(ANN, CAT)
    record = record_of(ANN, incarnation=FIRST + 5, left=True)
    for data in (
        sign_record(record, CAT, MESH_ID).data,
        sign_record(record, ANN, OTHER_SECRET.mesh_id).data,
        sign_record(record_of(STRANGER), CAT, MESH_ID).data,
    ):
        tell(engine, data)
    assert state(engine, ANN) is ALIVE
    assert state(engine, STRANGER) is None
    assert engine.refused == {"forged update": 3}


def test_an_update_that_is_none_is_counted_and_the_rest_of_the_frame_counts() -> None:
    engine = quiet(CAT)
    tell(engine, b"\xc1", word_of(ANN).data)
    assert engine.refused == {"malformed update": 1}
    assert state(engine, ANN) is ALIVE


def test_an_id_known_with_another_key_is_an_impostor_and_counted() -> None:
    engine = quiet(ANN, CAT)
    member = engine.members[ANN.agent]
    member.record = replace(member.record, key=BEN.key)
    tell(engine, word_of(ANN, incarnation=FIRST + 1).data)
    assert engine.refused == {"impostor": 1}


@pytest.mark.parametrize("said", [SUSPECT, GONE])
def test_hearing_outweighs_accusation_and_the_accused_is_told(said: PeerState) -> None:
    engine = quiet(ANN, BEN, CAT)
    engine.receive(Nack(0), ANN.agent, LATE)
    effects = tell(engine, accusation(ANN, BEN, said), now=LATE + 0.5)
    assert state(engine, ANN) is ALIVE
    assert told(effects, ANN) == [Accusation(ANN.agent, FIRST, said, BEN.agent)]


def test_the_accused_is_told_at_most_once_a_second() -> None:
    engine = quiet(ANN, BEN, CAT)
    engine.receive(Nack(0), ANN.agent, LATE)
    word = accusation(ANN, BEN)
    told_at = [n for n in range(9) if told(tell(engine, word, now=LATE + n / 10), ANN)]
    assert told_at == [0]


def test_a_suspect_is_told_who_accuses_it_however_much_there_is_to_pass_on() -> None:
    engine = quiet(ANN, BEN, CAT)
    tell(engine, accusation(ANN, BEN))
    for number in range(2 * UPDATES_PER_FRAME_MAX):
        engine.gossip.put(f"news {number}", word_of(CAT).data)
    engine._tick_at = LATE
    (ping,) = [each for each in frames(engine.on_timer(LATE), ANN) if isinstance(each, Ping)]
    assert accusation(ANN, BEN) in ping.updates
    assert len(ping.updates) == UPDATES_PER_FRAME_MAX


@pytest.mark.parametrize(
    "frame", [Ping(1), Ack(99), Nack(7), Gossip(()), Sync(0, ()), PingReq(1, "x")]
)
@pytest.mark.parametrize("start", [SUSPECT, GONE])
def test_any_frame_from_a_peer_shows_that_it_lives(frame: Frame, start: PeerState) -> None:
    engine = quiet(ANN, BEN, CAT)
    bring_to(engine, start)
    effects = engine.receive(frame, ANN.agent, LATE + 0.1)
    assert state(engine, ANN) is ALIVE
    assert any(isinstance(each, Accusation) for each in told(effects, ANN))


def test_who_left_is_not_back_until_it_says_so_itself() -> None:
    engine = quiet(ANN, CAT)
    bring_to(engine, LEFT)
    engine.receive(Ping(1), ANN.agent, LATE)
    assert state(engine, ANN) is LEFT
    engine.connected(ANN.agent, word_of(ANN, incarnation=2 << 32).data, False, LATE)
    assert state(engine, ANN) is ALIVE


def test_suspicion_ends_sooner_when_others_agree() -> None:
    def gone_after(accusers: list[Identity]) -> float:
        engine = quiet(ANN, BEN, CAT, STRANGER)
        tell(engine, *(accusation(ANN, each) for each in accusers))
        engine.on_timer(engine.suspicion.deadline() - 0.001)
        assert state(engine, ANN) is SUSPECT
        at = engine.suspicion.deadline()
        engine._tick_at = at
        engine.on_timer(at)
        assert state(engine, ANN) is GONE
        return at - LATE

    alone, agreed = gone_after([BEN]), gone_after([BEN, CAT, STRANGER])
    assert alone == pytest.approx(LAN.suspicion_s)
    assert LAN.suspicion_s * 0.75 <= agreed < alone


# -- ourselves ------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [SUSPECT, GONE])
def test_we_refute_what_is_said_against_us(said: PeerState) -> None:
    engine = quiet(ANN, CAT)
    tell(engine, accusation(ME, ANN, said))
    assert engine.record.incarnation == FIRST + 1
    assert engine.health.score == 1  # and doubt ourselves a little
    (record, *_) = told(engine.on_timer(LATE), ANN)
    assert record == engine.record


@pytest.mark.parametrize("ahead", [-1, 1, 2**62])
def test_an_accusation_of_another_incarnation_does_not_move_ours(ahead: int) -> None:
    engine = quiet(ANN, CAT)
    tell(engine, accusation(ME, ANN, SUSPECT, FIRST + ahead))
    assert engine.record.incarnation == FIRST


def test_an_accusation_that_nobody_can_check_moves_us_by_one_at_most() -> None:
    engine = quiet(ANN, CAT)
    tell(engine, accusation(ME, ANN, signer=CAT), accusation(ME, STRANGER))
    assert engine.record.incarnation == FIRST + 1


@pytest.mark.parametrize("incarnation", [FIRST + 1, 2**63 - 1])
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_digest_that_claims_more_than_we_ever_said_does_not_move_us(
    incarnation: int, rank: int
) -> None:
    engine = quiet(ANN)
    engine.receive(Sync(0, ((ME.agent, incarnation, rank),)), ANN.agent, LATE)
    assert engine.record.incarnation == FIRST


def test_an_own_word_from_an_earlier_run_is_outbid() -> None:
    engine = quiet(ANN, CAT)
    tell(engine, word_of(ME, incarnation=FIRST + 7, left=True).data)
    assert engine.record.incarnation == FIRST + 8
    assert engine.record.left is False


def test_our_own_word_in_another_wrapping_is_no_news() -> None:
    engine = quiet(ANN, CAT)
    word = word_of(ME)
    assert engine.record_bytes == word.data
    tell(engine, pack((True, word.body, word.signature)), word.data)
    tell(engine, b"\x93\xd3" + (1).to_bytes(8, "big") + word.data[2:])
    assert engine.record.incarnation == FIRST


def test_nobody_lists_itself() -> None:
    engine = quiet(ANN)
    tell(engine, word_of(ME, incarnation=FIRST + 1).data, by=ANN)
    engine.connected(ME.agent, word_of(ME).data, True, LATE)
    assert [peer.agent for peer in engine.peers()] == [ANN.agent]


def test_what_we_say_of_ourselves_goes_out_under_a_new_incarnation() -> None:
    engine = quiet(ANN)
    effects = engine.describe(LATE, presence=Presence.BLOCKED, status="waiting for review")
    (record,) = told(effects, ANN)
    assert isinstance(record, Record)
    assert (record.presence, record.status) == (Presence.BLOCKED, "waiting for review")
    assert record.incarnation == FIRST + 1


# -- leaving and missing --------------------------------------------------------------------------


def test_the_word_of_leaving_is_our_own_record_and_newer_than_any_other() -> None:
    engine = quiet(ANN)
    before = engine.record.incarnation
    (word,) = engine.leave(LATE).updates
    record = parse_update(word).statement
    assert isinstance(record, Record)
    assert record.left
    assert record.agent == engine.record.agent
    assert record.incarnation > before


def deliver(source: Identity, effects: list[Effect], to: Membership, who: Identity) -> list[Effect]:
    """Every frame for `who`, delivered; what `who` does then."""
    return [e for f in frames(effects, who) for e in to.receive(f, source.agent, LATE)]


@pytest.mark.parametrize("lacking", ["asker", "asked"])
def test_comparing_notes_repairs_what_was_missed_either_way(lacking: str) -> None:
    ann, ben = engine_of(ANN, BEN), engine_of(BEN, ANN)
    knows, lacks = (ben, ann) if lacking == "asker" else (ann, ben)
    news = [word_of(CAT).data, word_of(STRANGER, left=True).data]
    knows.receive(Gossip(tuple(news)), ANN.agent if knows is ben else BEN.agent, 1.0)
    ann._sync_at = LATE
    asks = [each for each in ann.on_timer(LATE) if isinstance(each, Send)]
    answers = deliver(ANN, [e for e in asks if isinstance(e.frame, Sync)], ben, BEN)
    deliver(BEN, deliver(BEN, answers, ann, ANN), ben, BEN)
    deliver(ANN, deliver(BEN, answers, ann, ANN), ben, BEN)
    assert state(lacks, CAT) is ALIVE
    assert state(lacks, STRANGER) is LEFT


def test_comparing_notes_carries_the_proof_of_a_death() -> None:
    ann, ben = engine_of(ANN, BEN, CAT), engine_of(BEN, ANN, CAT)
    ann.receive(Gossip((accusation(CAT, BEN, GONE),)), BEN.agent, 50.0)
    assert state(ann, CAT) is GONE
    answers = ann.receive(Sync(0, ben._digest()), BEN.agent, LATE)
    deliver(ANN, answers, ben, BEN)
    # BEN's own word about it, signed by BEN: it does not take it from others, but CAT is looked at.
    assert state(ben, CAT) in (ALIVE, GONE)
    third = engine_of(STRANGER, ANN, BEN, CAT)
    deliver(ANN, ann.receive(Sync(0, third._digest()), STRANGER.agent, LATE), third, STRANGER)
    assert state(third, CAT) is GONE


def test_an_agent_that_lost_its_counter_learns_it_from_others_and_is_back() -> None:
    # Its database was deleted after it had left at a larger incarnation.
    ann = engine_of(ANN)
    tell(ann, word_of(ME, incarnation=FIRST + 9, left=True).data, by=BEN)
    me = engine_of(ME)
    ann.connected(ME.agent, me.record_bytes, False, LATE)
    asks = me.connected(ANN.agent, ann.record_bytes, True, LATE)
    deliver(ANN, deliver(ME, asks, ann, ANN), me, ME)
    assert me.record.incarnation == FIRST + 10
    ann.receive(Gossip((me.record_bytes,)), ME.agent, LATE)
    assert state(ann, ME) is ALIVE


# -- probing --------------------------------------------------------------------------------------


def probing(*known: Identity) -> tuple[Membership, Ping]:
    """Our engine at LATE with a probe of ANN under way."""
    engine = quiet(*known)
    engine.members.order.hurry(ANN.agent)
    engine._tick_at = LATE
    effects = engine.on_timer(LATE)
    (ping,) = [each for each in frames(effects, ANN) if isinstance(each, Ping)]
    engine._tick_at = LATE + 1000.0
    return engine, ping


def test_a_probe_without_answer_asks_helpers_and_then_suspects() -> None:
    engine, ping = probing(ANN, BEN, CAT)
    effects = engine.on_timer(LATE + LAN.probe_timeout_s)
    asked = [each for each in frames(effects) if isinstance(each, PingReq)]
    assert [(each.seq, each.target) for each in asked] == [(ping.seq, ANN.agent)] * 2
    assert not frames(effects, ANN)
    engine.on_timer(LATE + LAN.probe_fail_s - 0.01)
    assert state(engine, ANN) is ALIVE
    engine.on_timer(LATE + LAN.probe_fail_s)
    assert state(engine, ANN) is SUSPECT


@pytest.mark.parametrize("by", [ANN, BEN])
def test_an_answer_from_the_target_or_a_helper_ends_the_doubt(by: Identity) -> None:
    engine, ping = probing(ANN, BEN)
    engine.on_timer(LATE + LAN.probe_timeout_s)
    engine.receive(Ack(ping.seq), by.agent, LATE + 0.5)
    engine.on_timer(LATE + LAN.probe_fail_s)
    assert state(engine, ANN) is ALIVE
    assert not len(engine.probes)


def test_a_member_that_was_not_asked_can_keep_nobody_alive() -> None:
    engine, ping = probing(ANN, BEN)
    engine.on_timer(LATE + LAN.probe_timeout_s)
    engine.connected(CAT.agent, word_of(CAT).data, False, LATE + 0.5)
    engine.receive(Ack(ping.seq), CAT.agent, LATE + 0.5)
    engine.on_timer(LATE + LAN.probe_fail_s)
    assert state(engine, ANN) is SUSPECT


def test_only_the_target_of_a_relayed_probe_can_answer_it() -> None:
    engine = quiet(ANN, BEN, CAT)
    (ping,) = frames(engine.receive(PingReq(7, ANN.agent), BEN.agent, LATE), ANN)
    assert isinstance(ping, Ping)
    assert not frames(engine.receive(Ack(ping.seq), CAT.agent, LATE), BEN)
    assert frames(engine.receive(Ack(ping.seq), ANN.agent, LATE), BEN) == [Ack(7)]


def test_a_helper_that_hears_nothing_either_says_so() -> None:
    engine = quiet(ANN, BEN)
    engine.receive(PingReq(7, ANN.agent), BEN.agent, LATE)
    effects = engine.on_timer(LATE + LAN.probe_timeout_s)
    assert Nack(7) in frames(effects, BEN)


def test_a_probe_that_nobody_helped_with_makes_us_doubt_ourselves() -> None:
    engine, ping = probing(ANN, BEN, CAT)
    engine.on_timer(LATE + LAN.probe_timeout_s)
    engine.receive(Nack(ping.seq), BEN.agent, LATE + 0.9)
    engine.on_timer(LATE + LAN.probe_fail_s)
    assert engine.health.score == 1  # of two helpers one answered nothing
    engine, ping = probing(ANN, BEN, CAT)
    engine.on_timer(LATE + LAN.probe_timeout_s)
    for helper in (BEN, CAT):
        engine.receive(Nack(ping.seq), helper.agent, LATE + 0.9)
    engine.on_timer(LATE + LAN.probe_fail_s)
    assert engine.health.score == 0  # both are well and hear nothing: it is not us


def test_probes_for_others_are_bounded() -> None:
    engine = quiet(ANN, BEN)
    for seq in range(RELAYS_MAX * 2):
        engine.receive(PingReq(seq, ANN.agent), BEN.agent, LATE)
    assert engine.probes.relay_count == RELAYS_MAX


def test_our_own_stall_is_held_against_nobody() -> None:
    engine, _ = probing(ANN, BEN, CAT)
    tell(engine, accusation(BEN, CAT))
    engine._tick_at = LATE + 0.5
    for late in (10.0, 10.1):
        engine.on_timer(LATE + late)
        assert state(engine, ANN) is ALIVE
        assert state(engine, BEN) is SUSPECT  # and has all its time again
    assert engine.health.score >= 1


def test_a_broken_link_is_reason_to_look_at_once() -> None:
    engine = quiet(ANN, BEN, CAT)
    engine.disconnected(ANN.agent, LATE)
    assert engine.deadline() == LATE
    assert any(isinstance(each, Ping) for each in frames(engine.on_timer(LATE), ANN))


def test_a_machine_that_refuses_the_connection_makes_a_suspect() -> None:
    engine = quiet(ANN, BEN)
    engine.unreachable(ANN.agent, LATE)
    assert state(engine, ANN) is SUSPECT
    assert engine.unreachable(STRANGER.agent, LATE) == []


# -- bounds ---------------------------------------------------------------------------------------


def test_a_full_table_is_counted_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEMBERS_MAX", 4)
    engine = quiet(ANN, BEN, CAT)
    tell(engine, word_of(STRANGER).data)
    assert state(engine, STRANGER) is None
    assert engine.refused == {"members full": 1}


def test_a_full_table_spends_nothing_on_the_signature_of_a_stranger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MEMBERS_MAX", 4)
    engine = quiet(ANN, BEN, CAT)
    engine._verify = lambda *_: pytest.fail("a signature was checked in vain")
    tell(engine, word_of(STRANGER).data)
    assert engine.refused == {"members full": 1}


def test_a_forged_record_takes_nobodys_room_in_a_full_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MEMBERS_MAX", 4)
    engine = quiet(ANN, BEN, CAT)
    bring_to(engine, GONE)
    forged = sign_record(record_of(STRANGER), BEN, MESH_ID)
    tell(engine, forged.data)
    assert (state(engine, STRANGER), state(engine, ANN)) == (None, GONE)
    assert engine.refused == {"forged update": 1}


def test_who_is_acquainted_is_as_after_meeting_each() -> None:
    met, acquainted = quiet(ANN, BEN, CAT), engine_of(ME)
    acquainted.acquaint([word_of(each) for each in (ANN, BEN, CAT)], 0.0)
    assert dict(acquainted.members.items()) == dict(met.members.items())
    assert acquainted.members.order._ring == met.members.order._ring
    assert acquainted._digest() == met._digest()
    assert not acquainted.gossip


def test_nobody_is_acquainted_with_more_than_a_node_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEMBERS_MAX", 3)
    words = [word_of(each) for each in (ANN, BEN, CAT)]
    with pytest.raises(AssertionError, match="more than a node keeps"):
        engine_of(ME).acquaint(words, 0.0)
    engine_of(ME).acquaint(words[:2], 0.0)


@pytest.mark.parametrize("start", [GONE, LEFT])
def test_in_a_full_table_who_is_not_there_makes_room(
    start: PeerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MEMBERS_MAX", 4)
    engine = quiet(ANN, BEN, CAT)
    bring_to(engine, start)
    tell(engine, word_of(STRANGER).data)
    assert state(engine, STRANGER) is ALIVE
    assert state(engine, ANN) is None


def test_who_is_gone_is_forgotten_after_a_day() -> None:
    engine = quiet(ANN, BEN, CAT)
    bring_to(engine, GONE)
    for at, expected in ((LAN.forget_s - 10.0, GONE), (LAN.forget_s + 200.0, None)):
        engine._tick_at = engine._sync_at = LATE + at
        engine.on_timer(LATE + at)
        assert state(engine, ANN) is expected


def test_there_is_always_a_next_deadline_and_it_comes_nearer() -> None:
    engine = quiet(ANN, BEN)
    before = engine.deadline()
    tell(engine, accusation(ANN, BEN), by=BEN)
    after = engine.deadline()
    assert before is not None
    assert after is not None
    assert after <= before


def test_many_accusers_of_one_are_bounded() -> None:
    many = [identity(f"n{n}") for n in range(20)]
    engine = quiet(ANN, *many)
    tell(engine, *(accusation(ANN, each) for each in many), by=many[0])
    accusers: dict[Any, Any] = engine.members[ANN.agent].accusers or {}
    assert 1 <= len(accusers) <= LAN.agreeing + 1
