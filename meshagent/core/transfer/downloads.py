"""Which blob is downloaded next, from whom, and how far ahead. Never writes or hashes a chunk.

Downloads wait in a queue; a few have a slot (`download_slots.py`). A download with a slot opens
its partial file, which says how much is there already, and asks one source for the rest, in order.
The source may send as far as its credit (`credit_window.py`); more credit follows as chunks are
written, not as they arrive (`source_requests.py`).

When a source stalls, leaves, is busy or lacks the blob, another continues at the next chunk. Wrong
contents show only at the end: one source alone is never asked for that blob again; after several,
it is downloaded from one at a time, which shows whose fault it was.

Invariants: a blob has at most one unanswered OpenPartial or FinishBlob, and none of them together
with an unanswered WriteChunk; ClosePartial is sent only when nothing is unanswered.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from meshagent.core.effects import (
    BlobFailed,
    BlobProgress,
    BlobReady,
    ClosePartial,
    Effect,
    FinishBlob,
    OpenPartial,
    Send,
    WriteChunk,
)
from meshagent.core.membership.lifeguard import backoff_s
from meshagent.core.model.file_names import one_line
from meshagent.core.model.peers import AgentId
from meshagent.core.transfer.chunks import BLOB_BYTES_MAX, chunk_length
from meshagent.core.transfer.credit_window import CreditWindow
from meshagent.core.transfer.download import (
    ABSENT,
    NOT_ALLOWED,
    WRONG,
    BlobOffer,
    BlobSource,
    Download,
    DownloadState,
)
from meshagent.core.transfer.download_config import DownloadConfig
from meshagent.core.transfer.download_queue import DownloadQueue
from meshagent.core.transfer.download_slots import DownloadSlots
from meshagent.core.transfer.download_table import DownloadTable
from meshagent.core.transfer.source_requests import SourceRequests
from meshagent.core.wire.frames import BlobChunk, BlobEnd, BlobStop, Frame
from meshagent.errors import LimitReached

__all__ = ["DownloadConfig", "Downloads"]

NOBODY_HERE = "Nobody who has it is here."


class Downloads:
    """Every blob that this agent wants."""

    def __init__(
        self, rng: random.Random, refused: Counter[str], config: DownloadConfig | None = None
    ) -> None:
        self._rng, self._refused = rng, refused
        self._config = config or DownloadConfig()
        self._linked: set[AgentId] = set()
        self._waiting = DownloadQueue()
        self.table = DownloadTable(self._config.wanted_max)
        self.slots = DownloadSlots(self._config, self._linked, rng)
        self.window = CreditWindow(self._config)
        self.requests = SourceRequests(rng, self.window)

    # -- from above ---------------------------------------------------------------------------

    def want(
        self,
        sha256: bytes,
        size: int,
        sources: Sequence[AgentId],
        granter: AgentId,
        grant: bytes,
        now: float,
    ) -> list[Effect]:
        """Download this blob; another call for it adds sources and grants."""
        if not 0 <= size <= BLOB_BYTES_MAX:
            raise LimitReached(f"A blob of {size} bytes is beyond the limit of {BLOB_BYTES_MAX}.")
        offer = BlobOffer(size, tuple(sources), granter, grant)
        known = self.table.get(sha256)
        if known is None:
            self.slots.enqueue(self.table.add(sha256, offer))
        elif known.is_cancelled:
            known.after_slot, known.discard = DownloadState.QUEUED, False
            known.rivals = [offer] if size != known.size else []
            if size == known.size:
                self.table.merge(known, offer)
        elif size != known.size:
            self._refused["another size for the same blob"] += 1
            known.add_rival(offer)
        else:
            self.table.merge(known, offer)
            if known.state is DownloadState.WAITING_FOR_SOURCE:
                self._enqueue(known)
        return self._continue(now)

    def unwant(self, sha256: bytes, now: float) -> list[Effect]:
        """Nobody wants it any more."""
        download = self.table.get(sha256)
        if download is None or download.is_cancelled:
            return []
        if sha256 not in self.slots.active:
            self._end(download, DownloadState.CANCELLED)
            return []
        download.leave_for(DownloadState.CANCELLED)
        effects: list[Effect] = []
        if download.state in (DownloadState.RECEIVING, DownloadState.CLOSING):
            effects = self._close(download, discard=True)
        return effects + self._continue(now)

    def progress(self, sha256: bytes) -> tuple[int, int, str] | None:
        """Bytes written, size, and what it waits for, if anything; None when it is not wanted."""
        download = self.table.get(sha256)
        if download is None or download.is_cancelled:
            return None
        return download.received_bytes, download.size, download.reason

    # -- the engine contract ------------------------------------------------------------------

    def receive(self, frame: Frame, peer: AgentId, now: float) -> list[Effect]:
        """What a source sends."""
        match frame:
            case BlobChunk():
                return self._chunk(frame, peer, now)
            case BlobEnd():
                return self._ended(frame, peer, now)
        return []

    def on_timer(self, now: float) -> list[Effect]:
        """Leave sources that stall, and try again what had to wait."""
        effects = self.requests.resend(now)
        for download in list(self.slots.active.values()):
            if download.is_owed() and now >= download.heard_at + self._config.stall_s:
                self._refused["stalled"] += 1
                self.slots.pause_sender(download.source, now)
                self._pause_source(download.sources[download.source], "It does not go on.", now)
                effects += self.requests.stop(download)
        for download in self._waiting.due(now):
            self._enqueue(download)
        return effects + self._continue(now)

    def deadline(self) -> float | None:
        """When on_timer is wanted next."""
        resend_at = self.requests.resend_at
        if not len(self.table) and resend_at is None:
            return None  # the usual case, and this is called after every turn
        times = [
            each.heard_at + self._config.stall_s
            for each in self.slots.active.values()
            if each.is_owed()
        ]
        times += self.slots.deadlines()
        waiting = self._waiting.first()
        if waiting is not None:
            times.append(waiting[0])
        if resend_at is not None:
            times.append(resend_at)
        return min(times, default=None)

    def connected(self, peer: AgentId, now: float) -> list[Effect]:
        """A source has a new link: whatever was on another is lost."""
        effects = self.disconnected(peer, now)
        self._linked.add(peer)
        for download in self.table.with_source(peer):
            source = download.sources[peer]
            source.paused_until, source.failures = 0.0, 0
            if source.verdict == ABSENT:
                source.verdict = ""
            download.failures = 0
            if download.state is DownloadState.WAITING_FOR_SOURCE:
                self._enqueue(download)
        return effects + self._continue(now)

    def disconnected(self, peer: AgentId, now: float) -> list[Effect]:
        """Its link is gone, with what was on it."""
        self._linked.discard(peer)
        self.slots.resume_sender(peer)
        self.requests.disconnected(peer)
        for download in self.slots.active.values():
            if download.number and download.source == peer:
                self.requests.end(download)
        return self._continue(now)

    def not_sent(self, peer: AgentId, frame: Frame, now: float) -> None:
        """The link is full: make the request again in a moment, as it is true then."""
        self.requests.not_sent(peer, frame, now)

    # -- what the driver answers --------------------------------------------------------------

    def opened(self, sha256: bytes, received_chunks: int, now: float) -> list[Effect]:
        """The partial file is open and holds the first `received_chunks` chunks."""
        download = self.table[sha256]
        download.enter(DownloadState.RECEIVING)
        received = min(received_chunks, download.chunks)
        download.has_foreign_chunks = download.has_foreign_chunks or received > download.written
        download.written = download.arrived = download.upto = received
        download.reason = ""
        if download.is_cancelled:
            return self._close(download, discard=True) + self._continue(now)
        return self._report(download) + self._finish(download) + self._continue(now)

    def present(self, sha256: bytes, now: float) -> list[Effect]:
        """Another agent of this machine has it: nothing to do."""
        return self._succeed(self.table[sha256], now)

    def held_up(self, sha256: bytes, reason: str, now: float) -> list[Effect]:
        """The disk is full, or another process downloads it: try again after a pause."""
        download = self.table[sha256]
        state = download.state
        if state in (DownloadState.RECEIVING, DownloadState.CLOSING):
            download.writes -= 1
        if state is not DownloadState.CLOSING:
            download.failures += 1
            download.reason = reason
            download.leave_for(DownloadState.WAITING_FOR_DISK)
            longest_s = self._config.longest_pause_s
            download.wait_until = now + self._pause_s(download.failures, longest_s)
            self.slots.delay_opening(now + self._config.open_delay_s)
        if state is DownloadState.OPENING:
            return self._leave_slot(download) + self._continue(now)
        return self._close(download, discard=download.is_cancelled) + self._continue(now)

    def impossible(self, sha256: bytes, why: str, now: float) -> list[Effect]:
        """There is no room for it here, or it may not be kept here."""
        download = self.table[sha256]
        self._will_fail(download, why)
        return self._leave_slot(download) + self._continue(now)

    def wrote(self, sha256: bytes, index: int, now: float) -> list[Effect]:
        """A chunk is written: its credit is free again."""
        download = self.table[sha256]
        download.writes -= 1
        if index == download.written:  # while closing, an earlier one may have failed
            self.window.written(download)
        if download.state is DownloadState.CLOSING:
            return self._close(download, discard=download.discard) + self._continue(now)
        download.failures = 0
        effects = self._report(download)
        if download.written == download.chunks:
            return effects + self._finish(download)
        return effects + self._share_window(now)

    def finished(self, sha256: bytes, now: float) -> list[Effect]:
        """It is complete, verified and in place."""
        return self._succeed(self.table[sha256], now)

    def wrong(self, sha256: bytes, now: float) -> list[Effect]:
        """All of it came, and its hash is another."""
        download = self.table[sha256]
        if len(download.contributors) == 1 and not download.has_foreign_chunks:
            (liar,) = download.contributors
            download.sources[liar].verdict = download.sources[liar].reason = WRONG
            self._refused[WRONG] += 1
        elif download.contributors or download.has_foreign_chunks:
            download.single_source = True
        else:
            self._will_fail(download, "No file of that size has this hash.")
        return self._close(download, discard=True) + self._continue(now)

    # -- chunks -------------------------------------------------------------------------------

    def _chunk(self, frame: BlobChunk, peer: AgentId, now: float) -> list[Effect]:
        download = self.requests.find(frame.pull)
        if download is None or download.source != peer:
            return self._unexpected_chunk(frame.pull, peer)
        index = frame.index
        if index >= download.upto:
            self._refused["chunk beyond the credit"] += 1
            return []
        if index != download.arrived:
            self._refused["chunk out of order"] += 1
            return []
        source = download.sources[peer]
        if len(frame.data) != chunk_length(download.size, index):
            self._refused["chunk of a wrong length"] += 1
            source.verdict = source.reason = WRONG
            return self.requests.stop(download) + self._continue(now)
        source.answered, source.failures = True, 0
        self.slots.resume_sender(peer)
        download.contributors.add(peer)
        download.arrived += 1
        download.writes += 1
        download.heard_at = now
        effects: list[Effect] = [WriteChunk(download.sha256, index, frame.data)]
        if download.arrived == download.chunks:
            effects += self.requests.stop(download)
        return effects

    def _unexpected_chunk(self, number: int, peer: AgentId) -> list[Effect]:
        if not self.requests.has_ended(number):
            self._refused["chunk that was never asked for"] += 1
            return []
        self._refused["chunk that came too late"] += 1
        return [Send(peer, BlobStop(number))]

    def _ended(self, frame: BlobEnd, peer: AgentId, now: float) -> list[Effect]:
        download = self.requests.find(frame.pull)
        if download is None or download.source != peer:
            self._refused["end of no pull"] += 1
            return []
        source, reason = download.sources[peer], one_line(frame.reason)
        if frame.why == NOT_ALLOWED:
            source.refused_grants.add(download.asked_as)
            if set(download.grants) <= source.refused_grants:
                source.verdict, source.reason = NOT_ALLOWED, reason
        elif frame.why == ABSENT:
            source.verdict, source.reason = ABSENT, reason
        else:
            self._pause_source(source, reason, now)
        self.requests.end(download)
        return self._continue(now)

    # -- requests -----------------------------------------------------------------------------

    def _share_window(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for download, chunks in self.window.shares(self.slots.active.values()):
            if download.number:
                effects.append(self.requests.more(download, chunks, now))
            else:
                effects += self._ask(download, chunks, now)
        return effects

    def _ask(self, download: Download, chunks: int, now: float) -> list[Effect]:
        source = download.choose_source(self._linked, now)
        if source is None:
            return self._wait_for_source(download, now)
        if download.single_source and download.contributors - {source}:
            download.leave_for(DownloadState.QUEUED)
            return self._close(download, discard=True)
        download.window = self._config.window_first
        return [self.requests.ask(download, source, chunks, now)]

    # -- sources ------------------------------------------------------------------------------

    def _pause_source(self, source: BlobSource, reason: str, now: float) -> None:
        source.failures += 1
        source.reason = reason
        source.paused_until = now + self._pause_s(source.failures, self._config.longest_pause_s)

    def _wait_for_source(self, download: Download, now: float) -> list[Effect]:
        """Nobody can be asked now: free the slot for others, or fail when nobody ever can."""
        if download.is_hopeless(self._linked):
            self._will_fail(download, f"Nobody gives it: {download.verdicts()}.")
            return self._close(download, discard=True)
        download.leave_for(DownloadState.WAITING_FOR_SOURCE)
        download.failures += 1
        download.wait_until = now + self._pause_s(download.failures, self._config.source_check_s)
        download.reason = NOBODY_HERE
        soonest = download.next_source(self._linked)
        if soonest is not None:
            download.wait_until = soonest.paused_until
            download.reason = soonest.reason or NOBODY_HERE
        # A partial file that holds nothing gives its reserved space back.
        return self._close(download, discard=not download.arrived)

    # -- into a slot and out of it ------------------------------------------------------------

    def _continue(self, now: float) -> list[Effect]:
        """Fill the window, then the slots."""
        effects = self._share_window(now)
        while (download := self.slots.start_next(now)) is not None:
            effects.append(OpenPartial(download.sha256, download.size))
        return effects

    def _enqueue(self, download: Download) -> None:
        download.enter(DownloadState.QUEUED)
        self.slots.enqueue(download)

    def _finish(self, download: Download) -> list[Effect]:
        if download.written < download.chunks:
            return []
        download.enter(DownloadState.FINISHING)
        return [FinishBlob(download.sha256)]

    def _close(self, download: Download, discard: bool) -> list[Effect]:
        """Leave the slot, once every write is answered."""
        effects = self.requests.stop(download)
        download.enter(DownloadState.CLOSING)
        download.discard = discard or download.discard
        if download.writes:
            return effects
        effects.append(ClosePartial(download.sha256, download.discard))
        self.window.release(download)
        if download.discard:
            download.written = download.arrived = download.upto = 0
            download.contributors.clear()
            download.has_foreign_chunks, download.reported_percent = False, -1
        download.discard = False
        return effects + self._leave_slot(download)

    def _leave_slot(self, download: Download) -> list[Effect]:
        """Go back to the queue, wait, or end."""
        self.slots.free(download)
        state, download.after_slot = download.after_slot, DownloadState.QUEUED
        if state is DownloadState.CANCELLED:
            self._end(download, state)
        elif state is DownloadState.FAILED:
            return self._fail(download)
        elif state is DownloadState.QUEUED:
            self._enqueue(download)
        else:
            download.enter(state)
            self._waiting.add(download.wait_until, download)
        return []

    def _succeed(self, download: Download, now: float) -> list[Effect]:
        self.slots.free(download)
        self._end(download, DownloadState.DONE)
        ready: list[Effect] = []
        if not download.is_cancelled:
            ready.append(BlobReady(download.sha256, frozenset(download.contributors)))
        return ready + self._continue(now)

    def _end(self, download: Download, state: DownloadState) -> None:
        download.enter(state)
        self.table.remove(download)

    def _will_fail(self, download: Download, reason: str) -> None:
        download.leave_for(DownloadState.FAILED)
        download.reason = reason

    def _fail(self, download: Download) -> list[Effect]:
        """It can't be had, unless another message is right about its size."""
        download.enter(DownloadState.FAILED)
        other = self.table.replace(download)
        if other is None:
            return [BlobFailed(download.sha256, download.reason)]
        self.slots.enqueue(other)
        return []

    def _report(self, download: Download) -> list[Effect]:
        percent = download.written * 100 // download.chunks if download.chunks else 100
        if percent == download.reported_percent:
            return []
        download.reported_percent = percent
        return [BlobProgress(download.sha256, download.received_bytes, download.size)]

    def _pause_s(self, failures: int, longest_s: float) -> float:
        return backoff_s(failures - 1, self._config.pause_s, longest_s, self._rng)
