"""One engine, answered by hand: what it keeps, sends, believes and refuses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgpack
import pytest
from core.made import identity, mesh_of, open_link

from meshagent.core.delivery import engine as delivery
from meshagent.core.delivery.engine import Delivery, DeliveryConfig
from meshagent.core.delivery.incomplete_messages import SENDER_FILES_MAX
from meshagent.core.delivery.receive_stream import FORGOTTEN
from meshagent.core.effects import (
    CountUnread,
    Deliver,
    Durable,
    Effect,
    Flush,
    Load,
    Note,
    Persist,
    ReceiptChanged,
    Send,
    Transmit,
)
from meshagent.core.model.attachments import Attachment
from meshagent.core.model.message_states import MessageState
from meshagent.core.model.messages import Message, body_hash, pack_body
from meshagent.core.model.peers import AgentId, LinkId
from meshagent.core.model.rows import (
    Delivered,
    InRow,
    NewEpoch,
    OutEntry,
    OutState,
    PeerRow,
    ReceiptRow,
    StreamStart,
    Watermark,
    singly,
)
from meshagent.core.wire.frames import EPOCH_BYTES, HASH_BYTES, WHOLE_MAX, Mail, MailAck, Ping
from meshagent.errors import LimitReached, RemoteProtocolError

PEER, OTHER = AgentId("bob-aaaaaaaa"), AgentId("eve-bbbbbbbb")
EPOCH, THEIRS = b"ourepoch", b"theirday"
NOTHING = bytes(HASH_BYTES)
WRONG = b"\xff" * HASH_BYTES
WELL, BUSY, GAP = 0, 1, 2
NOW_MS = 1_000_000


class Desk:
    """An engine, and the frames and rows that it asked for."""

    def __init__(self, config: DeliveryConfig | None = None, **start: Any) -> None:
        streams, marks = start.pop("streams", ()), start.pop("marks", ())
        unread = start.pop("unread", 0)
        self.engine = Delivery(EPOCH, streams, marks, unread, random.Random(1), config, **start)
        self.messages: list[Message] = []

    def link(self, now: float = 0.0) -> Desk:
        """The peer is here, and has nothing of ours."""
        self.engine.connected(PEER, now)
        self.answer(0, NOTHING, epoch=bytes(EPOCH_BYTES), now=now)
        return self

    def write(self, count: int, now: float = 0.0, **fields: Any) -> list[Effect]:
        """Messages that are durable at once, each in a frame of its own."""
        effects: list[Effect] = []
        for _ in range(count):
            message = Message(f"m{len(self.messages) + 1}", "text", "hello", 1, **fields)
            self.messages.append(message)
            effects += self.engine.accept(PEER, message, now)
            effects += self.engine.flush(PEER, self.epoch, len(self.messages), now)
        return effects

    @property
    def epoch(self) -> bytes:
        return self.engine.numbers(PEER)[0]

    def hash(self, seq: int) -> bytes:
        return body_hash(pack_body(self.messages[seq - 1])) if seq else NOTHING

    def answer(
        self,
        upto: int,
        last: bytes | None = None,
        mode: int = WELL,
        exceptions: tuple[tuple[int, str], ...] = (),
        epoch: bytes = EPOCH,
        now: float = 0.0,
        now_ms: int = NOW_MS,
    ) -> list[Effect]:
        last = self.hash(upto) if last is None else last
        ack = MailAck(epoch, upto, last, mode, exceptions)
        return self.engine.receive(ack, PEER, now, now_ms)

    def entry(self, seq: int, state: MessageState = MessageState.QUEUED) -> OutEntry:
        message = self.messages[seq - 1]
        body = pack_body(message)
        return OutEntry(PEER, seq, message.id, body, state, "", message.expires_ms, 0, 0, False)


def mails(effects: Sequence[Effect]) -> list[Mail]:
    frames = [each.frame for each in effects if isinstance(each, Send)]
    return [each for each in frames if isinstance(each, Mail)]


def numbers(effects: Sequence[Effect]) -> list[int]:
    """What goes on the wire, in order."""
    return [mail.first + at for mail in mails(effects) for at in range(len(mail.items))]


def acks(effects: Sequence[Effect]) -> list[MailAck]:
    frames = [each.frame for each in effects if isinstance(each, Send)]
    return [each for each in frames if isinstance(each, MailAck)]


def rows(effects: Sequence[Effect], kind: type) -> list[Any]:
    kept = [row for e in effects if isinstance(e, Note | Persist) for row in e.rows]
    return [row for row in singly(kept) if isinstance(row, kind)]


def ends(effects: Sequence[Effect]) -> dict[str, str]:
    """How messages have ended, as the rows say; those of a Delivered are named by their number."""
    arrived = [n for row in rows(effects, Delivered) for n in range(row.first, row.last + 1)]
    said = {row.id: str(row.state.value) for row in rows(effects, OutState)}
    return said | {f"m{number}": "delivered" for number in arrived}


def receipts(effects: Sequence[Effect]) -> list[tuple[str, str, str]]:
    changes = [each for each in effects if isinstance(each, ReceiptChanged)]
    return [(ident, e.state.value, e.reason) for e in changes for ident in e.ids]


def starts_over(effects: Sequence[Effect]) -> bool:
    return bool(rows(effects, NewEpoch))


# -- sending --------------------------------------------------------------------------------------


def test_nothing_is_sent_before_it_is_durable() -> None:
    desk = Desk().link()
    effects = desk.engine.accept(PEER, Message("m", "text", "", 1), 0.0)
    assert [type(each) for each in effects] == [Persist, Send, Durable, ReceiptChanged]
    assert numbers(effects) == [1], "in the same turn, and so behind its row"
    assert desk.engine.durable(PEER, EPOCH, 1, 0.0) == [], "it has left"


def test_what_comes_while_a_commit_is_under_way_shares_a_frame() -> None:
    desk = Desk().link()
    assert numbers(desk.engine.accept(PEER, Message("m1", "text", "", 1), 0.0)) == [1]
    for ident in ("m2", "m3"):
        effects = desk.engine.accept(PEER, Message(ident, "text", "", 1), 0.0)
        assert [type(each) for each in effects] == [Persist, Flush]
    assert desk.engine.durable(PEER, EPOCH, 1, 0.0) == []
    (mail,) = mails(desk.engine.flush(PEER, EPOCH, 3, 0.1))
    assert (mail.first, len(mail.items)) == (2, 2)


def test_what_left_with_its_own_commit_is_not_sent_again_before_that_has_ended() -> None:
    """A slow disk: its time to be answered is up, or its link is another, before it is durable."""
    desk = Desk().link()
    assert numbers(desk.write(1)) == [1]
    assert numbers(desk.engine.accept(PEER, Message("m2", "text", "", 1), 0.0)) == [2]
    assert numbers(desk.engine.on_timer(60.0)) == [1]
    desk.engine.connected(PEER, 61.0)
    assert numbers(desk.answer(0, NOTHING, now=61.0)) == [1]
    assert numbers(desk.engine.durable(PEER, EPOCH, 2, 62.0)) == [2]


def test_what_the_link_had_no_room_for_leaves_later_though_it_went_along() -> None:
    desk = Desk().link()
    (mail,) = mails(desk.engine.accept(PEER, Message("m", "text", "", 1), 0.0))
    desk.engine.not_sent(PEER, mail, 0.0)
    assert numbers(desk.engine.durable(PEER, EPOCH, 1, 0.0)) == [], "the link is full"
    due = desk.engine.deadline()
    assert due is not None
    assert numbers(desk.engine.on_timer(due)) == [1]


def test_nothing_is_sent_before_the_peer_has_said_what_it_has() -> None:
    desk = Desk()
    desk.engine.connected(PEER, 0.0)
    (question,) = mails(desk.write(2))
    assert question == Mail(EPOCH, 1, 1, ())
    assert desk.answer(0, NOTHING, epoch=b"anotherd") == [], "of another epoch"
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
    effects = desk.answer(2)
    assert ends(effects) == {"m1": "delivered", "m2": "delivered"}
    assert receipts(effects) == [("m1", "delivered", ""), ("m2", "delivered", "")]
    assert (desk.engine.pending, desk.engine.on_wire) == (1, 1)
    desk.answer(3)
    assert (desk.engine.pending, desk.engine.on_wire, desk.engine.deadline()) == (0, 0, None)


def test_duplicate_and_late_answers_change_nothing() -> None:
    desk = Desk().link()
    desk.write(3)
    desk.answer(3)
    for upto in (3, 2, 1, 0):
        assert desk.answer(upto) == []
        assert desk.answer(upto, WRONG) == []


def test_an_answer_about_another_epoch_changes_nothing() -> None:
    desk = Desk().link()
    desk.write(2)
    assert desk.answer(2, epoch=b"anotherd") == []
    assert desk.answer(10**6, WRONG, epoch=b"anotherd") == []
    assert desk.engine.pending == 2


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
    effects = desk.answer(upto, last)
    (new,) = rows(effects, NewEpoch)
    assert not ends(effects)
    assert desk.engine.numbers(PEER) == (new.epoch, 1)
    assert desk.engine.pending == 2
    (load,) = [e for e in desk.engine.flush(PEER, desk.epoch, 2, 0.0) if isinstance(e, Load)]
    assert (load.first, desk.engine.refused["numbers from another day"]) == (1, 1)


def test_a_recipient_that_forgot_how_a_message_ended_is_not_taken_for_having_it() -> None:
    desk = Desk().link()
    desk.write(4)
    elsewhere = desk.answer(2, exceptions=((1, FORGOTTEN),), epoch=b"anotherd")
    assert elsewhere == [], "another epoch's numbers are not ours"
    desk.answer(1)
    known = desk.answer(2, exceptions=((1, FORGOTTEN),))
    assert ends(known) == {"m2": "delivered"}, "how that one ended we know ourselves"
    unknown = desk.answer(4, exceptions=((3, FORGOTTEN),))
    assert starts_over(unknown)
    assert not ends(unknown)
    assert desk.engine.pending == 2


def test_whoever_contradicts_an_epoch_of_this_run_is_not_believed() -> None:
    desk = Desk().link()
    desk.write(2)
    assert starts_over(desk.answer(9, WRONG))
    epoch = desk.engine.numbers(PEER)[0]
    assert not starts_over(desk.answer(9, WRONG, epoch=epoch, now=10.0))
    assert starts_over(desk.answer(9, WRONG, epoch=epoch, now=delivery.START_OVER_S))
    assert desk.engine.pending == 2


def test_a_refusal_ends_the_message_with_its_reason() -> None:
    desk = Desk().link()
    desk.write(2)
    effects = desk.answer(2, exceptions=((1, "not today"),))
    assert receipts(effects) == [("m1", "refused", "not today"), ("m2", "delivered", "")]


def test_what_was_taken_back_travels_as_nothing_and_ends_when_the_peer_knows() -> None:
    desk = Desk()
    desk.write(2)
    taken_back = desk.engine.withdraw(PEER, 1, "m1", MessageState.CANCELLED, NOW_MS)
    assert ends(taken_back) == {"m1": "cancelled"}
    assert (desk.engine.pending, desk.engine.withdrawn) == (2, 1)
    desk.link()
    effects = desk.engine.loaded(
        PEER, [desk.entry(1, MessageState.CANCELLED), desk.entry(2)], 0.0, NOW_MS
    )
    (mail,) = mails(effects)
    assert [body is None for body in mail.items] == [True, False]
    effects = desk.answer(2, exceptions=((1, ""),))
    assert ends(effects) == {"m1": "cancelled", "m2": "delivered"}
    assert (desk.engine.pending, desk.engine.withdrawn) == (0, 0)


def test_the_recipients_word_counts_more_than_ours_when_it_came_anyway() -> None:
    desk = Desk().link()
    desk.write(1)
    desk.engine.disconnected(PEER)
    assert desk.engine.withdraw(PEER, 1, "m1", MessageState.CANCELLED, NOW_MS)
    assert desk.engine.withdrawn == 1
    desk.engine.connected(PEER, 0.0)
    assert not ends(desk.answer(1)), "it is looked at before that is believed"
    found = desk.engine.loaded(PEER, [desk.entry(1, MessageState.CANCELLED)], 0.0, NOW_MS)
    assert ends(found) == {"m1": "delivered"}
    assert desk.engine.withdrawn == 0


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
        assert desk.engine.withdraw(PEER, 2, "m2", state, NOW_MS) == []
    desk.engine.disconnected(PEER)
    effects = desk.engine.withdraw(PEER, 2, "m2", MessageState.EXPIRED, NOW_MS)
    assert ends(effects) == {"m2": "expired"}


def test_a_message_is_taken_back_once_and_not_after_it_has_ended() -> None:
    desk = Desk().link()
    desk.write(2)
    desk.answer(0, NOTHING, BUSY)  # so they are not on the wire any more
    assert desk.engine.withdraw(PEER, 2, "m2", MessageState.EXPIRED, NOW_MS)
    assert not desk.engine.withdraw(PEER, 2, "m2", MessageState.CANCELLED, NOW_MS)
    desk.answer(1)
    assert not desk.engine.withdraw(PEER, 1, "m1", MessageState.CANCELLED, NOW_MS)


def test_what_is_taken_back_while_it_is_read_from_disk_does_not_leave() -> None:
    desk = Desk()
    desk.write(2)
    desk.link()
    desk.engine.withdraw(PEER, 2, "m2", MessageState.CANCELLED, NOW_MS)
    (mail,) = mails(desk.engine.loaded(PEER, [desk.entry(1), desk.entry(2)], 0.0, NOW_MS))
    assert mail.items[1] is None


def test_a_message_whose_time_is_up_at_the_recipient_first_expires() -> None:
    desk = Desk().link()
    desk.write(1, expires_ms=NOW_MS)
    effects = desk.answer(1, NOTHING, exceptions=((1, ""),))
    assert receipts(effects)[-1] == ("m1", "expired", "")
    assert (desk.engine.pending, desk.engine.withdrawn) == (0, 0)


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
    effects = desk.answer(2, exceptions=((1, ""),))
    assert ends(effects) == {"m1": "expired", "m2": "delivered"}


def test_what_is_proven_expired_stays_so_when_the_rest_starts_over() -> None:
    desk = Desk().link()
    desk.write(3, expires_ms=2 * NOW_MS)
    effects = desk.answer(3, desk.hash(2), exceptions=((1, ""), (3, "")))
    kept = [type(row) for e in effects if isinstance(e, Persist) for row in e.rows]
    assert kept == [OutState, NewEpoch], "in that order: the number must carry nothing"
    assert ends(effects) == {"m1": "expired"}


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
    assert desk.answer(1, mode=GAP, now=1.0) == []


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
    assert due == delivery.FULL_LINK_S
    assert numbers(desk.engine.on_timer(due)) == [1, 2]
    desk.engine.not_sent(PEER, Mail(b"anotherd", 1, 1, ()), 5.0)
    assert desk.engine.deadline() != 5.0 + delivery.FULL_LINK_S


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
    assert (desk.engine.on_wire, desk.engine.deadline()) == (0, None)
    assert not desk.engine._peers[PEER].out.items
    desk.engine.connected(OTHER, 0.0)
    desk.engine.disconnected(OTHER)
    assert OTHER not in desk.engine._peers


def test_an_answer_beyond_memory_is_checked_against_the_disk_before_it_counts() -> None:
    desk = Desk()
    desk.write(3)
    effects = [*desk.engine.connected(PEER, 0.0), *desk.answer(2)]
    loads = [each for each in effects if isinstance(each, Load)]
    assert loads, "what it names is not in memory"
    assert not ends(effects)
    effects = desk.engine.loaded(PEER, [desk.entry(n) for n in (1, 2, 3)], 0.0, NOW_MS)
    assert ends(effects) == {"m1": "delivered", "m2": "delivered"}
    assert numbers(effects) == [3]


def test_an_answer_that_the_disk_contradicts_makes_us_start_over() -> None:
    for items, last in (([1, 2, 3], WRONG), ([], None)):
        desk = Desk()
        desk.write(3)
        desk.engine.connected(PEER, 0.0)
        desk.answer(2, last)
        effects = desk.engine.loaded(PEER, [desk.entry(n) for n in items], 0.0, NOW_MS)
        if not starts_over(effects):  # the first read was of what comes next: that was not there
            effects = desk.engine.loaded(PEER, [], 0.0, NOW_MS)
        assert starts_over(effects), items


def test_what_was_read_under_other_numbers_is_not_used() -> None:
    desk = Desk()
    desk.write(2)
    desk.link()  # reads both
    assert starts_over(desk.answer(9, WRONG))
    assert not mails(desk.engine.loaded(PEER, [desk.entry(1), desk.entry(2)], 0.0, NOW_MS))
    assert not mails(desk.engine.flush(PEER, EPOCH, 99, 0.0)), "a word about the old numbers"


def test_a_full_outbox_refuses() -> None:
    desk = Desk(DeliveryConfig(pending_max=2))
    desk.write(2)
    with pytest.raises(LimitReached, match="2 are waiting"):
        desk.engine.accept(PEER, Message("m", "text", "", 1), 0.0)
    assert desk.engine.pending == 2


def test_a_restart_goes_on_where_the_disk_stands() -> None:
    desk = Desk(streams=[StreamStart(PEER, 3, 6), StreamStart(OTHER, 1, 1)], withdrawn=2)
    assert (desk.engine.pending, desk.engine.withdrawn) == (3, 2)
    assert desk.engine.numbers(PEER) == (EPOCH, 3)


# -- receiving ------------------------------------------------------------------------------------


def body(ident: str, **fields: Any) -> bytes:
    fields = {"kind": "text", "text": "hello", "created_ms": 1} | fields
    return pack_body(Message(ident, **fields))


def mail(first: int, *items: bytes | None, floor: int = 1, epoch: bytes = THEIRS) -> Mail:
    return Mail(epoch, floor, first, items)


def take(desk: Desk, frame: Mail, spooled: bool = False) -> list[Effect]:
    return desk.engine.take(frame, PEER, NOW_MS, spooled)


def test_what_comes_is_kept_then_answered_then_shown() -> None:
    desk = Desk()
    bodies = [body("a"), body("b")]
    effects = take(desk, mail(1, *bodies))
    assert [row.id for row in rows(effects, InRow)] == ["a", "b"]
    assert rows(effects, Watermark) == [Watermark(PEER, THEIRS, 2, body_hash(bodies[1]))]
    assert acks(effects) == [MailAck(THEIRS, 2, body_hash(bodies[1]))]
    (came,) = [each for each in effects if isinstance(each, Deliver)]
    assert [message.id for message in came.messages] == ["a", "b"]
    assert desk.engine.unread == 2


def test_what_came_before_is_answered_and_not_kept_again() -> None:
    desk = Desk()
    take(desk, mail(1, body("a"), body("b")))
    effects = take(desk, mail(1, body("a"), body("b"), body("c")))
    assert [row.id for row in rows(effects, InRow)] == ["c"]
    effects = take(desk, mail(3, body("c")))
    assert (rows(effects, InRow), acks(effects)[0].upto) == ([], 3)
    assert desk.engine.unread == 3


def test_nothing_is_taken_after_a_gap() -> None:
    desk = Desk()
    effects = take(desk, mail(2, body("b")))
    assert not rows(effects, InRow)
    assert (acks(effects)[0].upto, acks(effects)[0].mode) == (0, GAP)


def test_what_was_settled_before_our_disk_was_lost_is_not_waited_for() -> None:
    desk = Desk()
    effects = take(desk, mail(7, body("g"), floor=7))
    assert [row.id for row in rows(effects, InRow)] == ["g"]
    (ack,) = acks(effects)
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
    effects = take(desk, mail(1, bad, body("b")))
    assert [row.id for row in rows(effects, InRow)] == ["b"]
    ((number, reason),) = acks(effects)[0].exceptions
    assert number == 1
    assert 0 < len(reason) <= 200
    assert desk.engine.refused["malformed message"] == 1


@pytest.mark.parametrize("state", ["delivered", "seen", "done", "refused", "expired"])
def test_a_receipt_is_noted_for_the_one_who_gave_it_and_not_shown(state: str) -> None:
    desk = Desk()
    word = body("r", kind="receipt", data={"id": "m1", "state": state, "reason": "why"})
    effects = take(desk, mail(1, word))
    assert rows(effects, ReceiptRow) == [ReceiptRow(PEER, "m1", state, NOW_MS, "why")]
    assert receipts(effects) == [("m1", state, "why")]
    assert not [each for each in effects if isinstance(each, Deliver)]
    assert desk.engine.unread == 0


def test_nobody_ends_a_message_that_another_is_fetching() -> None:
    desk = Desk()
    other = AgentId("other")
    desk.engine.taken = {(PEER, "m1"), (other, "m1")}
    take(desk, mail(1, body("r", kind="receipt", data={"id": "m1", "state": "delivered"})))
    assert desk.engine.taken == {(other, "m1")}


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
    effects = take(desk, mail(1, body("r", kind="receipt", data=data)))
    assert not rows(effects, ReceiptRow)
    assert not receipts(effects)
    assert acks(effects)[0].exceptions[0][1]


def test_a_full_inbox_says_so_and_says_when_there_is_room() -> None:
    desk = Desk(DeliveryConfig(unread_max=10), unread=9)
    effects = take(desk, mail(1, body("a"), body("b")))
    assert [row.id for row in rows(effects, InRow)] == ["a"]
    assert (acks(effects)[0].upto, acks(effects)[0].mode) == (1, BUSY)
    assert not desk.engine.inbox_shrank(0, 0.0)
    (word,) = acks(desk.engine.inbox_shrank(1, 0.0))
    assert (word.upto, word.mode) == (1, WELL)
    assert not desk.engine.inbox_shrank(1, 0.0), "it was told once"


def test_a_message_that_comes_again_under_a_new_epoch_does_not_fill_the_inbox_for_ever() -> None:
    desk = Desk(DeliveryConfig(unread_max=3))
    asked: list[Effect] = []
    for at in range(6):
        asked += take(desk, mail(1, body("the same"), epoch=at.to_bytes(EPOCH_BYTES)))
    assert asked.count(CountUnread()) == 1, "one count is enough until it is there"
    assert acks(asked)[-1].mode == BUSY
    assert acks(desk.engine.inbox_holds(1, 0.0)), "who was told to wait may go on"
    assert desk.engine.unread == 1
    assert acks(take(desk, mail(1, body("another"), epoch=b"yetmore!")))[0].mode == WELL


def test_a_full_inbox_is_not_counted_again_while_nothing_comes_or_goes() -> None:
    desk = Desk(DeliveryConfig(unread_max=1), unread=1)
    assert CountUnread() not in take(desk, mail(1, body("a"))), "it is as the disk counted it"
    desk.engine.inbox_shrank(1, 0.0)
    take(desk, mail(1, body("a")))
    assert CountUnread() in take(desk, mail(2, body("b")))
    desk.engine.inbox_holds(1, 0.0)
    assert CountUnread() not in take(desk, mail(2, body("b")))


def test_more_refusals_than_an_answer_can_carry_wait() -> None:
    desk = Desk()
    bad = [raw(float("nan"))] * (delivery.MAIL_ITEMS_MAX + 1)
    (ack,) = acks(take(desk, mail(1, *bad)))
    assert (ack.upto, ack.mode) == (delivery.MAIL_ITEMS_MAX, BUSY)
    floor = delivery.MAIL_ITEMS_MAX + 1
    (ack,) = acks(take(desk, mail(floor, body("good"), floor=floor)))
    assert (ack.upto, ack.mode, ack.exceptions) == (floor, WELL, ((floor - 1, FORGOTTEN),))
    (ack,) = acks(take(desk, mail(floor + 1, *bad, floor=floor + 1)))
    assert (len(ack.exceptions), ack.mode) == (delivery.MAIL_ITEMS_MAX, BUSY)


def test_that_something_was_forgotten_outlasts_a_restart() -> None:
    desk = Desk()
    take(desk, mail(1, None, body("b"), None))
    (mark,) = rows(take(desk, mail(4, body("d"), floor=4)), Watermark)
    assert mark.exceptions == ((3, FORGOTTEN),), "one word for all of them"
    (greeting,) = acks(Desk(marks=[mark]).engine.connected(PEER, 0.0))
    assert (greeting.upto, greeting.exceptions) == (4, mark.exceptions)


def test_epochs_of_a_sender_are_bounded() -> None:
    desk = Desk()
    for at in range(delivery.EPOCHS_KEPT_MAX + 5):
        take(desk, mail(1, body(f"m{at}"), epoch=at.to_bytes(EPOCH_BYTES)))
    assert len(desk.engine._peers[PEER].inward) == delivery.EPOCHS_KEPT_MAX


def test_a_number_beyond_the_limit_is_an_offence() -> None:
    with pytest.raises(RemoteProtocolError):
        take(Desk(), mail(WHOLE_MAX, body("a")))


def test_a_linked_sender_whose_numbers_mean_other_messages_is_told_and_not_heard() -> None:
    desk = Desk()
    take(desk, mail(1, body("a"), body("b")))
    effects = take(desk, mail(2, body("not b"), body("c")))
    assert not rows(effects, InRow)
    assert acks(effects) == [MailAck(THEIRS, 2, body_hash(body("b")))]
    assert not rows(take(desk, mail(3, body("c"))), InRow), "whatever it sends in that epoch"
    assert rows(take(desk, mail(1, body("c"), epoch=b"new one!")), InRow)


def test_a_file_of_another_day_is_not_taken_and_does_not_stop_the_link() -> None:
    desk = Desk()
    take(desk, mail(1, body("a"), body("b")))
    old = mail(2, body("not b"), body("not c"))
    assert not rows(take(desk, old, spooled=True), InRow)
    assert not desk.engine.has(old, PEER, spooled=True)
    behind = mail(3, body("not c either"))
    assert not rows(take(desk, behind, spooled=True), InRow), "its other files are of that day too"
    assert not desk.engine.has(behind, PEER, spooled=True)
    assert [row.id for row in rows(take(desk, mail(3, body("c"))), InRow)] == ["c"]


def test_a_file_is_not_taken_when_nobody_can_tell_what_its_numbers_mean() -> None:
    desk = Desk(marks=[Watermark(PEER, THEIRS, 2, NOTHING)])
    drop = mail(1, body("not a"), body("not b"), body("c"))
    assert not rows(take(desk, drop, spooled=True), InRow)
    assert not desk.engine.has(drop, PEER, spooled=True)
    later = mail(3, body("c"), floor=3)
    assert rows(take(desk, later, spooled=True), InRow), "its sender knows how those ended"


def test_a_file_that_brings_back_what_was_withdrawn_lets_nothing_overtake_it() -> None:
    desk = Desk()
    take(desk, mail(1, body("a"), None))
    drop = mail(1, body("a"), body("b"), body("c"))
    assert not rows(take(desk, drop, spooled=True), InRow)
    assert not desk.engine.has(drop, PEER, spooled=True)
    assert desk.engine.has(mail(1, body("a"), body("b")), PEER, spooled=True), "without news"
    rewritten = mail(1, body("a"), None, body("c"))
    assert [row.id for row in rows(take(desk, rewritten, spooled=True), InRow)] == ["c"]


def test_what_was_too_late_in_a_file_does_not_stop_the_rest_of_it() -> None:
    desk = Desk(DeliveryConfig(unread_max=1))
    drop = mail(1, body("a"), body("late", expires_ms=NOW_MS), body("c"))
    take(desk, mail(1, *drop.items[:1]), spooled=True)
    desk.engine.inbox_shrank(1, 0.0)
    take(desk, mail(1, *drop.items[:2]), spooled=True)
    assert [row.id for row in rows(take(desk, drop, spooled=True), InRow)] == ["c"]


def test_a_file_is_ours_when_all_of_it_was_taken() -> None:
    desk = Desk(DeliveryConfig(unread_max=1))
    drop = mail(1, body("a"), body("b"))
    assert not desk.engine.has(drop, PEER, spooled=True)
    take(desk, drop, spooled=True)
    assert not desk.engine.has(drop, PEER, spooled=True), "there was room for one"
    desk.engine.inbox_shrank(1, 0.0)
    take(desk, drop, spooled=True)
    assert desk.engine.has(drop, PEER, spooled=True)
    assert not desk.engine.has(drop, OTHER, spooled=True)


def test_what_expired_in_the_spool_is_nothing_and_what_a_link_brings_is_not_judged() -> None:
    late = body("late", expires_ms=NOW_MS)
    desk = Desk()
    effects = take(desk, mail(1, body("a"), late), spooled=True)
    assert [row.id for row in rows(effects, InRow)] == ["a"]
    assert acks(effects) == [MailAck(THEIRS, 2, body_hash(body("a")), WELL, ((2, ""),))]
    assert rows(take(Desk(), mail(1, late)), InRow)


def test_a_restart_knows_what_has_come() -> None:
    mark = Watermark(PEER, THEIRS, 3, body_hash(body("c")), ((2, "bad"),))
    desk = Desk(marks=[mark])
    effects = take(desk, mail(1, body("a"), body("b"), body("c"), body("d")))
    assert [row.id for row in rows(effects, InRow)] == ["d"]
    (greeting,) = acks(desk.engine.connected(PEER, 0.0))
    assert (greeting.epoch, greeting.upto, greeting.exceptions) == (THEIRS, 4, ((2, "bad"),))


def test_other_frames_are_not_for_delivery() -> None:
    assert Desk().engine.receive(Ping(1), PEER, 0.0, NOW_MS) == []


# -- within a mesh --------------------------------------------------------------------------------


def test_what_was_on_a_lost_link_goes_over_the_other_one_at_once() -> None:
    me, peer = identity("me"), identity("peer")
    mesh = mesh_of(me)
    mesh.delivery = Delivery(EPOCH, (), (), 0, random.Random(1))
    open_link(mesh, peer, 1, 0.0)
    open_link(mesh, peer, 2, 0.1)
    in_use = mesh.links.link_to(peer.agent)
    assert in_use is not None
    mesh.received(in_use, MailAck(bytes(EPOCH_BYTES), 0, NOTHING), 0.2)
    effects = mesh.accept([(peer.agent, Message("m", "text", "", 1))], 0.2)
    assert Mail in {type(e.frame) for e in effects if _is_sent(e)}
    epoch, _ = mesh.numbers(peer.agent) or (b"", 0)
    assert mesh.durable(peer.agent, epoch, 1, 0.2) == []
    effects = mesh.closed(in_use, "lost", 0.3)
    (other,) = {1, 2} - {in_use}
    asked = [e for e in effects if _is_sent(e) and e.link == other and type(e.frame) is Mail]
    assert asked, "it asks what has come, and does not wait for an answer's time to be up"
    effects = mesh.received(LinkId(other), MailAck(EPOCH, 0, NOTHING), 0.4)
    (again,) = [e.frame for e in effects if _is_sent(e) and type(e.frame) is Mail]
    assert len(again.items) == 1


def test_losing_a_link_that_was_not_in_use_disturbs_nothing() -> None:
    me, peer = identity("me"), identity("peer")
    mesh = mesh_of(me)
    mesh.delivery = Delivery(EPOCH, (), (), 0, random.Random(1))
    open_link(mesh, peer, 1, 0.0)
    open_link(mesh, peer, 2, 0.1)
    (spare,) = {1, 2} - {mesh.links.link_to(peer.agent)}
    assert mesh.closed(LinkId(spare), "lost", 0.3) == []


def test_who_was_met_a_moment_before_leaving_is_remembered() -> None:
    mesh, peer = mesh_of(identity("me")), identity("peer")
    open_link(mesh, peer, 1, 0.0)
    rows = [row for e in mesh.leave(0.1) if isinstance(e, Persist) for row in e.rows]
    assert [row.agent for row in rows if isinstance(row, PeerRow)] == [peer.agent]
    assert not [e for e in mesh.leave(0.2) if isinstance(e, Persist)]


def _is_sent(effect: Effect) -> bool:
    return isinstance(effect, Transmit)


def test_only_what_can_expire_waits_for_the_disk_before_it_is_called_delivered() -> None:
    me = Desk().link()
    me.write(1)
    me.write(1, expires_ms=10**13)
    first, second = (e for e in me.answer(2) if isinstance(e, Note))
    assert (ends([first]), first.urgent) == ({"m1": "delivered"}, False)
    assert (ends([second]), second.urgent) == ({"m2": "delivered"}, True)


def test_a_recipient_is_told_only_what_is_settled_on_our_disk_too() -> None:
    me = Desk().link()
    me.write(2)
    kept = rows(me.answer(1), Delivered)
    assert [mail.floor for mail in mails(me.write(1))] == [1]
    me.engine.noted(kept)
    assert [mail.floor for mail in mails(me.write(1))] == [2]


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
    effects = desk.engine.take(mail(1, with_file("theirs", 0), body("text")), other, 0)
    assert [(each.upto, each.mode) for each in acks(effects)] == [(2, 0)]
    ended = desk.engine.incomplete.ready((0).to_bytes(32, "big"))
    assert [each.to for each in desk.engine.end(ended, 0.0, 0) if isinstance(each, Send)] == [PEER]
    (ack,) = acks(take(desk, mail(upto + 2, with_file("more", upto), body("behind"))))
    assert (ack.upto, ack.mode) == (upto + 3, 0)


def test_who_takes_none_of_our_words_gets_no_more_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "WORDS_WAITING_MAX", 3)
    desk = Desk()
    for number in range(3):
        (ack,) = acks(take(desk, mail(number + 1, with_file(f"m{number}", number))))
        assert ack.mode == 0
        desk.engine.end(desk.engine.incomplete.failed(number.to_bytes(32, "big"), "no"), 0.0, 0)
    (ack,) = acks(take(desk, mail(4, with_file("m3", 3))))
    assert (ack.upto, ack.mode) == (3, 1)
