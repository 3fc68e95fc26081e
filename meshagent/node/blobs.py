"""Carries attachments: performs what the transfer engine asks for, on the blob store's files.

Decides who may have a blob, never which chunk comes next. Invariant: a peer gets only what a
message to it names, from somebody who had it: naming a hash opens nothing. A blob is held by this
agent's own link before anybody hears that it is here.
"""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

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
from meshagent.core.model.identity import verify
from meshagent.core.model.peers import AgentId
from meshagent.core.transfer.chunks import CHUNK_BYTES, chunk_count
from meshagent.core.wire.frames import Payload, Pieces
from meshagent.errors import MeshError, StorageError, UsageError
from meshagent.node.buffer_pool import BufferPool
from meshagent.node.worker_thread import Then, WorkerThread
from meshagent.storage.blobs.errors import (
    Busy,
    DiskFull,
    Held,
    NotHeld,
    QuotaReached,
    TypeNotAllowed,
    WrongHash,
)

if TYPE_CHECKING:
    from meshagent.node.driver import Driver
    from meshagent.storage.blobs.partials import Partial
    from meshagent.storage.blobs.store import BlobStore, Reader, Stored

__all__ = ["Attachable", "BlobTransfers"]

Attachable = str | os.PathLike[str] | tuple[str, bytes | BinaryIO]
"""What can be attached: a path, or a name with bytes or a file that is open for reading."""
Progress = Callable[[int, int | None], None]
GIVEN_MAX = 10_000  # blobs of which is remembered who sent them; others are served by their senders


class BlobTransfers:
    """The attachments of one agent."""

    def __init__(self, blobs: BlobStore, holder: Path, is_local: Callable[[AgentId], bool]) -> None:
        self.blobs = blobs
        self._holder, self._is_local = holder, is_local
        self._partials: dict[bytes, Partial] = {}
        self._readers: dict[tuple[AgentId, int], Reader] = {}
        self._fetching: set[asyncio.Future[None]] = set()
        self._importing: WorkerThread | None = None
        self._closing = False
        self._givers: dict[bytes, frozenset[AgentId]] = {}
        self._blocks = BufferPool(CHUNK_BYTES)
        self._answers: list[tuple[Callable[..., list[Effect]], tuple[Any, ...]]] = []

    async def start(self, driver: Driver) -> None:
        """The node has started."""
        self._driver, self._transfer = driver, driver.mesh.transfer
        self._loop = asyncio.get_running_loop()
        driver.changes.listen(BlobReady, self._remember)
        # Two threads: what others read from us must not wait for what we write.
        self._writing = WorkerThread("meshagent-writes", self._hand_in)
        self._reading = WorkerThread("meshagent-reads", self._hand_in)

    async def close(self) -> None:
        """The node ends; what is half here stays for the next run."""
        self._closing = True
        for partial_blob in self._partials.values():
            self._writing.do(partial_blob.close, _ignore)
        for reader in self._readers.values():
            self._reading.do(reader.close, _ignore)
        self._partials.clear()
        self._readers.clear()
        for hands in (self._writing, self._reading, self._importing):
            if hands is not None:
                await hands.close()
        for each in self._fetching:
            if not each.done():
                each.set_exception(StorageError("The node ended before the file was here."))

    # -- what sessions ask --------------------------------------------------------------------

    async def enclose(self, what: Attachable, progress: Progress | None = None) -> tuple[str, str]:
        """Copy a file, bytes or a stream into the store, as it is now; its name and SHA-256."""
        name, source = _named(what)

        def report(done: int, size: int | None) -> None:
            if self._closing:
                raise StorageError("The node ended before the file was copied.")
            if progress is not None:
                self._loop.call_soon_threadsafe(progress, done, size)

        # By hands of its own: a large one must not hold up what others need of us.
        if self._importing is None:
            self._importing = WorkerThread("meshagent-imports")
        stored = await self._importing.ask(partial(self.blobs.put, source, report))
        return name, stored.sha256.hex()

    async def contents(self, sha256: bytes) -> bytes:
        """All bytes of a blob that is here."""
        return await self._reading.ask(self.blobs.path(sha256).read_bytes)

    async def describe(self, sha256: bytes) -> Stored:
        """What the store holds under this hash."""
        return await self._reading.ask(partial(self.blobs.describe, sha256))

    async def keep(self, sha256: bytes) -> None:
        """This agent needs the blob from now on; raises NotHeld."""
        await self._writing.ask(partial(self.blobs.keep, sha256, self._holder))

    async def fetch(
        self,
        sender: AgentId,
        attachment: Attachment,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Until the blob is here; raises why it can't be had."""
        sha256 = attachment.sha256
        if self.blobs.holds(sha256, attachment.size):
            await self.keep(sha256)
            return
        with ExitStack() as listening:
            arrived = self._arrival_of(sha256, listening)
            if progress is not None:
                told = _progress_of(sha256, progress)
                listening.enter_context(self._driver.changes.listening(BlobProgress, told))
            self._driver.fetch(sender, attachment)
            await arrived

    def _arrival_of(self, sha256: bytes, listening: ExitStack) -> asyncio.Future[None]:
        """Done when the blob is here; fails when it can't be had, or the node ends first."""
        arrived: asyncio.Future[None] = self._loop.create_future()

        def ready(change: BlobReady) -> None:
            if change.sha256 == sha256 and not arrived.done():
                arrived.set_result(None)

        def failed(change: BlobFailed) -> None:
            if change.sha256 == sha256 and not arrived.done():
                arrived.set_exception(
                    StorageError(
                        f"The file can't be had: {change.why}.",
                        hint="Ask its sender to send it again.",
                    )
                )

        self._fetching.add(arrived)
        listening.callback(self._fetching.discard, arrived)
        listening.enter_context(self._driver.changes.listening(BlobReady, ready))
        listening.enter_context(self._driver.changes.listening(BlobFailed, failed))
        return arrived

    async def tidy(self, needed: set[bytes]) -> None:
        """Let go of what no message of this agent names, and of what nobody needs."""

        def work() -> None:
            self.blobs.release(self._holder, needed)
            self.blobs.sweep()

        await self._writing.ask(work)

    # -- effects ------------------------------------------------------------------------------

    def perform(self, effect: Effect) -> None:
        """Do it; the engine hears of it in the loop's thread."""
        match effect:
            case WriteChunk(sha256, index, data):
                work = partial(_write, self._partials[sha256], index, data)
                self._writing.do(work, partial(self._wrote, sha256, index))
            case ReadChunk(peer, pull, _, index):
                self._read_chunk(
                    self._readers.get((peer, pull)), partial(self._read, peer, pull, index), index
                )
            case CheckAsk():
                self._driver.spawn(self._check(effect))
            case CloseReader(peer, pull):
                closing = self._readers.pop((peer, pull), None)
                if closing is not None:
                    self._reading.do(closing.close, _ignore)
            case OpenPartial(sha256, size):
                self._writing.do(partial(self._open, sha256, size), partial(self._opened, sha256))
            case FinishBlob(sha256):
                work = partial(self._finish, sha256, self._partials.pop(sha256))
                self._writing.do(work, partial(self._finished, sha256))
            case ClosePartial(sha256, discard):
                ending = self._partials.pop(sha256, None)
                if ending is not None:
                    self._writing.do(ending.discard if discard else ending.close, _ignore)

    def _answer(self, method: Callable[..., list[Effect]], *arguments: Any) -> None:
        """Note what came of an effect; the engine hears of a bunch in one turn."""
        self._answers.append((method, arguments))

    def _hand_in(self) -> None:
        if self._answers:
            answers, self._answers = self._answers, []
            self._driver.transferred(_all_of, answers)

    def _remember(self, change: BlobReady) -> None:
        if change.givers:
            self._givers[change.sha256] = change.givers
            if len(self._givers) > GIVEN_MAX:
                del self._givers[next(iter(self._givers))]

    # -- receiving ----------------------------------------------------------------------------

    def _open(self, sha256: bytes, size: int) -> Partial | None:
        """In the thread: the partial to write to, or nothing when the blob is here."""
        try:
            return self.blobs.begin(sha256, size)
        except Held:
            self._check_type(sha256)
            self.blobs.keep(sha256, self._holder)
            return None

    def _check_type(self, sha256: bytes) -> None:
        """By its contents: what the sender said was enough to fetch it, not to keep it."""
        limits = self._driver.limits
        if limits.types and not limits.allows(mime := self.blobs.describe(sha256).mime):
            raise TypeNotAllowed(mime, limits.types)

    def _opened(self, sha256: bytes, opened: Partial | None, error: Exception | None) -> None:
        transfer = self._transfer
        if opened is not None:
            self._partials[sha256] = opened
            self._answer(transfer.opened, sha256, chunk_count(opened.received))
            return
        match error:
            case None:
                self._answer(transfer.present, sha256)
            case Busy():
                self._answer(transfer.held_up, sha256, "another agent here receives it")
            case QuotaReached() | TypeNotAllowed():
                self._answer(transfer.impossible, sha256, error.message)
            case _:
                self._held_up(sha256, error)

    def _wrote(self, sha256: bytes, index: int, _: None, error: Exception | None) -> None:
        if error is None:
            self._answer(self._transfer.wrote, sha256, index)
        else:
            self._held_up(sha256, error)

    def _finish(self, sha256: bytes, whole: Partial) -> None:
        try:
            whole.finish()
        except BaseException:
            whole.close()  # its lock must not outlive the attempt
            raise
        self._check_type(sha256)
        self.blobs.keep(sha256, self._holder)

    def _finished(self, sha256: bytes, _: None, error: Exception | None) -> None:
        transfer = self._transfer
        if error is None:
            self._answer(transfer.finished, sha256)
        elif isinstance(error, WrongHash):
            self._driver.log.warning("what came is another file: %s", error)
            self._answer(transfer.wrong, sha256)
        elif isinstance(error, TypeNotAllowed):
            self._answer(transfer.impossible, sha256, error.message)
        else:
            self._held_up(sha256, error)

    def _held_up(self, sha256: bytes, error: Exception) -> None:
        known = isinstance(error, MeshError)
        reason = error.reason if isinstance(error, DiskFull) else str(error)
        self._driver.log.warning(
            "an attachment waits: %s", error, exc_info=None if known else error
        )
        self._answer(self._transfer.held_up, sha256, reason)

    # -- serving ------------------------------------------------------------------------------

    async def _check(self, ask: CheckAsk) -> None:
        try:
            refusal = await self._refusal(ask)
        except Exception:  # an ask without an answer would hold its place for ever
            self._driver.log.exception("an ask could not be checked")
            refusal = "failed", "it can't be read"
        transfer = self._transfer
        if refusal is not None:
            self._driver.transferred(transfer.turned_away, ask.peer, ask.pull, *refusal)
        else:
            self._driver.transferred(transfer.admitted, ask.peer, ask.pull)

    async def _refusal(self, ask: CheckAsk) -> tuple[str, str] | None:
        """Why the peer does not get it; None when the reader is open."""
        try:
            if not await self._may_have(ask):
                return "not allowed", "no message to you names this file"
            reader = await self._reading.ask(partial(self.blobs.open, ask.sha256))
        except NotHeld:
            return "absent", "it is not here any more"
        except MeshError as error:
            self._driver.log.warning("not served: %s", error)
            return "failed", "it can't be read"
        if reader.size != ask.size:
            reader.close()
            return "absent", f"it has {reader.size} bytes"
        self._readers[ask.peer, ask.pull] = reader
        return None

    async def _may_have(self, ask: CheckAsk) -> bool:
        """By a message of ours to the peer; or by the word of another from whom we have it.

        Another's message to us is not enough: it may name what it never had, and then grant it.
        """
        driver = self._driver
        if ask.granter == driver.agent:
            return await driver.store.names_blob(ask.sha256, ask.peer, "out")
        key = driver.mesh.links.key_of(ask.granter)
        words = grant_words(driver.profile.secret.mesh_id, ask.granter, ask.peer, ask.sha256)
        if key is None or not verify(key, words, ask.grant):
            return False
        if self._is_local(ask.granter):
            return True  # its store is ours
        if ask.granter not in self._givers.get(ask.sha256, ()):
            return False
        return await driver.store.names_blob(ask.sha256, ask.granter, "in")

    def _read_chunk(self, reader: Reader | None, then: Then, index: int) -> None:
        """Here and now when it is in memory, as it is just after `send`: a thread takes longer."""
        if reader is None:
            self._reading.do(_nothing, then)
            return
        into = self._blocks.take()
        data = reader.read_at_once(index, into)
        if data is None:
            self._reading.do(partial(reader.read, index, into), then)
            return
        then(data, None)
        self._loop.call_soon(self._hand_in)

    def _read(self, peer: AgentId, pull: int, index: int, data: Any, error: Any) -> None:
        if error is not None:
            self._driver.log.warning("a chunk can't be read: %s", error)
        self._answer(self._transfer.chunk_read, peer, pull, index, data)


def _named(what: Attachable) -> tuple[str, Path | BinaryIO]:
    match what:
        case (str() as name, bytes() | bytearray() | memoryview() as data):
            return name, io.BytesIO(data)
        case (str() as name, stream) if hasattr(stream, "read"):
            return name, stream
        case str() | os.PathLike():
            path = Path(what)
            return path.name, path
    raise UsageError(
        f"{what!r} can't be attached.",
        hint='Give a path, or a name with bytes or an open file: ("shot.png", data).',
    )


def _progress_of(
    sha256: bytes, progress: Callable[[int, int], None]
) -> Callable[[BlobProgress], None]:
    """Pass on what is heard of this blob, until the program's own callback fails."""
    failed = False

    def told(change: BlobProgress) -> None:
        nonlocal failed
        if change.sha256 == sha256 and not failed:
            failed = True
            progress(change.received, change.size)
            failed = False

    return told


def _write(part: Partial, index: int, data: Payload) -> None:
    """In the thread: a chunk behind one that failed must not take its place."""
    if part.received != index * CHUNK_BYTES:
        raise StorageError("The chunk before it could not be written.")
    part.write(*(data.parts if isinstance(data, Pieces) else (data,)))


def _all_of(
    answers: list[tuple[Callable[..., list[Effect]], tuple[Any, ...]]], now: float
) -> list[Effect]:
    return [each for method, arguments in answers for each in method(*arguments, now)]


def _ignore(result: Any, error: Exception | None) -> None:
    """Nothing rests on it."""


def _nothing() -> None:
    """A reader that was closed meanwhile reads nothing."""
