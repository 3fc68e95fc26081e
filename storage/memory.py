"""A store without a disk, for simulations and tests: the same port, and faults on demand.

Decides nothing that the real store does not. Never touches a file, a thread or a clock.
Invariant: what is durable changes only when a write is synced; a crash leaves exactly that.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshagent.core.ports import PeerRow, Row
from meshagent.errors import StorageError

__all__ = ["MemoryStore"]


@dataclass(slots=True)
class _Content:
    """What is on the imaginary disk."""

    epoch: str = field(default_factory=lambda: secrets.token_hex(8))
    run: int = 0
    peers: dict[str, PeerRow] = field(default_factory=dict)


def _put_peer(content: _Content, row: PeerRow) -> None:
    content.peers[row.agent] = row


_PUT: dict[type, Callable[[_Content, Any], None]] = {PeerRow: _put_peer}

_Write = Callable[[_Content], Any]


class MemoryStore:
    """Rows that survive `crash` exactly when their commit returned."""

    def __init__(self) -> None:
        self.commits = 0
        """How many writes were synced."""
        self._durable = _Content()
        self._open = False
        self._held = False
        self._unsynced: deque[tuple[_Write, asyncio.Future[Any]]] = deque()
        self._failures: deque[Exception] = deque()

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
            result = self._sync(write)
            if not future.done():
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
        puts = [(_PUT[type(row)], row) for row in rows]

        def write(content: _Content) -> None:
            for put, row in puts:
                put(content, row)

        if puts or not self._open:
            await self._write(write)

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

    async def facts(self) -> Mapping[str, str]:
        """The same keys as the store on disk has."""
        self._require_open()
        return {
            "path": ":memory:",
            "journal_mode": "memory",
            "synchronous": "full",
            "schema": "0",
            "epoch": self._durable.epoch,
            "quarantined": "0",
        }

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

    def _require_open(self) -> None:
        if not self._open:
            raise StorageError("The store is not open.")
