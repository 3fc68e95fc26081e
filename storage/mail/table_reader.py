"""What can be asked about the messages in the tables.

Decides how each question finds its rows; never changes one that is sound. Invariant: a row that
does not fit its checksums is never returned, but moved to quarantine, and the question asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from meshagent.core.delivery.mailbox import FOUND_MAX
from meshagent.core.model.rows import (
    Delivered,
    InEntry,
    MailStart,
    NewEpoch,
    OutBatch,
    OutEntry,
    OutRow,
    OutState,
    ReceiptRow,
    Row,
    Watermark,
)
from meshagent.storage.mail.quarantine import quarantine, stream_start
from meshagent.storage.mail.row_checksums import (
    IN_COLUMNS,
    IN_OPEN,
    IN_RECEIVING,
    IN_UNREAD,
    OUT_COLUMNS,
    OUT_DELIVERED,
    OUT_WAITING,
    read_in,
    read_out,
)
from meshagent.storage.mail.schema import TABLES, StreamRow

if TYPE_CHECKING:
    from meshagent.storage.mail.database import Database

__all__ = ["TableReader", "pending_among"]

POSITION_MAX = 2**63 - 1
_VISIBLE = f"AND state < {IN_RECEIVING}"
_OF_PEER = frozenset({OutRow, OutBatch, OutState, Delivered, ReceiptRow})

Entry = TypeVar("Entry", OutEntry, InEntry)


class TableReader:
    """The messages of one agent, both ways."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def start(self) -> MailStart:
        """Where delivery stands."""
        streams: list[StreamRow] = self._database.scan(
            TABLES[StreamRow], self._database.mail.start_over
        )
        marks: list[Watermark] = self._database.scan(TABLES[Watermark])
        with self._database.mapped("read"):
            floors = [stream_start(self._database.connected(), row) for row in streams]
        unread = self._database.value(
            f"SELECT count(*) FROM inbox WHERE state < {IN_OPEN}"  # noqa: S608
        )
        rows = self.read_out(f"settled = 1 AND state < {OUT_WAITING}", ())
        taken = [(each.peer, each.id) for each in rows]
        return MailStart(self._database.epoch(), tuple(floors), tuple(marks), unread, tuple(taken))

    def pending(self, peer: str, first: int, limit: int) -> list[OutEntry]:
        """Not settled, from a number on."""
        where = "peer = ? AND settled = 0 AND seq >= ? ORDER BY seq LIMIT ?"
        return self.read_out(where, (peer, first, limit))

    def due(self, now_ms: int, limit: int) -> list[OutEntry]:
        """Their time is up, and no answer has come."""
        where = (
            "expires_ms > 0 AND expires_ms <= ? AND state < 2 AND settled = 0 "
            "ORDER BY expires_ms LIMIT ?"
        )
        return self.read_out(where, (now_ms, limit))

    def next_expiry(self) -> int | None:
        """The earliest time at which `due` has something."""
        found: int | None = self._database.value(
            "SELECT min(expires_ms) FROM outbox WHERE expires_ms > 0 AND state < 2 AND settled = 0"
        )
        return found

    def outbox(self, limit: int, ended: bool) -> list[OutEntry]:
        """By age."""
        if ended:
            return self.read_out("TRUE ORDER BY position LIMIT ?", (limit,))
        where = (
            "position IN (SELECT position FROM outbox INDEXED BY outbox_pending "  # noqa: S608
            f"WHERE settled = 0 AND state < {OUT_WAITING} UNION ALL SELECT position FROM outbox "
            f"WHERE settled = 1 AND state < {OUT_WAITING} ORDER BY position LIMIT ?) "
            "ORDER BY position"
        )
        return self.read_out(where, (limit,))

    def withdrawn(self) -> int:
        """Those that ended here, and whose numbers are not settled."""
        return int(
            self._database.value(
                "SELECT count(*) FROM outbox INDEXED BY outbox_pending "  # noqa: S608
                f"WHERE settled = 0 AND state >= {OUT_WAITING} AND state < {OUT_DELIVERED}"
            )
        )

    def outgoing(self, prefix: str) -> list[OutEntry]:
        """Those whose id begins so."""
        return self.read_out("id >= ? AND id < ? ORDER BY id LIMIT ?", _range(prefix))

    def inbox(self, after: int, limit: int, unread: bool) -> list[InEntry]:
        """Beyond a position."""
        still = f"AND state < {IN_OPEN if unread else IN_RECEIVING}"
        return self.read_in(f"position > ? {still} ORDER BY position LIMIT ?", (after, limit))

    def recent(self, limit: int, upto: int | None, unseen: bool) -> list[InEntry]:
        """The newest up to a position, oldest of them first."""
        # The index holds what is open; SQLite takes it when the query has the same words.
        still = f"AND state < {IN_OPEN} AND state = {IN_UNREAD}" if unseen else _VISIBLE
        where = f"position <= ? {still} ORDER BY position DESC LIMIT ?"
        bound = POSITION_MAX if upto is None else upto
        return self.read_in(where, (bound, limit))[::-1]

    def newest(self) -> int:
        """The largest position in the inbox."""
        return int(self._database.value("SELECT coalesce(max(position), 0) FROM inbox"))

    def receiving(self) -> list[InEntry]:
        """Those that are held, oldest first."""
        return self.read_in(f"state = {IN_RECEIVING} ORDER BY position", ())

    def incoming(self, prefix: str) -> list[InEntry]:
        """Those whose id begins so."""
        return self.read_in("id >= ? AND id < ? ORDER BY id LIMIT ?", _range(prefix))

    def read_out(self, where: str, values: tuple[Any, ...]) -> list[OutEntry]:
        """The sound rows of the outbox that fit."""
        sql = f"SELECT {OUT_COLUMNS} FROM outbox WHERE {where}"  # noqa: S608
        return self._read("outbox", sql, values, read_out)

    def read_in(self, where: str, values: tuple[Any, ...]) -> list[InEntry]:
        """The sound rows of the inbox that fit."""
        sql = f"SELECT {IN_COLUMNS} FROM inbox WHERE {where}"  # noqa: S608
        return self._read("inbox", sql, values, read_in)

    def _read(
        self,
        table: str,
        sql: str,
        values: tuple[Any, ...],
        open_row: Callable[[Sequence[Any]], Entry | None],
    ) -> list[Entry]:
        while True:
            with self._database.mapped("read"):
                rows = self._database.connected().execute(sql, values).fetchall()
            entries = [open_row(row) for row in rows]
            damaged = [row for row, entry in zip(rows, entries, strict=True) if entry is None]
            if not damaged:
                return [entry for entry in entries if entry is not None]
            # Each round removes some, so this ends; the rest of what was asked for moves up.
            quarantine(self._database, table, damaged)


def pending_among(rows: Sequence[Row], peer: str, first: int, limit: int) -> list[OutRow]:
    """Messages for `peer` from this number on, if these rows have them just as they were accepted;
    none when the tables have to be asked.

    For a peer that is a little slower than we are: 50,000 messages a second are committed, read
    back and settled with this, 16,000 without it, since a message that is folded after it has
    arrived is written once.
    """
    found: list[OutRow] = []
    for row in rows:
        kind: type = type(row)
        if kind is NewEpoch:
            return []
        if kind not in _OF_PEER or row.peer != peer:  # type: ignore[union-attr]
            continue
        if isinstance(row, OutBatch):
            if len(found) < limit and row.first + len(row.ids) > first:
                found += row.rows()[max(0, first - row.first) :]
        elif isinstance(row, OutRow):
            found += [row] if row.seq >= first else []
        elif not (isinstance(row, Delivered) and row.last < first):
            return []  # something has become of one that is asked for, perhaps
    return found[:limit] if found and found[0].seq == first else []


def _range(prefix: str) -> tuple[str, str, int]:
    """Ids that begin so, as bounds: an index finds them."""
    clean = prefix.encode("utf-8", "replace").decode("utf-8")
    return clean, clean + "\U0010ffff", FOUND_MAX
