"""What goes to each peer: numbered, sent once it is durable here, settled by the peer's answers.

Never touches a disk: what must be durable, and what rests on that, is said in turns. Nothing is
sent on a link before the recipient has said how much it has of our epoch. When its answer names a
message that we never sent, or has forgotten how one ended that we still have open (our database
was put back to an earlier day), numbers can't be trusted: everything pending gets new ones under a
new epoch, and the recipient keeps each message once by its id.

Invariants: nothing is sent before it is durable here; a number never means two messages in one
epoch; every message ends once.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from itertools import groupby
from operator import attrgetter

from meshagent.core.delivery.config import DeliveryConfig
from meshagent.core.delivery.conversations import (
    NO_EPOCH,
    WORDS_WAITING_MAX,
    Conversation,
    Conversations,
)
from meshagent.core.delivery.receive_stream import BUSY, FORGOTTEN, GAP, last_that_came
from meshagent.core.delivery.send_stream import Item, LinkPhase, Reading, SendStream
from meshagent.core.effects import Durable, Effect, Load, Noted, ReceiptChanged, Send, TakenBack
from meshagent.core.membership.lifeguard import backoff_s
from meshagent.core.model.file_names import one_line
from meshagent.core.model.message_states import WITHDRAWN, MessageState
from meshagent.core.model.messages import Outgoing, body_hash
from meshagent.core.model.peers import AgentId
from meshagent.core.model.rows import Delivered, NewEpoch, OutBatch, OutEntry, OutState, Row
from meshagent.core.turns import NOTHING, Turn, join_turns
from meshagent.core.wire.frames import EPOCH_BYTES, Mail, MailAck
from meshagent.errors import LimitReached

__all__ = ["Sending"]

FULL_LINK_S = 0.01  # the transport has no word for "writable again": its queue drains in less
LOAD_ITEMS_MAX = 1024  # read from disk at once
START_OVER_S = 3600.0  # a restored database needs it once per run; a liar gets no more than this
ENDED_EARLY_MAX = 1_000  # an answer that waits for a read from disk is soon believed
WITHDRAWN_KEPT_MAX = 10_000  # ten rounds of expiry: more than one commit can be behind
_ident = attrgetter("id")


class Sending:
    """The messages of one agent to all its peers."""

    def __init__(
        self,
        conversations: Conversations,
        rng: random.Random,
        config: DeliveryConfig,
        refused: Counter[str],
        withdrawn: int = 0,
        taken: Iterable[tuple[str, str]] = (),
    ) -> None:
        self._all, self._rng, self._config, self._refused = conversations, rng, config, refused
        self.pending = sum(known.out.waiting for _, known in conversations)
        """How many messages of ours have not ended."""
        self.withdrawn_count = withdrawn
        """How many of them only wait to tell that they were taken back."""
        self.taken = set(taken)
        """Messages of ours, by peer and id, whose recipients have them and fetch what they name."""
        self._ended_early: dict[tuple[AgentId, str], None] = {}
        """Those of which the recipient said how they ended before its answer was believed."""
        self._withdrawn: dict[str, MessageState] = {}
        self._untold: dict[tuple[AgentId, str], int] = {}
        """Messages whose end is told when the disk has it, by peer and id: their numbers."""
        self._start_over_at = float("-inf")

    # -- accepting and taking back ------------------------------------------------------------

    def accept(self, outgoing: Outgoing, now: float, receipts: bool = False) -> Turn:
        """Take responsibility for these messages, for all or none; they count once durable.

        A full outbox does not stop `receipts`, of which each peer has a share: two whose boxes are
        full would else wait for each other for ever.
        """
        full = self.pending + len(outgoing.ids) > self._config.pending_max
        if receipts:
            to = [self._all.with_peer(peer).out for peer in set(outgoing.peers)]
            full = any(stream.waiting >= WORDS_WAITING_MAX for stream in to)
        if full:
            raise LimitReached(
                f"The outbox takes no more messages: {self.pending} are waiting.",
                hint="Cancel what is no longer needed: meshagent outbox",
            )
        return self.add(outgoing)

    def add(self, outgoing: Outgoing) -> Turn:
        """The same, however many wait."""
        rows: list[Row] = []
        after: list[Effect] = []
        for peer, part in outgoing.by_peer():
            stream = self._all.with_peer(peer).out
            batch = OutBatch(
                peer, stream.epoch, stream.next_seq, part.ids, part.bodies, part.expires, part.blobs
            )
            stream.add(batch.rows())
            rows.append(batch)
            after.append(Durable(peer, stream.epoch, stream.next_seq - 1))
        self.pending += len(outgoing.ids)
        return Turn((), rows, after)

    def withdraw(
        self, peer: AgentId, seq: int, ident: str, state: MessageState, now_ms: int
    ) -> Turn:
        """A pending message expired or was cancelled: from now on its number carries nothing.

        What is on the wire can't be taken back: its recipient says how it ends, or its link does.
        """
        if self.is_on_wire(peer, seq):
            return NOTHING
        turn = self._withdraw(peer, seq, ident, state, now_ms)
        if not turn.rows:
            return NOTHING
        stream = self._all.with_peer(peer).out
        stream.withheld.add(seq)
        return turn._replace(after=[*turn.after, TakenBack(peer, stream.epoch, seq)])

    def _withdraw(
        self, peer: AgentId, seq: int, ident: str, state: MessageState, now_ms: int
    ) -> Turn:
        assert state in WITHDRAWN, state
        stream = self._all.with_peer(peer).out
        if not stream.floor <= seq <= stream.durable or ident in self._withdrawn:
            return NOTHING  # it has ended; or whoever read its number has read an old one
        if not stream.withdraw(seq, ident, state):
            return NOTHING
        # A read that is under way, or another look at the disk, may not know of it yet.
        self._withdrawn[ident] = state
        self.withdrawn_count += 1
        if len(self._withdrawn) > WITHDRAWN_KEPT_MAX:
            del self._withdrawn[next(iter(self._withdrawn))]
        row = OutState(peer, seq, ident, state, "", now_ms)
        return Turn((), [row], [ReceiptChanged(peer, [ident], state, "")])

    def _ended(self, peer: AgentId, ident: str) -> None:
        if (peer, ident) in self.taken:
            self.taken.discard((peer, ident))
            return
        self._ended_early[peer, ident] = None
        if len(self._ended_early) > ENDED_EARLY_MAX:
            del self._ended_early[next(iter(self._ended_early))]

    def is_on_wire(self, peer: AgentId, seq: int) -> bool:
        """Whether this message was sent on the present link and has no answer yet."""
        known = self._all.get(peer)
        return known is not None and known.out.floor <= seq <= known.out.sent

    @property
    def on_wire(self) -> int:
        """How many messages were sent and have no answer yet."""
        return sum(known.out.sent + 1 - known.out.floor for _, known in self._all)

    # -- what the driver says -----------------------------------------------------------------

    def durable(self, peer: AgentId, epoch: bytes, upto: int, now: float) -> Turn:
        """All messages up to this number are on the disk, so they may leave."""
        stream = self._all.with_peer(peer).out
        if epoch == stream.epoch:  # else it speaks of numbers that were given up
            stream.durable = max(stream.durable, upto)
        return self.pump(peer, now)

    def taken_back(self, peer: AgentId, epoch: bytes, seq: int, now: float) -> Turn:
        """The disk knows that this number carries nothing, so the recipient may know it."""
        stream = self._all.with_peer(peer).out
        if epoch == stream.epoch:
            stream.withheld.discard(seq)
        return self.pump(peer, now)

    def noted(self, peer: AgentId, epoch: bytes, upto: int) -> None:
        """The disk knows how all up to this number have ended."""
        known = self._all.get(peer)
        if known is not None and known.out.epoch == epoch and upto < known.out.floor:
            known.out.noted = max(known.out.noted, upto)
        if self._untold:
            told = [key for key, seq in self._untold.items() if key[0] == peer and seq <= upto]
            for key in told:
                del self._untold[key]

    def receipt_came(self, peer: AgentId, ident: str, is_end: bool) -> bool:
        """The recipient says what became of a message; `is_end`: of one that it had to complete.

        Whether it may be told at once: not while an earlier word on it waits for the disk."""
        if is_end:
            self._ended(peer, ident)
        return ident not in self._withdrawn and (peer, ident) not in self._untold

    def not_sent(self, peer: AgentId, mail: Mail, now: float) -> None:
        """The link is full: go on from there in a moment."""
        stream = self._all.with_peer(peer).out
        if mail.epoch == stream.epoch:
            stream.rewind(mail.first - 1)
            stream.busy_until = now + FULL_LINK_S
            if not stream.on_wire:
                stream.answer_due = None
            self._all.timers.set(peer, stream.due)

    def loaded(self, peer: AgentId, entries: Sequence[OutEntry], now: float, now_ms: int) -> Turn:
        """What a Load read."""
        known = self._all.with_peer(peer)
        was_proof = known.out.reading is Reading.PROOF
        fresh = known.out.take_loaded(entries, self._withdrawn)
        turn = self._apply_answer(known, peer, fresh, now, now_ms)
        if was_proof and known.out.reading is Reading.PROOF:
            # What should wait under that number is not there.
            known.out.change_read("arrived")
            turn = self._start_over(known, now)
        return join_turns([turn, self.pump(peer, now)])

    def on_timer(self, peer: AgentId, now: float) -> Turn:
        """Send again what has no answer."""
        stream = self._all.with_peer(peer).out
        if stream.answer_due is not None and now >= stream.answer_due:
            stream.failures += 1
            stream.rewind(0)
            stream.answer_due = None
        if stream.busy_until and now >= stream.busy_until:
            stream.busy_until = 0.0
        if stream.gap_due is not None and now >= stream.gap_due:
            stream.go_back(stream.gap_at, now)
        return self.pump(peer, now)

    # -- sending ------------------------------------------------------------------------------

    def pump(self, peer: AgentId, now: float) -> Turn:
        """All that may leave now; whoever changes a stream's times ends here."""
        known = self._all.with_peer(peer)
        stream = known.out
        some = stream.is_linked and stream.next_seq > stream.floor  # else nothing waits
        effects = self._next_frames(peer, known, now) if some else ()
        self._all.timers.set(peer, stream.due)
        return Turn(effects)

    def _next_frames(self, peer: AgentId, known: Conversation, now: float) -> list[Effect]:
        effects: list[Effect] = []
        stream = known.out
        if stream.link is LinkPhase.GREETING:
            effects += self._ask(peer, stream, now)
        elif stream.busy_until <= now and not known.is_unproven:
            while stream.has_next:
                effects.append(Send(peer, stream.next_frame()))
            if stream.first_sent:
                effects.append(ReceiptChanged(peer, stream.first_sent, MessageState.SENT, ""))
                stream.first_sent = []
            if stream.answer_due is None and stream.on_wire:
                stream.answer_due = now + self._patience(stream)
        if stream.wants_more():
            stream.change_read("read on")
            effects.append(Load(peer, stream.loaded + 1, LOAD_ITEMS_MAX))
        return effects

    def _ask(self, peer: AgentId, stream: SendStream, now: float) -> list[Effect]:
        """Mail without messages: the answer tells how much the peer has of this epoch."""
        if not stream.waiting or stream.answer_due is not None or stream.busy_until > now:
            return []
        stream.answer_due = now + self._patience(stream)
        return [Send(peer, Mail(stream.epoch, stream.told_floor, stream.floor, ()))]

    def _patience(self, stream: SendStream) -> float:
        """How long to wait for an answer; only who got none before waits longer."""
        answer_s = self._config.answer_s
        return max(answer_s, self._pause(stream, answer_s)) if stream.failures else answer_s

    def _pause(self, stream: SendStream, first_s: float) -> float:
        return backoff_s(stream.failures, first_s, self._config.longest_pause_s, self._rng)

    # -- answers ------------------------------------------------------------------------------

    def answered(self, ack: MailAck, peer: AgentId, now: float, now_ms: int) -> Turn:
        """The peer says how far it has come with our messages."""
        known = self._all.with_peer(peer)
        stream = known.out
        if ack.epoch not in (stream.epoch, NO_EPOCH):
            return self.pump(peer, now)  # it speaks of another database; we asked about this one
        stream.answered()
        if ack.epoch == NO_EPOCH:
            return self.pump(peer, now)  # it has nothing of ours
        forgotten = any(why == FORGOTTEN and seq >= stream.floor for seq, why in ack.exceptions)
        if forgotten or ack.upto > stream.durable:  # nothing else ever left under these numbers
            return join_turns([self._start_over(known, now), self.pump(peer, now)])
        if known.answer is None or ack.upto >= known.answer.upto:
            known.answer = ack
        turn = self._apply_answer(known, peer, (), now, now_ms)
        if ack.mode == BUSY:
            stream.rewind(ack.upto)
            stream.answer_due = None
            stream.failures += 1
            stream.busy_until = now + self._pause(stream, self._config.busy_s)
        elif ack.mode == GAP:
            stream.missing_after(ack.upto, now)
        else:  # a gap is what all frames behind the first that had no room meet
            stream.busy_until = 0.0
        return join_turns([turn, self.pump(peer, now)])

    def _apply_answer(
        self, known: Conversation, peer: AgentId, fresh: Sequence[Item], now: float, now_ms: int
    ) -> Turn:
        """Settle what an answer covers; beyond what is in memory, as it is loaded."""
        stream, ack = known.out, known.answer
        if ack is None:
            return NOTHING
        if ack.upto < stream.floor:
            known.answer = None
            return NOTHING
        if known.is_unproven:
            named = known.named
            item = stream.find(named)
            if item is None:
                item = next((each for each in fresh if each.seq == named), None)
            if item is None:
                # The answer reaches beyond memory: look at that message before believing it.
                if stream.reading is not Reading.NOTHING:
                    return NOTHING
                stream.change_read("prove")
                return Turn([Load(peer, named, 1)])
            if body_hash(item.body) != ack.last:
                return self._start_over(known, now)
            known.checked = (named, ack.last)
        return self._settle(known, peer, ack, now, now_ms)

    def _settle(
        self, known: Conversation, peer: AgentId, ack: MailAck, now: float, now_ms: int
    ) -> Turn:
        stream = known.out
        turns: list[Turn] = []
        if ack.exceptions:
            unsaid, strange = self._withdraw_unsaid(peer, stream, ack, now, now_ms)
            turns.append(unsaid)
            if strange:
                return join_turns([unsaid, self._start_over(known, now)])
        floor, exceptions, special = stream.floor, dict(ack.exceptions), stream.special
        settled = stream.settle(min(ack.upto, stream.loaded))
        if stream.states or exceptions:
            withdrawn = {seq for seq in stream.states if stream.withdrawn(seq)}
            special = special | withdrawn | exceptions.keys()
        for plain, items in _by_kind(settled, special):
            if plain:
                turns.append(_arrived(peer, list(items), now_ms))
            else:
                for item in items:
                    why, known_as = exceptions.get(item.seq), stream.states.get(item.seq)
                    turns.append(self._settle_one(peer, item, why, known_as, now_ms))
        stream.forget_settled()
        self.pending -= stream.floor - floor
        if stream.floor > ack.upto:
            known.answer = None
        if settled:
            stream.failures = 0
            stream.answer_due = now + self._config.answer_s if stream.on_wire else None
            noted = Noted(peer, stream.epoch, stream.floor - 1)
            turns.append(Turn(after=[noted], may_wait=True))
        return join_turns(turns)

    def _withdraw_unsaid(
        self, peer: AgentId, stream: SendStream, ack: MailAck, now: float, now_ms: int
    ) -> tuple[Turn, bool]:
        """Its recipient saw that the time of some was up before we did; or it means others."""
        unsaid = [
            item
            for seq, why in ack.exceptions
            if not why and seq <= ack.upto and (item := stream.find(seq)) is not None
            if not stream.withdrawn(seq)
        ]
        strange = [item for item in unsaid if self._never_withdrawn(item, ack, now, now_ms)]
        turns = [
            self._withdraw(peer, item.seq, item.id, MessageState.EXPIRED, now_ms)
            for item in unsaid
            if item not in strange
        ]
        return join_turns(turns), bool(strange)

    def _settle_one(
        self, peer: AgentId, item: Item, why: str | None, known_as: MessageState | None,
        now_ms: int,
    ) -> Turn:  # fmt: skip
        withdrawn = known_as if known_as in WITHDRAWN else None
        why = why and one_line(why)
        state = MessageState.DELIVERED if why is None else MessageState.REFUSED
        if why == "":
            state = withdrawn or MessageState.EXPIRED
        taken = item.attached and why is None
        if taken:
            state = MessageState.SENT  # how it ends, its recipient says later, or has said
            if known_as in (None, MessageState.SENT) and (peer, item.id) not in self._ended_early:
                self.taken.add((peer, item.id))
            self._ended_early.pop((peer, item.id), None)
        if withdrawn:
            self._withdrawn.pop(item.id, None)
            self.withdrawn_count = max(0, self.withdrawn_count - 1)
        row = OutState(peer, item.seq, item.id, state, why or "", now_ms, taken)
        told = [] if taken else [ReceiptChanged(peer, [item.id], state, why or "")]
        if withdrawn is not None or item.expires_ms:
            # It would be called expired or taken back if a crash forgot this: so it is kept first.
            self._untold[peer, item.id] = item.seq
            return Turn((), [row], told)
        return Turn(told, [row], may_wait=True)

    def _never_withdrawn(self, item: Item, ack: MailAck, now: float, now_ms: int) -> bool:
        """Whether an answer that this is nothing must be about another message of that number.

        One that could expire did so by another clock than ours shows now, if a later message is
        the same to both; else only if the numbers are of this run.
        """
        if 0 < item.expires_ms <= now_ms:
            return False
        proven = item.seq < last_that_came(ack.upto, dict(ack.exceptions))
        return not item.expires_ms or not (proven or not self._may_start_over(now))

    # -- new numbers --------------------------------------------------------------------------

    def _start_over(self, liar: Conversation, now: float) -> Turn:
        """A recipient holds numbers that we never gave: our database is from an earlier day."""
        self._refused["numbers from another day"] += 1
        liar.answer = None
        if not self._may_start_over(now):
            return NOTHING  # the epoch is of this run, so only a lie can contradict it
        self._start_over_at = now
        epoch = self._all.epoch = self._rng.randbytes(EPOCH_BYTES)
        after: list[Effect] = []
        for peer, known in self._all:
            known.out = SendStream.renumbered(known.out, epoch)
            known.answer, known.checked = None, (0, b"")
            self._all.timers.set(peer, None)
            # Reading waits for the commit: it must find the new numbers.
            after.append(Durable(peer, epoch, known.out.waiting))
        return Turn((), [NewEpoch(epoch)], after)

    def _may_start_over(self, now: float) -> bool:
        return now >= self._start_over_at + START_OVER_S


def _by_kind(items: Sequence[Item], special: Set[int]) -> Iterable[tuple[bool, Iterable[Item]]]:
    """Stretches of those that are not special, and of those that are; most often there are none."""
    if not special:
        return [(True, items)] if items else []
    return groupby(items, lambda item: item.seq not in special)


def _arrived(peer: AgentId, items: Sequence[Item], now_ms: int) -> Turn:
    """A crash that forgets it makes us ask again, and the answer is the same."""
    news = ReceiptChanged(peer, list(map(_ident, items)), MessageState.DELIVERED, "")
    return Turn([news], [Delivered(peer, items[0].seq, items[-1].seq, now_ms)], may_wait=True)
