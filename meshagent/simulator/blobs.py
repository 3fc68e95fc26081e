"""Attachments of a simulated agent: performs what the transfer engine asks for, each in its time.

As node/blobs.py: every effect is performed once and answered once, in order for one blob. What the
transfer engine promises its driver is asserted here. Chunks are a few bytes long, so that a large
blob costs little. Whole blobs survive everything, a partial survives a crash up to some chunk.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

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
    WriteChunk,
)
from meshagent.core.model.attachments import Attachment, grant_words
from meshagent.core.model.peers import AgentId
from meshagent.core.transfer import chunks
from meshagent.core.transfer.chunks import chunk_count
from meshagent.core.transfer.engine import Transfer
from meshagent.simulator.small_limits import SMALL_CHUNK_BYTES

if TYPE_CHECKING:
    from meshagent.simulator.driver import SimDriver

__all__ = ["Machine", "SimBlobs", "random_blob"]

WORK_S = (0.0001, 0.002)
SLOW_WORK_S = (0.05, 0.2)


class Machine:
    """The blob store that agents of one machine share: whole blobs, partials, and who has them
    open. It lasts; `is_full` is a disk with no room for another chunk."""

    def __init__(self) -> None:
        self.blobs: dict[bytes, bytes] = {}
        self.partials: dict[bytes, bytearray] = {}
        self.open: dict[bytes, AgentId] = {}
        self.is_full = self.is_slow = False
        self.agents: set[AgentId] = set()

    def received(self, sha256: bytes) -> int:
        """How many chunks of a partial are there."""
        return chunk_count(len(self.partials.get(sha256, b"")))

    def put(self, data: bytes) -> bytes:
        """Keep a whole blob; its name."""
        sha256 = hashlib.sha256(data).digest()
        self.blobs[sha256] = data
        return sha256


class SimBlobs:
    """The attachments of one agent."""

    def __init__(self, node: SimDriver, machine: Machine) -> None:
        self.node, self.world, self.machine = node, node.world, machine
        self.lies = False
        """It serves other bytes than it has."""
        self.quota = 1 << 40
        self.ready: dict[bytes, float] = {}
        self.failed: dict[bytes, str] = {}
        self.lost_chunks = self.most_unwritten = 0
        self.start()

    def start(self) -> None:
        """A new run: nothing is open."""
        self._givers: dict[bytes, frozenset[AgentId]] = {}
        self._readers: set[tuple[AgentId, int]] = set()
        self._due: Counter[bytes] = Counter()
        self._free_at: dict[str, float] = {}
        self._unwritten = 0

    def crash(self) -> None:
        """Some chunks that were written last are gone."""
        machine = self.machine
        for sha256 in [each for each, owner in machine.open.items() if owner == self.node.agent]:
            del machine.open[sha256]
            before = machine.received(sha256)
            kept = self.world.rng.randint(max(0, before - 4), before)
            del machine.partials[sha256][kept * chunks.CHUNK_BYTES :]
            self.lost_chunks += before - kept

    def attach(self, sha256: bytes, to: AgentId) -> Attachment:
        """A blob of this machine, as a message to this peer names it."""
        node, size = self.node, len(self.machine.blobs[sha256])
        grant = node.identity.sign(grant_words(node.mesh_id, node.agent, to, sha256))
        return Attachment("file", size, "application/octet-stream", sha256, grant=grant)

    # -- effects ------------------------------------------------------------------------------

    def perform(self, effect: Effect) -> None:
        """Do it; the engine hears of it later."""
        match effect:
            case CheckAsk():
                self._later("check", self._check, effect)
            case ReadChunk(peer, pull, _, _):
                assert (peer, pull) in self._readers, "a chunk is read before the ask is admitted"
                self._later("", self._read, effect)
            case CloseReader(peer, pull):
                self._readers.remove((peer, pull))
            case OpenPartial(sha256):
                assert not self._due[sha256]
                assert self.machine.open.get(sha256) != self.node.agent
                self._on_disk(sha256, self._open, effect)
            case WriteChunk(sha256):
                assert self.machine.open.get(sha256) == self.node.agent
                self._unwritten += 1
                self.most_unwritten = max(self.most_unwritten, self._unwritten)
                self._on_disk(sha256, self._write, effect)
            case FinishBlob(sha256):
                assert not self._due[sha256]
                self._on_disk(sha256, self._finish, effect)
            case ClosePartial(sha256, discard):
                self._close(sha256, discard)
            case BlobReady(sha256, givers):
                whole = self.machine.blobs[sha256]
                assert hashlib.sha256(whole).digest() == sha256, "a blob is not what it is called"
                self.ready[sha256], self._givers[sha256] = self.world.now, givers
                self.world.say(f"{self.node.name} has {sha256.hex()[:6]}")
            case BlobFailed(sha256, why):
                self.failed[sha256] = why
                self.world.say(f"{self.node.name} gives up {sha256.hex()[:6]}: {why}")
            case BlobProgress():
                pass
            case _:
                raise AssertionError(f"nobody performs {effect}")

    def _on_disk(self, sha256: bytes, work: Callable[..., list[Effect]], effect: Effect) -> None:
        self._due[sha256] += 1
        self._later("disk", work, effect)

    def _later(self, queue: str, work: Callable[..., list[Effect]], effect: Effect) -> None:
        """After the time that it takes; what stands in one queue is done in order."""
        takes_s = self.world.rng.uniform(*(SLOW_WORK_S if self.machine.is_slow else WORK_S))
        at = self.world.now + takes_s
        if queue:
            at = self._free_at[queue] = max(at, self._free_at.get(queue, 0.0))
        self.world.plan(at - self.world.now, self._do, self.node.life, work, effect)

    def _do(self, life: int, work: Callable[..., list[Effect]], effect: Effect) -> None:
        engine = self.node.engine
        if life == self.node.life and engine is not None:
            effects = work(engine.transfer, effect, self.world.now)
            self.node.perform(engine.relay(effects, self.world.now))

    def _check(self, engine: Transfer, ask: CheckAsk, now: float) -> list[Effect]:
        if not self._may_have(ask):
            return engine.turned_away(ask.peer, ask.pull, "not allowed", "Not for you.", now)
        if len(self.machine.blobs.get(ask.sha256, b"")) != ask.size:
            return engine.turned_away(ask.peer, ask.pull, "absent", "It is not here.", now)
        self._readers.add((ask.peer, ask.pull))
        return engine.admitted(ask.peer, ask.pull, now)

    def _may_have(self, ask: CheckAsk) -> bool:
        """As node/blobs.py: by a message of ours; or by the word of another who gave it to us."""
        node, mail = self.node, self.node.disk.mail
        if ask.granter == node.agent:
            return mail.names_blob(ask.sha256, ask.peer, "out")
        assert node.engine is not None
        key = node.engine.links.key_of(ask.granter)
        words = grant_words(node.mesh_id, ask.granter, ask.peer, ask.sha256)
        if key is None or not node.verify(key, words, ask.grant):
            return False
        if ask.granter in self.machine.agents:
            return True
        given = ask.granter in self._givers.get(ask.sha256, ())
        return given and mail.names_blob(ask.sha256, ask.granter, "in")

    def _read(self, engine: Transfer, read: ReadChunk, now: float) -> list[Effect]:
        at = read.chunk * chunks.CHUNK_BYTES
        blob = self.machine.blobs.get(read.sha256)
        data = None if blob is None else blob[at : at + chunks.CHUNK_BYTES]
        if data is not None and self.lies:
            data = bytes(each ^ 1 for each in data)
        return engine.chunk_read(read.peer, read.pull, read.chunk, data, now)

    def _open(self, engine: Transfer, effect: OpenPartial, now: float) -> list[Effect]:
        sha256, machine = effect.sha256, self.machine
        self._due[sha256] -= 1
        if sha256 in machine.blobs:
            return engine.present(sha256, now)
        if effect.size > self.quota:
            return engine.impossible(sha256, "quota", now)
        if machine.is_full or sha256 in machine.open:
            return engine.held_up(sha256, "disk full or in use", now)
        machine.open[sha256] = self.node.agent
        machine.partials.setdefault(sha256, bytearray())
        return engine.opened(sha256, machine.received(sha256), now)

    def _write(self, engine: Transfer, effect: WriteChunk, now: float) -> list[Effect]:
        sha256 = effect.sha256
        self._due[sha256] -= 1
        self._unwritten -= 1
        if self.machine.is_full:
            return engine.held_up(sha256, "disk full", now)
        at, partial = effect.chunk * chunks.CHUNK_BYTES, self.machine.partials[sha256]
        if at > len(partial):  # one before it was not written
            return engine.held_up(sha256, "gap", now)
        partial[at : at + chunks.CHUNK_BYTES] = bytes(effect.data)
        return engine.wrote(sha256, effect.chunk, now)

    def _finish(self, engine: Transfer, effect: FinishBlob, now: float) -> list[Effect]:
        sha256, machine = effect.sha256, self.machine
        self._due[sha256] -= 1
        whole = bytes(machine.partials[sha256])
        if hashlib.sha256(whole).digest() != sha256:
            self.world.say(f"{self.node.name} finds {sha256.hex()[:6]} wrong")
            return engine.wrong(sha256, now)
        del machine.open[sha256], machine.partials[sha256]
        machine.blobs[sha256] = whole
        return engine.finished(sha256, now)

    def _close(self, sha256: bytes, discard: bool) -> None:
        assert not self._due[sha256], "a partial is closed before its writes are answered"
        assert self.machine.open.pop(sha256) == self.node.agent
        if discard:
            self.lost_chunks += self.machine.received(sha256)
            self.machine.partials.pop(sha256, None)


def random_blob(rng: random.Random, chunk_number: int) -> bytes:
    """The bytes of a blob of about that many chunks."""
    return rng.randbytes(max(0, chunk_number * SMALL_CHUNK_BYTES - rng.randrange(3)))
