"""The thread that owns a database and its commit log. The event loop's thread never touches them.

Decides the order of work: as it was handed in, with all commits that wait side by side made one;
and in a quiet moment the database's chores. The loop may wait for a lone commit, for a bounded
moment (log/wait_policy.py). Invariants: every job is told once how it ended; a commit that was told
as done is on the disk; commits become durable in the order in which they were handed in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from meshagent.core.model.rows import InRow, OutRow, Row, singly
from meshagent.errors import LimitReached, MeshError
from meshagent.storage.log.wait_policy import WAIT_S, WaitPolicy
from meshagent.storage.mail.database import Database

__all__ = ["StoreThread", "Then"]

log = logging.getLogger(__name__)

PENDING_JOBS_MAX = 4_096  # more waiters than one node has sessions and links together
GROUP_JOBS_MAX = 512  # per commit: keeps its latency in bounds
GROUP_BYTES_MAX = 4 * 1024 * 1024  # of messages per commit, beyond its first job
QUIET_S = 0.2  # without a job: then there is time to bring the log into the tables
RETRY_S = 10.0  # after a full disk would not take it: it is safe where it is

T = TypeVar("T")
Then = Callable[[Any, Exception | None], None]


class _Commit:
    """Rows to be kept."""

    __slots__ = ("outcome", "ready", "rows", "then", "took_s")

    def __init__(self, rows: Sequence[Row], then: Then) -> None:
        self.rows, self.then = rows, then
        self.ready: threading.Lock | None = None
        """Released when a loop that waits may look at `outcome`."""
        self.outcome: _Outcome | None = None
        self.took_s = 0.0


class _Call(NamedTuple):
    """Something to be asked or done; the thread ends after the last one."""

    run: Callable[[Database], Any]
    then: Then
    last: bool = False


_Job = _Commit | _Call
_Outcome = tuple[Then, Any, Exception | None]


class StoreThread:
    """Does one thing after the other. It belongs to the event loop in which it was made."""

    def __init__(self, path: Path) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._taken: deque[_Job] = deque()
        self._unheard = 0
        """Jobs of which the loop has not heard yet."""
        self._policy = WaitPolicy()
        self._claim = threading.Lock()
        self._awaited: _Commit | None = None
        """The commit that the loop waits for. Whoever takes it away from here, with the claim,
        tells how it ended: the thread hands it over, or the loop hears of it later."""
        self._database = Database(path)
        self._database.log.between = self._let_commits_pass
        # A daemon: a program that forgot to close must still be able to end; the next run recovers.
        self._thread = threading.Thread(target=self._serve, name=f"store {path}", daemon=True)
        self._thread.start()

    # -- in the loop --------------------------------------------------------------------------

    async def call(self, run: Callable[[Database], T]) -> T:
        """Do this after what waits, and return what came of it."""
        future: asyncio.Future[T] = self._loop.create_future()
        self.require_room()
        self._put(_Call(run, partial(_tell, future)))
        return await future

    async def commit(self, rows: Sequence[Row]) -> None:
        """Durable on return."""
        future: asyncio.Future[None] = self._loop.create_future()
        self.require_room()
        self._put(_Commit(rows, partial(_tell, future)))
        await future

    def begin(self, rows: Sequence[Row], then: Then) -> None:
        """As `commit`; `then` is called, perhaps before this returns."""
        job = _Commit(rows, then)
        began = monotonic()
        if self._unheard or not self._policy.allows(began):
            self._put(job)
            return
        job.ready = threading.Lock()
        job.ready.acquire()
        try:
            self._awaited = job
            self._put(job)
            job.ready.acquire(timeout=WAIT_S)
        except BaseException:  # of a signal: who is called later is not lost
            if (outcome := self._take_over(job)) is not None:
                self._loop.call_soon(_resolve, [outcome])
            raise
        outcome = self._take_over(job)
        self._policy.waited(began, monotonic(), ran_out=outcome is None)
        if outcome is not None:
            outcome[0](*outcome[1:])

    def _take_over(self, job: _Commit) -> _Outcome | None:
        """Stop waiting for it; None when the loop is to hear of it later."""
        with self._claim:
            self._awaited = None
            outcome = job.outcome
        if outcome is not None:
            self._unheard -= 1
            self._policy.committed(job.took_s)
        return outcome

    def post(self, run: Callable[[Database], Any]) -> None:
        """Do this after what waits; nobody waits for it."""
        self._put(_Call(run, lambda result, error: None))

    def ask_to_stop(self) -> asyncio.Future[Any]:
        """End the thread after what waits; the future tells when."""
        future: asyncio.Future[Any] = self._loop.create_future()
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

    @property
    def damage_found(self) -> int:
        """How often the database has set something aside."""
        return self._database.damage_found

    def require_room(self) -> None:
        """Raise LimitReached when too much waits already."""
        if self._jobs.qsize() >= PENDING_JOBS_MAX:
            raise LimitReached(
                f"{PENDING_JOBS_MAX} writes wait for the disk already.",
                hint="The disk is slower than the senders; send more slowly.",
                limit=PENDING_JOBS_MAX,
            )

    def _put(self, job: _Job) -> None:
        self._unheard += 1
        self._jobs.put(job)

    def _hear(self, outcomes: Sequence[_Outcome], commit_s: float | None) -> None:
        self._unheard -= len(outcomes)
        if commit_s is not None:
            self._policy.committed(commit_s)
        _resolve(outcomes)

    # -- in the thread ------------------------------------------------------------------------

    def _serve(self) -> None:
        ended, patience_s = False, None
        while not ended:
            if not self._taken:
                try:
                    self._taken.append(self._jobs.get(timeout=patience_s))
                except queue.Empty:
                    patience_s = self._do_chore()
                    continue
            group = self._take()
            ended = isinstance(group[0], _Call) and group[0].last
            self._do(group)
            patience_s = QUIET_S if self._database.has_chores() else None

    def _do_chore(self) -> float | None:
        """One of them, and how long to wait for a job before the next; None without one."""
        try:
            self._database.do_chore()
        except MeshError:
            return RETRY_S
        except Exception:
            log.exception("the commit log is not brought into the tables")
            return RETRY_S
        return 0.0 if self._database.has_chores() else None

    def _take(self, commits_only: bool = False) -> Sequence[_Job]:
        """The next call, or all commits that stand before it and fit into one."""
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
        took_s = monotonic() - began
        if self._hand_over(group[0], outcomes[0], took_s):
            return
        # A loop that is closed has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            commit_s = took_s if isinstance(group[0], _Commit) else None
            self._loop.call_soon_threadsafe(self._hear, outcomes, commit_s)

    def _hand_over(self, job: _Job, outcome: _Outcome, took_s: float) -> bool:
        """To the loop, if it waits for this."""
        with self._claim:
            if self._awaited is not job or not isinstance(job, _Commit):
                return False
            self._awaited, job.outcome, job.took_s = None, outcome, took_s
        assert job.ready is not None, "it is waited for"
        job.ready.release()
        return True


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
    first = group[0]
    if isinstance(first, _Call):
        return first.run(database)
    rows = first.rows
    if len(group) > 1:
        rows = [row for job in group if isinstance(job, _Commit) for row in job.rows]
    return database.write(rows)


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


def _size(rows: Sequence[Row]) -> int:
    return sum(len(row.body) for row in singly(rows) if isinstance(row, OutRow | InRow))
