"""Blobs in both directions: what this agent pulls and what it serves. Never touches disk.

Theory, in short. A blob is named by its SHA-256 and cut into chunks of 512 KiB. Who wants it asks
a peer that may have it, naming the message's author and its grant, the first chunk it lacks and
how far the peer may send; more credit follows as chunks are written, never as they come. The
asker chooses the pace, the order and the source; the asked only turns away, sends in order, or
says that it can't go on. Nothing is acknowledged and nothing sent twice on a link that stays up:
what was lost with a link is asked for again from the first chunk that is not written.

`serving.py` answers who gets the next read, `pulling.py` which blob is asked for next and from
whom; this module is the engine's one face. The driver performs each effect once and answers it
once, with the method that the effect names; for one blob in the order of the effects.
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
_FOR_PULLING = (BlobChunk, BlobEnd)


class Transfer:
    """The transfer engine of one agent."""

    def __init__(
        self,
        rng: random.Random,
        pulling: DownloadConfig | None = None,
        serving: UploadConfig | None = None,
    ) -> None:
        self.refused: Counter[str] = Counter()
        self._pulling = Downloads(rng, self.refused, pulling)
        self._serving = Uploads(self.refused, serving)
        self.want, self.unwant = self._pulling.want, self._pulling.unwant
        self.progress = self._pulling.progress
        self.opened, self.present = self._pulling.opened, self._pulling.present
        self.held_up, self.impossible = self._pulling.held_up, self._pulling.impossible
        self.wrote = self._pulling.wrote
        self.finished, self.wrong = self._pulling.finished, self._pulling.wrong
        self.admitted, self.turned_away = self._serving.admitted, self._serving.turned_away
        self.chunk_read = self._serving.chunk_read

    def receive(self, frame: Frame, peer: AgentId, now: float) -> list[Effect]:
        """A frame about blobs; others are not for us."""
        if isinstance(frame, _FOR_PULLING):
            return self._pulling.receive(frame, peer, now)
        return self._serving.receive(frame, peer, now)

    def on_timer(self, now: float) -> list[Effect]:
        """Do what is due."""
        return self._pulling.on_timer(now) + self._serving.on_timer(now)

    def deadline(self) -> float | None:
        """When on_timer is wanted next."""
        times = [self._pulling.deadline(), self._serving.deadline()]
        return min((each for each in times if each is not None), default=None)

    def connected(self, peer: AgentId, now: float) -> list[Effect]:
        """The peer has a link, or a new one: whatever was on another is lost."""
        return self._serving.disconnected(peer) + self._pulling.connected(peer, now)

    def disconnected(self, peer: AgentId, now: float) -> list[Effect]:
        """The last link to it is gone."""
        return self._serving.disconnected(peer) + self._pulling.disconnected(peer, now)

    def not_sent(self, peer: AgentId, frame: Frame, now: float) -> None:
        """The link is full: whatever the frame was, it is made up for in a moment."""
        self._pulling.not_sent(peer, frame, now)
        self._serving.not_sent(peer, frame, now)
