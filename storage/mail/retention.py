"""How long what has ended is kept: by age, and by size in total. Never drops what is pending.
What was damaged is told for as long.

A dropped message that came can't come in again: the sender's watermark stands above it. Invariant:
one call does a bounded amount of work, so that a commit never waits long behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from meshagent.core.delivery.mailbox import RETAIN_ROWS_MAX
from meshagent.storage.mail.attachment_index import forget_unnamed
from meshagent.storage.mail.row_checksums import IN_OPEN, IN_RECEIVING, OUT_WAITING

if TYPE_CHECKING:
    from meshagent.storage.mail.database import Database

__all__ = ["Retention"]

_ENDED = {
    "outbox": f"settled = 1 AND state >= {OUT_WAITING}",
    "inbox": f"state >= {IN_OPEN} AND state < {IN_RECEIVING}",
}


class Retention:
    """Messages that have ended."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def retain(self, now_ms: int, keep_ms: int, keep_bytes: int) -> int:
        """Drop what is too old, then the oldest of what is too much; how many rows."""
        found = self._oldest(RETAIN_ROWS_MAX)
        old = [each for each in found if each[0] < now_ms - keep_ms]
        excess = 0 if len(old) == RETAIN_ROWS_MAX else self._excess(keep_bytes)
        dropped = 0
        for _, size, _, _ in found:
            if dropped >= len(old) and excess <= 0:
                break
            excess -= size
            dropped += 1
        if dropped:
            self._drop([(table, position) for _, _, table, position in found[:dropped]])
        self._forget_damage(now_ms - keep_ms)
        return dropped

    def _forget_damage(self, before_ms: int) -> None:
        before = datetime.fromtimestamp(before_ms / 1000, UTC).isoformat(timespec="seconds")
        if self._database.value("SELECT 1 FROM quarantine WHERE found_at < ? LIMIT 1", (before,)):
            with self._database.transaction("tidy") as connection:
                connection.execute("DELETE FROM quarantine WHERE found_at < ?", (before,))

    def _oldest(self, limit: int) -> list[tuple[int, int, str, int]]:
        """changed_ms, size, table, position; oldest first."""
        found = []
        with self._database.mapped("read"):
            for table, ended in _ENDED.items():
                rows = self._database.connected().execute(
                    f"SELECT changed_ms, size, position FROM {table} INDEXED BY {table}_ended "  # noqa: S608
                    f"WHERE {ended} ORDER BY changed_ms LIMIT ?",
                    (limit,),
                )
                found += [(changed, size, table, position) for changed, size, position in rows]
        return sorted(found)[:limit]

    def _excess(self, keep_bytes: int) -> int:
        """By how many bytes what has ended is too much; 0 when it can't be."""
        value = self._database.value
        pages = value("PRAGMA page_count") - value("PRAGMA freelist_count")
        if pages * value("PRAGMA page_size") <= keep_bytes:
            return 0  # adding it all up takes its time; mostly that settles it
        total = sum(
            value(
                f"SELECT coalesce(sum(size), 0) FROM {table} INDEXED BY {table}_ended "  # noqa: S608
                f"WHERE {ended}"
            )
            for table, ended in _ENDED.items()
        )
        return int(total) - keep_bytes

    def _drop(self, rows: Sequence[tuple[str, int]]) -> None:
        with self._database.transaction("tidy") as connection:
            for table in _ENDED:
                positions = [position for name, position in rows if name == table]
                self._database.search.forget(connection, table, positions)
                connection.executemany(
                    f"DELETE FROM {table} WHERE position = ?",  # noqa: S608
                    [(position,) for position in positions],
                )
            forget_unnamed(connection)
