"""What comes in: what is kept, answered, shown and refused, and whose numbers are believed."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from core.delivery.desk import (
    BUSY,
    GAP,
    NOTHING,
    NOW_MS,
    OTHER,
    PEER,
    WELL,
    Desk,
    acks,
    is_nothing,
    receipts,
    rows,
)

from meshagent.core.delivery import receiving
from meshagent.core.delivery.config import DeliveryConfig
from meshagent.core.delivery.conversations import EPOCHS_KEPT_MAX
from meshagent.core.delivery.incomplete_messages import SENDER_FILES_MAX
from meshagent.core.delivery.receive_stream import FORGOTTEN
from meshagent.core.effects import Collect, CountUnread, Deliver, Send
from meshagent.core.model.attachments import Attachment
from meshagent.core.model.messages import Message, body_hash, pack_body
from meshagent.core.model.peers import AgentId
from meshagent.core.model.rows import InRow, ReceiptRow, Watermark
from meshagent.core.turns import Turn, join_turns
from meshagent.core.wire.frames import (
    EPOCH_BYTES,
    MAIL_ITEMS_MAX,
    WHOLE_MAX,
    Mail,
    MailAck,
)
from meshagent.errors import RemoteProtocolError

THEIRS = b"theirday"


def body(ident: str, **fields: Any) -> bytes:
    fields = {"kind": "text", "text": "hello", "created_ms": 1} | fields
    return pack_body(Message(ident, **fields))


def mail(first: int, *items: bytes | None, floor: int = 1, epoch: bytes = THEIRS) -> Mail:
    return Mail(epoch, floor, first, items)


def take(desk: Desk, frame: Mail, spooled: bool = False) -> Turn:
    if spooled:
        return desk.engine.take(frame, PEER, NOW_MS)
    return desk.engine.receive(frame, PEER, 0.0, NOW_MS)


def test_what_comes_is_kept_then_answered_then_shown() -> None:
    desk = Desk()
    bodies = [body("a"), body("b")]
    turn = take(desk, mail(1, *bodies))
    assert [row.id for row in rows(turn, InRow)] == ["a", "b"]
    assert rows(turn, Watermark) == [Watermark(PEER, THEIRS, 2, body_hash(bodies[1]))]
    assert acks(turn) == [MailAck(THEIRS, 2, body_hash(bodies[1]))]
    (came,) = [each for each in turn.after if isinstance(each, Deliver)]
    assert not turn.may_wait
    assert [message.id for message in came.messages] == ["a", "b"]
    assert desk.engine.unread == 2


def test_what_came_before_is_answered_and_not_kept_again() -> None:
    desk = Desk()
    take(desk, mail(1, body("a"), body("b")))
    turn = take(desk, mail(1, body("a"), body("b"), body("c")))
    assert [row.id for row in rows(turn, InRow)] == ["c"]
    turn = take(desk, mail(3, body("c")))
    assert (rows(turn, InRow), acks(turn)[0].upto) == ([], 3)
    assert desk.engine.unread == 3


def test_nothing_is_taken_after_a_gap() -> None:
    desk = Desk()
    turn = take(desk, mail(2, body("b")))
    assert not rows(turn, InRow)
    assert (acks(turn)[0].upto, acks(turn)[0].mode) == (0, GAP)


def test_what_was_settled_before_our_disk_was_lost_is_not_waited_for() -> None:
    desk = Desk()
    turn = take(desk, mail(7, body("g"), floor=7))
    assert [row.id for row in rows(turn, InRow)] == ["g"]
    (ack,) = acks(turn)
    assert (ack.upto, ack.exceptions) == (7, ((6, FORGOTTEN),)), "nor is it vouched for"


def test_nothing_in_place_of_a_message_is_noted_until_its_sender_knows() -> None:
    desk = Desk()
    (first,) = acks(take(desk, mail(1, body("a"), None)))
    assert (first.upto, first.last, first.exceptions) == (2, body_hash(body("a")), ((2, ""),))
    (later,) = acks(take(desk, mail(3, body("c"), floor=3)))
    assert later.exceptions == ((2, FORGOTTEN),)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def raw(data: Any, **options: Any) -> bytes:
    fields = ["m", "text", "", 1, data, "", "", {}, [], 0, 0]
    packed: bytes = msgpack.packb(fields, **options)
    return packed


@pytest.mark.parametrize(
    "bad",
    [
        raw(float("nan")),
        raw([float("inf")]),
        raw({"a": b"bytes"}),
        raw(msgpack.ExtType(5, b"x")),
        raw(msgpack.Timestamp(1)),
        raw(nested(65)),
        raw({1: "a number as a key"}),
        b"",
        b"\xc1",
        msgpack.packb(["m", "text"]),
    ],
    ids=["nan", "inf", "bytes", "ext", "time", "deep", "keys", "empty", "no msgpack", "short"],
)
def test_a_message_that_nobody_could_print_is_refused_with_a_reason(bad: bytes) -> None:
    desk = Desk()
    turn = take(desk, mail(1, bad, body("b")))
    assert [row.id for row in rows(turn, InRow)] == ["b"]
    ((number, reason),) = acks(turn)[0].exceptions
    assert number == 1
    assert 0 < len(reason) <= 200
    assert desk.engine.refused["malformed message"] == 1


@pytest.mark.parametrize("state", ["delivered", "seen", "done", "refused", "expired"])
def test_a_receipt_is_noted_for_the_one_who_gave_it_and_not_shown(state: str) -> None:
    desk = Desk()
    word = body("r", kind="receipt", data={"id": "m1", "state": state, "reason": "why"})
    turn = take(desk, mail(1, word))
    assert rows(turn, ReceiptRow) == [ReceiptRow(PEER, "m1", state, NOW_MS, "why")]
    assert receipts(turn) == [("m1", state, "why")]
    assert not [each for each in turn.after if isinstance(each, Deliver)]
    assert desk.engine.unread == 0


def word(ident: str) -> bytes:
    return body(ident, kind="receipt", data={"id": "m1", "state": "done"})


def test_receipts_that_come_alone_may_wait_for_a_commit_and_their_answer_with_them() -> None:
    desk = Desk()
    turn = take(desk, mail(1, word("r1"), word("r2")))
    assert turn.may_wait
    assert receipts(Turn(turn.free)) == [("m1", "done", "")] * 2, "the news wait for nothing"
    assert acks(turn)[0].upto == 2


def test_receipts_that_come_with_a_message_are_kept_as_soon_as_it_is() -> None:
    for items in ((word("r"), body("a")), (body("a"), word("r"))):
        turn = take(Desk(), mail(1, *items))
        assert acks(turn)[0].upto == 2
        assert not turn.may_wait


def test_one_who_has_to_wait_with_what_comes_behind_its_receipts_hears_of_it_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receiving, "WORDS_WAITING_MAX", 0)
    turn = take(Desk(), mail(1, word("r"), with_file("a", 1)))
    assert (acks(turn)[0].upto, acks(turn)[0].mode) == (1, BUSY)
    assert not turn.may_wait


def test_what_a_message_names_is_fetched_when_the_message_is_durable() -> None:
    turn = take(Desk(), mail(1, with_file("a", 1)))
    assert [row.id for row in rows(turn, InRow)] == ["a"]
    (collect,) = [each for each in turn.after if isinstance(each, Collect)]
    assert (collect.sender, collect.message.id) == (PEER, "a")
    assert not turn.free
    assert not [each for each in turn.after if isinstance(each, Deliver)], "it is not complete"


def test_nobody_ends_a_message_that_another_is_fetching() -> None:
    desk = Desk()
    other = AgentId("other")
    desk.engine.sending.taken = {(PEER, "m1"), (other, "m1")}
    take(desk, mail(1, body("r", kind="receipt", data={"id": "m1", "state": "delivered"})))
    assert desk.engine.sending.taken == {(other, "m1")}


@pytest.mark.parametrize(
    "data",
    [
        None,
        {"id": "m1"},
        {"id": "", "state": "done"},
        {"id": "m1", "state": "queued"},
        {"id": "m1", "state": "cancelled"},
        {"id": "m1", "state": ["done"]},
        {"id": "m1", "state": "refused", "reason": "x" * 201},
        {"id": "m1", "state": "refused", "reason": "\x1b[2J"},
        {"id": "m1", "state": "refused", "reason": 7},
    ],
)
def test_a_receipt_of_another_form_is_refused(data: Any) -> None:
    desk = Desk()
    turn = take(desk, mail(1, body("r", kind="receipt", data=data)))
    assert not rows(turn, ReceiptRow)
    assert not receipts(turn)
    assert acks(turn)[0].exceptions[0][1]


def test_a_receipt_that_a_newer_node_may_know_is_passed_over() -> None:
    desk = Desk()
    data = {"id": "m1", "state": "parked"}
    turn = take(desk, mail(1, body("r", kind="receipt", data=data)))
    assert not receipts(turn)
    assert acks(turn)[0].exceptions == ()


def test_a_full_inbox_says_so_and_says_when_there_is_room() -> None:
    desk = Desk(DeliveryConfig(unread_max=10), unread=9)
    turn = take(desk, mail(1, body("a"), body("b")))
    assert [row.id for row in rows(turn, InRow)] == ["a"]
    assert (acks(turn)[0].upto, acks(turn)[0].mode) == (1, BUSY)
    assert is_nothing(desk.engine.inbox_shrank(0))
    (word,) = acks(desk.engine.inbox_shrank(1))
    assert (word.upto, word.mode) == (1, WELL)
    assert is_nothing(desk.engine.inbox_shrank(1)), "it was told once"


def test_a_message_that_comes_again_under_a_new_epoch_does_not_fill_the_inbox_for_ever() -> None:
    desk = Desk(DeliveryConfig(unread_max=3))
    turns = [
        take(desk, mail(1, body("the same"), epoch=at.to_bytes(EPOCH_BYTES))) for at in range(6)
    ]
    asked = join_turns(turns)
    assert list(asked.free) == [CountUnread()], "one count is enough until it is there"
    assert acks(asked)[-1].mode == BUSY
    assert acks(desk.engine.inbox_holds(1)), "who was told to wait may go on"
    assert desk.engine.unread == 1
    assert acks(take(desk, mail(1, body("another"), epoch=b"yetmore!")))[0].mode == WELL


def test_a_full_inbox_is_not_counted_again_while_nothing_comes_or_goes() -> None:
    desk = Desk(DeliveryConfig(unread_max=1), unread=1)
    assert CountUnread() not in take(desk, mail(1, body("a"))).free, "it is as the disk counted it"
    desk.engine.inbox_shrank(1)
    take(desk, mail(1, body("a")))
    assert CountUnread() in take(desk, mail(2, body("b"))).free
    desk.engine.inbox_holds(1)
    assert CountUnread() not in take(desk, mail(2, body("b"))).free


def test_more_refusals_than_an_answer_can_carry_wait() -> None:
    desk = Desk()
    bad = [raw(float("nan"))] * (MAIL_ITEMS_MAX + 1)
    (ack,) = acks(take(desk, mail(1, *bad)))
    assert (ack.upto, ack.mode) == (MAIL_ITEMS_MAX, BUSY)
    floor = MAIL_ITEMS_MAX + 1
    (ack,) = acks(take(desk, mail(floor, body("good"), floor=floor)))
    assert (ack.upto, ack.mode, ack.exceptions) == (floor, WELL, ((floor - 1, FORGOTTEN),))
    (ack,) = acks(take(desk, mail(floor + 1, *bad, floor=floor + 1)))
    assert (len(ack.exceptions), ack.mode) == (MAIL_ITEMS_MAX, BUSY)


def test_that_something_was_forgotten_outlasts_a_restart() -> None:
    desk = Desk()
    take(desk, mail(1, None, body("b"), None))
    (mark,) = rows(take(desk, mail(4, body("d"), floor=4)), Watermark)
    assert mark.exceptions == ((3, FORGOTTEN),), "one word for all of them"
    (greeting,) = acks(Desk(marks=[mark]).engine.connected(PEER, 0.0))
    assert (greeting.upto, greeting.exceptions) == (4, mark.exceptions)


def test_epochs_of_a_sender_are_bounded() -> None:
    desk = Desk()
    for at in range(EPOCHS_KEPT_MAX + 5):
        take(desk, mail(1, body(f"m{at}"), epoch=at.to_bytes(EPOCH_BYTES)))
    assert len(desk.engine._all.with_peer(PEER).inward) == EPOCHS_KEPT_MAX


def test_a_number_beyond_the_limit_is_an_offence() -> None:
    with pytest.raises(RemoteProtocolError):
        take(Desk(), mail(WHOLE_MAX, body("a")))


def test_a_linked_sender_whose_numbers_mean_other_messages_is_told_and_not_heard() -> None:
    desk = Desk()
    take(desk, mail(1, body("a"), body("b")))
    turn = take(desk, mail(2, body("not b"), body("c")))
    assert not rows(turn, InRow)
    assert acks(turn) == [MailAck(THEIRS, 2, body_hash(body("b")))]
    assert not rows(take(desk, mail(3, body("c"))), InRow), "whatever it sends in that epoch"
    assert rows(take(desk, mail(1, body("c"), epoch=b"new one!")), InRow)


def test_a_file_of_another_day_is_not_taken_and_does_not_stop_the_link() -> None:
    desk = Desk()
    take(desk, mail(1, body("a"), body("b")))
    old = mail(2, body("not b"), body("not c"))
    assert not rows(take(desk, old, spooled=True), InRow)
    assert not desk.engine.receiving.has(old, PEER, spooled=True)
    behind = mail(3, body("not c either"))
    assert not rows(take(desk, behind, spooled=True), InRow), "its other files are of that day too"
    assert not desk.engine.receiving.has(behind, PEER, spooled=True)
    assert [row.id for row in rows(take(desk, mail(3, body("c"))), InRow)] == ["c"]


def test_a_file_is_not_taken_when_nobody_can_tell_what_its_numbers_mean() -> None:
    desk = Desk(marks=[Watermark(PEER, THEIRS, 2, NOTHING)])
    drop = mail(1, body("not a"), body("not b"), body("c"))
    assert not rows(take(desk, drop, spooled=True), InRow)
    assert not desk.engine.receiving.has(drop, PEER, spooled=True)
    later = mail(3, body("c"), floor=3)
    assert rows(take(desk, later, spooled=True), InRow), "its sender knows how those ended"


def test_a_file_that_brings_back_what_was_withdrawn_lets_nothing_overtake_it() -> None:
    desk = Desk()
    take(desk, mail(1, body("a"), None))
    drop = mail(1, body("a"), body("b"), body("c"))
    assert not rows(take(desk, drop, spooled=True), InRow)
    assert not desk.engine.receiving.has(drop, PEER, spooled=True)
    assert desk.engine.receiving.has(mail(1, body("a"), body("b")), PEER, spooled=True), (
        "without news"
    )
    rewritten = mail(1, body("a"), None, body("c"))
    assert [row.id for row in rows(take(desk, rewritten, spooled=True), InRow)] == ["c"]


def test_what_was_too_late_in_a_file_does_not_stop_the_rest_of_it() -> None:
    desk = Desk(DeliveryConfig(unread_max=1))
    drop = mail(1, body("a"), body("late", expires_ms=NOW_MS), body("c"))
    take(desk, mail(1, *drop.items[:1]), spooled=True)
    desk.engine.inbox_shrank(1)
    take(desk, mail(1, *drop.items[:2]), spooled=True)
    assert [row.id for row in rows(take(desk, drop, spooled=True), InRow)] == ["c"]


def test_a_file_is_ours_when_all_of_it_was_taken() -> None:
    desk = Desk(DeliveryConfig(unread_max=1))
    drop = mail(1, body("a"), body("b"))
    assert not desk.engine.receiving.has(drop, PEER, spooled=True)
    take(desk, drop, spooled=True)
    assert not desk.engine.receiving.has(drop, PEER, spooled=True), "there was room for one"
    desk.engine.inbox_shrank(1)
    take(desk, drop, spooled=True)
    assert desk.engine.receiving.has(drop, PEER, spooled=True)
    assert not desk.engine.receiving.has(drop, OTHER, spooled=True)


def test_what_expired_in_the_spool_is_nothing_and_what_a_link_brings_is_not_judged() -> None:
    late = body("late", expires_ms=NOW_MS)
    desk = Desk()
    turn = take(desk, mail(1, body("a"), late), spooled=True)
    assert [row.id for row in rows(turn, InRow)] == ["a"]
    assert acks(turn) == [MailAck(THEIRS, 2, body_hash(body("a")), WELL, ((2, ""),))]
    assert rows(take(Desk(), mail(1, late)), InRow)


def test_a_restart_knows_what_has_come() -> None:
    mark = Watermark(PEER, THEIRS, 3, body_hash(body("c")), ((2, "bad"),))
    desk = Desk(marks=[mark])
    turn = take(desk, mail(1, body("a"), body("b"), body("c"), body("d")))
    assert [row.id for row in rows(turn, InRow)] == ["d"]
    (greeting,) = acks(desk.engine.connected(PEER, 0.0))
    assert (greeting.epoch, greeting.upto, greeting.exceptions) == (THEIRS, 4, ((2, "bad"),))


# -- crowds of attachments --------------------------------------------------------------------


def with_file(ident: str, number: int) -> bytes:
    attached = Attachment("a", 5, "text/plain", number.to_bytes(32, "big"))
    return body(ident, attachments=(attached,))


def test_who_offers_too_much_waits_with_its_files_and_not_with_its_texts() -> None:
    desk = Desk()
    upto = 0
    while upto < SENDER_FILES_MAX:
        items = [with_file(f"m{n}", n) for n in range(upto, upto + 512)]
        (ack,) = acks(take(desk, mail(upto + 1, *items)))
        upto += 512
        assert (ack.upto, ack.mode) == (upto, 0)
    (ack,) = acks(take(desk, mail(upto + 1, body("text"), with_file("more", upto), body("behind"))))
    assert (ack.upto, ack.mode) == (upto + 1, 1)  # the text was taken, the file has to wait
    other = AgentId("other")
    turn = desk.engine.receive(mail(1, with_file("theirs", 0), body("text")), other, 0.0, 0)
    assert [(each.upto, each.mode) for each in acks(turn)] == [(2, 0)]
    ended = desk.engine.incomplete.ready((0).to_bytes(32, "big"))
    told = desk.engine.end(ended, 0.0, 0).after
    assert [each.to for each in told if isinstance(each, Send)] == [PEER]
    (ack,) = acks(take(desk, mail(upto + 2, with_file("more", upto), body("behind"))))
    assert (ack.upto, ack.mode) == (upto + 3, 0)


def test_who_takes_none_of_our_words_gets_no_more_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "WORDS_WAITING_MAX", 3)
    desk = Desk()
    for number in range(3):
        (ack,) = acks(take(desk, mail(number + 1, with_file(f"m{number}", number))))
        assert ack.mode == 0
        desk.engine.end(desk.engine.incomplete.failed(number.to_bytes(32, "big"), "no"), 0.0, 0)
    (ack,) = acks(take(desk, mail(4, with_file("m3", 3))))
    assert (ack.upto, ack.mode) == (3, 1)
