"""What is held of each peer that messages go to or come from. Decides nothing about them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from meshagent.core.delivery.receive_stream import ReceiveStream, last_that_came
from meshagent.core.delivery.retry_timers import Timers
from meshagent.core.delivery.send_stream import SendStream
from meshagent.core.model.peers import AgentId
from meshagent.core.model.rows import StreamStart, Watermark
from meshagent.core.wire.frames import EPOCH_BYTES, MailAck

__all__ = ["NO_EPOCH", "WORDS_WAITING_MAX", "Conversation", "Conversations"]

NO_EPOCH = bytes(EPOCH_BYTES)
WORDS_WAITING_MAX = 10_000  # receipts for one peer: who takes none of them gets no more
EPOCHS_KEPT_MAX = 64  # per sender: each is one restored or deleted database of that sender


@dataclass(slots=True)
class Conversation:
    """One peer, both ways."""

    out: SendStream
    inward: dict[bytes, ReceiveStream] = field(default_factory=dict)
    told_busy: bool = False
    answer: MailAck | None = None
    """The furthest answer that is not applied in full: the rest as it is loaded from disk."""
    checked: tuple[int, bytes] = (0, b"")
    """The number and hash of an answer that were found to be of the message it names."""

    @property
    def is_unproven(self) -> bool:
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

    @property
    def latest_epoch(self) -> bytes:
        """The one that this peer used last."""
        return next(reversed(self.inward), NO_EPOCH)

    def stream_of(self, epoch: bytes) -> ReceiveStream:
        """What has come in this epoch, which is now the latest."""
        stream = self.inward.get(epoch)
        if stream is None:
            if len(self.inward) >= EPOCHS_KEPT_MAX:
                del self.inward[next(iter(self.inward))]
            stream = self.inward[epoch] = ReceiveStream()
        elif len(self.inward) > 1:
            self.inward[epoch] = self.inward.pop(epoch)
        return stream

    def is_blank(self) -> bool:
        """Whether no message ever went either way: there is nothing to remember."""
        return self.out.next_seq == 1 and not self.inward


class Conversations:
    """All of them, in the epoch of our own numbers."""

    def __init__(
        self, epoch: bytes, streams: Iterable[StreamStart], watermarks: Iterable[Watermark]
    ) -> None:
        self.epoch = epoch
        self.timers = Timers()
        self._all: dict[AgentId, Conversation] = {}
        for start in streams:
            stream = SendStream(epoch, start.next_seq, start.floor)
            self._all[AgentId(start.peer)] = Conversation(stream)
        for mark in watermarks:
            inward = self.with_peer(AgentId(mark.sender)).inward
            inward[mark.epoch] = ReceiveStream(mark.seq, mark.last, dict(mark.exceptions))

    def __iter__(self) -> Iterator[tuple[AgentId, Conversation]]:
        return iter(self._all.items())

    def get(self, peer: AgentId) -> Conversation | None:
        """The conversation with this peer, if there is one."""
        return self._all.get(peer)

    def with_peer(self, peer: AgentId) -> Conversation:
        """The conversation with this peer, which begins now if there was none."""
        known = self._all.get(peer)
        if known is None:
            known = self._all[peer] = Conversation(SendStream(self.epoch))
        return known

    def forget(self, peer: AgentId) -> None:
        """Nothing is remembered of it."""
        del self._all[peer]
