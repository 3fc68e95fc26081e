"""Rows of messages, made in few words, and a store that lives through several scripts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgpack

from meshagent.core.ports import InRow, InState, OutRow, OutState, Receipt, Store

EPOCH = b"epoch--1"
PEER = "beta-bbbbbbbb"
OTHER = "gamma-cccccccc"


def body(ident: str, text: str = "", kind: str = "text", at_ms: int = 1_000) -> bytes:
    fields = (ident, kind, text, at_ms, None, "", "", {}, [], 0, 0)
    packed: bytes = msgpack.packb(fields)
    return packed


def out(seq: int, ident: str = "", peer: str = PEER, expires_ms: int = 0, **more: Any) -> OutRow:
    ident = ident or f"{peer[0]}{seq}"
    return OutRow(peer, EPOCH, seq, ident, body(ident, **more), expires_ms)


def outs(count: int, peer: str = PEER) -> list[OutRow]:
    return [out(seq, peer=peer) for seq in range(1, count + 1)]


def word(ident: str, state: str, at_ms: int = 5_000, peer: str = PEER, why: str = "") -> OutState:
    return OutState(peer, 0, ident, state, why, at_ms)


def receipt(ident: str, state: str, at_ms: int = 6_000, peer: str = PEER) -> Receipt:
    return Receipt(peer, ident, state, at_ms)


def came(ident: str, sender: str = PEER, seq: int = 1, at_ms: int = 2_000, **more: Any) -> InRow:
    return InRow(sender, EPOCH, seq, ident, body(ident, **more), at_ms)


def became(ident: str, state: str, at_ms: int = 7_000, sender: str = PEER, n: int = 0) -> InState:
    return InState(sender, ident, state, n, at_ms)


def live(store: Store, *scripts: Callable[[Any], Awaitable[None]]) -> None:
    """Run each script in a life of its own: open, script, close."""

    async def lives() -> None:
        for script in scripts:
            await store.open()
            try:
                await script(store)
            finally:
                await store.close()

    asyncio.run(lives())


def torn_copy(path: Path, copy: Path) -> None:
    """The database as a power cut might leave it: the end of what was logged last is missing."""
    copy.write_bytes(path.read_bytes())
    log = path.with_name(f"{path.name}-wal").read_bytes()
    copy.with_name(f"{copy.name}-wal").write_bytes(log.rstrip(b"\0")[:-100])
