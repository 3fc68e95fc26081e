"""The audit trail: messages both ways, newest first, and those with certain words in them.

Decides how a person's words become a query. Never slows a commit: the index over the texts is
brought up to date by whoever searches, a bounded step at a time. Invariant: a search sees every
message that was committed before it began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshagent.core.delivery.mailbox import log_entry
from meshagent.core.delivery.word_search import SEARCH_WORDS_MAX
from meshagent.core.model.body_summary import summarize
from meshagent.core.model.rows import InEntry, LogEntry, OutEntry
from meshagent.storage.mail.schema import TEXT_TABLES, MetaRow, encode_row

if TYPE_CHECKING:
    import apsw

    from meshagent.storage.mail.database import Database

__all__ = ["DIRECTIONS", "LogPage", "SearchIndex", "Wanted", "match_query"]

DIRECTIONS = {"out": "outbox", "in": "inbox"}
INDEX_ROWS = 500  # per step: a few ms, then a commit that waits has its turn
PAGE_ROWS_MIN = 50  # looked at per step, with their bodies: twice what is asked for, since
PAGE_ROWS_MAX = 500  # a receipt may stand behind each message, within these bounds

LogPage = tuple[list[LogEntry], int | None]
"""Entries, newest first, and the position to go on before; None when there are no more."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the trail is searched for; an empty word asks for nothing."""

    query: str = ""
    peer: str = ""
    kind: str = ""
    without: str = ""

    def takes(self, entry: LogEntry) -> bool:
        """Whether it fits; that its words do, the index has said."""
        if self.peer and entry.peer != self.peer:
            return False
        kind = summarize(entry.body).kind if self.kind or self.without else ""
        return (not self.kind or kind == self.kind) and (not self.without or kind != self.without)


class SearchIndex:
    """Looks through the outbox and the inbox."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def index_some(self) -> bool:
        """Bring the index forward by a step; whether there may be more to do."""
        more = [self._index_table(table) for table in DIRECTIONS.values()]
        return any(more)

    def _index_table(self, table: str) -> bool:
        done = int(self._database.meta().get(f"indexed {table}", "0"))
        with self._database.mapped("read"):
            rows: list[Any] = (
                self._database.connected()
                .execute(
                    f"SELECT position, CAST(body AS BLOB) FROM {table} "  # noqa: S608
                    "WHERE position > ? ORDER BY position LIMIT ?",
                    (done, INDEX_ROWS),
                )
                .fetchall()
            )
        if not rows:
            return False
        texts = [(position, summarize(body or b"").text) for position, body in rows]
        with self._database.transaction("index") as connection:
            connection.executemany(
                f"INSERT OR REPLACE INTO {table}_text(rowid, text) VALUES(?, ?)",
                [(position, text) for position, text in texts if text],
            )
            connection.execute(*encode_row(MetaRow(f"indexed {table}", str(rows[-1][0]))))
        return len(rows) == INDEX_ROWS

    def forget(self, connection: apsw.Connection, table: str, positions: Sequence[int]) -> None:
        """These messages are gone from the table."""
        connection.executemany(
            f"DELETE FROM {table}_text WHERE rowid = ?",  # noqa: S608
            [(position,) for position in positions],
        )

    def rebuild(self) -> None:
        """Begin the index anew: it is damaged, and all that is in it is elsewhere too."""
        with self._database.transaction("repair") as connection:
            for table in DIRECTIONS.values():
                connection.execute(f"DROP TABLE {table}_text")
                connection.execute(TEXT_TABLES[f"{table}_text"])
                connection.execute(*encode_row(MetaRow(f"indexed {table}", "0")))

    def page(self, direction: str, before: int | None, limit: int, wanted: Wanted) -> LogPage:
        """A bounded look: matching messages older than position `before`."""
        rows = min(PAGE_ROWS_MAX, max(PAGE_ROWS_MIN, 2 * limit))
        positions = self._positions(DIRECTIONS[direction], before, rows, wanted.query)
        entries = self._entries(direction, positions)
        found = [entry for entry in reversed(entries) if wanted.takes(entry)]
        return found[:limit], positions[-1] if len(positions) == rows else None

    def _positions(self, table: str, before: int | None, rows: int, query: str) -> list[int]:
        bound = 2**63 - 1 if before is None else before
        if query:
            sql = f"SELECT rowid FROM {table}_text WHERE {table}_text MATCH ? AND rowid < ? "  # noqa: S608
            values: tuple[Any, ...] = (query, bound, rows)
        else:
            sql = f"SELECT position AS rowid FROM {table} WHERE position < ? "  # noqa: S608
            values = (bound, rows)
        with self._database.mapped("search"):
            found = self._database.connected().execute(sql + "ORDER BY rowid DESC LIMIT ?", values)
            return [position for (position,) in found]

    def _entries(self, direction: str, positions: Sequence[int]) -> list[LogEntry]:
        """By position, upwards."""
        holders = ", ".join(map(str, positions))
        where = f"position IN ({holders}) ORDER BY position"
        mail = self._database.mail
        rows: Sequence[OutEntry | InEntry] = (
            mail.read_out(where, ()) if direction == "out" else mail.read_in(where, ())
        )
        return [log_entry(row) for row in rows]


def match_query(search: str) -> str:
    """A person's words for FTS5: all must be there, the last may be unfinished.

    Each is quoted, so that nothing in it is syntax. Empty when no word is left.
    """
    words = [
        word.encode("utf-8", "replace").decode("utf-8").replace("\0", " ")
        for word in search.split()[:SEARCH_WORDS_MAX]
        if any(character.isalnum() for character in word)
    ]
    quoted = ['"' + word.replace('"', '""') + '"' for word in words]
    return " ".join(quoted) + "*" if quoted else ""
