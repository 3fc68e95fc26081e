"""One upload: its state, and which of its chunks is read next. Never reads or sends one.

Invariant: the state changes only as `TRANSITIONS` says.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from meshagent.core.model.peers import AgentId
from meshagent.core.wire.frames import BlobAsk, Payload

__all__ = ["TRANSITIONS", "Upload", "UploadEvent", "UploadPeer", "UploadState"]


class UploadState(Enum):
    """How far an upload has come."""

    CHECKING = "checking"
    """The driver checks whether the peer may have the blob."""
    CANCELLED = "cancelled"
    """It ended while it was being checked: the driver's answer is still due."""
    OPEN = "open"
    ENDED = "ended"


class UploadEvent(Enum):
    """What happens to an upload."""

    ADMITTED = "admitted"
    TURNED_AWAY = "turned away"
    END = "end"


TRANSITIONS: dict[tuple[UploadState, UploadEvent], UploadState] = {
    (UploadState.CHECKING, UploadEvent.ADMITTED): UploadState.OPEN,
    (UploadState.CHECKING, UploadEvent.TURNED_AWAY): UploadState.ENDED,
    (UploadState.CHECKING, UploadEvent.END): UploadState.CANCELLED,
    (UploadState.CANCELLED, UploadEvent.ADMITTED): UploadState.ENDED,
    (UploadState.CANCELLED, UploadEvent.TURNED_AWAY): UploadState.ENDED,
    (UploadState.OPEN, UploadEvent.END): UploadState.ENDED,
}
"""What is not here changes nothing: a second answer, or the end of an upload that has ended."""


@dataclass(slots=True, eq=False)
class Upload:
    """One blob that one peer downloads from us."""

    to: UploadPeer
    ask: BlobAsk
    upto: int
    send: int
    read: int
    touched: float
    state: UploadState = UploadState.CHECKING
    reading: set[int] = field(default_factory=set)
    held: dict[int, Payload] = field(default_factory=dict)
    """Read, and waiting for an earlier one that is being read."""
    queued: bool = False

    @property
    def is_answered(self) -> bool:
        """Whether it has ended, and every answer about it has come."""
        return self.state is UploadState.ENDED and not self.reading

    def apply(self, event: UploadEvent) -> UploadState | None:
        """Change the state; returns the one before, or None when nothing changed."""
        before = self.state
        after = TRANSITIONS.get((before, event))
        if after is None:
            return None
        self.state = after
        return before

    def next_read(self, reads_max: int) -> int | None:
        """The chunk to read now, if any."""
        if self.state is not UploadState.OPEN or len(self.reading) + len(self.held) >= reads_max:
            return None
        while self.read in self.reading or self.read in self.held:
            self.read += 1
        return self.read if self.read < self.upto else None

    def rewind(self, index: int) -> None:
        """This chunk and those after it must be read again."""
        self.send = self.read = min(self.send, index)
        self.held.clear()


@dataclass(slots=True, eq=False)
class UploadPeer:
    """A peer that downloads from us."""

    peer: AgentId
    uploads: dict[int, Upload] = field(default_factory=dict)
    ready: deque[Upload] = field(default_factory=deque)
    """Uploads that can read a chunk now."""
    queued: bool = False
    blocked: bool = False
    """Its link is full."""
