"""A store without a disk, for simulations and tests: the same port, and faults on demand.

Decides nothing that the real store does not. Never touches a file (but for
`backup`), a thread or a clock.
Invariant: what is durable changes only when a write is synced; a crash leaves exactly that.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshagent.core.delivery.mailbox import MailboxModel
from meshagent.core.model.rows import InEntry, LogEntry, MailStart, NewEpoch, OutEntry, PeerRow, Row
from meshagent.core.ports import Damage
from meshagent.errors import MeshError, StorageError
from meshagent.storage.folders.files import write_private
from meshagent.storage.mail.tables import EPOCH_BYTES

__all__ = ["MemoryStore"]


@dataclass(slots=True)
class _Content:
    """What is on the imaginary disk."""

    mail: MailboxModel = field(
        default_factory=lambda: MailboxModel(secrets.token_bytes(EPOCH_BYTES))
    )
    run: int = 0
    peers: dict[str, PeerRow] = field(default_factory=dict)

    def copy(self) -> _Content:
        return _Content(self.mail.copy(), self.run, dict(self.peers))


def _new_epoch() -> bytes:
    return secrets.token_bytes(EPOCH_BYTES)


_Write = Callable[[_Content], Any]


class MemoryStore:
    """Rows that survive `crash` exactly when their commit returned."""

    def __init__(self) -> None:
        self.commits = 0
        """How many writes were synced."""
        self.at_once = False
        """Whether `begin` commits and tells before it returns."""
        self._durable = _Content()
        self._backups: dict[Path, _Content] = {}
        self._open = False
        self._held = False
        self._unsynced: deque[tuple[_Write, asyncio.Future[Any]]] = deque()
        self._failures: deque[Exception] = deque()
        self._begun: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        """How many writes are not durable yet."""
        return len(self._unsynced)

    def hold(self) -> None:
        """From now on no write is synced, and none returns, until `let_go`."""
        self._held = True

    def let_go(self) -> None:
        """Sync what waits, in order, and go on."""
        self._held = False
        while self._unsynced:
            write, future = self._unsynced.popleft()
            try:
                result, error = self._sync(write), None
            except StorageError as refusal:
                result, error = None, refusal
            if future.done():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

    def fail_next(self, error: Exception) -> None:
        """Let the next write or `open` raise `error` and change nothing; may be called again."""
        self._failures.append(error)

    def crash(self) -> None:
        """Lose power: unsynced writes are gone, and the store must be opened again."""
        self._open = self._held = False
        while self._unsynced:
            _, future = self._unsynced.popleft()
            if not future.done():
                future.set_exception(StorageError("The store crashed."))

    async def open(self) -> None:
        """Open; what was durable is there."""
        assert not self._open, "opened twice"
        self._fail_if_asked()
        self._open = True

    async def commit(self, rows: Sequence[Row]) -> None:
        """All rows or none, durable on return."""
        if rows or not self._open:
            await self._write(_keeping(rows))

    def begin(self, rows: Sequence[Row], then: Callable[[MeshError | None], None]) -> None:
        """As `commit`, for who does not wait; told before this returns only with `at_once`."""
        if self.at_once and not self._held:
            then(self._commit_now(rows))
            return
        task = asyncio.get_running_loop().create_task(self.commit(rows))
        self._begun.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._begun.discard(task)
            error = None if task.cancelled() else task.exception()
            assert error is None or isinstance(error, MeshError), error
            then(error)

        task.add_done_callback(done)

    def _commit_now(self, rows: Sequence[Row]) -> MeshError | None:
        try:
            self._require_open()
            self._fail_if_asked()
            self._sync(_keeping(rows))
        except MeshError as error:
            return error
        return None

    async def next_run(self, at_least: int = 0) -> int:
        """A number larger than any returned before, and at least `at_least`."""

        def write(content: _Content) -> int:
            content.run = max(content.run + 1, at_least)
            return content.run

        run: int = await self._write(write)
        return run

    async def peers(self) -> Iterable[PeerRow]:
        """All remembered peers."""
        self._require_open()
        return list(self._durable.peers.values())

    async def mail_start(self) -> MailStart:
        """Where delivery stands."""
        return self._mail().start()

    async def pending(self, peer: str, first: int, limit: int) -> Sequence[OutEntry]:
        """Messages for `peer` that are not settled, from number `first` on, in order."""
        return self._mail().pending(peer, first, limit)

    async def due(self, now_ms: int, limit: int) -> Sequence[OutEntry]:
        """Messages whose time is up, and of which no word has come."""
        return self._mail().due(now_ms, limit)

    async def next_expiry(self) -> int | None:
        """When `due` has something next."""
        return self._mail().next_expiry()

    async def outbox(self, limit: int, *, ended: bool = False) -> Sequence[OutEntry]:
        """Messages of ours that are queued or sent (with `ended`, all), oldest first."""
        return self._mail().outbox(limit, ended)

    async def outgoing(self, prefix: str) -> Sequence[OutEntry]:
        """Messages of ours whose id begins so; at most a few."""
        return self._mail().outgoing(prefix)

    async def inbox(self, after: int, limit: int, *, unread: bool = False) -> Sequence[InEntry]:
        """Messages beyond a position; with `unread`, only those not done and not parked."""
        return self._mail().inbox(after, limit, unread)

    async def recent(
        self, limit: int, *, upto: int | None = None, unseen: bool = False
    ) -> Sequence[InEntry]:
        """The newest messages up to a position, oldest of them first."""
        return self._mail().recent(limit, upto, unseen)

    async def withdrawn(self) -> int:
        """How many messages of ours only wait to tell that they were taken back or expired."""
        return self._mail().withdrawn()

    async def newest(self) -> int:
        """The largest position in the inbox; 0 when it is empty."""
        return self._mail().newest()

    async def incoming(self, prefix: str) -> Sequence[InEntry]:
        """Messages that came whose id begins so; at most a few."""
        return self._mail().incoming(prefix)

    async def log(
        self, limit: int, *, search: str = "", peer: str = "", kind: str = "", without: str = ""
    ) -> Sequence[LogEntry]:
        """The newest `limit` messages both ways that match, oldest first."""
        return self._mail().log(limit, search, peer, kind, without)

    async def receiving(self) -> Sequence[InEntry]:
        """Messages that are held until their attachments are here, oldest first."""
        return self._mail().receiving()

    async def names_blob(self, sha256: bytes, peer: str, direction: str) -> bool:
        """Whether a message to (`out`) or from (`in`) this peer names the blob."""
        return self._mail().names_blob(sha256, peer, direction)

    async def blobs(self) -> Collection[bytes]:
        """Every blob that a message names."""
        return self._mail().blobs()

    async def retain(self, now_ms: int, keep_ms: int, keep_bytes: int) -> int:
        """Drop history that has ended and is old or too much; at most so many at a time."""

        def write(content: _Content) -> int:
            return content.mail.retain(now_ms, keep_ms, keep_bytes)

        dropped: int = await self._write(write)
        return dropped

    async def backup(self, path: str | Path) -> None:
        """A copy in memory; the file in its place only says so."""
        self._require_open()
        path = Path(path)
        write_private(path, b"a backup of a store in memory\n")
        self._backups[path] = self._durable.copy()

    async def restore(self, path: str | Path) -> str:
        """Become what that copy holds, under a new epoch; where what it replaced is kept."""
        kept = Path(f"replaced-{len(self._backups)}")

        def write(content: _Content) -> None:
            backup = self._backups.get(Path(path))
            if backup is None:
                raise StorageError(f"Can't read {path}: it does not exist.", path=str(path))
            self._backups[kept], found = content.copy(), backup.copy()
            found.mail.write([NewEpoch(_new_epoch())])
            content.mail, content.peers = found.mail, found.peers
            content.run += 1

        await self._write(write)
        return str(kept)

    async def facts(self) -> Mapping[str, str]:
        """The same keys as the store on disk has."""
        self._require_open()
        return {
            "path": ":memory:",
            "journal_mode": "memory",
            "schema": "0",
            "epoch": self._durable.mail.epoch.hex(),
            "wal": "0",
            "quarantined": "0",
        }

    damage_found = 0

    async def damage(self) -> Sequence[Damage]:
        """Memory does not decay."""
        self._require_open()
        return []

    async def close(self) -> None:
        """Sync what waits and close; does nothing when not open."""
        if self._open:
            self.let_go()
            self._open = False

    async def _write(self, write: _Write) -> Any:
        self._require_open()
        self._fail_if_asked()
        if not self._held:
            return self._sync(write)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._unsynced.append((write, future))
        return await future

    def _sync(self, write: _Write) -> Any:
        result = write(self._durable)
        self.commits += 1
        return result

    def _fail_if_asked(self) -> None:
        if self._failures:
            raise self._failures.popleft()

    def _mail(self) -> MailboxModel:
        self._require_open()
        return self._durable.mail

    def _require_open(self) -> None:
        if not self._open:
            raise StorageError("The store is not open.")


def _keeping(rows: Sequence[Row]) -> _Write:
    def write(content: _Content) -> None:
        content.mail.write([row for row in rows if not isinstance(row, PeerRow)])
        content.peers |= {row.agent: row for row in rows if isinstance(row, PeerRow)}

    return write
