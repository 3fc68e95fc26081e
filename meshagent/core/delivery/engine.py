"""The delivery engine of one agent: messages to and from every peer. Never touches a disk.

Theory, in short. Each sender numbers its messages to each recipient 1, 2, 3 … in an epoch that
belongs to its database. The recipient takes them in that order and answers with one number, after
its commit (receiving.py). What the sender has no answer for it sends again: on a new link, after a
pause, or when the answer says so (sending.py). A receipt for what became of a message later is a
message of the mesh's own in the other direction. This module puts the two directions together.

Invariants: nothing is sent before it is durable here, nothing is acknowledged before it is durable
there, and a number never means two messages in one epoch.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence

from meshagent.core.delivery.config import DeliveryConfig
from meshagent.core.delivery.conversations import Conversations
from meshagent.core.delivery.incomplete_messages import Ended, IncompleteMessages
from meshagent.core.delivery.receiving import Receiving
from meshagent.core.delivery.sending import Sending
from meshagent.core.model.message_states import MessageState
from meshagent.core.model.messages import RECEIPT_KIND, Message, MessageIds, Outgoing
from meshagent.core.model.peers import AgentId
from meshagent.core.model.rows import MailStart, OutEntry
from meshagent.core.turns import NOTHING, Turn, join_turns
from meshagent.core.wire.frames import TEXT_CHARACTERS_MAX, Frame, Mail, MailAck

__all__ = ["Delivery"]


class Delivery:
    """Both directions, for all peers."""

    def __init__(
        self,
        start: MailStart,
        rng: random.Random,
        config: DeliveryConfig | None = None,
        incomplete: IncompleteMessages | None = None,
    ) -> None:
        config = config or DeliveryConfig()
        self.refused: Counter[str] = Counter()
        self._all = Conversations(start.epoch, start.streams, start.watermarks)
        self.sending = Sending(
            self._all, rng, config, self.refused, start.withdrawn, start.taken
        )  # fmt: skip
        self.receiving = Receiving(
            self._all, config, self.refused, start.unread,
            IncompleteMessages() if incomplete is None else incomplete,  # an empty one is false
            self.sending.receipt_came,
        )  # fmt: skip
        self._ids = MessageIds(rng)

    # -- what sessions ask --------------------------------------------------------------------

    @property
    def incomplete(self) -> IncompleteMessages:
        """Messages that wait for their attachments."""
        return self.receiving.incomplete

    @property
    def unread(self) -> int:
        """Messages in the inbox that nobody has dealt with."""
        return self.receiving.unread

    def outbox_counts(self) -> dict[str, int]:
        """How many messages wait here, and how many are on the wire without an answer."""
        waiting = max(0, self.sending.pending - self.sending.withdrawn_count)
        sent = min(waiting, self.sending.on_wire)
        return {"queued": waiting - sent, "sent": sent + len(self.sending.taken)}

    def correspondents(self) -> list[AgentId]:
        """Everyone to whom we have sent something."""
        return [peer for peer, known in self._all if known.out.next_seq > 1]

    def numbers(self, peer: AgentId) -> tuple[bytes, int]:
        """Our epoch, and the first number for `peer` that is not settled."""
        stream = self._all.with_peer(peer).out
        return stream.epoch, stream.told_floor

    def accept(self, outgoing: Outgoing, now: float, receipts: bool = False) -> Turn:
        """Take responsibility for messages, or for receipts, for all or none."""
        return self.sending.accept(outgoing, now, receipts)

    def withdraw(
        self, peer: AgentId, seq: int, ident: str, state: MessageState, now_ms: int
    ) -> Turn:
        """A pending message expired or was cancelled."""
        return self.sending.withdraw(peer, seq, ident, state, now_ms)

    def inbox_shrank(self, by: int) -> Turn:
        """Messages in the inbox were dealt with."""
        return self.receiving.shrank(by)

    def inbox_holds(self, unread: int) -> Turn:
        """So many messages in the inbox are unread, as the disk has counted them."""
        return self.receiving.holds(unread)

    # -- links --------------------------------------------------------------------------------

    def connected(self, peer: AgentId, now: float) -> Turn:
        """The peer is here: say how much of its mail we have, and send what waits for it."""
        known = self._all.with_peer(peer)
        known.out.connected()
        answer = self.receiving.answer(peer, known.latest_epoch)
        return join_turns([answer, self.sending.pump(peer, now)])

    def disconnected(self, peer: AgentId) -> Turn:
        """The last link to it is gone."""
        known = self._all.get(peer)
        if known is not None:
            known.out.disconnected()
            known.answer = None
            self._all.timers.set(peer, None)
            if known.is_blank():
                self._all.forget(peer)
        return NOTHING

    # -- the engine contract ------------------------------------------------------------------

    def receive(self, frame: Frame, peer: AgentId, now: float, now_ms: int) -> Turn:
        """Mail, or an answer to ours."""
        if type(frame) is Mail:
            return self.receiving.take(frame, peer, now_ms)
        if type(frame) is MailAck:
            return self.sending.answered(frame, peer, now, now_ms)
        return NOTHING

    def on_timer(self, now: float) -> Turn:
        """Send again what has no answer."""
        due = self._all.timers.reached(now)
        return join_turns([self.sending.on_timer(peer, now) for peer in due])

    def deadline(self) -> float | None:
        """When on_timer is wanted next."""
        return self._all.timers.earliest()

    # -- what comes of effects ----------------------------------------------------------------

    def durable(self, peer: AgentId, epoch: bytes, upto: int, now: float) -> Turn:
        """All messages to `peer` up to this number are on the disk."""
        return self.sending.durable(peer, epoch, upto, now)

    def taken_back(self, peer: AgentId, epoch: bytes, seq: int, now: float) -> Turn:
        """The disk knows that this number to `peer` carries nothing."""
        return self.sending.taken_back(peer, epoch, seq, now)

    def noted(self, peer: AgentId, epoch: bytes, upto: int) -> None:
        """The disk knows how all messages to `peer` up to this number have ended."""
        self.sending.noted(peer, epoch, upto)

    def not_sent(self, peer: AgentId, mail: Mail, now: float) -> None:
        """The link could not take this frame."""
        self.sending.not_sent(peer, mail, now)

    def loaded(self, peer: AgentId, entries: Sequence[OutEntry], now: float, now_ms: int) -> Turn:
        """What a Load read."""
        return self.sending.loaded(peer, entries, now, now_ms)

    def take(self, mail: Mail, peer: AgentId, now_ms: int) -> Turn:
        """Mail that was left in the spool."""
        return self.receiving.take(mail, peer, now_ms, spooled=True)

    def end(self, ended: Iterable[Ended], now: float, now_ms: int) -> Turn:
        """Held messages have ended: handed out or dropped, and their senders told."""
        turns: list[Turn] = []
        for each in ended:
            state, reason = each.state.value, each.reason[:TEXT_CHARACTERS_MAX]
            turns.append(self.receiving.end(each))
            turns.append(self._tell(each.sender, each.message.id, state, reason, now_ms))
        return join_turns([*turns, self.receiving.let_on()])

    def _tell(self, peer: AgentId, ident: str, state: str, reason: str, now_ms: int) -> Turn:
        """A receipt for one message: a full outbox must not keep it from ending."""
        data = {"id": ident, "state": state, "reason": reason}
        receipt = Message(self._ids.next(now_ms), RECEIPT_KIND, "", now_ms, data)
        outgoing = Outgoing.of([peer], [(value,) for value in receipt])
        return self.sending.add(outgoing)
