"""What goes out: when it leaves, when it leaves again, what ends it, and which answers count."""

from __future__ import annotations

import pytest
from core.delivery.desk import (
    BUSY,
    EPOCH,
    GAP,
    NOTHING,
    NOW_MS,
    OTHER,
    PEER,
    WRONG,
    Desk,
    ends,
    is_nothing,
    loads,
    mails,
    numbers,
    outgoing,
    receipts,
    rows,
    starts_over,
)

from meshagent.core.delivery.config import DeliveryConfig
from meshagent.core.delivery.receive_stream import FORGOTTEN
from meshagent.core.delivery.sending import FULL_LINK_S, START_OVER_S
from meshagent.core.effects import Durable, Noted
from meshagent.core.model.message_states import MessageState
from meshagent.core.model.messages import Message, Outgoing
from meshagent.core.model.rows import Delivered, NewEpoch, OutBatch, OutRow, OutState, StreamStart
from meshagent.core.turns import Turn, join_turns
from meshagent.core.wire.frames import Mail
from meshagent.errors import LimitReached


def test_nothing_is_sent_before_it_is_durable() -> None:
    desk = Desk().link()
    turn = desk.engine.accept(outgoing(Message("m", "text", "", 1)), 0.0)
    (row,) = turn.rows
    assert isinstance(row, OutBatch)
    assert (row.peer, row.epoch, row.first, row.ids) == (PEER, EPOCH, 1, ("m",))
    assert (turn.free, turn.after, turn.may_wait) == ((), [Durable(PEER, EPOCH, 1)], False)
    turn = desk.engine.durable(PEER, EPOCH, 1, 0.0)
    assert numbers(turn) == [1]
    assert receipts(turn) == [("m", "sent", "")]
    assert is_nothing(desk.engine.durable(PEER, EPOCH, 1, 0.0)), "it has left"


def test_what_comes_while_a_commit_is_under_way_shares_a_frame() -> None:
    desk = Desk().link()
    for ident in ("m1", "m2", "m3"):
        desk.engine.accept(outgoing(Message(ident, "text", "", 1)), 0.0)
    assert numbers(desk.engine.durable(PEER, EPOCH, 1, 0.0)) == [1]
    (mail,) = mails(desk.engine.durable(PEER, EPOCH, 3, 0.1))
    assert (mail.first, len(mail.items)) == (2, 2)


def test_a_batch_for_several_is_numbered_for_each_in_the_order_given() -> None:
    desk = Desk()
    messages = [Message(ident, "text", "", 1) for ident in "abcd"]
    messages[2] = messages[2]._replace(expires_ms=9)
    turn = desk.engine.accept(outgoing(*messages, to=[PEER, PEER, OTHER, PEER]), 0.0)
    kept = [(row.peer, row.seq, row.id, row.expires_ms) for row in rows(turn, OutRow)]
    assert kept == [(PEER, 1, "a", 0), (PEER, 2, "b", 0), (OTHER, 1, "c", 9), (PEER, 3, "d", 0)]
    assert turn.after == [
        Durable(PEER, EPOCH, 2), Durable(OTHER, EPOCH, 1), Durable(PEER, EPOCH, 3),
    ]  # fmt: skip
    assert desk.engine.sending.pending == 4


def test_an_empty_batch_is_nothing_to_keep() -> None:
    assert is_nothing(Desk().engine.accept(Outgoing((), (), ()), 0.0))


def test_what_is_not_durable_yet_leaves_neither_again_nor_for_the_first_time() -> None:
    """A slow disk: the answer is overdue, or the link is another, before the commit ends."""
    desk = Desk().link()
    assert numbers(desk.write(1)) == [1]
    desk.engine.accept(outgoing(Message("m2", "text", "", 1)), 0.0)
    assert numbers(desk.engine.on_timer(60.0)) == [1]
    desk.engine.connected(PEER, 61.0)
    assert numbers(desk.answer(0, NOTHING, now=61.0)) == [1]
    assert numbers(desk.engine.durable(PEER, EPOCH, 2, 62.0)) == [2]


def test_what_becomes_durable_while_the_link_is_full_leaves_later_and_in_order() -> None:
    desk = Desk().link()
    (mail,) = mails(desk.write(1))
    desk.engine.not_sent(PEER, mail, 0.0)
    assert numbers(desk.write(1)) == [], "the link is full"
    due = desk.engine.deadline()
    assert due is not None
    assert numbers(desk.engine.on_timer(due)) == [1, 2]


def test_nothing_is_sent_before_the_peer_has_said_what_it_has() -> None:
    desk = Desk()
    desk.engine.connected(PEER, 0.0)
    (question,) = mails(desk.write(2))
    assert question == Mail(EPOCH, 1, 1, ())
    assert is_nothing(desk.answer(0, NOTHING, epoch=b"anotherd")), "of another epoch"
    assert numbers(desk.answer(0, NOTHING)) == [1, 2]


def test_the_question_is_repeated_until_it_is_answered() -> None:
    desk = Desk()
    desk.engine.connected(PEER, 0.0)
    desk.write(1)
    for _ in range(3):
        due = desk.engine.deadline()
        assert due is not None
        assert len(mails(desk.engine.on_timer(due))) == 1


def test_an_answer_settles_what_it_covers_and_is_reported_once() -> None:
    desk = Desk().link()
    desk.write(3)
    turn = desk.answer(2)
    assert ends(turn) == {"m1": "delivered", "m2": "delivered"}
    assert receipts(turn) == [("m1", "delivered", ""), ("m2", "delivered", "")]
    assert (desk.engine.sending.pending, desk.engine.sending.on_wire) == (1, 1)
    desk.answer(3)
    assert (desk.engine.sending.pending, desk.engine.sending.on_wire, desk.engine.deadline()) == (
        0,
        0,
        None,
    )


def test_duplicate_and_late_answers_change_nothing() -> None:
    desk = Desk().link()
    desk.write(3)
    desk.answer(3)
    for upto in (3, 2, 1, 0):
        assert is_nothing(desk.answer(upto))
        assert is_nothing(desk.answer(upto, WRONG))


def test_an_answer_about_another_epoch_changes_nothing() -> None:
    desk = Desk().link()
    desk.write(2)
    assert is_nothing(desk.answer(2, epoch=b"anotherd"))
    assert is_nothing(desk.answer(10**6, WRONG, epoch=b"anotherd"))
    assert desk.engine.sending.pending == 2


@pytest.mark.parametrize(
    ("upto", "last"),
    [(2, WRONG), (3, WRONG), (10**9, WRONG), (2, NOTHING)],
    ids=["another message", "one more", "far beyond", "no hash"],
)
def test_an_answer_that_names_what_we_never_sent_makes_us_start_over(
    upto: int, last: bytes
) -> None:
    desk = Desk().link()
    desk.write(2)
    turn = desk.answer(upto, last)
    (new,) = rows(turn, NewEpoch)
    assert not ends(turn)
    assert desk.engine.numbers(PEER) == (new.epoch, 1)
    assert desk.engine.sending.pending == 2
    assert not loads(turn), "reading waits for the commit: it must find the new numbers"
    (waits,) = turn.after
    assert waits == Durable(PEER, new.epoch, 2)
    (load,) = loads(desk.engine.durable(*waits, 0.0))
    assert (load.first, desk.engine.refused["numbers from another day"]) == (1, 1)


def test_a_recipient_that_forgot_how_a_message_ended_is_not_taken_for_having_it() -> None:
    desk = Desk().link()
    desk.write(4)
    elsewhere = desk.answer(2, exceptions=((1, FORGOTTEN),), epoch=b"anotherd")
    assert is_nothing(elsewhere), "another epoch's numbers are not ours"
    desk.answer(1)
    known = desk.answer(2, exceptions=((1, FORGOTTEN),))
    assert ends(known) == {"m2": "delivered"}, "how that one ended we know ourselves"
    unknown = desk.answer(4, exceptions=((3, FORGOTTEN),))
    assert starts_over(unknown)
    assert not ends(unknown)
    assert desk.engine.sending.pending == 2


def test_whoever_contradicts_an_epoch_of_this_run_is_not_believed() -> None:
    desk = Desk().link()
    desk.write(2)
    assert starts_over(desk.answer(9, WRONG))
    epoch = desk.engine.numbers(PEER)[0]
    assert not starts_over(desk.answer(9, WRONG, epoch=epoch, now=10.0))
    assert starts_over(desk.answer(9, WRONG, epoch=epoch, now=START_OVER_S))
    assert desk.engine.sending.pending == 2


def test_a_refusal_ends_the_message_with_its_reason() -> None:
    desk = Desk().link()
    desk.write(2)
    turn = desk.answer(2, exceptions=((1, "not today"),))
    assert receipts(turn) == [("m1", "refused", "not today"), ("m2", "delivered", "")]


def test_what_was_taken_back_travels_as_nothing_and_ends_when_the_peer_knows() -> None:
    desk = Desk()
    desk.write(2)
    taken_back = desk.take_back(1)
    assert ends(taken_back) == {"m1": "cancelled"}
    assert (desk.engine.sending.pending, desk.engine.sending.withdrawn_count) == (2, 1)
    desk.link()
    turn = desk.engine.loaded(
        PEER, [desk.entry(1, MessageState.CANCELLED), desk.entry(2)], 0.0, NOW_MS
    )
    (mail,) = mails(turn)
    assert [body is None for body in mail.items] == [True, False]
    turn = desk.answer(2, exceptions=((1, ""),))
    assert ends(turn) == {"m1": "cancelled", "m2": "delivered"}
    assert (desk.engine.sending.pending, desk.engine.sending.withdrawn_count) == (0, 0)


def test_the_recipients_word_counts_more_than_ours_when_it_came_anyway() -> None:
    desk = Desk().link()
    desk.write(1)
    desk.engine.disconnected(PEER)
    assert ends(desk.engine.withdraw(PEER, 1, "m1", MessageState.CANCELLED, NOW_MS))
    assert desk.engine.sending.withdrawn_count == 1
    desk.engine.connected(PEER, 0.0)
    assert not ends(desk.answer(1)), "it is looked at before that is believed"
    found = desk.engine.loaded(PEER, [desk.entry(1, MessageState.CANCELLED)], 0.0, NOW_MS)
    assert ends(found) == {"m1": "delivered"}
    assert desk.engine.sending.withdrawn_count == 0


def test_a_message_that_was_done_before_its_answer_came_is_settled_like_any_other() -> None:
    desk = Desk()
    desk.write(3)
    desk.link()
    entries = [desk.entry(1), desk.entry(2, MessageState.DONE), desk.entry(3)]
    (mail,) = mails(desk.engine.loaded(PEER, entries, 0.0, NOW_MS))
    assert None not in mail.items
    assert rows(desk.answer(3), Delivered) == [Delivered(PEER, 1, 3, NOW_MS)]


def test_what_is_on_the_wire_is_not_taken_back_until_its_link_is_gone() -> None:
    desk = Desk().link()
    desk.write(2)
    for state in (MessageState.EXPIRED, MessageState.CANCELLED):
        assert is_nothing(desk.engine.withdraw(PEER, 2, "m2", state, NOW_MS))
    desk.engine.disconnected(PEER)
    turn = desk.engine.withdraw(PEER, 2, "m2", MessageState.EXPIRED, NOW_MS)
    assert ends(turn) == {"m2": "expired"}


def test_a_message_is_taken_back_once_and_not_after_it_has_ended() -> None:
    desk = Desk().link()
    desk.write(2)
    desk.answer(0, NOTHING, BUSY)  # so they are not on the wire any more
    assert ends(desk.engine.withdraw(PEER, 2, "m2", MessageState.EXPIRED, NOW_MS))
    assert is_nothing(desk.engine.withdraw(PEER, 2, "m2", MessageState.CANCELLED, NOW_MS))
    desk.answer(1)
    assert is_nothing(desk.engine.withdraw(PEER, 1, "m1", MessageState.CANCELLED, NOW_MS))


def test_what_is_taken_back_while_it_is_read_from_disk_does_not_leave() -> None:
    desk = Desk()
    desk.write(2)
    desk.link()
    desk.engine.withdraw(PEER, 2, "m2", MessageState.CANCELLED, NOW_MS)
    (mail,) = mails(desk.engine.loaded(PEER, [desk.entry(1), desk.entry(2)], 0.0, NOW_MS))
    assert len(mail.items) == 1, "nobody hears of it before the disk knows"
    (mail,) = mails(desk.engine.taken_back(PEER, desk.epoch, 2, 0.0))
    assert mail.items == (None,)


def test_a_message_whose_time_is_up_at_the_recipient_first_expires() -> None:
    desk = Desk().link()
    desk.write(1, expires_ms=NOW_MS)
    turn = desk.answer(1, NOTHING, exceptions=((1, ""),))
    assert receipts(turn)[-1] == ("m1", "expired", "")
    assert (desk.engine.sending.pending, desk.engine.sending.withdrawn_count) == (0, 0)


def test_nothing_expires_on_the_word_of_one_who_means_another_message() -> None:
    desk = Desk().link()
    desk.write(1)
    assert starts_over(desk.answer(1, NOTHING, exceptions=((1, ""),)))
    desk = Desk().link()
    desk.write(1, expires_ms=2 * NOW_MS)
    assert starts_over(desk.answer(1, NOTHING, exceptions=((1, ""),)))


def test_a_clock_that_was_ahead_is_believed_when_a_later_message_proves_the_numbers() -> None:
    desk = Desk().link()
    desk.write(2, expires_ms=2 * NOW_MS)
    turn = desk.answer(2, exceptions=((1, ""),))
    assert ends(turn) == {"m1": "expired", "m2": "delivered"}


def test_what_is_proven_expired_stays_so_when_the_rest_starts_over() -> None:
    desk = Desk().link()
    desk.write(3, expires_ms=2 * NOW_MS)
    turn = desk.answer(3, desk.hash(2), exceptions=((1, ""), (3, "")))
    kept = [type(row) for row in turn.rows]
    assert kept == [OutState, NewEpoch], "in that order: the number must carry nothing"
    assert ends(turn) == {"m1": "expired"}


def test_a_full_inbox_is_tried_again_after_a_pause() -> None:
    desk = Desk().link()
    desk.write(3)
    assert numbers(desk.answer(1, mode=BUSY)) == []
    due = desk.engine.deadline()
    assert due is not None
    assert 0 < due <= 2 * DeliveryConfig().busy_s
    assert numbers(desk.engine.on_timer(due)) == [2, 3]


def test_room_in_the_inbox_ends_the_pause_at_once() -> None:
    desk = Desk().link()
    desk.write(3)
    desk.answer(1, mode=BUSY)
    assert numbers(desk.answer(1, mode=GAP, now=0.01)) == [], "frames behind the first say that"
    assert numbers(desk.answer(1, now=0.02)) == [2, 3]


def test_one_lost_frame_is_gone_back_for_once() -> None:
    desk = Desk().link()
    desk.write(9)
    assert numbers(desk.answer(2, mode=GAP)) == [3, 4, 5, 6, 7, 8, 9]
    for _ in range(6):  # each frame behind the lost one says the same
        assert numbers(desk.answer(2, mode=GAP, now=0.05)) == []
    assert numbers(desk.answer(9, now=0.06)) == []
    assert desk.engine.deadline() is None


def test_a_frame_that_is_lost_again_is_sent_again_well_within_a_second() -> None:
    desk = Desk().link()
    desk.write(4)
    assert numbers(desk.answer(2, mode=GAP)) == [3, 4]
    desk.answer(2, mode=GAP, now=0.01)
    due = desk.engine.deadline()
    assert due is not None
    assert due < 0.5
    assert numbers(desk.engine.on_timer(due)) == [3, 4]


def test_another_gap_is_gone_back_for_at_once() -> None:
    desk = Desk().link()
    desk.write(9)
    desk.answer(2, mode=GAP)
    assert numbers(desk.answer(5, mode=GAP, now=0.01)) == [6, 7, 8, 9]


def test_an_old_word_of_a_gap_is_no_news() -> None:
    desk = Desk().link()
    desk.write(4)
    desk.answer(3)
    assert is_nothing(desk.answer(1, mode=GAP, now=1.0))


def test_silence_is_broken_with_longer_and_longer_pauses_up_to_the_longest() -> None:
    desk = Desk().link()
    desk.write(1)
    at, pauses = 0.0, []
    for _ in range(12):
        due = desk.engine.deadline()
        assert due is not None
        pauses.append(due - at)
        assert numbers(desk.engine.on_timer(due)) == [1]
        at = due
    config = DeliveryConfig()
    assert min(pauses) >= config.answer_s
    assert max(pauses) <= config.longest_pause_s
    assert max(pauses) > 20


def test_a_full_link_is_tried_again_in_a_moment() -> None:
    desk = Desk().link()
    first, second = mails(desk.write(2))
    desk.engine.not_sent(PEER, first, 0.0)
    desk.engine.not_sent(PEER, second, 0.0)
    due = desk.engine.deadline()
    assert due == FULL_LINK_S
    assert numbers(desk.engine.on_timer(due)) == [1, 2]
    desk.engine.not_sent(PEER, Mail(b"anotherd", 1, 1, ()), 5.0)
    assert desk.engine.deadline() != 5.0 + FULL_LINK_S


def test_a_new_link_sends_again_what_has_no_answer() -> None:
    desk = Desk().link()
    desk.write(3)
    desk.answer(1)
    desk.engine.connected(PEER, 1.0)
    assert numbers(desk.answer(1, now=1.01)) == [2, 3]


def test_memory_is_for_those_who_are_here() -> None:
    desk = Desk().link()
    desk.write(3)
    desk.engine.disconnected(PEER)
    assert (desk.engine.sending.on_wire, desk.engine.deadline()) == (0, None)
    assert not desk.engine._all.with_peer(PEER).out.items
    desk.engine.connected(OTHER, 0.0)
    desk.engine.disconnected(OTHER)
    assert desk.engine._all.get(OTHER) is None


def test_an_answer_beyond_memory_is_checked_against_the_disk_before_it_counts() -> None:
    desk = Desk()
    desk.write(3)
    turn = join_turns([desk.engine.connected(PEER, 0.0), desk.answer(2)])
    assert loads(turn), "what it names is not in memory"
    assert not ends(turn)
    turn = desk.engine.loaded(PEER, [desk.entry(n) for n in (1, 2, 3)], 0.0, NOW_MS)
    assert ends(turn) == {"m1": "delivered", "m2": "delivered"}
    assert numbers(turn) == [3]


def test_an_answer_that_the_disk_contradicts_makes_us_start_over() -> None:
    for items, last in (([1, 2, 3], WRONG), ([], None)):
        desk = Desk()
        desk.write(3)
        desk.engine.connected(PEER, 0.0)
        desk.answer(2, last)
        turn = desk.engine.loaded(PEER, [desk.entry(n) for n in items], 0.0, NOW_MS)
        if not starts_over(turn):  # the first read was of what comes next: that was not there
            turn = desk.engine.loaded(PEER, [], 0.0, NOW_MS)
        assert starts_over(turn), items


def test_what_was_read_under_other_numbers_is_not_used() -> None:
    desk = Desk()
    desk.write(2)
    desk.link()  # reads both
    assert starts_over(desk.answer(9, WRONG))
    assert not mails(desk.engine.loaded(PEER, [desk.entry(1), desk.entry(2)], 0.0, NOW_MS))
    assert is_nothing(desk.engine.durable(PEER, EPOCH, 99, 0.0)), "a word about the old numbers"


def test_a_full_outbox_refuses() -> None:
    desk = Desk(DeliveryConfig(pending_max=2))
    desk.write(2)
    with pytest.raises(LimitReached, match="2 are waiting"):
        desk.engine.accept(outgoing(Message("m", "text", "", 1)), 0.0)
    assert desk.engine.sending.pending == 2


def test_a_restart_goes_on_where_the_disk_stands() -> None:
    desk = Desk(streams=[StreamStart(PEER, 3, 6), StreamStart(OTHER, 1, 1)], withdrawn=2)
    assert (desk.engine.sending.pending, desk.engine.sending.withdrawn_count) == (3, 2)
    assert desk.engine.numbers(PEER) == (EPOCH, 3)


def test_only_what_can_expire_waits_for_the_disk_before_it_is_called_delivered() -> None:
    desk = Desk().link()
    desk.write(1)
    desk.write(1, expires_ms=10**13)
    turn = desk.answer(1)
    assert (ends(turn), turn.may_wait) == ({"m1": "delivered"}, True)
    assert receipts(Turn(turn.free)) == [("m1", "delivered", "")]
    turn = desk.answer(2)
    assert (ends(turn), turn.may_wait) == ({"m2": "delivered"}, False)
    assert receipts(Turn(after=turn.after)) == [("m2", "delivered", "")]


def test_a_recipient_is_told_only_what_is_settled_on_our_disk_too() -> None:
    desk = Desk().link()
    desk.write(2)
    (noted,) = [each for each in desk.answer(1).after if isinstance(each, Noted)]
    assert noted == Noted(PEER, EPOCH, 1)
    assert [mail.floor for mail in mails(desk.write(1))] == [1]
    desk.engine.noted(PEER, b"anotherd", 1)
    desk.engine.noted(PEER, EPOCH, 2)
    assert [mail.floor for mail in mails(desk.write(1))] == [1], "other numbers, or not settled"
    desk.engine.noted(*noted)
    assert [mail.floor for mail in mails(desk.write(1))] == [2]
