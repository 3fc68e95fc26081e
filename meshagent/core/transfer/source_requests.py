"""What this agent asks of sources: chunks, more chunks, or to stop. Never chooses a source.

A download asks one source at a time, under a number of its own. A request that a full link did not
take is made again a moment later, as it is true then. Invariants: a number is used once; at most
one request waits for each number.
"""

from __future__ import annotations

import random

from meshagent.core.effects import Effect, Send
from meshagent.core.model.peers import AgentId
from meshagent.core.transfer.chunks import FULL_LINK_S
from meshagent.core.transfer.credit_window import CreditWindow
from meshagent.core.transfer.download import Download
from meshagent.core.wire.frames import BlobAsk, BlobMore, BlobStop, Frame

__all__ = ["SourceRequests"]

FIRST_NUMBER_BITS = 48  # numbers begin at a random one: those of an earlier run do not come again
UNSENT_MAX = 1024  # a request beyond it is lost, and costs a stall


class SourceRequests:
    """The requests under way, by number."""

    def __init__(self, rng: random.Random, window: CreditWindow) -> None:
        self.resend_at: float | None = None
        self._window = window
        self._first = self._last = rng.getrandbits(FIRST_NUMBER_BITS)
        self._downloads: dict[int, Download] = {}
        self._unsent: dict[int, tuple[AgentId, type[Frame]]] = {}

    def numbers(self) -> list[int]:
        """The numbers under way."""
        return list(self._downloads)

    def find(self, number: int) -> Download | None:
        """The download that asks under this number now."""
        return self._downloads.get(number)

    def has_ended(self, number: int) -> bool:
        """Whether this number was used, and is not any more."""
        return self._first < number <= self._last and number not in self._downloads

    def ask(self, download: Download, source: AgentId, chunks: int, now: float) -> Send:
        """Ask this source for the next chunks."""
        self._last += 1
        download.number, download.source, download.heard_at = self._last, source, now
        download.asked_as = download.granter_for(source)
        self._downloads[download.number] = download
        self._window.grant(download, chunks)
        return Send(source, _ask_frame(download))

    def more(self, download: Download, chunks: int, now: float) -> Send:
        """Let the source send more chunks."""
        if not download.is_owed():
            download.heard_at = now  # it owes chunks from now on
        self._window.grant(download, chunks)
        return Send(download.source, BlobMore(download.number, download.upto))

    def stop(self, download: Download) -> list[Effect]:
        """Tell the source to send no more, if one is asked."""
        if not download.number:
            return []
        stop = Send(download.source, BlobStop(download.number))
        self.end(download)
        return [stop]

    def end(self, download: Download) -> None:
        """Nobody is asked any more; what the source may still send is not waited for."""
        del self._downloads[download.number]
        download.number = 0
        self._window.take_back(download)

    def disconnected(self, peer: AgentId) -> None:
        """Whatever was to be sent to this peer is of no use any more."""
        for number in [each for each, (to, _) in self._unsent.items() if to == peer]:
            del self._unsent[number]

    def not_sent(self, peer: AgentId, frame: Frame, now: float) -> None:
        """The link did not take this frame."""
        if not isinstance(frame, BlobAsk | BlobMore | BlobStop):
            return
        before = self._unsent.get(frame.pull)
        if before is not None and before[1] is BlobAsk:
            if isinstance(frame, BlobStop):
                del self._unsent[frame.pull]  # the source never heard of that number
            return
        if len(self._unsent) < UNSENT_MAX:
            self._unsent[frame.pull] = (peer, type(frame))
            if self.resend_at is None:
                self.resend_at = now + FULL_LINK_S

    def resend(self, now: float) -> list[Effect]:
        """The requests that were not sent, once their time has come."""
        if self.resend_at is None or now < self.resend_at:
            return []
        unsent, self._unsent, self.resend_at = self._unsent, {}, None
        effects: list[Effect] = []
        for number, (peer, kind) in unsent.items():
            download = self._downloads.get(number)
            if kind is BlobStop:
                effects.append(Send(peer, BlobStop(number)))
            elif download is not None and kind is BlobAsk:
                effects.append(Send(peer, _ask_frame(download)))
            elif download is not None:
                effects.append(Send(peer, BlobMore(number, download.upto)))
        return effects


def _ask_frame(download: Download) -> BlobAsk:
    granter = download.asked_as
    return BlobAsk(
        download.number, download.sha256, download.size, granter, download.grants[granter],
        download.arrived, download.upto,
    )  # fmt: skip
