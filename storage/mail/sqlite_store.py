"""The store on disk: a `Database` in a thread of its own, behind the `Store` port.

Decides how work reaches that thread: in order, with all commits that wait side by side put into
one transaction. A commit that has none before it is made in the loop's own thread while the disk
is quick (`pace.py`); else the loop is never held up. Invariants: a `commit` that returned is
on the disk; one that raised is not; of one that was cancelled, all rows are or none. One thread at
a time uses the database. What an interrupt left undone is made good before the next use.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic  # the loop's own clock has one more call around it
from typing import Any, NamedTuple, TypeVar

from meshagent.core.model.rows import (
    InEntry,
    InRow,
    LogEntry,
    MailStart,
    OutEntry,
    OutRow,
    PeerRow,
    Row,
    singly,
)
from meshagent.errors import CorruptFile, LimitReached, MeshError, StorageError
from meshagent.storage.log.loop_commits import Pace
from meshagent.storage.mail.attachment_index import blobs, names_blob
from meshagent.storage.mail.backup import Snapshot, claim, finish_restore, restore_database
from meshagent.storage.mail.database import Database
from meshagent.storage.mail.search import DIRECTIONS, LogPage, Wanted, match_query

__all__ = ["SqliteStore"]

log = logging.getLogger(__name__)

PENDING_JOBS_MAX = 4_096  # more waiters than one node has sessions and links together
GROUP_JOBS_MAX = 512  # per transaction: keeps its latency and the log's growth in bounds
QUIET_S = 0.2  # without a job, then there is time to bring the journal into the tables
RETRY_S = 10.0  # after a full disk would not take it: it is safe where it is
GROUP_BYTES_MAX = 4 * 1024 * 1024  # of messages per transaction, beyond its first commit

T = TypeVar("T")


Then = Callable[[Any, Exception | None], None]


class _Commit(NamedTuple):
    rows: Sequence[Row]
    then: Then


class _Call(NamedTuple):
    run: Callable[[Database], Any]
    then: Then
    last: bool = False


_Job = _Commit | _Call
_Outcome = tuple[Then, Any, Exception | None]


class SqliteStore:
    """An agent's rows in `mesh.db`. It belongs to the event loop that opened it."""

    def __init__(self, path: Path, agent: str = "") -> None:
        self.path, self.agent = path, agent
        self._worker: _Worker | None = None

    async def open(self) -> None:
        """Open or create, and migrate; after a failure it may be tried again."""
        assert self._worker is None, "opened twice"
        worker = _Worker(self.path)
        try:
            await worker.call(self._open)
        except Exception:
            await worker.stop()
            raise
        except asyncio.CancelledError:
            worker.ask_to_stop()
            raise
        self._worker = worker

    async def commit(self, rows: Sequence[Row]) -> None:
        """All rows in one transaction, durable on return."""
        worker = self._working()
        if rows:
            future = worker.new_future()
            worker.submit(_Commit(rows, partial(_tell, future)))
            await future

    def begin(self, rows: Sequence[Row], then: Callable[[MeshError | None], None]) -> None:
        """As `commit`, for who does not wait: `then` is called, later, with why it failed."""

        def told(_: None, error: Exception | None) -> None:
            then(error if error is None or isinstance(error, MeshError) else _broken(error))

        try:
            self._working().submit(_Commit(rows, told))
        except MeshError as error:
            asyncio.get_running_loop().call_soon(then, error)

    def commit_at_once(self, rows: Sequence[Row]) -> bool:
        """As `commit`, before this returns; False when that might hold up the loop."""
        try:
            return (self._worker or self._working()).commit_at_once(rows)
        except MeshError:
            raise
        except Exception as error:
            raise _broken(error) from error

    async def next_run(self, at_least: int = 0) -> int:
        """A number larger than any returned before, and at least `at_least`."""
        return await self._call(lambda database: database.next_run(at_least))

    async def peers(self) -> Iterable[PeerRow]:
        """All remembered peers, without those whose rows are damaged."""
        return await self._ask(Database.peers)

    async def mail_start(self) -> MailStart:
        """Where delivery stands."""
        return await self._ask(lambda database: database.mail.start())

    async def pending(self, peer: str, first: int, limit: int) -> Sequence[OutEntry]:
        """Messages for `peer` that are not settled, from number `first` on, in order."""
        return await self._call(lambda database: database.pending(peer, first, limit))

    async def due(self, now_ms: int, limit: int) -> Sequence[OutEntry]:
        """Messages whose time is up, and of which no word has come."""
        return await self._ask(lambda database: database.mail.due(now_ms, limit))

    async def next_expiry(self) -> int | None:
        """When `due` has something next."""
        return await self._ask(lambda database: database.mail.next_expiry())

    async def outbox(self, limit: int, *, ended: bool = False) -> Sequence[OutEntry]:
        """Messages of ours that are queued or sent (with `ended`, all), oldest first."""
        return await self._ask(lambda database: database.mail.outbox(limit, ended))

    async def outgoing(self, prefix: str) -> Sequence[OutEntry]:
        """Messages of ours whose id begins so; at most a few."""
        return await self._ask(lambda database: database.mail.outgoing(prefix))

    async def inbox(self, after: int, limit: int, *, unread: bool = False) -> Sequence[InEntry]:
        """Messages beyond a position; with `unread`, only those not done and not parked."""
        return await self._ask(lambda database: database.mail.inbox(after, limit, unread))

    async def recent(
        self, limit: int, *, upto: int | None = None, unseen: bool = False
    ) -> Sequence[InEntry]:
        """The newest messages up to a position, oldest of them first."""
        return await self._ask(lambda database: database.mail.recent(limit, upto, unseen))

    async def withdrawn(self) -> int:
        """How many messages of ours only wait to tell that they were taken back or expired."""
        return await self._ask(lambda database: database.mail.withdrawn())

    async def newest(self) -> int:
        """The largest position in the inbox; 0 when it is empty."""
        return await self._ask(lambda database: database.mail.newest())

    async def incoming(self, prefix: str) -> Sequence[InEntry]:
        """Messages that came whose id begins so; at most a few."""
        return await self._ask(lambda database: database.mail.incoming(prefix))

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
        return await self._ask(lambda database: database.mail.receiving())

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
            if self._worker is not None:
                self._worker.post(lambda _: snapshot.abandon())
            raise
        except Exception:
            if self._worker is not None:
                await self._call(lambda _: snapshot.abandon())
            raise

    async def restore(self, path: str | Path) -> str:
        """Become what that copy holds, under a new epoch; where what it replaced is kept."""
        return await self._call(partial(self._restore, Path(path)))

    def _open(self, database: Database) -> None:
        finish_restore(self.path)
        database.open()
        database.journal.recover()
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
        """CommitLog mode, sync level, schema, epoch, damaged rows."""
        return await self._ask(Database.facts)

    async def close(self) -> None:
        """Finish what waits, release the file and its thread; does nothing when not open."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.stop()

    async def _ask(self, ask: Callable[[Database], T]) -> T:
        """With all that was committed before in the tables."""
        return await self._call(lambda database: database.look(ask))

    async def _call(self, run: Callable[[Database], T]) -> T:
        return await self._working().call(run)

    def _working(self) -> _Worker:
        if self._worker is None:
            raise StorageError(f"The store {self.path} is not open.", path=str(self.path))
        return self._worker


class _Worker:
    """The thread that owns the database. It ends with the job that is marked as the last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._taken: deque[_Job] = deque()
        self._untold = 0
        """Jobs of which the loop has not heard yet. The thread uses the database for these only,
        and the loop while there are none: so they need no lock, and nothing passes a job."""
        self._pace = Pace()
        self._committed_at = float("-inf")
        self._tidying: asyncio.TimerHandle | None = None
        self._resting = False
        self._database = Database(path)
        self._database.journal.between = self._let_commits_pass
        # A daemon: a program that forgot to close must still be able to end; SQLite recovers.
        self._thread = threading.Thread(target=self._serve, name=f"store {path}", daemon=True)
        self._thread.start()

    def new_future(self) -> asyncio.Future[Any]:
        return self._loop.create_future()

    async def call(self, run: Callable[[Database], T]) -> T:
        future: asyncio.Future[T] = self._loop.create_future()
        self.submit(_Call(run, partial(_tell, future)))
        return await future

    def submit(self, job: _Job) -> None:
        if self._jobs.qsize() >= PENDING_JOBS_MAX:
            raise LimitReached(
                f"{PENDING_JOBS_MAX} writes wait for the disk already.",
                hint="The disk is slower than the senders; send more slowly.",
                limit=PENDING_JOBS_MAX,
            )
        self._put(job)

    def _put(self, job: _Job) -> None:
        self._untold += 1
        self._jobs.put(job)

    def commit_at_once(self, rows: Sequence[Row]) -> bool:
        """In this thread, which is the loop's, if nothing is in the way and it will be short."""
        began = monotonic()
        if self._untold or not self._pace.allows(began) or not self._database.write_at_once(rows):
            return False
        self._committed_at = monotonic()
        self._pace.took(began, self._committed_at)
        if self._tidying is None:
            self._tidy_later()
        return True

    def _tidy_later(self) -> None:
        """In a quiet moment, bring the journal into the tables."""
        journal = self._database.journal
        if self._tidying is None and (journal.size or journal.overrun):
            self._tidying = self._loop.call_later(QUIET_S, self._tidy)

    def _tidy(self) -> None:
        self._tidying = None
        if self._untold:
            return  # who hears of it comes back to this
        if (left_s := self._committed_at + QUIET_S - monotonic()) > 0:
            self._tidying = self._loop.call_later(left_s, self._tidy)
        else:
            self._put(_Call(_fold_some, self._tidied))

    def _tidied(self, is_left: bool, error: Exception | None) -> None:
        """A step at a time: whoever came meanwhile had his turn."""
        if error is not None:
            if not isinstance(error, MeshError):
                log.error("the journal is not folded", exc_info=error)
            if self._tidying is not None:
                self._tidying.cancel()
            self._tidying = self._loop.call_later(RETRY_S, self._tidy)
        elif is_left and not self._untold:
            self._put(_Call(_fold_some, self._tidied))

    def _rested(self, _: None, error: Exception | None) -> None:
        """A disk that did not let it is asked again after the next job, not at once."""
        self._resting = False
        if error is not None and not isinstance(error, MeshError):
            log.error("the journal's file is not begun anew", exc_info=error)

    def post(self, run: Callable[[Database], Any]) -> None:
        """Do this after what waits; nobody waits for it."""
        self._put(_Call(run, lambda result, error: None))

    def ask_to_stop(self) -> asyncio.Future[Any]:
        """End the thread after what waits; the future tells when."""
        if self._tidying is not None:
            self._tidying.cancel()
        future = self.new_future()
        self._put(_Call(Database.close, partial(_tell, future), last=True))
        return future

    async def stop(self) -> None:
        """End the thread and wait for it; when cancelled, it ends all the same, unwatched."""
        ended = self.ask_to_stop()
        try:
            await ended
        finally:
            if not ended.cancelled():
                self._thread.join()  # it has reported its last job: nothing is left but to return

    def _serve(self) -> None:
        ended = False
        while not ended:
            if not self._taken:
                self._taken.append(self._jobs.get())
            group = self._take()
            ended = isinstance(group[0], _Call) and group[0].last
            self._do(group)

    def _take(self, commits_only: bool = False) -> Sequence[_Job]:
        """The next call, or all commits that stand before it and fit into one transaction."""
        while self._jobs.qsize() and len(self._taken) < GROUP_JOBS_MAX:
            self._taken.append(self._jobs.get_nowait())
        if self._taken and isinstance(self._taken[0], _Call):
            return [] if commits_only else [self._taken.popleft()]
        group: list[_Commit] = []
        size = 0  # most often there is one commit, and nobody asks for it
        while self._taken and isinstance(job := self._taken[0], _Commit):
            if group:
                size = (size or _size(group[0].rows)) + _size(job.rows)
                if size > GROUP_BYTES_MAX:
                    break
            group.append(job)
            self._taken.popleft()
        return group

    def _let_commits_pass(self) -> None:
        """A call takes its time; what is committed meanwhile is not for it to see."""
        if group := self._take(commits_only=True):
            self._do(group)

    def _do(self, group: Sequence[_Job]) -> None:
        """Perform it, and tell the loop."""
        began = monotonic()
        outcomes = _run(self._database, group)
        rows = sum([len(job.rows) for job in group if isinstance(job, _Commit)])
        # A loop that is closed has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._hear, outcomes, rows, began, monotonic())

    def _hear(self, outcomes: Sequence[_Outcome], rows: int, began: float, ended: float) -> None:
        self._untold -= len(outcomes)
        if rows:
            self._committed_at = ended
            if outcomes[0][1]:
                self._pace.saw(began, ended)
        if self._database.wants_rest() and not self._resting:
            self._resting = True
            self._put(_Call(Database.rest, self._rested))
        _resolve(outcomes)
        self._tidy_later()


def _fold_some(database: Database) -> bool:
    """Whether there is more."""
    database.journal.overrun = False
    database.journal.fold_some()
    return database.journal.size > 0


def _log_page(database: Database, **asked: Any) -> LogPage:
    return database.search.page(**asked)


def _run(database: Database, group: Sequence[_Job]) -> list[_Outcome]:
    """Perform a group; one bad commit must not fail its neighbours, so then each goes alone."""
    try:
        result = _perform(database, group)
    except Exception as error:
        if len(group) == 1:
            return [(group[0].then, None, error)]
        return [outcome for job in group for outcome in _run(database, [job])]
    return [(job.then, result, None) for job in group]


def _perform(database: Database, group: Sequence[_Job]) -> Any:
    database.make_sure()
    if isinstance(group[0], _Call):
        return group[0].run(database)
    commits = [job for job in group if isinstance(job, _Commit)]
    return database.write([row for job in commits for row in job.rows])


def _resolve(outcomes: Sequence[_Outcome]) -> None:
    for then, result, error in outcomes:
        try:
            then(result, error)
        except Exception as fault:  # one that is told badly must not leave others untold
            about = {"message": "what came of a write was not taken", "exception": fault}
            asyncio.get_running_loop().call_exception_handler(about)


def _tell(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():  # its waiter was cancelled
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _broken(error: Exception) -> MeshError:
    log.error("the store failed", exc_info=error)
    return StorageError(f"The store failed: {error!r}.", hint="Run 'meshagent doctor'.")


def _size(rows: Sequence[Row]) -> int:
    return sum(len(row.body) for row in singly(rows) if isinstance(row, OutRow | InRow))
