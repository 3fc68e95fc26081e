"""Which chunk is read next, and for whom. Never reads one, and never decides who may have a blob.

A peer asks for a blob under a number of its own and says how far we may send. The driver checks
whether it may have the blob. Then chunks are read, a few at a time, in turn for each peer and for
each of its uploads, and are sent in order. A chunk that the link could not take is read again
rather than kept, so a peer that does not read its link costs no memory.

Invariants: a chunk is sent only after `admitted`, within the credit, and after the chunk before
it. A number is free again only when every answer about it has come, so an answer about one upload
is never taken for another. Each `admitted` is followed by exactly one CloseReader.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from meshagent.core.effects import CheckAsk, CloseReader, Effect, ReadChunk, Send
from meshagent.core.model.peers import AgentId
from meshagent.core.transfer.chunks import BLOB_BYTES_MAX, FULL_LINK_S, chunk_count, chunk_length
from meshagent.core.transfer.upload import Upload, UploadEvent, UploadPeer, UploadState
from meshagent.core.wire.frames import (
    CREDIT_CHUNKS_MAX,
    BlobAsk,
    BlobChunk,
    BlobEnd,
    BlobMore,
    BlobStop,
    Frame,
    Payload,
)

__all__ = ["UploadConfig", "Uploads"]

ENDS_KEPT_MAX = 256  # BlobEnds for full links; one that is lost costs the downloader a stall


@dataclass(frozen=True, slots=True)
class UploadConfig:
    """How much is uploaded at once."""

    per_peer_max: int = 16
    """Uploads to one peer at once: twice what a downloader uses, since old ones end late."""
    in_all_max: int = 128
    """Uploads at once. Beyond either limit the downloader is told that we are busy."""
    reads_max: int = 8
    """Chunks being read at once: 4 MiB, enough to keep a disk and the links busy."""
    reads_per_upload_max: int = 6
    """Of one upload. With `reads_max` it limits the chunks that wait for an earlier one."""
    idle_s: float = 60.0
    """An upload that got no credit for this long ends."""


class Uploads:
    """All uploads to all peers."""

    def __init__(self, refused: Counter[str], config: UploadConfig | None = None) -> None:
        self._refused, self._config = refused, config or UploadConfig()
        self._peers: dict[AgentId, UploadPeer] = {}
        self._turns: deque[UploadPeer] = deque()
        self._count = self._reading = 0
        self._blocked: list[UploadPeer] = []
        self._unsent_ends: deque[Send] = deque(maxlen=ENDS_KEPT_MAX)
        self._unblock_at: float | None = None
        self._idle_check_at: float | None = None

    # -- the engine contract ------------------------------------------------------------------

    def receive(self, frame: Frame, peer: AgentId, now: float) -> list[Effect]:
        """What a downloader sends."""
        match frame:
            case BlobAsk():
                return self._asked(frame, peer, now)
            case BlobMore(pull, upto):
                return self._more(peer, pull, upto, now)
            case BlobStop(pull):
                upload = self._find(peer, pull)
                return [] if upload is None else self._end(upload) + self._read_next()
        return []

    def on_timer(self, now: float) -> list[Effect]:
        """Try full links again, and end uploads that get no credit."""
        effects: list[Effect] = []
        if self._unblock_at is not None and now >= self._unblock_at:
            effects += self._unblock()
        if self._idle_check_at is not None and now >= self._idle_check_at:
            effects += self._end_idle(now)
        return effects

    def deadline(self) -> float | None:
        """When on_timer is wanted next."""
        times = [each for each in (self._unblock_at, self._idle_check_at) if each is not None]
        return min(times, default=None)

    def disconnected(self, peer: AgentId) -> list[Effect]:
        """Its link is gone, and with it all its uploads."""
        kept = [each for each in self._unsent_ends if each.to != peer]
        self._unsent_ends = deque(kept, maxlen=ENDS_KEPT_MAX)
        downloader = self._peers.get(peer)
        if downloader is None:
            return []
        downloader.blocked = False
        effects = [
            each for upload in list(downloader.uploads.values()) for each in self._end(upload)
        ]
        return effects + self._read_next()

    def not_sent(self, peer: AgentId, frame: Frame, now: float) -> None:
        """The link is full: continue from this frame in a moment."""
        if self._unblock_at is None:
            self._unblock_at = now + FULL_LINK_S
        if isinstance(frame, BlobEnd):
            self._unsent_ends.append(Send(peer, frame))
        elif isinstance(frame, BlobChunk):
            upload = self._find(peer, frame.pull)
            if upload is not None and upload.state is UploadState.OPEN:
                upload.rewind(frame.index)
                if not upload.to.blocked:
                    upload.to.blocked = True
                    self._blocked.append(upload.to)

    # -- what the driver answers --------------------------------------------------------------

    def admitted(self, peer: AgentId, pull: int, now: float) -> list[Effect]:
        """The peer may have that blob, and it is here, open for reading."""
        upload = self._find(peer, pull)
        before = None if upload is None else upload.apply(UploadEvent.ADMITTED)
        if upload is None or before is None:
            return []
        if upload.state is UploadState.ENDED:
            self._remove_if_answered(upload)
            return [CloseReader(peer, pull)]
        upload.touched = now
        self._enqueue(upload)
        return self._read_next()

    def turned_away(
        self, peer: AgentId, pull: int, why: str, reason: str, now: float
    ) -> list[Effect]:
        """The peer may not have it, or it is not here."""
        upload = self._find(peer, pull)
        before = None if upload is None else upload.apply(UploadEvent.TURNED_AWAY)
        if upload is None or before is None:
            return []
        self._remove_if_answered(upload)
        if why == "not allowed":
            self._refused["blob not granted"] += 1
        if before is UploadState.CANCELLED:
            return []
        return [Send(peer, BlobEnd(pull, why, reason))]

    def chunk_read(
        self, peer: AgentId, pull: int, index: int, data: Payload | None, now: float
    ) -> list[Effect]:
        """A chunk was read, or can't be any more."""
        upload = self._find(peer, pull)
        if upload is None or index not in upload.reading:
            return []
        upload.reading.discard(index)
        self._reading -= 1
        if upload.state is UploadState.ENDED:
            self._remove_if_answered(upload)
            return self._read_next()
        effects: list[Effect] = []
        if data is None or len(data) != chunk_length(upload.ask.size, index):
            effects.append(Send(peer, BlobEnd(pull, "failed", "It can't be read any more.")))
            effects += self._end(upload)
            return effects + self._read_next()
        upload.touched = now
        if upload.to.blocked:
            upload.rewind(index)
        else:
            upload.held[index] = data
            while (ready := upload.held.pop(upload.send, None)) is not None:
                effects.append(Send(peer, BlobChunk(pull, upload.send, ready)))
                upload.send += 1
            self._enqueue(upload)
        return effects + self._read_next()

    # -- requests ---------------------------------------------------------------------------------

    def _asked(self, ask: BlobAsk, peer: AgentId, now: float) -> list[Effect]:
        downloader = self._peers.get(peer)
        if downloader is not None and ask.pull in downloader.uploads:
            self._refused["pull number used twice"] += 1
            return []
        chunks = chunk_count(ask.size)
        sound = ask.first < ask.upto <= min(chunks, ask.first + CREDIT_CHUNKS_MAX)
        if not sound or ask.size > BLOB_BYTES_MAX:
            self._refused["absurd ask"] += 1
            return [Send(peer, BlobEnd(ask.pull, "failed", "No blob has such numbers."))]
        mine = 0 if downloader is None else len(downloader.uploads)
        if mine >= self._config.per_peer_max or self._count >= self._config.in_all_max:
            self._refused["too many pulls at once"] += 1
            return [Send(peer, BlobEnd(ask.pull, "busy", "Too many uploads at once."))]
        if downloader is None:
            downloader = self._peers[peer] = UploadPeer(peer)
        downloader.uploads[ask.pull] = Upload(downloader, ask, ask.upto, ask.first, ask.first, now)
        self._count += 1
        if self._idle_check_at is None:
            self._idle_check_at = now + self._config.idle_s
        granter = AgentId(ask.granter)
        return [CheckAsk(peer, ask.pull, ask.sha256, ask.size, granter, ask.grant)]

    def _more(self, peer: AgentId, pull: int, upto: int, now: float) -> list[Effect]:
        upload = self._find(peer, pull)
        if upload is None:
            self._refused["credit for no pull"] += 1
            return []
        if upto > min(chunk_count(upload.ask.size), upload.send + CREDIT_CHUNKS_MAX):
            self._refused["absurd credit"] += 1
            return []
        if upto > upload.upto:  # the same credit again does not keep an idle upload
            upload.upto, upload.touched = upto, now
        self._enqueue(upload)
        return self._read_next()

    def _end(self, upload: Upload) -> list[Effect]:
        """Nothing more is sent; its number stays taken until the last answer about it has come."""
        before = upload.apply(UploadEvent.END)
        upload.held.clear()
        self._dequeue(upload)
        self._remove_if_answered(upload)
        opened = before is UploadState.OPEN
        return [CloseReader(upload.to.peer, upload.ask.pull)] if opened else []

    def _remove_if_answered(self, upload: Upload) -> None:
        downloader = upload.to
        if upload.is_answered:
            del downloader.uploads[upload.ask.pull]
            self._count -= 1
            if not downloader.uploads:
                del self._peers[downloader.peer]

    # -- turns --------------------------------------------------------------------------------

    def _enqueue(self, upload: Upload) -> None:
        downloader = upload.to
        if upload.queued or downloader.blocked:
            return
        if upload.next_read(self._config.reads_per_upload_max) is None:
            return
        upload.queued = True
        downloader.ready.append(upload)
        if not downloader.queued:
            downloader.queued = True
            self._turns.append(downloader)

    def _dequeue(self, upload: Upload) -> None:
        downloader = upload.to
        if upload.queued:
            upload.queued = False
            downloader.ready.remove(upload)
            if not downloader.ready:
                downloader.queued = False
                self._turns.remove(downloader)

    def _read_next(self) -> list[Effect]:
        effects: list[Effect] = []
        while self._reading < self._config.reads_max and self._turns:
            downloader = self._turns.popleft()
            downloader.queued = False
            upload = downloader.ready.popleft()
            upload.queued = False
            index = upload.next_read(self._config.reads_per_upload_max)
            if index is not None and not downloader.blocked:
                upload.read = index + 1
                upload.reading.add(index)
                self._reading += 1
                effects.append(
                    ReadChunk(downloader.peer, upload.ask.pull, upload.ask.sha256, index)
                )
                self._enqueue(upload)
            if downloader.ready and not downloader.queued:
                downloader.queued = True
                self._turns.append(downloader)
        return effects

    def _unblock(self) -> list[Effect]:
        self._unblock_at = None
        effects: list[Effect] = list(self._unsent_ends)
        self._unsent_ends.clear()
        blocked, self._blocked = self._blocked, []
        for downloader in blocked:
            downloader.blocked = False
            self._enqueue_all(downloader.uploads.values())
        return effects + self._read_next()

    def _enqueue_all(self, uploads: Iterable[Upload]) -> None:
        for upload in uploads:
            self._enqueue(upload)

    def _end_idle(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        uploads = [
            each for downloader in self._peers.values() for each in downloader.uploads.values()
        ]
        for upload in uploads:
            idle = upload.state is UploadState.OPEN and upload.send >= upload.upto
            if idle and now - upload.touched >= self._config.idle_s:
                end = BlobEnd(upload.ask.pull, "busy", "The download was idle for too long.")
                effects.append(Send(upload.to.peer, end))
                effects += self._end(upload)
        self._idle_check_at = now + self._config.idle_s / 2 if self._count else None
        return effects

    def _find(self, peer: AgentId, pull: int) -> Upload | None:
        downloader = self._peers.get(peer)
        return None if downloader is None else downloader.uploads.get(pull)
