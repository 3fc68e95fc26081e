"""Both directions together: greetings, what ends a held message, and what is not delivery's."""

from __future__ import annotations

import pytest
from core.delivery.desk import (
    NOW_MS,
    PEER,
    Desk,
    acks,
    is_nothing,
    mails,
    outgoing,
    receipts,
    rows,
)

from meshagent.core.delivery.incomplete_messages import Ended
from meshagent.core.effects import Deliver, Durable, Noted
from meshagent.core.model.message_states import MessageState
from meshagent.core.model.messages import Message, pack_body, parse_body
from meshagent.core.model.rows import Arrived, OutRow, TurnedAway
from meshagent.core.turns import Turn, TurnQueue
from meshagent.core.wire.frames import EPOCH_BYTES, Mail, MailAck, Ping


def test_other_frames_are_not_for_delivery() -> None:
    assert is_nothing(Desk().engine.receive(Ping(1), PEER, 0.0, NOW_MS))


def test_a_greeting_says_what_we_have_and_asks_what_the_peer_has() -> None:
    desk = Desk()
    desk.write(1)
    turn = desk.engine.connected(PEER, 0.0)
    assert acks(turn) == [MailAck(bytes(EPOCH_BYTES), 0, bytes(16))], "that rests on our rows"
    assert mails(turn) == [Mail(desk.epoch, 1, 1, ())]


def test_how_a_held_message_ended_and_the_word_to_its_sender_are_kept_together() -> None:
    for state, kept in ((MessageState.DELIVERED, Arrived), (MessageState.REFUSED, TurnedAway)):
        desk = Desk()
        message = Message("m", "text", "", 1)
        turn = desk.engine.end([Ended(PEER, message, state, "why" * 100)], 0.0, NOW_MS)
        (ended,), (word,) = rows(turn, kept), rows(turn, OutRow)
        assert (ended.sender, ended.id, word.peer) == (PEER, "m", PEER)
        told = parse_body(word.body)
        assert (told.kind, told.data["id"], told.data["state"]) == ("receipt", "m", state)
        assert len(told.data["reason"]) <= 200
        assert not turn.may_wait
        shown = [each for each in turn.after if isinstance(each, Deliver)]
        assert bool(shown) == (state is MessageState.DELIVERED)
        assert Durable(PEER, desk.epoch, 1) in turn.after


@pytest.mark.parametrize("was_taken_back", [False, True])
def test_what_became_of_a_message_later_is_never_told_before_what_became_of_it_first(
    was_taken_back: bool,
) -> None:
    """Its first news rest on a commit that is slow; the recipient says `done` meanwhile."""
    desk, queue = Desk().link(), TurnQueue()
    desk.write(2, expires_ms=10**13)
    if was_taken_back:
        desk.engine.disconnected(PEER)
        first = desk.engine.withdraw(PEER, 1, "m1", MessageState.CANCELLED, NOW_MS)
    else:
        first = desk.answer(1)
    done = Message("r", "receipt", "", 1, {"id": "m1", "state": "done"})
    assert not receipts(Turn(queue.add(first)))
    assert queue.next_commit()
    later = desk.engine.receive(Mail(b"theirday", 1, 1, (pack_body(done),)), PEER, 0.0, NOW_MS)
    assert not receipts(Turn(queue.add(later)))
    told = queue.committed()
    queue.hurry()
    assert queue.next_commit()
    told += queue.committed()
    expected = "cancelled" if was_taken_back else "delivered"
    assert [state for _, state, _ in receipts(Turn(told))] == [expected, "done"]


def test_what_became_of_a_message_later_is_told_at_once_when_all_before_it_was() -> None:
    desk = Desk().link()
    desk.write(1, expires_ms=10**13)
    (noted,) = [each for each in desk.answer(1).after if isinstance(each, Noted)]
    desk.engine.noted(*noted)
    done = Message("r", "receipt", "", 1, {"id": "m1", "state": "done"})
    turn = desk.engine.receive(Mail(b"theirday", 1, 1, (pack_body(done),)), PEER, 0.0, NOW_MS)
    assert receipts(Turn(turn.free)) == [("m1", "done", "")]


def test_who_was_written_to_is_a_correspondent_and_who_was_only_met_is_not() -> None:
    desk = Desk().link()
    assert desk.engine.correspondents() == []
    desk.engine.accept(outgoing(Message("m", "text", "", 1)), 0.0)
    assert desk.engine.correspondents() == [PEER]


def test_what_waits_is_counted_by_how_far_it_has_come() -> None:
    desk = Desk(taken=((PEER, "large"),))
    desk.write(3)
    assert desk.engine.outbox_counts() == {"queued": 3, "sent": 1}
    desk.take_back(2)
    assert desk.engine.outbox_counts() == {"queued": 2, "sent": 1}
    desk.link()
    desk.engine.loaded(PEER, [desk.entry(n) for n in (1, 2, 3)], 0.0, NOW_MS)
    assert desk.engine.outbox_counts() == {"queued": 0, "sent": 3}
