"""Which messages name which blobs, and those that are held until theirs are here.

Decides nothing about bytes. Invariant: a held message is in the inbox table once, invisible, and
becomes visible at the end of the line; what no message names is named nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshagent.core.model.rows import Arrived, InRow, OutRow, TurnedAway
from meshagent.storage.mail.row_checksums import IN_RECEIVING, OUT_CODES, in_mark, in_values

if TYPE_CHECKING:
    import apsw

    from meshagent.storage.mail.database import Database

__all__ = ["blobs", "forget_unnamed", "hold", "names_blob", "note_sent", "release"]

_NAME = "INSERT OR IGNORE INTO attached(sha256, direction, peer, id) VALUES(?, ?, ?, ?)"
_HOLD = (
    "INSERT INTO inbox(sender, id, received_ms, size, checksum, body, state, changed_ms, mark) "
    f"VALUES(?, ?, ?, ?, ?, ?, {IN_RECEIVING}, ?, ?) ON CONFLICT(id, sender) DO NOTHING"
)
_HELD = f"FROM inbox WHERE id = ? AND sender = ? AND state = {IN_RECEIVING}"
_SHOW = "INSERT INTO inbox(sender, id, received_ms, size, checksum, body) VALUES(?, ?, ?, ?, ?, ?)"
_NAMES = "SELECT 1 FROM attached WHERE sha256 = ? AND direction = ? AND peer = ? LIMIT 1"
_ENDED = tuple(OUT_CODES[state] for state in ("expired", "cancelled", "refused"))
_NAMES_SENT = (
    "SELECT 1 FROM attached JOIN outbox USING(id, peer) WHERE attached.sha256 = ? "  # noqa: S608
    f"AND direction = ? AND peer = ? AND outbox.state NOT IN {_ENDED} LIMIT 1"
)
_FORGET = (
    "DELETE FROM attached WHERE direction = ? AND NOT EXISTS (SELECT 1 FROM {table} "
    "WHERE {table}.id = attached.id AND {table}.{peer} = attached.peer)"
)
_FORGETS = (
    ("out", _FORGET.format(table="outbox", peer="peer")),
    ("in", _FORGET.format(table="inbox", peer="sender")),
)


def note_sent(connection: apsw.Connection, rows: Sequence[OutRow]) -> None:
    """Remember what these messages name: their recipients may ask for it."""
    for row in rows:
        connection.executemany(_NAME, [(sha256, "out", row.peer, row.id) for sha256 in row.blobs])


def hold(connection: apsw.Connection, rows: Sequence[InRow]) -> None:
    """Keep messages that came, out of sight."""
    for row in rows:
        mark = in_mark(row.id, IN_RECEIVING, 0, row.received_ms)
        connection.execute(_HOLD, (*in_values(row), row.received_ms, mark))
        if not connection.changes():
            continue  # an id that came before, perhaps with other attachments: that one counts
        connection.executemany(_NAME, [(sha256, "in", row.sender, row.id) for sha256 in row.blobs])


def release(database: Database, connection: apsw.Connection, row: Arrived | TurnedAway) -> None:
    """Show a held message as the newest, or drop it."""
    key = (row.id, row.sender)
    columns = "position, sender, id, received_ms, size, checksum, body"
    found = connection.execute(f"SELECT {columns} {_HELD}", key).fetchone()
    if found is None:
        return
    position, *values = found
    database.search.forget(connection, "inbox", [position])
    connection.execute(f"DELETE {_HELD}", key)
    if isinstance(row, Arrived):
        connection.execute(_SHOW, values)
    else:
        forget_unnamed(connection)


def forget_unnamed(connection: apsw.Connection) -> None:
    """Names given by messages that are no more."""
    for direction, sql in _FORGETS:
        connection.execute(sql, (direction,))


def names_blob(connection: apsw.Connection, sha256: bytes, peer: str, direction: str) -> bool:
    """Whether a message to or from this peer names the blob; none that was taken back."""
    sql = _NAMES_SENT if direction == "out" else _NAMES
    return connection.execute(sql, (sha256, direction, peer)).fetchone() is not None


def blobs(connection: apsw.Connection) -> set[bytes]:
    """Every blob that a message names."""
    return {sha256 for (sha256,) in connection.execute("SELECT DISTINCT sha256 FROM attached")}
