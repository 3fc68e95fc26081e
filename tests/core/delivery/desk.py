"""One delivery engine, answered by hand, and how to read the turns that it answers with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from meshagent.core.delivery.engine import Delivery, DeliveryConfig
from meshagent.core.effects import Effect, Load, ReceiptChanged, Send
from meshagent.core.model.message_states import MessageState
from meshagent.core.model.messages import Message, Outgoing, body_hash, pack_body
from meshagent.core.model.peers import AgentId
from meshagent.core.model.rows import Delivered, MailStart, NewEpoch, OutEntry, OutState, singly
from meshagent.core.turns import Turn, join_turns
from meshagent.core.wire.frames import EPOCH_BYTES, HASH_BYTES, Frame, Mail, MailAck

PEER, OTHER = AgentId("bob-aaaaaaaa"), AgentId("eve-bbbbbbbb")
EPOCH = b"ourepoch"
NOTHING = bytes(HASH_BYTES)
WRONG = b"\xff" * HASH_BYTES
WELL, BUSY, GAP = 0, 1, 2
NOW_MS = 1_000_000


def outgoing(*messages: Message, to: Sequence[AgentId] = (PEER,)) -> Outgoing:
    """A batch; with one recipient, all of it is for that one."""
    peers = [*to] * len(messages) if len(to) == 1 else to
    return Outgoing.of(peers, list(zip(*messages, strict=True)))


class Desk:
    """An engine, and the messages that were written with it."""

    def __init__(self, config: DeliveryConfig | None = None, **start: Any) -> None:
        streams, marks = tuple(start.pop("streams", ())), tuple(start.pop("marks", ()))
        unread = start.pop("unread", 0)
        begin = MailStart(EPOCH, streams, marks, unread, **start)
        self.engine = Delivery(begin, random.Random(1), config)
        self.messages: list[Message] = []

    def link(self, now: float = 0.0) -> Desk:
        """The peer is here, and has nothing of ours."""
        self.engine.connected(PEER, now)
        self.answer(0, NOTHING, epoch=bytes(EPOCH_BYTES), now=now)
        return self

    def write(self, count: int, now: float = 0.0, **fields: Any) -> Turn:
        """What comes of messages that are durable at once, each in a frame of its own."""
        turns: list[Turn] = []
        for _ in range(count):
            message = Message(f"m{len(self.messages) + 1}", "text", "hello", 1, **fields)
            self.messages.append(message)
            self.engine.accept(outgoing(message), now)
            turns.append(self.engine.durable(PEER, self.epoch, len(self.messages), now))
        return join_turns(turns)

    def take_back(self, seq: int, state: MessageState = MessageState.CANCELLED) -> Turn:
        """What comes of taking a message back; the disk knows it at once."""
        turn = self.engine.withdraw(PEER, seq, f"m{seq}", state, NOW_MS)
        then = self.engine.taken_back(PEER, self.epoch, seq, 0.0)
        return join_turns([turn, then])

    @property
    def epoch(self) -> bytes:
        """The one that our numbers are of."""
        return self.engine.numbers(PEER)[0]

    def hash(self, seq: int) -> bytes:
        """What names the message with this number."""
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
    ) -> Turn:
        """The peer says how far it has come."""
        last = self.hash(upto) if last is None else last
        ack = MailAck(epoch, upto, last, mode, exceptions)
        return self.engine.receive(ack, PEER, now, now_ms)

    def entry(self, seq: int, state: MessageState = MessageState.QUEUED) -> OutEntry:
        """The message with this number as the disk has it."""
        message = self.messages[seq - 1]
        body = pack_body(message)
        return OutEntry(PEER, seq, message.id, body, state, "", message.expires_ms, 0, 0, False)


def is_nothing(turn: Turn) -> bool:
    """Whether nothing is to be done."""
    return not (turn.free or turn.rows or turn.after)


def _frames(effects: Sequence[Effect]) -> list[Frame]:
    return [each.frame for each in effects if isinstance(each, Send)]


def mails(turn: Turn) -> list[Mail]:
    """What goes on the wire: it is durable, so it waits for nothing."""
    assert not [each for each in _frames(turn.after) if isinstance(each, Mail)]
    return [each for each in _frames(turn.free) if isinstance(each, Mail)]


def numbers(turn: Turn) -> list[int]:
    """The numbers that go on the wire, in order."""
    return [mail.first + at for mail in mails(turn) for at in range(len(mail.items))]


def acks(turn: Turn) -> list[MailAck]:
    """What a sender hears: it rests on the rows of all that has come, so it never goes at once."""
    assert not [each for each in _frames(turn.free) if isinstance(each, MailAck)]
    return [each for each in _frames(turn.after) if isinstance(each, MailAck)]


def rows(turn: Turn, kind: type) -> list[Any]:
    """What is to be kept, of one kind, with a row for each message."""
    return [row for row in singly(turn.rows) if isinstance(row, kind)]


def loads(turn: Turn) -> list[Load]:
    """What is to be read from disk."""
    return [each for each in turn.free if isinstance(each, Load)]


def ends(turn: Turn) -> dict[str, str]:
    """How messages have ended, as the rows say; those of a Delivered are named by their number."""
    arrived = [n for row in rows(turn, Delivered) for n in range(row.first, row.last + 1)]
    said = {row.id: str(row.state.value) for row in rows(turn, OutState)}
    return said | {f"m{number}": "delivered" for number in arrived}


def receipts(turn: Turn) -> list[tuple[str, str, str]]:
    """What is told of our messages, at once or when that is durable."""
    changes = [each for each in [*turn.free, *turn.after] if isinstance(each, ReceiptChanged)]
    return [(ident, e.state.value, e.reason) for e in changes for ident in e.ids]


def starts_over(turn: Turn) -> bool:
    """Whether all that waits gets new numbers."""
    return bool(rows(turn, NewEpoch))
