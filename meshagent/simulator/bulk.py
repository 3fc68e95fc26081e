"""Blobs between a few agents, with everything that can go wrong with links, disks and sources.

Each node drives its engine as the real driver does: every effect is performed once, takes its
time, and is answered once, in order for one blob; what the driver may rely on is asserted here.
Links are ordered and lose nothing but what is on them when they are cut. A partial survives a
crash up to some chunk. Chunks are a few bytes long, so that a large blob costs little.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from meshagent.core.effects import (
    BlobFailed,
    BlobProgress,
    BlobReady,
    CheckAsk,
    ClosePartial,
    CloseReader,
    Effect,
    FinishBlob,
    OpenPartial,
    ReadChunk,
    Send,
    WriteChunk,
)
from meshagent.core.model.peers import AgentId
from meshagent.core.transfer import chunks
from meshagent.core.transfer.chunks import chunk_count
from meshagent.core.transfer.downloads import DownloadConfig
from meshagent.core.transfer.engine import Transfer
from meshagent.core.transfer.uploads import UploadConfig
from meshagent.core.wire.frames import BlobChunk, Frame
from meshagent.simulator.world import World

__all__ = ["Bulk", "BulkNode", "SharedBlobs", "grant_of", "small_chunks"]

SMALL_CHUNK_BYTES = 4
DISK_S = (0.0001, 0.002)
SLOW_DISK_S = (0.05, 0.2)


@contextmanager
def small_chunks() -> Iterator[None]:
    """Everyone cuts blobs into chunks of a few bytes."""
    before = chunks.CHUNK_BYTES
    chunks.CHUNK_BYTES = SMALL_CHUNK_BYTES
    try:
        yield
    finally:
        chunks.CHUNK_BYTES = before


def grant_of(granter: AgentId, puller: AgentId, sha256: bytes) -> bytes:
    """What stands for the granter's signature here."""
    return hashlib.sha256(f"{granter} {puller}".encode() + sha256).digest()


class SharedBlobs:
    """A blob store that agents of one machine share: whole blobs, partials, and who has them open.

    It lasts; `full` is a disk with no room for another chunk.
    """

    def __init__(self) -> None:
        self.blobs: dict[bytes, bytes] = {}
        self.partials: dict[bytes, bytearray] = {}
        self.open: dict[bytes, AgentId] = {}
        self.full = False

    def received(self, sha256: bytes) -> int:
        """How many chunks of a partial are there."""
        return chunk_count(len(self.partials.get(sha256, b"")))


class BulkNode:
    """One agent: a store that lasts, and an engine while it runs."""

    def __init__(self, bulk: Bulk, name: str, store: SharedBlobs) -> None:
        self.bulk, self.world, self.name, self.store = bulk, bulk.world, AgentId(name), store
        self.engine: Transfer | None = None
        self.life = 0
        self.slow = self.lies = self.mute = False
        self.quota = 1 << 40
        self.wanted: dict[bytes, tuple[int, list[AgentId], AgentId]] = {}
        self.ready: dict[bytes, float] = {}
        self.failed: dict[bytes, str] = {}
        self.lost_chunks = 0
        self.told: Counter[bytes] = Counter()
        self._readers: set[tuple[AgentId, int]] = set()
        self._due: Counter[bytes] = Counter()
        self._unwritten = 0
        self._free_at: Counter[str] = Counter()
        self._timer_at = float("inf")

    # -- living and dying ---------------------------------------------------------------------

    def start(self) -> None:
        """A new life: what it wanted, it still wants."""
        self.life += 1
        self._timer_at, self._unwritten = float("inf"), 0
        self._readers, self._due = set(), Counter()
        seed = random.Random(self.world.rng.random())
        self.engine = Transfer(seed, self.bulk.pulling, self.bulk.serving)
        self.world.say(f"{self.name} starts")
        for sha256, (size, sources, granter) in self.wanted.items():
            if sha256 not in self.ready:
                self._ask_engine(sha256, size, sources, granter)

    def crash(self) -> None:
        """Some chunks that were written last are gone."""
        self.engine = None
        self.life += 1
        self.world.say(f"{self.name} crashes")
        for sha256 in [each for each, owner in self.store.open.items() if owner == self.name]:
            del self.store.open[sha256]
            before = self.store.received(sha256)
            kept = self.world.rng.randint(max(0, before - 4), before)
            del self.store.partials[sha256][kept * chunks.CHUNK_BYTES :]
            self.lost_chunks += before - kept
        self.bulk.unlink_all(self.name)

    def want(self, sha256: bytes, size: int, sources: list[AgentId], granter: AgentId) -> None:
        """A message names this blob."""
        self.wanted[sha256] = (size, sources, granter)
        if self.engine is not None:
            self._ask_engine(sha256, size, sources, granter)

    def unwant(self, sha256: bytes) -> None:
        """Nobody needs it any more."""
        self.wanted.pop(sha256, None)
        if self.engine is not None:
            self.perform(self.engine.unwant(sha256, self.world.now))

    def _ask_engine(
        self, sha256: bytes, size: int, sources: list[AgentId], granter: AgentId
    ) -> None:
        assert self.engine is not None
        grant = grant_of(granter, self.name, sha256)
        self.perform(self.engine.want(sha256, size, sources, granter, grant, self.world.now))

    # -- what the network does ----------------------------------------------------------------

    def connected(self, peer: AgentId) -> None:
        if self.engine is not None:
            self.perform(self.engine.connected(peer, self.world.now))

    def disconnected(self, peer: AgentId) -> None:
        if self.engine is not None:
            self.perform(self.engine.disconnected(peer, self.world.now))

    def receive(self, frame: Frame, peer: AgentId) -> None:
        if self.engine is not None:
            self.perform(self.engine.receive(frame, peer, self.world.now))

    def in_flight(self) -> int:
        """Chunks that are on links to us for a pull that lives, or wait to be written."""
        if self.engine is None:
            return 0
        live = self.engine.downloads.requests.numbers()
        flying = self.bulk.flying.get(self.name, ())
        return self._unwritten + sum(1 for pull, _ in flying if pull in live)

    # -- the driver ---------------------------------------------------------------------------

    def perform(self, effects: list[Effect]) -> None:
        """Do what the engine asks, each in its time."""
        for effect in effects:
            if self.engine is None:
                return
            self._perform_one(effect)
        self._arm()

    def _perform_one(self, effect: Effect) -> None:
        assert self.engine is not None
        match effect:
            case Send(to, frame):
                muted = self.mute and isinstance(frame, BlobChunk)
                if not muted and not self.bulk.carry(self.name, to, frame):
                    self.engine.not_sent(to, frame, self.world.now)
            case CheckAsk():
                self._later("check", self._check, effect)
            case ReadChunk(peer, pull, _, _):
                assert (peer, pull) in self._readers, "a chunk is read before the ask is admitted"
                self._later("", self._read, effect)
            case CloseReader(peer, pull):
                self._readers.remove((peer, pull))
            case OpenPartial(sha256):
                assert not self._due[sha256]
                assert self.store.open.get(sha256) != self.name
                self._due[sha256] += 1
                self._later("disk", self._open, effect)
            case WriteChunk(sha256):
                assert self.store.open.get(sha256) == self.name
                self._due[sha256] += 1
                self._unwritten += 1
                self._later("disk", self._write, effect)
            case FinishBlob(sha256):
                assert not self._due[sha256]
                self._due[sha256] += 1
                self._later("disk", self._finish, effect)
            case ClosePartial(sha256, discard):
                assert not self._due[sha256], "a partial is closed before its writes are answered"
                assert self.store.open.pop(sha256) == self.name
                if discard:
                    self.lost_chunks += self.store.received(sha256)
                    self.store.partials.pop(sha256, None)
            case BlobReady(sha256):
                assert hashlib.sha256(self.store.blobs[sha256]).digest() == sha256
                self.ready[sha256] = self.world.now
                self.world.say(f"{self.name} has {sha256.hex()[:6]}")
            case BlobFailed(sha256, why):
                self.failed[sha256] = why
                self.world.say(f"{self.name} gives up {sha256.hex()[:6]}: {why}")
            case BlobProgress(sha256):
                self.told[sha256] += 1

    def _later(self, queue: str, what: object, effect: Effect) -> None:
        """After the time that it takes; what stands in one queue is done in order."""
        at = self.world.now + self.world.rng.uniform(*(SLOW_DISK_S if self.slow else DISK_S))
        if queue:
            at = self._free_at[queue] = max(at, self._free_at[queue])  # type: ignore[assignment]
        self.world.plan(at - self.world.now, self._if_alive, self.life, what, effect)

    def _if_alive(self, life: int, what: object, effect: Effect) -> None:
        if life == self.life and self.engine is not None:
            self.perform(what(self.engine, effect))  # type: ignore[operator]

    def _check(self, engine: Transfer, ask: CheckAsk) -> list[Effect]:
        now = self.world.now
        granted = ask.grant == grant_of(ask.granter, ask.peer, ask.sha256)
        if not granted:
            return engine.turned_away(ask.peer, ask.pull, "not allowed", "Not for you.", now)
        if len(self.store.blobs.get(ask.sha256, b"")) != ask.size:
            return engine.turned_away(ask.peer, ask.pull, "absent", "It is not here.", now)
        self._readers.add((ask.peer, ask.pull))
        return engine.admitted(ask.peer, ask.pull, now)

    def _read(self, engine: Transfer, read: ReadChunk) -> list[Effect]:
        at = read.chunk * chunks.CHUNK_BYTES
        blob = self.store.blobs.get(read.sha256)
        data = None if blob is None else blob[at : at + chunks.CHUNK_BYTES]
        if data is not None and self.lies:
            data = bytes(each ^ 1 for each in data)
        return engine.chunk_read(read.peer, read.pull, read.chunk, data, self.world.now)

    def _open(self, engine: Transfer, effect: OpenPartial) -> list[Effect]:
        sha256, now = effect.sha256, self.world.now
        self._due[sha256] -= 1
        if sha256 in self.store.blobs:
            return engine.present(sha256, now)
        if effect.size > self.quota:
            return engine.impossible(sha256, "quota", now)
        if self.store.full or sha256 in self.store.open:
            return engine.held_up(sha256, "disk full or in use", now)
        self.store.open[sha256] = self.name
        self.store.partials.setdefault(sha256, bytearray())
        return engine.opened(sha256, self.store.received(sha256), now)

    def _write(self, engine: Transfer, effect: WriteChunk) -> list[Effect]:
        sha256, now = effect.sha256, self.world.now
        self._due[sha256] -= 1
        self._unwritten -= 1
        if self.store.full:
            return engine.held_up(sha256, "disk full", now)
        at, partial = effect.chunk * chunks.CHUNK_BYTES, self.store.partials[sha256]
        if at > len(partial):  # one before it was not written
            return engine.held_up(sha256, "gap", now)
        partial[at : at + chunks.CHUNK_BYTES] = bytes(effect.data)
        return engine.wrote(sha256, effect.chunk, now)

    def _finish(self, engine: Transfer, effect: FinishBlob) -> list[Effect]:
        sha256, now = effect.sha256, self.world.now
        self._due[sha256] -= 1
        whole = bytes(self.store.partials[sha256])
        if hashlib.sha256(whole).digest() != sha256:
            self.world.say(f"{self.name} finds {sha256.hex()[:6]} wrong")
            return engine.wrong(sha256, now)
        del self.store.open[sha256], self.store.partials[sha256]
        self.store.blobs[sha256] = whole
        return engine.finished(sha256, now)

    def _arm(self) -> None:
        at = None if self.engine is None else self.engine.deadline()
        if at is not None and (at < self._timer_at or self._timer_at < self.world.now):
            self._timer_at = at
            self.world.plan(max(0.0, at - self.world.now), self._timer, self.life, at)

    def _timer(self, life: int, at: float) -> None:
        if life == self.life and at == self._timer_at and self.engine is not None:
            self._timer_at = float("inf")
            self.perform(self.engine.on_timer(self.world.now))


class Bulk:
    """The agents and the links between them, and what has moved on those."""

    def __init__(
        self,
        seed: int,
        stores: list[int],
        pulling: DownloadConfig | None = None,
        serving: UploadConfig | None = None,
    ) -> None:
        """One agent for each entry of `stores`: those with equal numbers share a machine."""
        self.world = World(seed)
        self.pulling, self.serving = pulling or DownloadConfig(), serving or UploadConfig()
        shared = {at: SharedBlobs() for at in stores}
        names = [f"n{at}" for at in range(len(stores))]
        self.nodes = {
            AgentId(name): BulkNode(self, name, shared[at])
            for name, at in zip(names, stores, strict=True)
        }
        self.links: dict[frozenset[AgentId], int] = {}
        self.full = 0.0
        self.delay_s, self.chunk_s = 0.002, 0.001
        self.cuts = self.moved = self.refusals = 0
        self.most_in_flight = 0
        self.flying: dict[AgentId, Counter[tuple[int, int]]] = {}
        """Pull and index of what is on the way to each; sent again after a full link, it is one."""
        self._links = 0
        self._arrives: dict[tuple[int, AgentId], float] = {}
        for node in self.nodes.values():
            node.start()

    def blob(self, chunk_number: int, *holders: AgentId) -> tuple[bytes, int]:
        """A new blob of about that many chunks, whole at each of the holders; name and size."""
        size = max(0, chunk_number * chunks.CHUNK_BYTES - self.world.rng.randrange(3))
        data = self.world.rng.randbytes(size)
        sha256 = hashlib.sha256(data).digest()
        for holder in holders:
            self.nodes[holder].store.blobs[sha256] = data
        return sha256, size

    def link(self, a: AgentId, b: AgentId) -> None:
        """A new link, when both run; an old one between them is gone."""
        self.unlink(a, b)
        if self.nodes[a].engine is None or self.nodes[b].engine is None:
            return
        self._links += 1
        self.world.say(f"{a} and {b} are linked")
        self.links[frozenset((a, b))] = self._links
        self.nodes[a].connected(b)
        self.nodes[b].connected(a)

    def unlink(self, a: AgentId, b: AgentId) -> None:
        """The link breaks, with everything that is on it."""
        if self.links.pop(frozenset((a, b)), None) is not None:
            self.cuts += 1
            self.world.say(f"{a} and {b} lose their link")
            self.nodes[a].disconnected(b)
            self.nodes[b].disconnected(a)

    def unlink_all(self, name: AgentId) -> None:
        """Its process ended."""
        for pair in [each for each in self.links if name in each]:
            self.unlink(*pair)

    def carry(self, source: AgentId, to: AgentId, frame: Frame) -> bool:
        """Put a frame on the link, if there is one; False when it is full."""
        link = self.links.get(frozenset((source, to)))
        if link is None:
            return True
        if self.full and self.world.rng.random() < self.full:
            self.refusals += 1
            return False
        is_chunk = isinstance(frame, BlobChunk)
        at = max(self.world.now + self.delay_s, self._arrives.get((link, to), 0.0))
        self._arrives[link, to] = at = at + (self.chunk_s if is_chunk else 0.0)
        if isinstance(frame, BlobChunk):
            self.moved += 1
            self.flying.setdefault(to, Counter())[frame.pull, frame.index] += 1
            self.most_in_flight = max(self.most_in_flight, self.nodes[to].in_flight())
        self.world.plan(at - self.world.now, self._arrive, link, source, to, frame)
        return True

    def _arrive(self, link: int, source: AgentId, to: AgentId, frame: Frame) -> None:
        if isinstance(frame, BlobChunk):
            flying, chunk = self.flying[to], (frame.pull, frame.index)
            flying[chunk] -= 1
            if not flying[chunk]:
                del flying[chunk]
        if self.links.get(frozenset((source, to))) == link:
            self.nodes[to].receive(frame, source)

    # -- what must hold -----------------------------------------------------------------------

    def settled(self) -> bool:
        """Whether everyone has what it wants."""
        return all(sha256 in n.ready for n in self.nodes.values() for sha256 in n.wanted)
