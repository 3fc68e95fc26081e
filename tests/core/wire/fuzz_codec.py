"""A mutation fuzzer over everything that a peer's bytes reach.

    python tests/core/fuzz_codec.py --seconds 60 --seed 7

decode and parse_update may raise RemoteProtocolError; a whole engine, on a link that is open and
on one that is fresh, may raise nothing at all, stays bounded, and answers only with frames that
others can read. A failure names the seed and the iteration that make it again.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from core.made import EXAMPLES, MESH_ID, accusation, hello_of, identity, mesh_of, open_link, word_of

from meshagent.core.effects import CheckAsk, Effect, OpenPartial, ReadChunk, Transmit, WriteChunk
from meshagent.core.mesh import Mesh
from meshagent.core.model.peers import AgentId, LinkId
from meshagent.core.model.records import Signed, parse_update
from meshagent.core.transfer.engine import BLOB_FRAMES, Transfer
from meshagent.core.wire.codec import decode, encode, pack
from meshagent.core.wire.frames import CHUNK_BYTES, Gossip, Hello, Ping, Sync, field_names
from meshagent.errors import RemoteProtocolError

VICTIM, MEMBER, BYSTANDER = identity("victim"), identity("member"), identity("bystander")
ENGINE_LIVES = 200  # iterations before a fresh engine takes over
LINKS_MAX = 32

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 127, 128, 255, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 0.0,
    float("nan"), float("inf"), "", "x", "\x00", "\x1b[2J", "é" * 150, "x" * 300, b"", bytes(16),
    bytes(32), bytes(64), bytes(4096), bytes(5000), [], [[]], {}, {"a": 1}, {1: 1}, [b""] * 300,
    VICTIM.agent, MEMBER.agent, BYSTANDER.agent, VICTIM.key, MEMBER.key,
    msgpack.ExtType(3, b"x"), msgpack.Timestamp(1),
]  # fmt: skip


def corpus() -> list[bytes]:
    """Valid bytes to start from: frames of each kind, and updates."""
    words = [word_of(MEMBER).data, word_of(BYSTANDER, left=True).data, word_of(VICTIM).data]
    words += [accusation(BYSTANDER, MEMBER), accusation(VICTIM, MEMBER)]
    frames = [*EXAMPLES.values(), hello_of(MEMBER), Gossip(tuple(words)), Ping(7, tuple(words))]
    frames.append(Sync(1, ((VICTIM.agent, 1 << 32, 2), (MEMBER.agent, 2**63 - 1, 3))))
    return [*(encode(frame)[0] for frame in frames), *words]


def mutate(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """`data` with a few changes, blind ones or ones that know msgpack."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice(_WAYS)(data, others, rng)
    return data


def _flip(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    changed = bytearray(data or b"\x00")
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _overwrite(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.randint(1, 4)) + data[at + rng.randint(0, 4) :]


def _cut(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    start, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:start] + data[end:]


def _splice(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    other = rng.choice(others)
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other)) :]


def _nest(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    return rng.choice((b"\x91", b"\x81\xa1a", b"\xc4\xff")) * rng.choice((1, 9, 2000)) + data


def _odd_field(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    try:
        value = msgpack.unpackb(data)
        if not isinstance(value, list) or not value:
            return data
        at = rng.randrange(len(value))
        deeper = value[at]
        if isinstance(deeper, list) and deeper and rng.random() < 0.5:
            deeper[rng.randrange(len(deeper))] = rng.choice(ODD)
        elif isinstance(deeper, bytes) and rng.random() < 0.5:
            value[at] = _odd_field(deeper, (), rng)
        else:
            value[at] = rng.choice(ODD)
        return pack(value)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException, OverflowError):
        return data


_WAYS = (_flip, _overwrite, _cut, _splice, _nest, _odd_field, _odd_field, _odd_field)


def odd_but_signed(rng: random.Random) -> bytes:
    """What a hostile member can do best: absurd contents under its own good signature."""
    record = list(msgpack.unpackb(word_of(MEMBER, incarnation=rng.randrange(2**63)).body))
    if rng.random() < 0.8:
        record[rng.randrange(len(record))] = rng.choice(ODD)
    body = pack(record)
    label = rng.choice((b"meshagent record 1", b"meshagent accusation 1"))
    return pack((rng.choice((1, 1, 1, 2, True, 3)), body, MEMBER.sign(label + MESH_ID + body)))


class FuzzedMesh:
    """The engine under fire, with one open link and a supply of fresh ones."""

    def __init__(self, seed: int) -> None:
        self.mesh: Mesh = mesh_of(VICTIM, seed)
        self.now, self.link, self.open = 0.0, 0, 0
        self.check(open_link(self.mesh, BYSTANDER, self._next(), self.now))

    def _next(self) -> int:
        self.link += 1
        return self.link

    def fire(self, parts: Sequence[bytes], rng: random.Random) -> None:
        """The same bytes on an open link and on a fresh one; then some time passes."""
        if self.mesh.links.agent_on(LinkId(self.open)) is None:
            self.open = self._next()
            self.check(open_link(self.mesh, MEMBER, self.open, self.now))
        self.check(self.mesh.received_parts(LinkId(self.open), parts, self.now))
        fresh = LinkId(self._next())
        self.check(self.mesh.opened(fresh, rng.choice((MEMBER.curve_public, None)), self.now))
        self.check(self.mesh.received_parts(fresh, parts, self.now))
        self.check(self.mesh.received_parts(LinkId(self.link + 99), parts, self.now))
        self.now += rng.choice((0.0, 0.01, 0.3, 6.0))
        self.check(self.mesh.on_timer(self.now))
        assert self.mesh.deadline() is not None

    def check(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Transmit):
                assert decode(encode(effect.frame)) == effect.frame
        assert all(each.agent != VICTIM.agent for each in self.mesh.peers())
        assert len(self.mesh.links.table) <= LINKS_MAX + ENGINE_LIVES
        assert self.mesh.me.incarnation < 2**62


class FuzzedTransfer:
    """The transfer engine under fire from one peer, with a driver that says yes to everything."""

    def __init__(self, seed: int) -> None:
        self.engine, self.now, self.peer = Transfer(random.Random(seed)), 0.0, MEMBER.agent
        self.perform(self.engine.connected(self.peer, self.now))
        for at in range(3):
            name, size = bytes([at]) * 32, (300_000, 5, 0)[at]
            self.perform(self.engine.want(name, size, [self.peer], self.peer, b"", self.now))

    def fire(self, parts: Sequence[bytes], rng: random.Random) -> None:
        """The frame as it came, and with the number of a pull that lives."""
        with suppress(RemoteProtocolError):
            frame = decode(parts)
            if isinstance(frame, BLOB_FRAMES):
                self.perform(self.engine.receive(frame, self.peer, self.now))
                live = replace(
                    frame, pull=rng.choice([*self.engine.downloads.requests.numbers(), 7])
                )
                self.perform(self.engine.receive(live, AgentId(self.peer), self.now))
        self.now += rng.choice((0.0, 0.01, 40.0))
        self.perform(self.engine.on_timer(self.now))

    def perform(self, effects: list[Effect]) -> None:
        engine, now, queue = self.engine, self.now, list(effects)
        while queue:
            match queue.pop(0):
                case CheckAsk(peer, pull):
                    queue += engine.admitted(peer, pull, now)
                case ReadChunk(peer, pull, _, index):
                    queue += engine.chunk_read(peer, pull, index, b"x" * index, now)
                case OpenPartial(sha256):
                    queue += engine.opened(sha256, 0, now)
                case WriteChunk(sha256, index):
                    queue += engine.wrote(sha256, index, now)
        uploads, downloads = self.engine.uploads, self.engine.downloads
        assert uploads._count <= 16
        assert 0 <= downloads.window.used <= 16
        assert len(downloads.table) <= 3


def attack(bases: Sequence[bytes], rng: random.Random) -> list[bytes]:
    """The parts of one hostile frame."""
    if rng.random() < 0.15:
        return encode(Gossip((odd_but_signed(rng),)))
    data = mutate(rng.choice(bases), bases, rng)
    if rng.random() < 0.2:
        data = pack([20, [data]])
    if rng.random() < 0.1:
        return [data, rng.randbytes(rng.choice((0, 1, 300, CHUNK_BYTES + 1)))]
    return [data] * rng.choice((1, 1, 1, 1, 1, 2, 65))


def fuzz(seed: int, iterations: int | None = None, seconds: float = 0.0) -> int:
    """Attack until the budget is spent; how many attacks that were."""
    rng, bases, target, blobs = (
        random.Random(seed),
        corpus(),
        FuzzedMesh(seed),
        FuzzedTransfer(seed),
    )
    until = time.monotonic() + seconds
    done = 0
    while done < iterations if iterations is not None else time.monotonic() < until:
        done += 1
        if done % ENGINE_LIVES == 0:
            target, blobs = FuzzedMesh(seed + done), FuzzedTransfer(seed + done)
        parts = attack(bases, rng)
        try:
            read_all(parts)
            target.fire(parts, rng)
            blobs.fire(parts, rng)
        except BaseException:
            print(f"seed {seed}, iteration {done}: {[part[:200] for part in parts[:3]]}")
            raise
    return done


def read_all(parts: Sequence[bytes]) -> None:
    """The two readers by themselves."""
    with suppress(RemoteProtocolError):
        frame = decode(parts)
        if frame is not None:
            assert decode(encode(frame)) == frame
            assert len(field_names(type(frame))) == len(frame.checks)
            assert not isinstance(frame, Hello) or len(frame.signature) == 64
    with suppress(RemoteProtocolError):
        assert isinstance(parse_update(parts[0]), Signed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    done = fuzz(options.seed, seconds=options.seconds)
    print(f"seed {options.seed}: {done} attacks, nothing leaked")


if __name__ == "__main__":
    main()
