"""Rows of messages, made in few words, and a store that lives through several scripts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import apsw
import msgpack
import pytest

from meshagent.core.model.rows import (
    InBatch,
    InRow,
    InState,
    OutBatch,
    OutRow,
    OutState,
    ReceiptRow,
)
from meshagent.core.ports import Store

EPOCH = b"epoch--1"
PEER = "beta-bbbbbbbb"
OTHER = "gamma-cccccccc"


def body(
    ident: str, text: str = "", kind: str = "text", at_ms: int = 1_000, blobs: Sequence[bytes] = ()
) -> bytes:
    attached = [("shot.png", 9, "image/png", sha256) for sha256 in blobs]
    fields = (ident, kind, text, at_ms, None, "", "", {}, attached, 0, 0)
    packed: bytes = msgpack.packb(fields)
    return packed


def out(seq: int, ident: str = "", peer: str = PEER, expires_ms: int = 0, **more: Any) -> OutRow:
    ident = ident or f"{peer[0]}{seq}"
    blobs = tuple(more.get("blobs", ()))
    return OutRow(peer, EPOCH, seq, ident, body(ident, **more), expires_ms, blobs)


def outs(count: int, peer: str = PEER) -> list[OutRow]:
    return [out(seq, peer=peer) for seq in range(1, count + 1)]


def out_together(rows: list[OutRow]) -> OutBatch:
    """The same messages, accepted as a crowd."""
    first = rows[0]
    ids, bodies = [row.id for row in rows], [row.body for row in rows]
    return OutBatch(first.peer, first.epoch, first.seq, ids, bodies)


def came_together(rows: list[InRow]) -> InBatch:
    """The same messages, from one frame."""
    first = rows[0]
    ids, bodies = [row.id for row in rows], [row.body for row in rows]
    return InBatch(first.sender, first.epoch, first.seq, ids, bodies, first.received_ms)


def word(ident: str, state: str, at_ms: int = 5_000, peer: str = PEER, why: str = "") -> OutState:
    return OutState(peer, 0, ident, state, why, at_ms)


def receipt(ident: str, state: str, at_ms: int = 6_000, peer: str = PEER) -> ReceiptRow:
    return ReceiptRow(peer, ident, state, at_ms)


def came(ident: str, sender: str = PEER, seq: int = 1, at_ms: int = 2_000, **more: Any) -> InRow:
    blobs = tuple(more.get("blobs", ()))
    return InRow(sender, EPOCH, seq, ident, body(ident, **more), at_ms, blobs)


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


def beside(path: Path, ending: str) -> Path:
    """One of the files that belong to a database."""
    return path.with_name(path.name + ending)


def copy_files(path: Path, copy: Path) -> None:
    """The database as it stands on the disk, as the end of its process leaves it."""
    for ending in ("", "-wal", "-commits"):
        if beside(path, ending).exists():
            beside(copy, ending).write_bytes(beside(path, ending).read_bytes())


def torn_copy(path: Path, copy: Path, ending: str) -> None:
    """As a power cut might leave it: the end of what was written last to a file is missing."""
    copy_files(path, copy)
    torn = beside(copy, ending)
    torn.write_bytes(torn.read_bytes().rstrip(b"\0")[:-20])


class Syncs(apsw.VFS):
    """The disk under SQLite: tells which file was synced, when it was."""

    def __init__(self, synced: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__("syncs", "unix")
        self._synced = synced
        real = apsw.Connection
        monkeypatch.setattr(apsw, "Connection", lambda *a, **k: real(*a, **k, vfs="syncs"))

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        synced, path = self._synced, name.filename() if hasattr(name, "filename") else str(name)

        class File(apsw.VFSFile):
            def xSync(self, flags: int) -> None:
                super().xSync(flags)
                synced(Path(path))

        return File("unix", name, flags)
