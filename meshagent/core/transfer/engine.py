"""Blobs in both directions: downloads and uploads. Never touches the disk.

In short: a blob is named by its SHA-256 and cut into chunks of 512 KiB. The downloader asks a peer
that may have it, and names the message's author and its grant, the first chunk it lacks, and how
far the peer may send. More credit follows as chunks are written, not as they arrive. The downloader
chooses the speed, the order and the source; the uploader only refuses, sends in order, or says that
it can't continue. Nothing is acknowledged, and nothing is sent twice on a link that stays up: what
was lost with a link is asked for again from the first chunk that is not written.

`uploads.py` decides who gets the next read, `downloads.py` which blob is asked for next and from
whom; this module joins them. The driver performs each effect once and answers it once, with the
method that the effect names; for one blob in the order of the effects.
"""

from __future__ import annotations

import random
from collections import Counter

from meshagent.core.effects import Effect
from meshagent.core.model.peers import AgentId
from meshagent.core.transfer.downloads import DownloadConfig, Downloads
from meshagent.core.transfer.uploads import UploadConfig, Uploads
from meshagent.core.wire.frames import BlobAsk, BlobChunk, BlobEnd, BlobMore, BlobStop, Frame

__all__ = ["BLOB_FRAMES", "Transfer"]

BLOB_FRAMES = (BlobAsk, BlobMore, BlobChunk, BlobEnd, BlobStop)
_FOR_DOWNLOADS = (BlobChunk, BlobEnd)


class Transfer:
    """The transfer engine of one agent."""

    def __init__(
        self,
        rng: random.Random,
        downloads: DownloadConfig | None = None,
        uploads: UploadConfig | None = None,
    ) -> None:
        self.refused: Counter[str] = Counter()
        self.downloads = Downloads(rng, self.refused, downloads)
        self.uploads = Uploads(self.refused, uploads)
        self.want, self.unwant = self.downloads.want, self.downloads.unwant
        self.progress = self.downloads.progress
        self.opened, self.present = self.downloads.opened, self.downloads.present
        self.held_up, self.impossible = self.downloads.held_up, self.downloads.impossible
        self.wrote = self.downloads.wrote
        self.finished, self.wrong = self.downloads.finished, self.downloads.wrong
        self.admitted, self.turned_away = self.uploads.admitted, self.uploads.turned_away
        self.chunk_read = self.uploads.chunk_read

    def receive(self, frame: Frame, peer: AgentId, now: float) -> list[Effect]:
        """A frame about blobs; others are not for us."""
        if isinstance(frame, _FOR_DOWNLOADS):
            return self.downloads.receive(frame, peer, now)
        return self.uploads.receive(frame, peer, now)

    def on_timer(self, now: float) -> list[Effect]:
        """Do what is due."""
        return self.downloads.on_timer(now) + self.uploads.on_timer(now)

    def deadline(self) -> float | None:
        """When on_timer is wanted next."""
        times = [self.downloads.deadline(), self.uploads.deadline()]
        return min((each for each in times if each is not None), default=None)

    def connected(self, peer: AgentId, now: float) -> list[Effect]:
        """The peer has a link, or a new one: what was on another is lost."""
        return self.uploads.disconnected(peer) + self.downloads.connected(peer, now)

    def disconnected(self, peer: AgentId, now: float) -> list[Effect]:
        """The last link to it is gone."""
        return self.uploads.disconnected(peer) + self.downloads.disconnected(peer, now)

    def not_sent(self, peer: AgentId, frame: Frame, now: float) -> None:
        """The link is full: what the frame said is sent again in a moment."""
        self.downloads.not_sent(peer, frame, now)
        self.uploads.not_sent(peer, frame, now)
