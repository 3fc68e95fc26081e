"""The store on disk: a `Database` in a thread of its own, behind the `Store` port.

Decides how work reaches that thread: in order, with all commits that wait side by side put into
one transaction. Never blocks the event loop. Invariant: a `commit` that returned is on the disk;
one that raised is not; of one that was cancelled, all rows are or none.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from meshagent.core.ports import PeerRow, Row
from meshagent.errors import LimitReached, StorageError
from meshagent.storage.database import Database
from meshagent.storage.schema import Value, encode_row

__all__ = ["SqliteStore"]

PENDING_JOBS_MAX = 4_096  # more waiters than one node has sessions and links together
GROUP_JOBS_MAX = 512  # per transaction: keeps its latency and the log's growth in bounds

T = TypeVar("T")
Statements = tuple[tuple[str, tuple[Value, ...]], ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Commit:
    statements: Statements
    future: asyncio.Future[Any]


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    run: Callable[[Database], Any]
    future: asyncio.Future[Any]
    last: bool = False


_Job = _Commit | _Call
_Outcome = tuple[asyncio.Future[Any], Any, BaseException | None]


class SqliteStore:
    """An agent's rows in `mesh.db`. It belongs to the event loop that opened it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._worker: _Worker | None = None

    async def open(self) -> None:
        """Open or create, and migrate; after a failure it may be tried again."""
        assert self._worker is None, "opened twice"
        worker = _Worker(self.path)
        try:
            await worker.submit(_Call(Database.open, worker.new_future()))
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
        statements = tuple(encode_row(row) for row in rows)
        if statements:
            await worker.submit(_Commit(statements, worker.new_future()))

    async def next_run(self, at_least: int = 0) -> int:
        """A number larger than any returned before, and at least `at_least`."""
        return await self._call(lambda database: database.next_run(at_least))

    async def peers(self) -> Iterable[PeerRow]:
        """All remembered peers, without those whose rows are damaged."""
        return await self._call(Database.peers)

    async def facts(self) -> Mapping[str, str]:
        """Journal mode, sync level, schema, epoch, damaged rows."""
        return await self._call(Database.facts)

    async def close(self) -> None:
        """Finish what waits, release the file and its thread; does nothing when not open."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.stop()

    async def _call(self, run: Callable[[Database], T]) -> T:
        worker = self._working()
        result: T = await worker.submit(_Call(run, worker.new_future()))
        return result

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
        # A daemon: a program that forgot to close must still be able to end; SQLite recovers.
        self._thread = threading.Thread(target=self._serve, name=f"store {path}", daemon=True)
        self._thread.start()

    def new_future(self) -> asyncio.Future[Any]:
        return self._loop.create_future()

    async def submit(self, job: _Job) -> Any:
        if self._jobs.qsize() >= PENDING_JOBS_MAX:
            raise LimitReached(
                f"{PENDING_JOBS_MAX} writes wait for the disk already.",
                hint="The disk is slower than the senders; send more slowly.",
                limit=PENDING_JOBS_MAX,
            )
        self._jobs.put(job)
        return await job.future

    def ask_to_stop(self) -> asyncio.Future[Any]:
        """End the thread after what waits; the future tells when."""
        future = self.new_future()
        self._jobs.put(_Call(Database.close, future, last=True))
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
        database = Database(self._path)
        ended = False
        while not ended:
            for group in _groups(self._take()):
                ended = isinstance(group[-1], _Call) and group[-1].last
                self._report(_run(database, group))

    def _take(self) -> list[_Job]:
        """Wait for a job, and bring along those that wait behind it."""
        jobs = [self._jobs.get()]
        with contextlib.suppress(queue.Empty):
            while len(jobs) < GROUP_JOBS_MAX:
                jobs.append(self._jobs.get_nowait())
        return jobs

    def _report(self, outcomes: Sequence[_Outcome]) -> None:
        # A loop that is closed has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_resolve, outcomes)


def _groups(jobs: Sequence[_Job]) -> list[list[_Job]]:
    """Commits that stand side by side in one group, every call alone; in order."""
    groups: list[list[_Job]] = []
    for job in jobs:
        if groups and isinstance(job, _Commit) and isinstance(groups[-1][0], _Commit):
            groups[-1].append(job)
        else:
            groups.append([job])
    return groups


def _run(database: Database, group: Sequence[_Job]) -> list[_Outcome]:
    """Perform a group; one bad commit must not fail its neighbours, so then each goes alone."""
    try:
        result = _perform(database, group)
    except Exception as error:
        if len(group) == 1:
            return [(group[0].future, None, error)]
        return [outcome for job in group for outcome in _run(database, [job])]
    return [(job.future, result, None) for job in group]


def _perform(database: Database, group: Sequence[_Job]) -> Any:
    if isinstance(group[0], _Call):
        return group[0].run(database)
    commits = [job for job in group if isinstance(job, _Commit)]
    database.write([statement for job in commits for statement in job.statements])
    return None


def _resolve(outcomes: Sequence[_Outcome]) -> None:
    for future, result, error in outcomes:
        if future.done():  # its waiter was cancelled
            continue
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
