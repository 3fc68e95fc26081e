"""The blob_transfers alone, with a real store: what it lets through, and what it survives."""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from core.made import SECRET, identity

from meshagent.core.effects import (
    BlobFailed,
    BlobProgress,
    BlobReady,
    CheckAsk,
    Effect,
    Send,
)
from meshagent.core.model.attachments import Attachment, AttachmentLimits, grant_words
from meshagent.core.model.peers import AgentId
from meshagent.core.transfer.engine import Transfer
from meshagent.core.wire.frames import CHUNK_BYTES, BlobAsk, BlobEnd
from meshagent.errors import StorageError
from meshagent.node.blobs import BlobTransfers, _write
from meshagent.node.changes import ChangeFeed
from meshagent.storage.blobs.store import BlobStore

ME, BOB, EVE = identity("me"), identity("bob"), identity("eve")
X = b"x" * 32


class Stand:
    """What a blob_transfers needs of a driver, with the real engine."""

    def __init__(self, blob_transfers: BlobTransfers) -> None:
        self.agent, self.log, self.limits = ME.agent, logging.getLogger("test"), AttachmentLimits()
        self.profile = SimpleNamespace(secret=SECRET)
        self.changes = ChangeFeed(self.log)
        self.transfer = Transfer(random.Random(1))
        self.mesh = self.links = self.store = self
        self.blob_transfers = blob_transfers
        self.keys = {each.agent: each.key for each in (ME, BOB, EVE)}
        self.named: set[tuple[bytes, str, str]] = set()
        self.ill = False
        self.effects: list[Effect] = []
        self.tasks: set[asyncio.Task[None]] = set()

    def transferred(self, answer: Callable[..., list[Effect]], *arguments: Any) -> None:
        self.turn(answer(*arguments, 0.0))

    def turn(self, effects: list[Effect]) -> None:
        self.effects += effects
        for each in effects:
            if isinstance(each, BlobReady | BlobFailed | BlobProgress):
                self.changes.publish(each)
            elif not isinstance(each, Send):
                self.blob_transfers.perform(each)

    def spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)

    def key_of(self, agent: str) -> bytes | None:
        return self.keys.get(AgentId(agent))

    async def names_blob(self, sha256: bytes, peer: str, direction: str) -> bool:
        if self.ill:
            raise RuntimeError("a fault of ours")
        return (sha256, peer, direction) in self.named

    def fetch(self, sender: AgentId, attachment: Attachment) -> None:
        raise StorageError("not today")

    async def settle(self) -> None:
        while self.tasks:
            await asyncio.gather(*self.tasks)
            self.tasks = {each for each in self.tasks if not each.done()}
        await self.blob_transfers.describe(
            self.blob_transfers.blobs.put(io.BytesIO(b"mark")).sha256
        )

    async def ask(self, sha256: bytes, size: int, granter: AgentId, grant: bytes) -> str:
        """What Eve gets: `yes`, or why not."""
        self.effects.clear()
        ask = BlobAsk(1, sha256, size, granter, grant, 0, 1)
        self.turn(self.transfer.receive(ask, EVE.agent, 0.0))
        await self.settle()
        said = [each.frame for each in self.effects if isinstance(each, Send)]
        self.turn(self.transfer.disconnected(EVE.agent, 0.0))
        return said[0].why if said and isinstance(said[0], BlobEnd) else "yes"


def with_transfers(
    folder: Path, script: Callable[[BlobTransfers, Stand], Awaitable[None]], local: str = ""
) -> None:
    async def run() -> None:
        blob_transfers = BlobTransfers(
            BlobStore(folder / "blobs"), folder / "held", lambda peer: peer == local
        )
        stand = Stand(blob_transfers)
        await blob_transfers.start(stand)  # type: ignore[arg-type]
        try:
            await script(blob_transfers, stand)
        finally:
            await blob_transfers.close()
        assert not blob_transfers._readers
        assert not blob_transfers._fetching

    asyncio.run(asyncio.wait_for(run(), 20))


def granted(to: AgentId, sha256: bytes) -> bytes:
    return BOB.sign(grant_words(SECRET.mesh_id, BOB.agent, to, sha256))


def test_anothers_word_opens_only_what_that_one_gave_us(tmp_path: Path) -> None:
    async def script(blob_transfers: BlobTransfers, stand: Stand) -> None:
        sha256 = blob_transfers.blobs.put(io.BytesIO(b"secret")).sha256
        grant = granted(EVE.agent, sha256)
        assert await stand.ask(sha256, 6, BOB.agent, grant) == "not allowed"
        stand.named.add((sha256, BOB.agent, "in"))
        assert await stand.ask(sha256, 6, BOB.agent, grant) == "not allowed"
        stand.changes.publish(BlobReady(sha256, frozenset({EVE.agent})))
        assert await stand.ask(sha256, 6, BOB.agent, grant) == "not allowed"
        stand.changes.publish(BlobReady(sha256, frozenset({BOB.agent})))
        assert await stand.ask(sha256, 6, BOB.agent, grant) == "yes"
        assert await stand.ask(sha256, 6, BOB.agent, granted(ME.agent, sha256)) == "not allowed"
        assert await stand.ask(sha256, 7, BOB.agent, grant) == "absent"
        stand.named.clear()
        assert await stand.ask(sha256, 6, BOB.agent, grant) == "not allowed"

    with_transfers(tmp_path, script)


def test_a_local_agents_word_opens_the_store_it_shares(tmp_path: Path) -> None:
    async def script(blob_transfers: BlobTransfers, stand: Stand) -> None:
        sha256 = blob_transfers.blobs.put(io.BytesIO(b"ours")).sha256
        assert await stand.ask(sha256, 4, BOB.agent, granted(EVE.agent, sha256)) == "yes"
        assert await stand.ask(sha256, 4, BOB.agent, b"") == "not allowed"

    with_transfers(tmp_path, script, local=BOB.agent)


def test_our_own_message_opens_what_it_names_and_says_when_it_is_gone(tmp_path: Path) -> None:
    async def script(blob_transfers: BlobTransfers, stand: Stand) -> None:
        assert await stand.ask(X, 4, ME.agent, b"") == "not allowed"
        stand.named.add((X, EVE.agent, "out"))
        assert await stand.ask(X, 4, ME.agent, b"") == "absent"

    with_transfers(tmp_path, script)


def test_a_check_that_fails_gives_the_place_back(tmp_path: Path) -> None:
    async def script(blob_transfers: BlobTransfers, stand: Stand) -> None:
        stand.ill = True
        for _ in range(20):  # more than one peer may have at once
            assert await stand.ask(X, 4, ME.agent, b"") == "failed"

    with_transfers(tmp_path, script)


def fetching(
    blob_transfers: BlobTransfers, stand: Stand, progress: Callable[[int, int], None] | None = None
) -> asyncio.Task[None]:
    """Somebody waits for X, which is asked for."""
    stand.fetch = lambda sender, attachment: None  # type: ignore[method-assign]
    attachment = Attachment("a", 3, "text/plain", X)
    return asyncio.create_task(blob_transfers.fetch(BOB.agent, attachment, progress))


def test_a_watcher_that_fails_is_left_out_and_the_transfer_goes_on(tmp_path: Path) -> None:
    async def script(blob_transfers: BlobTransfers, stand: Stand) -> None:
        seen: list[int] = []
        tries: list[int] = []

        def bad(received: int, size: int) -> None:
            tries.append(received)
            raise ValueError("a program's own fault")

        waiting = [
            fetching(blob_transfers, stand, bad),
            fetching(blob_transfers, stand, lambda received, size: seen.append(received)),
        ]
        await asyncio.sleep(0)
        for received in (1, 2):
            stand.changes.publish(BlobProgress(X, received, 3))
            stand.changes.publish(BlobProgress(b"y" * 32, received, 3))
        assert (seen, tries) == ([1, 2], [1])
        stand.changes.publish(BlobReady(b"y" * 32))
        await asyncio.sleep(0)
        assert not any(each.done() for each in waiting)
        stand.changes.publish(BlobReady(X))
        await asyncio.gather(*waiting)

    with_transfers(tmp_path, script)


def test_who_waits_for_a_file_that_can_not_be_had_hears_why(tmp_path: Path) -> None:
    async def script(blob_transfers: BlobTransfers, stand: Stand) -> None:
        waiting = [fetching(blob_transfers, stand) for _ in range(2)]
        await asyncio.sleep(0)
        stand.changes.publish(BlobFailed(X, "it was deleted"))
        stand.changes.publish(BlobReady(X))
        for each in waiting:
            with pytest.raises(StorageError, match="it was deleted"):
                await each

    with_transfers(tmp_path, script)


def test_who_waits_for_a_file_when_the_node_ends_hears_of_it(tmp_path: Path) -> None:
    async def script(blob_transfers: BlobTransfers, stand: Stand) -> None:
        waiting = fetching(blob_transfers, stand)
        await asyncio.sleep(0)
        await blob_transfers.close()
        with pytest.raises(StorageError, match="ended"):
            await waiting

    with_transfers(tmp_path, script)


def test_a_fetch_that_can_not_begin_or_is_given_up_leaves_nothing_behind(tmp_path: Path) -> None:
    async def script(blob_transfers: BlobTransfers, stand: Stand) -> None:
        before = {kind: list(heard) for kind, heard in stand.changes._listeners.items() if heard}
        with pytest.raises(StorageError, match="not today"):
            await blob_transfers.fetch(
                BOB.agent, Attachment("a", 5, "text/plain", X), lambda *_: None
            )
        waiting = fetching(blob_transfers, stand, lambda *_: None)
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        after = {kind: heard for kind, heard in stand.changes._listeners.items() if heard}
        assert after == before

    with_transfers(tmp_path, script)


def test_a_chunk_behind_one_that_failed_does_not_take_its_place(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs")
    content = bytes(2 * CHUNK_BYTES)
    with store.begin(hashlib.sha256(content).digest(), len(content)) as part:
        with pytest.raises(StorageError):
            _write(part, 1, content[CHUNK_BYTES:])
        assert part.received == 0
        _write(part, 0, content[:CHUNK_BYTES])
        _write(part, 1, content[CHUNK_BYTES:])
        part.finish()


def test_what_comes_back_when_the_node_has_ended_raises_nothing(tmp_path: Path) -> None:
    async def script(blob_transfers: BlobTransfers, stand: Stand) -> None:
        stand.turn(stand.transfer.want(X, 5, [BOB.agent], BOB.agent, b"", 0.0))
        stand.transferred = lambda *_: None  # type: ignore[method-assign]
        del stand.transfer  # as a driver whose engine is gone
        blob_transfers.perform(CheckAsk(EVE.agent, 1, X, 5, ME.agent, b""))
        await stand.settle()

    with_transfers(tmp_path, script)
