"""Messages to and from every peer: accepted, sent, acknowledged, deduplicated. Never touches disk.

Theory, in short. Each sender numbers its messages to each recipient 1, 2, 3 … in an epoch that
belongs to its database. The recipient takes number n+1 only after n, so what it holds is one
number, the watermark, and duplicates are everything at or below it, for ever. Its answer names
epoch, watermark and the hash of the last message; it leaves after the commit. What the sender has
no answer for it sends again: on a new link, after a pause, or when the watermark says so.

Nothing is sent on a link before the recipient has said how much it has of our epoch. When its
answer names a message that we never sent, or has forgotten how one ended that we still have open
(our database was put back to an earlier day), numbers can't be trusted: everything pending gets
new ones under a new epoch, and the recipient keeps each message once by its id.

Invariants: nothing is sent before it is durable here, nothing is acknowledged before it is durable
there, and a number never means two messages in one epoch.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import count, groupby, repeat
from operator import attrgetter, itemgetter
from typing import NamedTuple

from meshagent.core.delivery.incomplete_messages import Ended, IncompleteMessages
from meshagent.core.delivery.receive_stream import FORGOTTEN, ReceiveStream, last_that_came
from meshagent.core.delivery.retry_timers import Timers
from meshagent.core.delivery.send_stream import WITHDRAWN, Item, SendStream
from meshagent.core.effects import (
    Collect,
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
)
from meshagent.core.membership.lifeguard import backoff_s
from meshagent.core.model.file_names import one_line
from meshagent.core.model.messages import (
    RECEIPT_KIND,
    Message,
    MessageIds,
    MessageState,
    Texts,
    body_hash,
    is_id,
    pack_bodies,
    pack_body,
    parse_body,
    parse_texts,
)
from meshagent.core.model.peers import AgentId
from meshagent.core.model.rows import (
    Arrived,
    Delivered,
    InRow,
    InBatch,
    NewEpoch,
    OutEntry,
    OutRow,
    OutState,
    OutBatch,
    ReceiptRow,
    Row,
    StreamStart,
    TurnedAway,
    Watermark,
)
from meshagent.core.wire.frames import (
    EPOCH_BYTES,
    MAIL_ITEMS_MAX,
    TEXT_CHARACTERS_MAX,
    WHOLE_MAX,
    Frame,
    Mail,
    MailAck,
)
from meshagent.errors import LimitReached, RemoteProtocolError

__all__ = ["Delivery", "DeliveryConfig"]

NO_EPOCH = bytes(EPOCH_BYTES)
_WELL, _BUSY, _GAP = 0, 1, 2  # MailAck.mode
_recipient, _message = itemgetter(0), itemgetter(1)
_ident, _expires, _attached = map(attrgetter, ("id", "expires_ms", "attachments"))
_new = tuple.__new__  # a named tuple's own way takes twice as long
_out_row = partial(_new, OutRow)
_RECIPIENT_SAYS = frozenset({"delivered", "seen", "done", "refused", "expired"})
FULL_LINK_S = 0.01  # the transport has no word for "writable again": its queue drains in less
LOAD_ITEMS_MAX = 1024  # read from disk at once
EPOCHS_KEPT_MAX = 64  # per sender: each is one restored or deleted database of that sender
START_OVER_S = 3600.0  # a restored database needs it once per run; a liar gets no more than this
WORDS_WAITING_MAX = 10_000  # for one peer: who takes none of our words gets no more of them
WITHDRAWN_KEPT_MAX = 10_000  # ten rounds of expiry: more than one commit can be behind


@dataclass(frozen=True, slots=True)
class DeliveryConfig:
    """The knobs of delivery."""

    answer_s: float = 3.0
    """What has no answer by then is sent again; shorter repeats what a slow disk still does."""
    longest_pause_s: float = 60.0
    """The cap of the pauses between repetitions; any contact ends a pause."""
    busy_s: float = 1.0
    """The first pause after a full inbox said so."""
    unread_max: int = 250_000
    """Messages in the inbox that nobody has dealt with; beyond it senders are told to wait."""
    pending_max: int = 1_000_000
    """Messages in the outbox that have not ended; beyond it `send` refuses."""


@dataclass(slots=True)
class Correspondent:
    """One peer, both ways."""

    out: SendStream
    inward: dict[bytes, ReceiveStream] = field(default_factory=dict)
    told_busy: bool = False
    answer: MailAck | None = None
    """The furthest answer that is not applied in full: the rest as it is loaded from disk."""
    checked: tuple[int, bytes] = (0, b"")
    """The number and hash of an answer that were found to be of the message it names."""
    proving: bool = False
    """The read under way is of that message."""

    @property
    def unproven(self) -> bool:
        """Whether an answer waits to be checked against the disk: until then nothing is sent."""
        answer = self.answer
        if answer is None:
            return False
        named = self.named
        return named >= self.out.floor and (named, answer.last) != self.checked

    @property
    def named(self) -> int:
        """The number of the message whose hash the answer has."""
        assert self.answer is not None, "nothing was answered"
        upto, exceptions = self.answer.upto, self.answer.exceptions
        return last_that_came(upto, dict(exceptions)) if exceptions else upto


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
class News:
    """What one frame of mail brought."""

    rows: list[Row] = field(default_factory=list)
    came: list[Message] = field(default_factory=list)
    other: list[Effect] = field(default_factory=list)

    def effects(self, peer: AgentId) -> list[Effect]:
        """Rows first, as in every turn."""
        effects: list[Effect] = [Persist(self.rows)] if self.rows else []
        if self.came:
            effects.append(Deliver(peer, self.came))
        return effects + self.other


class Delivery:
    """The delivery engine of one agent."""

    def __init__(
        self,
        epoch: bytes,
        streams: Iterable[StreamStart],
        watermarks: Iterable[Watermark],
        unread: int,
        rng: random.Random,
        config: DeliveryConfig | None = None,
        withdrawn: int = 0,
        incomplete: IncompleteMessages | None = None,
        taken: Iterable[tuple[str, str]] = (),
    ) -> None:
        self.refused: Counter[str] = Counter()
        self.unread = unread
        self.inbox_changes = 0
        """Grows whenever `unread` does not come from the disk: then a count is out of date."""
        self._sure = True
        self._counting = False
        self._epoch, self._rng = epoch, rng
        self._config = config or DeliveryConfig()
        self._peers: dict[AgentId, Correspondent] = {}
        self._timers = Timers()
        self._pending = 0
        self._withdrawn: dict[str, MessageState] = {}
        self._withdrawn_count = withdrawn
        self.incomplete = (
            IncompleteMessages() if incomplete is None else incomplete
        )  # an empty one is false
        self.taken = set(taken)
        """Messages of ours, by peer and id, whose recipients have them and fetch what they name."""
        self._ids = MessageIds(rng)
        self._start_over_at = float("-inf")
        for start in streams:
            stream = SendStream(epoch, start.next_seq, start.floor)
            self._peers[AgentId(start.peer)] = Correspondent(stream)
            self._pending += stream.waiting
        for mark in watermarks:
            inward = self._peer(AgentId(mark.sender)).inward
            inward[mark.epoch] = ReceiveStream(mark.seq, mark.last, dict(mark.exceptions))

    # -- what sessions ask --------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """How many messages of ours have not ended."""
        return self._pending

    @property
    def on_wire(self) -> int:
        """How many of them were sent and have no answer yet."""
        return sum(each.out.sent + 1 - each.out.floor for each in self._peers.values())

    @property
    def withdrawn(self) -> int:
        """How many of them only wait to tell that they were taken back."""
        return self._withdrawn_count

    def is_on_wire(self, peer: AgentId, seq: int) -> bool:
        """Whether this message was sent on the present link and has no answer yet."""
        known = self._peers.get(peer)
        return known is not None and known.out.floor <= seq <= known.out.sent

    def correspondents(self) -> list[AgentId]:
        """Everyone to whom we have sent something."""
        return [peer for peer, known in self._peers.items() if known.out.next_seq > 1]

    def numbers(self, peer: AgentId) -> tuple[bytes, int]:
        """Our epoch, and the first number for `peer` that is not settled."""
        stream = self._peer(peer).out
        return stream.epoch, stream.told_floor

    def accept(self, peer: AgentId, message: Message, now: float) -> list[Effect]:
        """Take responsibility for a message; it counts once the effects are performed."""
        self._check_room(1)
        return self._accept(peer, message, now)

    def _accept(self, peer: AgentId, message: Message, now: float) -> list[Effect]:
        """With the least of code: what comes alone is waited for."""
        body, blobs = pack_body(message), _blobs(message) if message.attachments else ()
        known = self._peer(peer)
        number, expires_ms = known.out.next_seq, message.expires_ms
        row = _out_row((peer, self._epoch, number, message.id, body, expires_ms, blobs))
        return [Persist([row]), *self._add(known, peer, [row], now)]

    def _add(
        self, known: Correspondent, peer: AgentId, fresh: list[OutRow], now: float
    ) -> list[Effect]:
        """New rows of one peer's stream; what they bring once they are durable."""
        stream = known.out
        stream.add(fresh)
        self._pending += len(fresh)
        if known.answer is None and stream.may_go_along(len(fresh)):
            return self._send_along(peer, stream, now)
        return [Flush(peer, self._epoch, stream.next_seq - 1)]

    def accept_texts(self, texts: Texts, now: float) -> list[Effect]:
        """As `accept_all`, with no line of Python for each."""
        self._check_room(len(texts.ids))
        peer, bodies = texts.peer, texts.bodies()
        known = self._peer(peer)
        fresh = OutBatch(peer, self._epoch, known.out.next_seq, texts.ids, bodies)
        return [Persist([fresh]), *self._add(known, peer, fresh.rows(), now)]

    def accept_all(self, outgoing: Sequence[tuple[AgentId, Message]], now: float) -> list[Effect]:
        """Take responsibility for all of them, or raise and take none."""
        self._check_room(len(outgoing))
        bodies = iter(pack_bodies(list(map(_message, outgoing))))
        rows: list[Row] = []
        effects: list[Effect] = [Persist(rows)]
        for peer, stretch in groupby(outgoing, _recipient):
            known = self._peer(peer)
            messages = list(map(_message, stretch))
            blobs = map(_blobs, messages) if any(map(_attached, messages)) else repeat(())
            # The ids end first, so that no body is taken from those behind.
            fresh: list[OutRow] = list(map(_out_row, zip(
                repeat(peer), repeat(self._epoch), count(known.out.next_seq), map(_ident, messages),
                bodies, map(_expires, messages), blobs, strict=False,
            )))  # fmt: skip
            rows += fresh
            effects += self._add(known, peer, fresh, now)
        return effects

    def _check_room(self, many: int) -> None:
        if self._pending + many > self._config.pending_max:
            raise LimitReached(
                f"The outbox takes no more messages: {self.pending} are waiting.",
                hint="Cancel what is no longer needed: meshagent outbox",
            )

    def _send_along(self, peer: AgentId, stream: SendStream, now: float) -> list[Effect]:
        """In the turn that makes them durable here, and so behind that."""
        mail = stream.next_frame(goes_along=True)
        ids, stream.first_sent = stream.first_sent, []
        if stream.answer_due is None:
            stream.answer_due = now + self._patience(stream)
            self._timers.set(peer, stream.due)
        return [
            Send(peer, mail),
            Durable(peer, stream.epoch, stream.sent),
            ReceiptChanged(peer, ids, MessageState.SENT, ""),
        ]

    def withdraw(
        self, peer: AgentId, seq: int, ident: str, state: MessageState, now_ms: int
    ) -> list[Effect]:
        """A pending message expired or was cancelled: from now on its number carries nothing.

        What is on the wire can't be taken back: its recipient says how it ends, or its link does.
        """
        return [] if self.is_on_wire(peer, seq) else self._withdraw(peer, seq, ident, state, now_ms)

    def _withdraw(
        self, peer: AgentId, seq: int, ident: str, state: MessageState, now_ms: int
    ) -> list[Effect]:
        assert state in WITHDRAWN, state
        stream = self._peer(peer).out
        if seq < stream.floor or ident in self._withdrawn:
            return []
        if not stream.withdraw(seq, ident, state):
            return []
        # A read that is under way, or another look at the disk, may not know of it yet.
        self._withdrawn[ident] = state
        self._withdrawn_count += 1
        if len(self._withdrawn) > WITHDRAWN_KEPT_MAX:
            del self._withdrawn[next(iter(self._withdrawn))]
        return [
            Persist([OutState(peer, seq, ident, state, "", now_ms)]),
            ReceiptChanged(peer, [ident], state, ""),
        ]

    def inbox_shrank(self, by: int, now: float) -> list[Effect]:
        """Messages were dealt with; whoever was told to wait hears when there is room again."""
        self.unread = max(0, self.unread - by)
        self.inbox_changes += 1
        self._sure = False
        return self._let_on()

    def inbox_holds(self, unread: int, now: float) -> list[Effect]:
        """As the disk counts them: a message that came again in another epoch is not one more."""
        self.unread = unread
        self._sure, self._counting = True, False
        return self._let_on()

    def _let_on(self) -> list[Effect]:
        if self._is_full() or self.unread > self._config.unread_max * 9 // 10:
            return []
        effects: list[Effect] = []
        for peer, known in self._peers.items():
            if known.told_busy and not self._is_crowded(peer):
                known.told_busy = False
                effects += self._answer(peer, self._latest_epoch(known))
        return effects

    # -- links --------------------------------------------------------------------------------

    def connected(self, peer: AgentId, now: float) -> list[Effect]:
        """The peer is here: say how much of its mail we have, and send what waits for it."""
        known = self._peer(peer)
        stream = known.out
        stream.linked = True
        stream.rewind(0)  # what was on another link may be lost with it
        stream.failures = 0
        stream.forget_times()
        # Its first answer tells whether our numbers mean the same to both: wait for that.
        stream.greeted = False
        return self._answer(peer, self._latest_epoch(known)) + self._pump(peer, now)

    def disconnected(self, peer: AgentId) -> list[Effect]:
        """The last link to it is gone."""
        known = self._peers.get(peer)
        if known is not None:
            known.out.unlink()
            self._timers.set(peer, None)
            known.answer, known.proving = None, False
            if known.out.next_seq == 1 and not known.inward:
                del self._peers[peer]  # no message either way: nothing to remember
        return []

    # -- the engine contract ------------------------------------------------------------------

    def receive(self, frame: Frame, peer: AgentId, now: float, now_ms: int) -> list[Effect]:
        """Mail, or an answer to ours."""
        match frame:
            case Mail():
                return self.take(frame, peer, now_ms)
            case MailAck():
                return self._answered(frame, peer, now, now_ms)
        return []

    def on_timer(self, now: float) -> list[Effect]:
        """Send again what has no answer."""
        effects: list[Effect] = []
        for peer in self._timers.reached(now):
            stream = self._peers[peer].out
            if stream.answer_due is not None and now >= stream.answer_due:
                stream.failures += 1
                stream.rewind(0)
                stream.answer_due = None
            if stream.busy_until and now >= stream.busy_until:
                stream.busy_until = 0.0
            if stream.gap_due is not None and now >= stream.gap_due:
                stream.go_back(stream.gap_at, now)
            effects += self._pump(peer, now)
        return effects

    def deadline(self) -> float | None:
        """When on_timer is wanted next."""
        return self._timers.earliest()

    def not_sent(self, peer: AgentId, mail: Mail, now: float) -> None:
        """The link is full: go on from there in a moment."""
        stream = self._peer(peer).out
        if mail.epoch == stream.epoch:
            stream.rewind(mail.first - 1)
            stream.busy_until = now + FULL_LINK_S
            if not stream.on_wire:
                stream.answer_due = None
            self._timers.set(peer, stream.due)

    def noted(self, rows: Iterable[OutState | Delivered]) -> None:
        """The driver says that these are on disk."""
        for row in rows:
            known = self._peers.get(AgentId(row.peer))
            seq = row.last if isinstance(row, Delivered) else row.seq
            if known is not None and known.out.noted < seq < known.out.floor:
                known.out.noted = seq

    def durable(self, peer: AgentId, epoch: bytes, upto: int, now: float) -> list[Effect]:
        """The driver says that these are durable, which have gone along with that."""
        stream = self._peer(peer).out
        if epoch == stream.epoch and upto == stream.sent:
            stream.durable = upto
            return []
        return self.flush(peer, epoch, upto, now)  # the link has been lost, or was too full

    def flush(self, peer: AgentId, epoch: bytes, upto: int, now: float) -> list[Effect]:
        """The driver says that all up to this number are durable."""
        stream = self._peer(peer).out
        if epoch == stream.epoch:  # else it speaks of numbers that were given up
            stream.durable = max(stream.durable, upto)
        return self._pump(peer, now)

    def loaded(
        self, peer: AgentId, entries: Sequence[OutEntry], now: float, now_ms: int
    ) -> list[Effect]:
        """What a Load read."""
        known = self._peer(peer)
        fresh = known.out.take_loaded(entries, self._withdrawn)
        proving, known.proving = known.proving, False
        effects = self._apply_answer(known, peer, fresh, now, now_ms)
        if proving and known.proving:  # what should wait under that number is not there
            known.out.loading = known.proving = False
            effects = self._start_over(known, now)
        return effects + self._pump(peer, now)

    # -- sending ------------------------------------------------------------------------------

    def _pump(self, peer: AgentId, now: float) -> list[Effect]:
        """All that may leave now; whoever changes a stream's times ends here."""
        known = self._peers[peer]
        stream = known.out
        some = stream.linked and stream.next_seq > stream.floor  # else nothing waits
        effects = self._next_frames(peer, known, now) if some else []
        self._timers.set(peer, stream.due)
        return effects

    def _next_frames(self, peer: AgentId, known: Correspondent, now: float) -> list[Effect]:
        effects: list[Effect] = []
        stream = known.out
        if not stream.greeted:
            effects += self._ask(peer, stream, now)
        elif stream.busy_until <= now and (known.answer is None or not known.unproven):
            while stream.has_next:
                effects.append(Send(peer, stream.next_frame()))
            if stream.first_sent:
                effects.append(ReceiptChanged(peer, stream.first_sent, MessageState.SENT, ""))
                stream.first_sent = []
            if stream.answer_due is None and stream.on_wire:
                stream.answer_due = now + self._patience(stream)
        if stream.wants_more():
            effects.append(self._load(known, peer, stream.loaded + 1, LOAD_ITEMS_MAX))
        return effects

    def _ask(self, peer: AgentId, stream: SendStream, now: float) -> list[Effect]:
        """Mail without messages: the answer tells how much the peer has of this epoch."""
        if not stream.waiting or stream.answer_due is not None or stream.busy_until > now:
            return []
        stream.answer_due = now + self._patience(stream)
        return [Send(peer, Mail(stream.epoch, stream.told_floor, stream.floor, ()))]

    def _answered(self, ack: MailAck, peer: AgentId, now: float, now_ms: int) -> list[Effect]:
        known = self._peer(peer)
        stream = known.out
        if ack.epoch not in (stream.epoch, NO_EPOCH):
            return self._pump(peer, now)  # it speaks of another database; we asked about this one
        if not stream.greeted:
            stream.greeted, stream.answer_due = True, None
        if ack.epoch == NO_EPOCH:
            return self._pump(peer, now)  # it has nothing of ours
        lost = ack.exceptions and [
            seq for seq, why in ack.exceptions if why == FORGOTTEN and seq >= stream.floor
        ]
        if lost or ack.upto >= stream.next_seq:
            return self._start_over(known, now) + self._pump(peer, now)
        if known.answer is None or ack.upto >= known.answer.upto:
            known.answer = ack
        effects = self._apply_answer(known, peer, (), now, now_ms)
        if ack.mode == _BUSY:
            stream.rewind(ack.upto)
            stream.answer_due = None
            stream.failures += 1
            stream.busy_until = now + self._pause(stream, self._config.busy_s)
        elif ack.mode == _GAP:
            stream.missing_after(ack.upto, now)
        if ack.mode == _WELL:  # a gap is what all frames behind the first that had no room meet
            stream.busy_until = 0.0
        return effects + self._pump(peer, now)

    def _apply_answer(
        self, known: Correspondent, peer: AgentId, fresh: Sequence[Item], now: float, now_ms: int
    ) -> list[Effect]:
        """Settle what an answer covers; beyond what is in memory, as it is loaded."""
        stream, ack = known.out, known.answer
        if ack is None:
            return []
        if ack.upto < stream.floor:
            known.answer = None
            return []
        if known.unproven:
            named = known.named
            item = stream.find(named)
            if item is None:
                item = next((each for each in fresh if each.seq == named), None)
            if item is None:
                # The answer reaches beyond memory: look at that message before believing it.
                return [] if stream.loading else [self._prove(known, peer, named)]
            if body_hash(item.body) != ack.last:
                return self._start_over(known, now)
            known.checked = (named, ack.last)
        return self._settle(known, peer, ack, now, now_ms)

    def _settle(
        self, known: Correspondent, peer: AgentId, ack: MailAck, now: float, now_ms: int
    ) -> list[Effect]:
        stream = known.out
        effects: list[Effect] = []
        if ack.exceptions:
            effects, strange = self._withdraw_unsaid(peer, stream, ack, now, now_ms)
            if strange:
                return effects + self._start_over(known, now)
        floor, exceptions, special = stream.floor, dict(ack.exceptions), stream.special
        settled = stream.settle(min(ack.upto, stream.loaded))
        if stream.states or exceptions:
            withdrawn = {seq for seq in stream.states if stream.withdrawn(seq)}
            special = special | withdrawn | exceptions.keys()
        for plain, items in _by_kind(settled, special):
            if plain:
                effects += _arrived(peer, list(items), now_ms)
            else:
                for item in items:
                    why, state = exceptions.get(item.seq), stream.withdrawn(item.seq)
                    effects += self._settle_one(peer, item, why, state, now_ms)
        stream.forget_settled()
        self._pending -= stream.floor - floor
        if effects:
            stream.failures = 0
            stream.answer_due = now + self._config.answer_s if stream.on_wire else None
        if stream.floor > ack.upto:
            known.answer = None
        return effects

    def _withdraw_unsaid(
        self, peer: AgentId, stream: SendStream, ack: MailAck, now: float, now_ms: int
    ) -> tuple[list[Effect], bool]:
        """Its recipient saw that the time of some was up before we did; or it means others."""
        unsaid = [
            item
            for seq, why in ack.exceptions
            if not why and seq <= ack.upto and (item := stream.find(seq)) is not None
            if not stream.withdrawn(seq)
        ]
        strange = [item for item in unsaid if self._never_withdrawn(item, ack, now, now_ms)]
        effects: list[Effect] = []
        for item in unsaid:
            if item not in strange:
                effects += self._withdraw(peer, item.seq, item.id, MessageState.EXPIRED, now_ms)
        return effects, bool(strange)

    def _settle_one(
        self, peer: AgentId, item: Item, why: str | None, withdrawn: MessageState | None,
        now_ms: int,
    ) -> list[Effect]:  # fmt: skip
        why = why and one_line(why)
        state = MessageState.DELIVERED if why is None else MessageState.REFUSED
        if why == "":
            state = withdrawn or MessageState.EXPIRED
        taken = item.attached and why is None
        if taken:
            state = MessageState.SENT  # how it ends, its recipient says later
            self.taken.add((peer, item.id))
        if withdrawn:
            self._withdrawn.pop(item.id, None)
            self._withdrawn_count = max(0, self._withdrawn_count - 1)
        # A crash that forgets it makes us ask again, and the answer is the same; but one that
        # can expire would be called so until then. What was taken back is heard of before.
        row = OutState(peer, item.seq, item.id, state, why or "", now_ms, taken)
        note = Note([row], urgent=withdrawn is not None or item.expires_ms > 0)
        return [note] if taken else [note, ReceiptChanged(peer, [item.id], state, why or "")]

    def _never_withdrawn(self, item: Item, ack: MailAck, now: float, now_ms: int) -> bool:
        """Whether an answer that this is nothing must be about another message of that number.

        One that could expire did so by another clock than ours shows now, if a later message is
        the same to both; else only if the numbers are of this run.
        """
        if 0 < item.expires_ms <= now_ms:
            return False
        proven = item.seq < last_that_came(ack.upto, dict(ack.exceptions))
        return not item.expires_ms or not (proven or not self._may_start_over(now))

    def _load(self, known: Correspondent, peer: AgentId, first: int, limit: int) -> Load:
        known.out.loading = True
        return Load(peer, first, limit)

    def _prove(self, known: Correspondent, peer: AgentId, seq: int) -> Load:
        known.proving = True
        return self._load(known, peer, seq, 1)

    def _patience(self, stream: SendStream) -> float:
        """How long to wait for an answer; only who got none before waits longer."""
        answer_s = self._config.answer_s
        return max(answer_s, self._pause(stream, answer_s)) if stream.failures else answer_s

    def _pause(self, stream: SendStream, first_s: float) -> float:
        return backoff_s(stream.failures, first_s, self._config.longest_pause_s, self._rng)

    def _start_over(self, liar: Correspondent, now: float) -> list[Effect]:
        """A recipient holds numbers that we never gave: our database is from an earlier day."""
        self.refused["numbers from another day"] += 1
        liar.answer = None
        if not self._may_start_over(now):
            return []  # the epoch is of this run, so only a lie can contradict it
        self._start_over_at = now
        self._epoch = self._rng.randbytes(EPOCH_BYTES)
        effects: list[Effect] = [Persist([NewEpoch(self._epoch)])]
        for peer, known in self._peers.items():
            old = known.out
            known.out = SendStream(self._epoch, old.waiting + 1, 1)
            known.out.linked = known.out.greeted = old.linked
            known.out.durable = 0
            known.out.loading = known.out.outdated = old.loading
            known.answer, known.checked, known.proving = None, (0, b""), False
            self._timers.set(peer, None)
            # Loading waits for the commit, as every effect does: it reads the new numbers.
            effects.append(Flush(peer, self._epoch, old.waiting))
        return effects

    def _may_start_over(self, now: float) -> bool:
        return now >= self._start_over_at + START_OVER_S

    # -- receiving ----------------------------------------------------------------------------

    def has(self, mail: Mail, peer: AgentId, spooled: bool = False) -> bool:
        """Whether all of this was taken, now or before, and counts once it is durable."""
        known = self._peers.get(peer)
        stream = known.inward.get(mail.epoch) if known is not None else None
        if stream is None or stream.distrusts(mail, spooled):
            return False
        return stream.seq >= mail.first + len(mail.items) - 1

    def take(self, mail: Mail, peer: AgentId, now_ms: int, spooled: bool = False) -> list[Effect]:
        """Mail from a peer, over a link or from the spool: what is news is kept, then answered."""
        if mail.first + len(mail.items) > WHOLE_MAX:
            raise RemoteProtocolError("A message's number is beyond the limit.")
        known = self._peer(peer)
        if mail.epoch not in known.inward:
            if len(known.inward) >= EPOCHS_KEPT_MAX:
                del known.inward[next(iter(known.inward))]
            known.inward[mail.epoch] = ReceiveStream()
        stream = known.inward[mail.epoch]
        if len(known.inward) > 1:
            known.inward[mail.epoch] = known.inward.pop(mail.epoch)  # the latest comes last
        arrival = _new(Arrival, (peer, mail.epoch, now_ms, spooled))
        if (spooled or stream.doubted or mail.first <= stream.seq) and (
            stream.distrusts(mail, spooled) or arrival.brings_back(stream.withdrawn_in(mail))
        ):
            return self._answer(peer, mail.epoch)  # it names what we have: the sender starts over
        if mail.floor > stream.seq + 1:
            self.refused["mail of a lost database"] += 1
            stream.skip_to(mail.floor)
        if stream.exceptions:
            stream.forget_below(mail.floor)
        if mail.first > stream.seq + 1:
            return [Send(peer, stream.answer(mail.epoch, _GAP))]
        items = mail.items[stream.seq + 1 - mail.first :]
        return self._take_texts(arrival, stream, items) or self._take_each(arrival, stream, items)

    def _take_texts(
        self, arrival: Arrival, stream: ReceiveStream, items: Sequence[bytes | None]
    ) -> list[Effect]:
        """Take them all if each is nothing but a text, more quickly than one by one; else none."""
        has_room = self.unread + len(items) <= self._config.unread_max
        if not (items and has_room and len(stream.exceptions) < MAIL_ITEMS_MAX):
            return []
        texts = parse_texts(items)
        if not texts:
            return []
        peer, epoch, now_ms, _ = arrival
        ids, bodies = list(map(_ident, texts)), [*filter(None, items)]  # none is missing
        came = InBatch(peer, epoch, stream.seq + 1, ids, bodies, now_ms)
        stream.seq, stream.unhashed = stream.seq + len(texts), items[-1]
        self.unread += len(texts)
        self.inbox_changes += len(texts)
        self._sure = False  # the disk keeps each once, whatever epoch it comes under again
        answer = stream.answer(epoch, _WELL)
        mark = Watermark(peer, epoch, answer.upto, answer.last, answer.exceptions)
        return [Persist([came, mark]), Deliver(peer, texts), Send(peer, answer)]

    def _take_each(
        self, arrival: Arrival, stream: ReceiveStream, items: Sequence[bytes | None]
    ) -> list[Effect]:
        """Take them one by one, as far as there is room."""
        peer, epoch, _, _ = arrival
        before, news = stream.seq, News()
        mode, busy = _WELL, list[Effect]()
        for seq, body in enumerate(items, before + 1):
            if not self._take_one(arrival, stream, seq, body, news):
                mode, self._peer(peer).told_busy = _BUSY, True
                busy = self._count_again()
                break
        answer = stream.answer(epoch, mode)
        if stream.seq != before:
            mark = Watermark(peer, epoch, answer.upto, answer.last, answer.exceptions)
            news.rows.append(mark)
        return news.effects(peer) + busy + [Send(peer, answer)]

    def _take_one(
        self, arrival: Arrival, stream: ReceiveStream, seq: int, body: bytes | None, news: News
    ) -> bool:
        """Whether it was taken; if not, it and all behind it have to wait."""
        if self.unread >= self._config.unread_max or len(stream.exceptions) >= MAIL_ITEMS_MAX:
            return False
        if body is None:
            stream.seq, stream.exceptions[seq] = seq, ""
            return True
        try:
            message = parse_body(body)
            if message.attachments and self._is_crowded(arrival.peer):
                return False
            if arrival.spooled and arrival.is_late(message):
                stream.seq, stream.exceptions[seq] = seq, ""
                return True
            stream.seq, stream.unhashed = seq, body
            if message.kind == RECEIPT_KIND:
                self._take_receipt(arrival.peer, message, arrival.now_ms, news)
            elif message.attachments:
                self._hold(arrival, stream, message, body, news)
            else:
                self.unread += 1
                self.inbox_changes += 1
                self._sure = False  # the disk keeps it once, whatever epoch it comes under again
                news.rows.append(
                    InRow(arrival.peer, arrival.epoch, seq, message.id, body, arrival.now_ms)
                )
                news.came.append(message)
        except RemoteProtocolError as error:
            self.refused["malformed message"] += 1
            stream.seq, stream.unhashed = seq, body
            stream.exceptions[seq] = error.message[:TEXT_CHARACTERS_MAX]
        return True

    def _hold(
        self, arrival: Arrival, stream: ReceiveStream, message: Message, body: bytes, news: News
    ) -> None:
        """A message with attachments is kept, and handed out when it is complete."""
        why = self.incomplete.limits.refusal(message.attachments)
        if why:
            self.refused["attachments beyond the limits"] += 1
            stream.exceptions[stream.seq] = why[:TEXT_CHARACTERS_MAX]
            return
        self.incomplete.hold(arrival.peer, message, len(body))
        news.rows.append(
            InRow(
                arrival.peer, arrival.epoch, stream.seq, message.id, body, arrival.now_ms,
                _blobs(message),
            )
        )  # fmt: skip
        news.other.append(Collect(arrival.peer, message))

    def end(self, ended: Iterable[Ended], now: float, now_ms: int) -> list[Effect]:
        """Held messages have ended: handed out or dropped, and their senders told."""
        effects: list[Effect] = []
        for sender, message, state, reason in ended:
            if state is MessageState.DELIVERED:
                self.unread += 1
                self.inbox_changes += 1
                self._sure = False  # one that came twice arrives once
                effects += [Persist([Arrived(sender, message.id)]), Deliver(sender, [message])]
            else:
                self.refused["attachments that can't be had"] += 1
                effects.append(Persist([TurnedAway(sender, message.id)]))
            data = {"id": message.id, "state": state.value, "reason": reason[:TEXT_CHARACTERS_MAX]}
            word = Message(self._ids.next(now_ms), RECEIPT_KIND, "", now_ms, data)
            effects += self._accept(sender, word, now)
        return effects + self._let_on()

    def _count_again(self) -> list[Effect]:
        """Somebody has to wait because of a count that may be too large."""
        if self._sure or self._counting or not self._is_full():
            return []
        self._counting = True
        return [CountUnread()]

    def _take_receipt(self, peer: AgentId, message: Message, now_ms: int, news: News) -> None:
        match message.data:
            case {"id": str() as ident, "state": str() as state} if (
                is_id(ident) and state in _RECIPIENT_SAYS
            ):
                reason = message.data.get("reason", "")
                if reason == "" or is_id(reason):
                    self.taken.discard((peer, ident))
                    news.rows.append(ReceiptRow(peer, ident, state, now_ms, reason))
                    news.other.append(ReceiptChanged(peer, [ident], MessageState(state), reason))
                    return
        raise RemoteProtocolError("A receipt names a message, how far it has come, and why.")

    def _answer(self, peer: AgentId, epoch: bytes, mode: int = 0) -> list[Effect]:
        stream = self._peer(peer).inward.get(epoch) or ReceiveStream()
        return [Send(peer, stream.answer(epoch, mode))]

    def _latest_epoch(self, known: Correspondent) -> bytes:
        return next(reversed(known.inward), NO_EPOCH)

    def _is_full(self) -> bool:
        return self.unread >= self._config.unread_max

    def _is_crowded(self, peer: AgentId) -> bool:
        """Whether what this peer attaches has to wait; its texts, and all others', do not."""
        waiting = self._peer(peer).out.waiting
        return self.incomplete.is_crowded(peer) or waiting >= WORDS_WAITING_MAX

    def _peer(self, peer: AgentId) -> Correspondent:
        known = self._peers.get(peer)
        if known is None:
            known = self._peers[peer] = Correspondent(SendStream(self._epoch))
        return known


def _by_kind(items: Sequence[Item], special: Set[int]) -> Iterable[tuple[bool, Iterable[Item]]]:
    """Stretches of those that are not special, and of those that are; most often there are none."""
    if not special:
        return [(True, items)] if items else []
    return groupby(items, lambda item: item.seq not in special)


def _arrived(peer: AgentId, items: Sequence[Item], now_ms: int) -> list[Effect]:
    """A crash that forgets it makes us ask again, and the answer is the same."""
    return [
        Note([Delivered(peer, items[0].seq, items[-1].seq, now_ms)]),
        ReceiptChanged(peer, list(map(_ident, items)), MessageState.DELIVERED, ""),
    ]


def _blobs(message: Message) -> tuple[bytes, ...]:
    return tuple(dict.fromkeys(each.sha256 for each in message.attachments))
