"""What comes from each peer: taken in order and once, kept, then answered. Never touches a disk.

The recipient takes number n+1 only after n, so what it holds of a sender is one number, the
watermark, and everything at or below it is a duplicate. Its answer names epoch, watermark and the
hash of the last message, and rests on the rows of all that it covers. Invariants: nothing is
acknowledged or handed out before it is durable; a full inbox stops those who fill it, visibly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from meshagent.core.delivery.config import DeliveryConfig
from meshagent.core.delivery.conversations import WORDS_WAITING_MAX, Conversations
from meshagent.core.delivery.incomplete_messages import Ended, IncompleteMessages
from meshagent.core.delivery.receive_stream import BUSY, GAP, WELL, ReceiveStream
from meshagent.core.effects import (
    Collect,
    CountUnread,
    Deliver,
    Effect,
    ReceiptChanged,
    Send,
)
from meshagent.core.model.message_states import MessageState
from meshagent.core.model.messages import (
    RECEIPT_KIND,
    Message,
    blobs_of,
    is_id,
    parse_bodies,
    parse_body,
)
from meshagent.core.model.peers import AgentId
from meshagent.core.model.rows import Arrived, InBatch, ReceiptRow, Row, TurnedAway, Watermark
from meshagent.core.turns import NOTHING, Turn
from meshagent.core.wire.frames import MAIL_ITEMS_MAX, TEXT_CHARACTERS_MAX, WHOLE_MAX, Mail
from meshagent.errors import RemoteProtocolError

__all__ = ["Receiving"]

_RECIPIENT_SAYS = frozenset({"delivered", "seen", "done", "refused", "expired"})
_STATES = frozenset(state.value for state in MessageState)
_SAID_LATER = frozenset({"seen", "done"})
_ident = attrgetter("id")
Found = Message | RemoteProtocolError | None
"""What stands under a number: a message, why it is none, or nothing, since it was withdrawn."""


class Arrival(NamedTuple):
    """Whose mail this is, and how it came."""

    peer: AgentId
    epoch: bytes
    now_ms: int
    spooled: bool

    def is_late(self, message: Message) -> bool:
        """Whether it expired in the spool: its sender may have ended before it could say so. One
        machine has one clock, so ours is the sender's; a link may have another at its end."""
        return self.spooled and 0 < message.expires_ms <= self.now_ms

    def brings_back(self, bodies: Iterable[bytes]) -> bool:
        """Whether a file holds what its sender had withdrawn, unless we did that, as too late.

        It is older than that, or its sender's database is: either way what comes behind in it
        waits for a file or a link that knows better, or it would overtake this.
        """
        return self.spooled and any(not self.is_late(parse_body(body)) for body in bodies)


@dataclass(slots=True)
class _Taken:
    """What one frame of mail brought."""

    rows: list[Row] = field(default_factory=list)
    came: list[Message] = field(default_factory=list)
    free: list[Effect] = field(default_factory=list)
    after: list[Effect] = field(default_factory=list)


class Receiving:
    """The messages of all peers to one agent."""

    def __init__(
        self,
        conversations: Conversations,
        config: DeliveryConfig,
        refused: Counter[str],
        unread: int,
        incomplete: IncompleteMessages,
        receipt_came: Callable[[AgentId, str, bool], bool],
    ) -> None:
        self._all, self._config, self._refused = conversations, config, refused
        self.incomplete = incomplete
        self.unread = unread
        """Messages in the inbox that nobody has dealt with, as far as it is known here."""
        self.inbox_changes = 0
        """Grows whenever `unread` does not come from the disk: then a count is out of date."""
        self._receipt_came = receipt_came
        self._is_sure = True
        self._is_counting = False

    # -- mail ---------------------------------------------------------------------------------

    def has(self, mail: Mail, peer: AgentId, spooled: bool = False) -> bool:
        """Whether all of this was taken, now or before, and counts once it is durable."""
        known = self._all.get(peer)
        stream = known.inward.get(mail.epoch) if known is not None else None
        if stream is None or stream.distrusts(mail, spooled):
            return False
        return stream.seq >= mail.first + len(mail.items) - 1

    def take(self, mail: Mail, peer: AgentId, now_ms: int, spooled: bool = False) -> Turn:
        """Mail from a peer, over a link or from the spool: what is news is kept, then answered."""
        if mail.first + len(mail.items) > WHOLE_MAX:
            raise RemoteProtocolError("A message's number is beyond the limit.")
        stream = self._all.with_peer(peer).stream_of(mail.epoch)
        arrival = Arrival(peer, mail.epoch, now_ms, spooled)
        if (spooled or stream.doubted or mail.first <= stream.seq) and (
            stream.distrusts(mail, spooled) or arrival.brings_back(stream.withdrawn_in(mail))
        ):
            return self.answer(peer, mail.epoch)  # it names what we have: the sender starts over
        if mail.floor > stream.seq + 1:
            self._refused["mail of a lost database"] += 1
            stream.skip_to(mail.floor)
        if stream.exceptions:
            stream.forget_below(mail.floor)
        if mail.first > stream.seq + 1:
            return Turn(after=[Send(peer, stream.answer(mail.epoch, GAP))])
        return self._take_items(arrival, stream, mail.items[stream.seq + 1 - mail.first :])

    def _take_items(
        self, arrival: Arrival, stream: ReceiveStream, items: Sequence[bytes | None]
    ) -> Turn:
        """As many as there is room for, in stretches of plain messages and one by one."""
        peer, epoch, _, _ = arrival
        before, taken, has_all = stream.seq, _Taken(), True
        found = zip(items, parse_bodies(items), strict=True) if items else ()
        for plain, stretch in groupby(found, lambda each: _is_plain(each[1], arrival)):
            part = list(stretch)
            took = self._take_plain if plain else self._take_special
            if not took(arrival, stream, part, taken):
                has_all = False
                break
        answer = stream.answer(epoch, WELL if has_all else BUSY)
        if stream.seq != before:
            taken.rows.append(
                Watermark(peer, epoch, answer.upto, answer.last, answer.exceptions)
            )  # fmt: skip
        if taken.came:
            taken.after.append(Deliver(peer, taken.came))
        taken.after.append(Send(peer, answer))
        if not has_all:
            self._all.with_peer(peer).told_busy = True
            taken.free += self._count_again()
        # Receipts alone are notes: until they are acknowledged, their sender says them again.
        is_note = has_all and set(map(type, taken.rows)) == {ReceiptRow, Watermark}
        return Turn(taken.free, taken.rows, taken.after, is_note)

    def _take_plain(
        self,
        arrival: Arrival,
        stream: ReceiveStream,
        part: Sequence[tuple[bytes | None, Found]],
        taken: _Taken,
    ) -> bool:
        """Messages with nothing attached; whether there was room for all."""
        if len(stream.exceptions) >= MAIL_ITEMS_MAX:
            return False
        room = max(0, self._config.unread_max - self.unread)
        fitting = part[:room] if room < len(part) else part
        if fitting:
            bodies = [body for body, _ in fitting if body is not None]
            messages = [message for _, message in fitting if isinstance(message, Message)]
            ids = list(map(_ident, messages))
            taken.rows.append(
                InBatch(arrival.peer, arrival.epoch, stream.seq + 1, ids, bodies, arrival.now_ms)
            )
            taken.came += messages
            stream.seq, stream.unhashed = stream.seq + len(bodies), bodies[-1]
            self._came(len(bodies))
        return len(fitting) == len(part)

    def _take_special(
        self,
        arrival: Arrival,
        stream: ReceiveStream,
        part: Sequence[tuple[bytes | None, Found]],
        taken: _Taken,
    ) -> bool:
        """Withdrawn ones, receipts, messages with attachments, and what is no message."""
        return all(self._take_one(arrival, stream, *each, taken) for each in part)

    def _take_one(
        self, arrival: Arrival, stream: ReceiveStream, body: bytes | None, found: Found,
        taken: _Taken,
    ) -> bool:  # fmt: skip
        """Whether it was taken; if not, it and all behind it have to wait."""
        seq, peer = stream.seq + 1, arrival.peer
        if self._is_full() or len(stream.exceptions) >= MAIL_ITEMS_MAX:
            return False
        if body is None or (isinstance(found, Message) and arrival.is_late(found)):
            stream.seq, stream.exceptions[seq] = seq, ""
            return True
        if isinstance(found, Message) and found.attachments and self.is_crowded(peer):
            return False
        stream.seq, stream.unhashed = seq, body
        try:
            if not isinstance(found, Message):
                assert found is not None, "a body is a message, or says why not"
                raise found
            if found.kind == RECEIPT_KIND:
                self._take_receipt(peer, found, arrival.now_ms, taken)
            else:
                self._hold(arrival, stream, found, body, taken)
        except RemoteProtocolError as error:
            self._refused["malformed message"] += 1
            stream.exceptions[seq] = error.message[:TEXT_CHARACTERS_MAX]
        return True

    def _hold(
        self, arrival: Arrival, stream: ReceiveStream, message: Message, body: bytes, taken: _Taken
    ) -> None:
        """A message with attachments is kept, and handed out when it is complete."""
        why = self.incomplete.limits.refusal(message.attachments)
        if why:
            self._refused["attachments beyond the limits"] += 1
            stream.exceptions[stream.seq] = why[:TEXT_CHARACTERS_MAX]
            return
        self.incomplete.hold(arrival.peer, message, len(body))
        blobs = (blobs_of(message.attachments),)
        peer, epoch, now_ms, _ = arrival
        taken.rows.append(InBatch(peer, epoch, stream.seq, [message.id], [body], now_ms, blobs))
        taken.after.append(Collect(arrival.peer, message))

    def _take_receipt(self, peer: AgentId, message: Message, now_ms: int, taken: _Taken) -> None:
        match message.data:
            case {"id": str() as ident, "state": str() as state} if is_id(ident) and is_id(state):
                reason = message.data.get("reason", "")
                if state not in _STATES:
                    return  # a newer node has more to say than we know
                if state in _RECIPIENT_SAYS and (reason == "" or is_id(reason)):
                    may_tell = self._receipt_came(peer, ident, state not in _SAID_LATER)
                    told = taken.free if may_tell else taken.after
                    taken.rows.append(ReceiptRow(peer, ident, state, now_ms, reason))
                    told.append(ReceiptChanged(peer, [ident], MessageState(state), reason))
                    return
        raise RemoteProtocolError("A receipt names a message, how far it has come, and why.")

    # -- answers ------------------------------------------------------------------------------

    def answer(self, peer: AgentId, epoch: bytes) -> Turn:
        """Say how much we have of this epoch; that rests on all that has come."""
        stream = self._all.with_peer(peer).inward.get(epoch) or ReceiveStream()
        return Turn(after=[Send(peer, stream.answer(epoch, WELL))])

    # -- messages that wait for attachments ---------------------------------------------------

    def end(self, each: Ended) -> Turn:
        """A message that was held has ended: it is handed out, or dropped."""
        sender, message, state, _ = each
        if state is not MessageState.DELIVERED:
            self._refused["attachments that can't be had"] += 1
            return Turn((), [TurnedAway(sender, message.id)])
        self._came(1)
        return Turn((), [Arrived(sender, message.id)], [Deliver(sender, [message])])

    def is_crowded(self, peer: AgentId) -> bool:
        """Whether what this peer attaches has to wait; its texts, and all others', do not."""
        waiting = self._all.with_peer(peer).out.waiting
        return self.incomplete.is_crowded(peer) or waiting >= WORDS_WAITING_MAX

    # -- a full inbox -------------------------------------------------------------------------

    def shrank(self, by: int) -> Turn:
        """Messages were dealt with; whoever was told to wait hears when there is room again."""
        self.unread = max(0, self.unread - by)
        self.inbox_changes += 1
        self._is_sure = False
        return self.let_on()

    def holds(self, unread: int) -> Turn:
        """As the disk counts them: a message that came again in another epoch is not one more."""
        self.unread = unread
        self._is_sure, self._is_counting = True, False
        return self.let_on()

    def let_on(self) -> Turn:
        """Tell those who wait that there is room again, if there is."""
        if self._is_full() or self.unread > self._config.unread_max * 9 // 10:
            return NOTHING
        after: list[Effect] = []
        for peer, known in self._all:
            if known.told_busy and not self.is_crowded(peer):
                known.told_busy = False
                after += self.answer(peer, known.latest_epoch).after
        return Turn(after=after)

    def _came(self, many: int) -> None:
        self.unread += many
        self.inbox_changes += many
        self._is_sure = False  # the disk keeps each once, whatever epoch it comes under again

    def _is_full(self) -> bool:
        return self.unread >= self._config.unread_max

    def _count_again(self) -> list[Effect]:
        """Somebody has to wait because of a count that may be too large."""
        if self._is_sure or self._is_counting or not self._is_full():
            return []
        self._is_counting = True
        return [CountUnread()]


def _is_plain(found: Found, arrival: Arrival) -> bool:
    """Whether it is a message that is kept and handed out just as it is."""
    return (
        isinstance(found, Message)
        and not found.attachments
        and found.kind != RECEIPT_KIND
        and not arrival.is_late(found)
    )
