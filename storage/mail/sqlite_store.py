"""The store on disk: a `Database` in a thread of its own, behind the `Store` port.

Decides which question goes to which part of the database. Never touches a file itself.
Invariants: a commit of which was said that it is kept is on the disk; one that failed is not; of
one that was cancelled, all rows are or none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from meshagent.core.model.rows import InEntry, LogEntry, MailStart, OutEntry, PeerRow, Row
from meshagent.core.ports import Damage
from meshagent.errors import CorruptFile, MeshError, StorageError
from meshagent.storage.mail.attachment_index import blobs, names_blob
from meshagent.storage.mail.backup import Snapshot, claim, finish_restore, restore_database
from meshagent.storage.mail.database import Database
from meshagent.storage.mail.search import DIRECTIONS, LogPage, Wanted, match_query
from meshagent.storage.mail.store_thread import StoreThread

__all__ = ["SqliteStore"]

log = logging.getLogger(__name__)

T = TypeVar("T")


class SqliteStore:
    """An agent's rows in `mesh.db`. It belongs to the event loop that opened it."""

    def __init__(self, path: Path, agent: str = "") -> None:
        self.path, self.agent = path, agent
        self._thread: StoreThread | None = None

    async def open(self) -> None:
        """Open or create; after a failure it may be tried again."""
        assert self._thread is None, "opened twice"
        thread = StoreThread(self.path)
        try:
            await thread.call(self._open)
        except Exception:
            await thread.stop()
            raise
        except asyncio.CancelledError:
            thread.ask_to_stop()
            raise
        self._thread = thread

    def begin(self, rows: Sequence[Row], then: Callable[[MeshError | None], None]) -> None:
        """Commit all rows or none; `then` hears how, perhaps before this returns."""

        def told(_: None, error: Exception | None) -> None:
            then(error if error is None or isinstance(error, MeshError) else _broken(error))

        try:
            thread = self._working()
            thread.require_room()
        except MeshError as error:
            then(error)
        else:
            thread.begin(rows, told)

    async def commit(self, rows: Sequence[Row]) -> None:
        """Commit all rows or none; durable on return."""
        thread = self._working()
        if rows:
            await thread.commit(rows)

    async def next_run(self, at_least: int = 0) -> int:
        """A number larger than any returned before, and at least `at_least`."""
        return await self._call(lambda database: database.next_run(at_least))

    async def peers(self) -> Iterable[PeerRow]:
        """All remembered peers, without those whose rows are damaged."""
        return await self._ask(Database.peers)

    async def mail_start(self) -> MailStart:
        """Where delivery stands."""
        return await self._ask(lambda database: database.reader.start())

    async def pending(self, peer: str, first: int, limit: int) -> Sequence[OutEntry]:
        """Messages for `peer` that are not settled, from number `first` on, in order."""
        return await self._call(lambda database: database.pending(peer, first, limit))

    async def due(self, now_ms: int, limit: int) -> Sequence[OutEntry]:
        """Messages whose time is up, and of which no word has come."""
        return await self._ask(lambda database: database.reader.due(now_ms, limit))

    async def next_expiry(self) -> int | None:
        """When `due` has something next."""
        return await self._ask(lambda database: database.reader.next_expiry())

    async def outbox(self, limit: int, *, ended: bool = False) -> Sequence[OutEntry]:
        """Messages of ours that are queued or sent (with `ended`, all), oldest first."""
        return await self._ask(lambda database: database.reader.outbox(limit, ended))

    async def outgoing(self, prefix: str) -> Sequence[OutEntry]:
        """Messages of ours whose id begins so; at most a few."""
        return await self._ask(lambda database: database.reader.outgoing(prefix))

    async def inbox(self, after: int, limit: int, *, unread: bool = False) -> Sequence[InEntry]:
        """Messages beyond a position; with `unread`, only those not done and not parked."""
        return await self._ask(lambda database: database.reader.inbox(after, limit, unread))

    async def recent(
        self, limit: int, *, upto: int | None = None, unseen: bool = False
    ) -> Sequence[InEntry]:
        """The newest messages up to a position, oldest of them first."""
        return await self._ask(lambda database: database.reader.recent(limit, upto, unseen))

    async def withdrawn(self) -> int:
        """How many messages of ours only wait to tell that they were taken back or expired."""
        return await self._ask(lambda database: database.reader.withdrawn())

    async def newest(self) -> int:
        """The largest position in the inbox; 0 when it is empty."""
        return await self._ask(lambda database: database.reader.newest())

    async def incoming(self, prefix: str) -> Sequence[InEntry]:
        """Messages that came whose id begins so; at most a few."""
        return await self._ask(lambda database: database.reader.incoming(prefix))

    async def log(
        self, limit: int, *, search: str = "", peer: str = "", kind: str = "", without: str = ""
    ) -> Sequence[LogEntry]:
        """The newest `limit` messages both ways that match, oldest first."""
        wanted = Wanted(match_query(search), peer, kind, without)
        if limit <= 0 or (search.strip() and not wanted.query):
            return []
        try:
            return await self._look(limit, wanted)
        except CorruptFile:
            if not wanted.query:
                raise
            await self._call(lambda database: database.search.rebuild())
            return await self._look(limit, wanted)

    async def _look(self, limit: int, wanted: Wanted) -> list[LogEntry]:
        behind = bool(wanted.query)
        while behind:
            behind = await self._call(lambda database: database.folded().search.index_some())
        found: list[LogEntry] = []
        for direction in DIRECTIONS:
            found += reversed(await self._newest(direction, limit, wanted))
        return sorted(found, key=lambda entry: entry.at_ms)[-limit:]

    async def _newest(self, direction: str, limit: int, wanted: Wanted) -> list[LogEntry]:
        """A page at a time, so that commits have their turn between them."""
        found: list[LogEntry] = []
        before: int | None = None
        while True:
            look = partial(
                _log_page, direction=direction, before=before, limit=limit - len(found),
                wanted=wanted,
            )  # fmt: skip
            entries, before = await self._ask(look)
            found += entries
            if before is None or len(found) >= limit:
                return found

    async def receiving(self) -> Sequence[InEntry]:
        """Messages that are held until their attachments are here, oldest first."""
        return await self._ask(lambda database: database.reader.receiving())

    async def names_blob(self, sha256: bytes, peer: str, direction: str) -> bool:
        """Whether a message to (`out`) or from (`in`) this peer names the blob."""
        return await self._ask(
            lambda database: names_blob(database.connected(), sha256, peer, direction)
        )

    async def blobs(self) -> Collection[bytes]:
        """Every blob that a message names."""
        return await self._ask(lambda database: blobs(database.connected()))

    async def retain(self, now_ms: int, keep_ms: int, keep_bytes: int) -> int:
        """Drop history that has ended and is old or too much; at most so many at a time."""
        return await self._call(
            lambda database: database.folded().history.retain(now_ms, keep_ms, keep_bytes)
        )

    async def backup(self, path: str | Path) -> None:
        """A consistent copy, a step at a time between commits; in place only when it is whole."""
        snapshot = await self._call(lambda database: Snapshot(database.folded(), Path(path)))
        try:
            while not await self._call(lambda _: snapshot.step()):
                pass
            await self._call(lambda _: snapshot.finish())
        except asyncio.CancelledError:
            if self._thread is not None:
                self._thread.post(lambda _: snapshot.abandon())
            raise
        except Exception:
            if self._thread is not None:
                await self._call(lambda _: snapshot.abandon())
            raise

    async def restore(self, path: str | Path) -> str:
        """Become what that copy holds, under a new epoch; where what it replaced is kept."""
        return await self._call(partial(self._restore, Path(path)))

    def _open(self, database: Database) -> None:
        finish_restore(self.path)
        database.open()
        if self.agent:
            claim(database, self.agent)

    def _restore(self, path: Path, database: Database) -> str:
        """In one call, so that nobody meets the file while it is replaced."""
        database.close()
        try:
            kept = restore_database(path, self.path, self.agent)
        finally:
            self._open(database)
        return "" if kept is None else str(kept)

    async def facts(self) -> Mapping[str, str]:
        """Path, schema, epoch, damaged rows."""
        return await self._ask(Database.facts)

    @property
    def damage_found(self) -> int:
        """Changes whenever `damage` may have become longer."""
        return 0 if self._thread is None else self._thread.damage_found

    async def damage(self) -> Sequence[Damage]:
        """What was damaged and has been set aside, oldest first; nothing is folded for that."""
        return await self._call(Database.damage)

    async def close(self) -> None:
        """Finish what waits, release the file and its thread; does nothing when not open."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await thread.stop()

    async def _ask(self, ask: Callable[[Database], T]) -> T:
        """With all that was committed before in the tables."""
        return await self._call(lambda database: database.look(ask))

    async def _call(self, run: Callable[[Database], T]) -> T:
        return await self._working().call(run)

    def _working(self) -> StoreThread:
        if self._thread is None:
            raise StorageError(f"The store {self.path} is not open.", path=str(self.path))
        return self._thread


def _log_page(database: Database, **asked: Any) -> LogPage:
    return database.search.page(**asked)


def _broken(error: Exception) -> MeshError:
    log.error("the store failed", exc_info=error)
    return StorageError(f"The store failed: {error!r}.", hint="Run 'meshagent doctor'.")
