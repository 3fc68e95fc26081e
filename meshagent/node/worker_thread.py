"""A thread that does blocking work in order, and tells the event loop what came of it.

Results come back in bunches: a loop that is busy is woken once for all that is done by then.
Invariant: whatever was asked is done once and told once, also when it failed; after `close`
nothing is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from meshagent.errors import StorageError

__all__ = ["Then", "WorkerThread"]

T = TypeVar("T")

OVER = "The node ended before this was done."

Then = Callable[[Any, Exception | None], None]


class WorkerThread:
    """One thread, for one event loop."""

    def __init__(self, name: str, told: Callable[[], None] | None = None) -> None:
        """`told` is called in the loop's thread after each bunch of results."""
        self._told = told
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Then] | None] = queue.SimpleQueue()
        self._done: list[tuple[Then, Any, Exception | None]] = []
        self._lock = threading.Lock()
        self._closed = False
        self._asked: set[asyncio.Future[Any]] = set()
        self._ended: asyncio.Future[None]
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], Any], then: Then) -> None:
        """Do `work` there, and call `then` here with what it returned, or why it failed."""
        self._jobs.put((work, then))

    async def ask(self, work: Callable[[], T]) -> T:
        """Do `work` there, and wait for what it returns or raises; StorageError when it is over."""
        if self._closed:
            raise StorageError(OVER)
        future: asyncio.Future[T] = self._loop.create_future()
        self._asked.add(future)
        future.add_done_callback(self._asked.discard)

        def then(result: T, error: Exception | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.do(work, then)
        return await future

    async def close(self) -> None:
        """Finish what waits, tell nothing more, and end the thread; who still asks hears of it."""
        if self._closed:
            return
        self._closed = True
        self._ended = self._loop.create_future()
        self._jobs.put(None)
        await asyncio.shield(self._ended)
        self._thread.join()  # it has said its last word: nothing is left but to return
        for asked in list(self._asked):
            if not asked.done():
                asked.set_exception(StorageError(OVER))

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, then = job
            outcome: tuple[Then, Any, Exception | None]
            try:
                outcome = (then, work(), None)
            except Exception as error:
                outcome = (then, None, error)
            with self._lock:
                self._done.append(outcome)
                first = len(self._done) == 1
            if first:
                self._call(self._tell)
        self._call(self._end)

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _call(self, function: Callable[[], Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(function)

    def _tell(self) -> None:
        with self._lock:
            done, self._done = self._done, []
        for then, result, error in done:
            if self._closed:
                return
            try:
                then(result, error)
            except Exception as fault:  # one that is told badly must not leave others untold
                about = {"message": "what came of a job was not taken", "exception": fault}
                self._loop.call_exception_handler(about)
        if self._told is not None and not self._closed:
            self._told()
