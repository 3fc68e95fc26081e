"""Which chunk is read next, and for whom. Never reads one, and never decides who may ask.

A peer asks for a blob under a number of its own and says how far we may send. Its ask is checked
by the driver; then chunks are read, a few at a time over all, one for each peer in turn and one
for each of its pulls in turn, and sent in order. What the link could not take is read again
rather than kept: whoever does not drain its link costs no memory.

Invariants: a chunk leaves only after `admitted`, below the credit, and after the one before it. A
number is free again only when every answer about it has come, so an answer about one ask is never
taken for another. Each `admitted` is followed by exactly one CloseReader.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from meshagent.core.effects import CheckAsk, CloseReader, Effect, ReadChunk, Send
from meshagent.core.model.peers import AgentId
from meshagent.core.transfer.chunks import BLOB_BYTES_MAX, FULL_LINK_S, chunk_count, chunk_length
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

ENDS_KEPT_MAX = 256  # for links that are full; one that is lost costs its puller a stall


@dataclass(frozen=True, slots=True)
class UploadConfig:
    """The knobs of serving."""

    per_peer_max: int = 16
    """Pulls of one peer at once: twice what a puller uses, since the old ones end late."""
    in_all_max: int = 128
    """Pulls at once; beyond it, as beyond the one above, a puller is told to come again."""
    reads_max: int = 8
    """Chunks being read at once: 4 MiB, enough to keep a disk and the links busy."""
    reads_per_pull_max: int = 6
    """Of one pull; together with `reads_max` it bounds what waits for an earlier chunk."""
    idle_s: float = 60.0
    """A pull that gave no credit for so long loses its place."""


class Stage(Enum):
    """How far an ask has come."""

    CHECKING = "checking"
    OPEN = "open"
    OVER = "over"
    """It has ended, but answers about it are still due."""


@dataclass(slots=True, eq=False)
class Serve:
    """One pull of one peer."""

    client: Client
    ask: BlobAsk
    upto: int
    send: int
    read: int
    touched: float
    stage: Stage = Stage.CHECKING
    checking: bool = True
    reading: set[int] = field(default_factory=set)
    held: dict[int, Payload] = field(default_factory=dict)
    """Read, and waiting for an earlier one that is being read."""
    queued: bool = False

    def next_read(self, reads_max: int) -> int | None:
        """The chunk to read now, if any."""
        if self.stage is not Stage.OPEN or len(self.reading) + len(self.held) >= reads_max:
            return None
        while self.read in self.reading or self.read in self.held:
            self.read += 1
        return self.read if self.read < self.upto else None

    def rewind(self, index: int) -> None:
        """This chunk and those after it must be read again."""
        self.send = self.read = min(self.send, index)
        self.held.clear()


@dataclass(slots=True, eq=False)
class Client:
    """A peer that pulls from us."""

    peer: AgentId
    serves: dict[int, Serve] = field(default_factory=dict)
    ready: deque[Serve] = field(default_factory=deque)
    queued: bool = False
    blocked: bool = False


class Uploads:
    """All that is being served to all peers."""

    def __init__(self, refused: Counter[str], config: UploadConfig | None = None) -> None:
        self._refused, self._config = refused, config or UploadConfig()
        self._clients: dict[AgentId, Client] = {}
        self._turns: deque[Client] = deque()
        self._count = self._reading = 0
        self._blocked: list[Client] = []
        self._unsent_ends: deque[Send] = deque(maxlen=ENDS_KEPT_MAX)
        self._unblock_at: float | None = None
        self._sweep_at: float | None = None

    # -- the engine contract ------------------------------------------------------------------

    def receive(self, frame: Frame, peer: AgentId, now: float) -> list[Effect]:
        """What pullers say."""
        match frame:
            case BlobAsk():
                return self._asked(frame, peer, now)
            case BlobMore(pull, upto):
                return self._more(peer, pull, upto, now)
            case BlobStop(pull):
                serve = self._find(peer, pull)
                return [] if serve is None else self._end(serve) + self._pump()
        return []

    def on_timer(self, now: float) -> list[Effect]:
        """Try full links again, and end what its puller has forgotten."""
        effects: list[Effect] = []
        if self._unblock_at is not None and now >= self._unblock_at:
            effects += self._unblock()
        if self._sweep_at is not None and now >= self._sweep_at:
            effects += self._sweep(now)
        return effects

    def deadline(self) -> float | None:
        """When on_timer is wanted next."""
        times = [each for each in (self._unblock_at, self._sweep_at) if each is not None]
        return min(times, default=None)

    def disconnected(self, peer: AgentId) -> list[Effect]:
        """Its link is gone, and with it every number it gave."""
        kept = [each for each in self._unsent_ends if each.to != peer]
        self._unsent_ends = deque(kept, maxlen=ENDS_KEPT_MAX)
        client = self._clients.get(peer)
        if client is None:
            return []
        client.blocked = False
        effects = [each for serve in list(client.serves.values()) for each in self._end(serve)]
        return effects + self._pump()

    def not_sent(self, peer: AgentId, frame: Frame, now: float) -> None:
        """The link is full: go on from there in a moment."""
        if self._unblock_at is None:
            self._unblock_at = now + FULL_LINK_S
        if isinstance(frame, BlobEnd):
            self._unsent_ends.append(Send(peer, frame))
        elif isinstance(frame, BlobChunk):
            serve = self._find(peer, frame.pull)
            if serve is not None and serve.stage is Stage.OPEN:
                serve.rewind(frame.index)
                if not serve.client.blocked:
                    serve.client.blocked = True
                    self._blocked.append(serve.client)

    # -- what the driver answers --------------------------------------------------------------

    def admitted(self, peer: AgentId, pull: int, now: float) -> list[Effect]:
        """The peer may have that blob, and it is here, open for reading."""
        serve = self._find(peer, pull)
        if serve is None or not serve.checking:
            return []
        serve.checking = False
        if serve.stage is Stage.OVER:
            self._bury(serve)
            return [CloseReader(peer, pull)]
        serve.stage, serve.touched = Stage.OPEN, now
        self._enqueue(serve)
        return self._pump()

    def turned_away(
        self, peer: AgentId, pull: int, why: str, reason: str, now: float
    ) -> list[Effect]:
        """The peer may not have it, or it is not here."""
        serve = self._find(peer, pull)
        if serve is None or not serve.checking:
            return []
        serve.checking = False
        over, serve.stage = serve.stage is Stage.OVER, Stage.OVER
        self._bury(serve)
        if why == "not allowed":
            self._refused["blob not granted"] += 1
        return [] if over else [Send(peer, BlobEnd(pull, why, reason))]

    def chunk_read(
        self, peer: AgentId, pull: int, index: int, data: Payload | None, now: float
    ) -> list[Effect]:
        """A chunk was read, or can't be any more."""
        serve = self._find(peer, pull)
        if serve is None or index not in serve.reading:
            return []
        serve.reading.discard(index)
        self._reading -= 1
        if serve.stage is Stage.OVER:
            self._bury(serve)
            return self._pump()
        effects: list[Effect] = []
        if data is None or len(data) != chunk_length(serve.ask.size, index):
            effects.append(Send(peer, BlobEnd(pull, "failed", "It can't be read any more.")))
            effects += self._end(serve)
            return effects + self._pump()
        serve.touched = now
        if serve.client.blocked:
            serve.rewind(index)
        else:
            serve.held[index] = data
            while (ready := serve.held.pop(serve.send, None)) is not None:
                effects.append(Send(peer, BlobChunk(pull, serve.send, ready)))
                serve.send += 1
            self._enqueue(serve)
        return effects + self._pump()

    # -- asks ---------------------------------------------------------------------------------

    def _asked(self, ask: BlobAsk, peer: AgentId, now: float) -> list[Effect]:
        client = self._clients.get(peer)
        if client is not None and ask.pull in client.serves:
            self._refused["pull number used twice"] += 1
            return []
        chunks = chunk_count(ask.size)
        sound = ask.first < ask.upto <= min(chunks, ask.first + CREDIT_CHUNKS_MAX)
        if not sound or ask.size > BLOB_BYTES_MAX:
            self._refused["absurd ask"] += 1
            return [Send(peer, BlobEnd(ask.pull, "failed", "No blob has such numbers."))]
        mine = 0 if client is None else len(client.serves)
        if mine >= self._config.per_peer_max or self._count >= self._config.in_all_max:
            self._refused["too many pulls at once"] += 1
            return [Send(peer, BlobEnd(ask.pull, "busy", "Too many pulls at once."))]
        if client is None:
            client = self._clients[peer] = Client(peer)
        client.serves[ask.pull] = Serve(client, ask, ask.upto, ask.first, ask.first, now)
        self._count += 1
        if self._sweep_at is None:
            self._sweep_at = now + self._config.idle_s
        granter = AgentId(ask.granter)
        return [CheckAsk(peer, ask.pull, ask.sha256, ask.size, granter, ask.grant)]

    def _more(self, peer: AgentId, pull: int, upto: int, now: float) -> list[Effect]:
        serve = self._find(peer, pull)
        if serve is None:
            self._refused["credit for no pull"] += 1
            return []
        if upto > min(chunk_count(serve.ask.size), serve.send + CREDIT_CHUNKS_MAX):
            self._refused["absurd credit"] += 1
            return []
        if upto > serve.upto:  # the same again is no reason to keep the place
            serve.upto, serve.touched = upto, now
        self._enqueue(serve)
        return self._pump()

    def _end(self, serve: Serve) -> list[Effect]:
        """Nothing more is sent; its number stays taken until the last answer about it has come."""
        opened, serve.stage = serve.stage is Stage.OPEN, Stage.OVER
        serve.held.clear()
        self._dequeue(serve)
        self._bury(serve)
        return [CloseReader(serve.client.peer, serve.ask.pull)] if opened else []

    def _bury(self, serve: Serve) -> None:
        client = serve.client
        if not serve.checking and not serve.reading:
            del client.serves[serve.ask.pull]
            self._count -= 1
            if not client.serves:
                del self._clients[client.peer]

    # -- turns --------------------------------------------------------------------------------

    def _enqueue(self, serve: Serve) -> None:
        client = serve.client
        if serve.queued or client.blocked:
            return
        if serve.next_read(self._config.reads_per_pull_max) is None:
            return
        serve.queued = True
        client.ready.append(serve)
        if not client.queued:
            client.queued = True
            self._turns.append(client)

    def _dequeue(self, serve: Serve) -> None:
        client = serve.client
        if serve.queued:
            serve.queued = False
            client.ready.remove(serve)
            if not client.ready:
                client.queued = False
                self._turns.remove(client)

    def _pump(self) -> list[Effect]:
        effects: list[Effect] = []
        while self._reading < self._config.reads_max and self._turns:
            client = self._turns.popleft()
            client.queued = False
            serve = client.ready.popleft()
            serve.queued = False
            index = serve.next_read(self._config.reads_per_pull_max)
            if index is not None and not client.blocked:
                serve.read = index + 1
                serve.reading.add(index)
                self._reading += 1
                effects.append(ReadChunk(client.peer, serve.ask.pull, serve.ask.sha256, index))
                self._enqueue(serve)
            if client.ready and not client.queued:
                client.queued = True
                self._turns.append(client)
        return effects

    def _unblock(self) -> list[Effect]:
        self._unblock_at = None
        effects: list[Effect] = list(self._unsent_ends)
        self._unsent_ends.clear()
        blocked, self._blocked = self._blocked, []
        for client in blocked:
            client.blocked = False
            self._enqueue_all(client.serves.values())
        return effects + self._pump()

    def _enqueue_all(self, serves: Iterable[Serve]) -> None:
        for serve in serves:
            self._enqueue(serve)

    def _sweep(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        serves = [each for client in self._clients.values() for each in client.serves.values()]
        for serve in serves:
            idle = serve.stage is Stage.OPEN and serve.send >= serve.upto
            if idle and now - serve.touched >= self._config.idle_s:
                end = BlobEnd(serve.ask.pull, "busy", "The pull was idle for too long.")
                effects.append(Send(serve.client.peer, end))
                effects += self._end(serve)
        self._sweep_at = now + self._config.idle_s / 2 if self._count else None
        return effects

    def _find(self, peer: AgentId, pull: int) -> Serve | None:
        client = self._clients.get(peer)
        return None if client is None else client.serves.get(pull)
