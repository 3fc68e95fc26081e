"""What becomes of a message whose row is damaged: it is kept aside and named; its stream goes on.

Decides what stands in for it; never makes up what it said. Invariant: afterwards the numbers of
every stream have no gap, so that nothing waits for a message that is not there.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from meshagent.core.model.rows import OutRow, Row, StreamStart, singly
from meshagent.storage.mail.row_checksums import (
    IN_COLUMNS,
    OUT_CODES,
    OUT_COLUMNS,
    out_mark,
    out_values,
    read_in,
    read_out,
)
from meshagent.storage.mail.schema import MAIL_INDEXES, TABLES, StreamRow, checksum
from meshagent.storage.mail.sqlite_errors import is_about_a_row

if TYPE_CHECKING:
    import apsw

    from meshagent.storage.mail.database import Database

__all__ = [
    "Lost",
    "close_gaps",
    "damaged_mail",
    "quarantine",
    "sound_streams",
    "stream_start",
    "write_singly",
]

DAMAGED = "its row was damaged on disk"
PEER, SEQ, IDENT, SETTLED = 3, 4, 5, 11  # where OUT_COLUMNS has them

_PUT_TOMBSTONE = (
    "INSERT INTO outbox(peer, seq, id, expires_ms, size, checksum, body, state, settled, "
    "changed_ms, reason, mark) VALUES(?, ?, ?, ?, ?, ?, ?, ?, 0, 0, ?, ?)"
)

_Row = Sequence[Any]


class Lost(NamedTuple):
    """A message of ours whose row is no more, as far as it can be known."""

    peer: bytes
    seq: int
    ident: bytes
    settled: int


def damaged_mail(database: Database) -> list[str]:
    """Every message that does not fit its checksum, by name; nothing is changed."""
    found = []
    with database.mapped("read"):
        for table, columns, open_row in (
            ("outbox", OUT_COLUMNS, read_out),
            ("inbox", IN_COLUMNS, read_in),
        ):
            rows = database.connected().execute(f"SELECT {columns} FROM {table}")  # noqa: S608
            found += [f"{table} {row[0]}" for row in rows if open_row(row) is None]
    return found


def quarantine(database: Database, table: str, damaged: Sequence[_Row]) -> None:
    """Move rows of the outbox or the inbox out of the way, and close the gaps that they leave."""
    with database.repair() as connection:
        # The flipped bit may be in a column that an index knows otherwise: without the indexes
        # the row can be removed, whatever they say.
        for index in MAIL_INDEXES[table]:
            connection.execute(f"DROP INDEX {index}")
        for row in damaged:
            cells = (row[IDENT] or b"?", row[PEER] or b"")
            database.note_damage(connection, table, cells[0], row[1:], cells[1], cells[0])
            connection.execute(f"DELETE FROM {table} WHERE position = ?", (row[0],))  # noqa: S608
        for sql in MAIL_INDEXES[table].values():
            connection.execute(sql)
        if table == "outbox":
            lost = [Lost(row[PEER], row[SEQ], row[IDENT], row[SETTLED]) for row in damaged]
            close_gaps(connection, lost)


def close_gaps(connection: apsw.Connection, lost: Sequence[Lost]) -> None:
    """Rows of the outbox are no more: in every stream something stands in for them."""
    for stream in sound_streams(connection):
        _close_gaps(connection, stream, lost)


def write_singly(
    database: Database, connection: apsw.Connection, rows: Sequence[Row]
) -> list[Lost]:
    """One row that can't be kept must not stop all others: it is set aside, and named. Returns
    the messages of ours among them: something has to stand in for their numbers."""
    lost: list[Lost] = []
    for row in singly(rows):
        try:
            with connection:
                database.mail.write(connection, [row])
        except Exception as error:
            if not is_about_a_row(error):
                raise
            ident = str(getattr(row, "id", "?")).encode()
            peer = str(getattr(row, "peer", getattr(row, "sender", ""))).encode()
            database.note_damage(connection, "log", ident, [row], peer, ident, repr(error))
            if isinstance(row, OutRow):
                lost.append(Lost(peer, row.seq, ident, 0))
    return lost


def stream_start(connection: apsw.Connection, row: StreamRow) -> StreamStart:
    """Where a stream stands."""
    found: Any = connection.execute(
        "SELECT min(seq) FROM outbox WHERE peer = ? AND settled = 0", (row.peer,)
    ).get
    floor = row.next_seq if found is None else int(found)
    return StreamStart(row.peer, floor, row.next_seq)


def sound_streams(connection: apsw.Connection) -> list[StreamRow]:
    """Those that are sound; the others make delivery start over when it begins."""
    table = TABLES[StreamRow]
    rows: list[Any] = connection.execute(table.scan).fetchall()
    cells = [(found, [cell or b"" for cell in columns]) for _, found, *columns in rows]
    return [table.decode(each) for found, each in cells if found == checksum(table.name, each)]


def _close_gaps(connection: apsw.Connection, stream: StreamRow, lost: Sequence[Lost]) -> None:
    """Say of each number that is not there that it is nothing: the recipient waits for it."""
    peer = stream.peer.encode()
    ids = {row.seq: row.ident for row in lost if row.peer == peer}
    waiting = {row.seq for row in lost if row.peer == peer and row.settled == 0}
    floor = stream_start(connection, stream).floor
    while floor - 1 in waiting:
        floor -= 1  # nobody would miss it, but a person must see how it ended
    known: Any = connection.execute(
        "SELECT CAST(seq AS INTEGER) FROM outbox WHERE peer = ? AND settled = 0", (stream.peer,)
    )
    missing = set(range(floor, stream.next_seq)) - {seq for (seq,) in known}
    for seq in sorted(missing):
        _put_tombstone(connection, stream.peer, seq, ids.get(seq))


def _put_tombstone(connection: apsw.Connection, peer: str, seq: int, name: bytes | None) -> None:
    """Its number travels as nothing, and its end is there to be seen."""
    ident = (name or b"").decode("utf-8", "replace")
    taken = connection.execute("SELECT 1 FROM outbox WHERE id = ?", (ident,)).fetchall()
    if taken or not ident or not ident.isprintable():
        ident = f"damaged-{secrets.token_hex(8)}"
    code = OUT_CODES["cancelled"]
    values = out_values(OutRow(peer, b"", seq, ident, b"", 0))
    mark = out_mark(ident, code, 0, 0, DAMAGED)
    connection.execute(_PUT_TOMBSTONE, (*values, code, DAMAGED, mark))
