"""The engines together: what one says and another hears, and that no link waits for a disk."""

from __future__ import annotations

import random

import pytest
from core.delivery.desk import is_nothing, outgoing
from core.made import identity, mesh_of, open_link, sent, word_of

from meshagent.core.delivery.engine import Delivery
from meshagent.core.effects import (
    Deliver,
    Durable,
    LinkDown,
    LinkReplaced,
    LinkUp,
    PeerChanged,
    Transmit,
    Unreachable,
)
from meshagent.core.mesh import Mesh
from meshagent.core.model.messages import Message, pack_body
from meshagent.core.model.peers import LinkId
from meshagent.core.model.rows import MailStart
from meshagent.core.turns import Turn, TurnQueue
from meshagent.core.wire.frames import (
    EPOCH_BYTES,
    HASH_BYTES,
    Ack,
    BlobAsk,
    Gossip,
    Mail,
    MailAck,
    Ping,
    Welcome,
)
from meshagent.errors import StorageError

EPOCH, THEIRS = b"ourepoch", b"theirday"
NO_HASH = bytes(HASH_BYTES)
ME, PEER = identity("me"), identity("peer")
L1 = LinkId(1)


def with_mail() -> Mesh:
    """An engine with an empty disk."""
    mesh = mesh_of(ME)
    mesh.delivery = Delivery(MailStart(EPOCH, (), (), 0), random.Random(1))
    return mesh


def met() -> Mesh:
    """The same, with a link to a peer that has nothing of ours."""
    mesh = with_mail()
    open_link(mesh, PEER, 1, 0.0)
    mesh.received(L1, MailAck(bytes(EPOCH_BYTES), 0, NO_HASH), 0.1)
    return mesh


def message(ident: str = "m") -> Message:
    return Message(ident, "text", "", 1)


def answers(turn: Turn) -> list[MailAck]:
    """What waits for the disk, of frames."""
    frames = [each.frame for each in turn.after if isinstance(each, Transmit)]
    return [each for each in frames if isinstance(each, MailAck)]


# -- what waits for the disk, and what never does -------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "answer"),
    [
        (Ping(7), Ack),
        (BlobAsk(1, bytes(32), 5, PEER.agent, b"", 0, 0), None),
        (Gossip((word_of(identity("third")).data,)), None),
    ],
    ids=["a probe", "an ask for a blob", "gossip"],
)
def test_probes_gossip_and_blobs_are_answered_while_a_commit_is_under_way(
    frame: Ping | BlobAsk | Gossip, answer: type | None
) -> None:
    mesh, queue = met(), TurnQueue()
    queue.add(mesh.accept(outgoing(message(), to=[PEER.agent]), 0.2))
    assert queue.next_commit()
    turn = mesh.received(L1, frame, 0.3)
    assert not turn.rows
    assert not turn.after
    assert turn.free
    assert list(queue.add(turn)) == turn.free
    if answer is not None:
        assert [type(each) for each in sent(turn)] == [answer]


def test_a_link_is_greeted_at_once_and_told_what_we_have_when_that_is_durable() -> None:
    mesh = with_mail()
    turn = open_link(mesh, PEER, 1, 0.0)
    assert Welcome in {type(each) for each in sent(turn)}
    assert [each.epoch for each in answers(turn)] == [bytes(EPOCH_BYTES)]
    assert any(isinstance(each, PeerChanged) for each in turn.free)


def test_mail_is_acknowledged_and_shown_only_behind_its_rows() -> None:
    mesh = met()
    turn = mesh.received(L1, Mail(THEIRS, 1, 1, (pack_body(message()),)), 5.0)
    assert turn.rows
    assert not turn.may_wait
    assert [each.upto for each in answers(turn)] == [1]
    assert any(isinstance(each, Deliver) for each in turn.after)
    assert not any(isinstance(each, Deliver) for each in turn.free)
    assert not sent(turn)


def test_the_first_sending_of_a_message_follows_once_it_is_durable() -> None:
    mesh = met()
    turn = mesh.accept(outgoing(message(), to=[PEER.agent]), 0.2)
    assert list(turn.free) == []
    (durable,) = turn.after
    assert isinstance(durable, Durable)
    turn = mesh.ask_delivery(lambda each: each.durable(*durable, 0.3), 0.3)
    assert [type(each) for each in sent(turn)] == [Mail]


def test_what_only_other_engines_hear_never_leaves_the_mesh() -> None:
    mesh = with_mail()
    turns = [
        open_link(mesh, PEER, 1, 0.0),
        open_link(mesh, PEER, 2, 0.1),
        *(mesh.closed(LinkId(link), "lost", 0.2) for link in (1, 2)),
        *(mesh.on_timer(0.3 + second) for second in range(20)),
    ]
    told = {type(each) for turn in turns for each in [*turn.free, *turn.after]}
    assert told.isdisjoint({LinkUp, LinkDown, LinkReplaced, Unreachable})
    assert PeerChanged in told


def test_without_a_disk_nothing_is_accepted_and_the_node_is_alive() -> None:
    mesh = met()
    mesh.deliver_with(None, 0.2)
    with pytest.raises(StorageError):
        mesh.accept(outgoing(message(), to=[PEER.agent]), 0.3)
    assert not mesh.received(L1, Mail(THEIRS, 1, 1, (pack_body(message()),)), 0.3).rows
    assert [type(each) for each in sent(mesh.received(L1, Ping(7), 0.4))] == [Ack]


def test_a_disk_that_is_well_again_begins_with_a_greeting_to_all_who_are_here() -> None:
    mesh = met()
    mesh.deliver_with(None, 0.2)
    fresh = Delivery(MailStart(EPOCH, (), (), 0), random.Random(1))
    assert [each.epoch for each in answers(mesh.deliver_with(fresh, 0.3))] == [bytes(EPOCH_BYTES)]


# -- links that come and go -----------------------------------------------------------------------


def test_what_was_on_a_lost_link_goes_over_the_other_one_at_once() -> None:
    mesh, peer = with_mail(), PEER
    open_link(mesh, peer, 1, 0.0)
    open_link(mesh, peer, 2, 0.1)
    in_use = mesh.links.link_to(peer.agent)
    assert in_use is not None
    mesh.received(in_use, MailAck(bytes(EPOCH_BYTES), 0, NO_HASH), 0.2)
    (durable,) = mesh.accept(outgoing(message(), to=[peer.agent]), 0.2).after
    assert isinstance(durable, Durable)
    turn = mesh.ask_delivery(lambda each: each.durable(*durable, 0.2), 0.2)
    assert Mail in {type(each) for each in sent(turn, in_use)}
    turn = mesh.closed(in_use, "lost", 0.3)
    (other,) = {1, 2} - {in_use}
    asked = [each for each in sent(turn, other) if type(each) is Mail]
    assert asked, "it asks what has come, and does not wait for an answer's time to be up"
    turn = mesh.received(LinkId(other), MailAck(EPOCH, 0, NO_HASH), 0.4)
    (again,) = [each for each in sent(turn) if type(each) is Mail]
    assert len(again.items) == 1


def test_losing_a_link_that_was_not_in_use_disturbs_nothing() -> None:
    mesh = with_mail()
    open_link(mesh, PEER, 1, 0.0)
    open_link(mesh, PEER, 2, 0.1)
    (spare,) = {1, 2} - {mesh.links.link_to(PEER.agent)}
    turn = mesh.closed(LinkId(spare), "lost", 0.3)
    assert is_nothing(turn)


def test_who_was_met_a_moment_before_leaving_is_remembered() -> None:
    mesh = mesh_of(ME)
    open_link(mesh, PEER, 1, 0.0)
    turn = mesh.leave(0.1)
    assert [row.agent for row in turn.rows] == [PEER.agent]
    assert not turn.after
    assert sent(turn), "the goodbye waits for no disk"
    assert not mesh.leave(0.2).rows
