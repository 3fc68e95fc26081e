"""What the simulator found in the sending half, each as one small test."""

from __future__ import annotations

import random

import pytest

from meshagent.core.delivery import sending
from meshagent.core.delivery.config import DeliveryConfig
from meshagent.core.delivery.engine import Delivery
from meshagent.core.effects import Durable, Load, ReceiptChanged, Send, TakenBack
from meshagent.core.model.attachments import Attachment
from meshagent.core.model.message_states import MessageState
from meshagent.core.model.messages import RECEIPT_KIND, Message, Outgoing, body_hash, pack_body
from meshagent.core.model.peers import AgentId
from meshagent.core.model.rows import MailStart, NewEpoch, OutState
from meshagent.core.turns import Turn
from meshagent.core.wire.frames import EPOCH_BYTES, HASH_BYTES, Mail, MailAck
from meshagent.errors import LimitReached

PEER, EPOCH, THEIRS = AgentId("bob-00000000"), b"e" * EPOCH_BYTES, b"t" * EPOCH_BYTES


def started(**limits: int) -> Delivery:
    start = MailStart(EPOCH, (), (), 0)
    return Delivery(start, random.Random(1), DeliveryConfig(**limits))


def text(ident: str, attachments: tuple[Attachment, ...] = ()) -> Message:
    return Message(ident, "text", "x", 1, attachments=attachments)


def outgoing(*messages: Message) -> Outgoing:
    return Outgoing.of([PEER] * len(messages), list(zip(*messages, strict=True)))


def accepted(engine: Delivery, *messages: Message) -> None:
    engine.accept(outgoing(*messages), 0.0)
    engine.durable(PEER, EPOCH, engine._all.with_peer(PEER).out.next_seq - 1, 0.0)


def linked(engine: Delivery) -> Turn:
    """The peer is here, and has nothing of ours."""
    engine.connected(PEER, 0.0)
    return engine.receive(MailAck(EPOCH, 0, bytes(HASH_BYTES)), PEER, 0.0, 0)


def mails(turn: Turn) -> list[Mail]:
    sends = [each for each in turn.free if isinstance(each, Send)]
    return [each.frame for each in sends if isinstance(each.frame, Mail)]


def test_a_message_that_was_taken_back_travels_as_nothing_once_the_disk_knows() -> None:
    engine = started()
    engine.connected(PEER, 0.0)
    accepted(engine, text("m1"), text("m2"), text("m3"))
    turn = engine.withdraw(PEER, 2, "m2", MessageState.CANCELLED, 0)
    assert [type(each) for each in turn.after] == [ReceiptChanged, TakenBack]
    (mail,) = mails(engine.receive(MailAck(EPOCH, 0, bytes(HASH_BYTES)), PEER, 0.0, 0))
    assert mail.items == (pack_body(text("m1")),), "what comes behind would say what is not kept"
    (mail,) = mails(engine.taken_back(PEER, EPOCH, 2, 0.0))
    assert (mail.first, mail.items) == (2, (None, pack_body(text("m3"))))


def test_a_number_of_an_epoch_that_is_being_given_up_takes_nothing_back() -> None:
    engine = started()
    accepted(engine, text("m1"), text("m2"))
    linked(engine)
    lie = engine.receive(MailAck(EPOCH, 10**6, bytes(HASH_BYTES)), PEER, 0.0, 0)
    assert [type(each) for each in lie.rows] == [NewEpoch]
    assert not engine.withdraw(PEER, 1, "m1", MessageState.EXPIRED, 0).rows
    (durable,) = [each for each in lie.after if isinstance(each, Durable)]
    engine.durable(PEER, durable.epoch, durable.upto, 0.0)
    (row,) = engine.withdraw(PEER, 1, "m1", MessageState.EXPIRED, 0).rows
    assert isinstance(row, OutState)


def test_an_answer_about_numbers_that_are_not_durable_yet_reads_nothing() -> None:
    engine = started()
    accepted(engine, text("m1"), text("m2"))
    linked(engine)
    lie = engine.receive(MailAck(EPOCH, 10**6, bytes(HASH_BYTES)), PEER, 0.0, 0)
    (durable,) = [each for each in lie.after if isinstance(each, Durable)]
    again = engine.receive(MailAck(durable.epoch, 1, b"h" * HASH_BYTES), PEER, 0.0, 0)
    assert not [each for each in again.free if isinstance(each, Load)], (
        "the disk still has the old numbers, and would give another message for this one"
    )


def test_a_receipt_that_overtakes_the_answer_leaves_nothing_on_the_wire() -> None:
    engine = started()
    message = text("m1", (Attachment("f", 1, "text/plain", b"s" * 32),))
    linked(engine)
    accepted(engine, message)
    said = Message("r1", RECEIPT_KIND, "", 1, {"id": "m1", "state": "delivered"})
    engine.receive(Mail(THEIRS, 1, 1, (pack_body(said),)), PEER, 0.0, 0)
    engine.receive(MailAck(EPOCH, 1, body_hash(pack_body(message))), PEER, 0.0, 0)
    assert engine.outbox_counts() == {"queued": 0, "sent": 0}


def test_a_full_outbox_takes_receipts_up_to_each_peers_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sending, "WORDS_WAITING_MAX", 3)
    engine = started(pending_max=2)
    accepted(engine, text("m1"), text("m2"))
    with pytest.raises(LimitReached):
        engine.accept(outgoing(text("m3")), 0.0)
    said = Message("r1", RECEIPT_KIND, "", 1, {"id": "x", "state": "done"})
    assert engine.accept(outgoing(said), 0.0, receipts=True).rows
    with pytest.raises(LimitReached):
        engine.accept(outgoing(said._replace(id="r2")), 0.0, receipts=True)
