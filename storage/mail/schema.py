"""What the database holds: its tables, and how each small row is written and checked. How messages
are written and checked is in row_checksums.py.

Never runs a statement. Invariant: a row's checksum covers every column that its reader looks at.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshagent.core.model.rows import PeerRow, Row, Watermark

__all__ = [
    "MAIL_INDEXES",
    "SCHEMA",
    "SCHEMA_VERSION",
    "TABLES",
    "TEXT_TABLES",
    "MetaRow",
    "StreamRow",
    "Table",
    "Value",
    "checksum",
    "encode_row",
]

Value = str | bytes | int
CHECKSUM_BYTES = 8  # against decay, not malice: one unnoticed flip in 2**64


@dataclass(frozen=True, slots=True)
class MetaRow:
    """A fact about the database itself: its epoch, the last run."""

    key: str
    value: str


@dataclass(frozen=True, slots=True)
class StreamRow:
    """Which number the next message to this peer gets."""

    peer: str
    next_seq: int


@dataclass(frozen=True)
class Table:
    """How one kind of row is kept. The first column is the row's key.

    The statements are made once, from names in this file only: nobody's input is in them.
    """

    name: str
    columns: tuple[str, ...]
    encode: Callable[[Any], tuple[Value, ...]]
    decode: Callable[[Sequence[bytes]], Any]
    peer_column: int | None = None
    """Which one names a peer."""
    renewed: bool = False
    """Whether a row that is put again becomes the youngest: `scan` goes by age."""

    @cached_property
    def put(self) -> str:
        """Insert a row, or replace the one with the same key."""
        columns = ", ".join(self.columns)
        holders = ", ".join("?" * len(self.columns))
        insert = f"INTO {self.name}({columns}, checksum) VALUES({holders}, ?)"
        if self.renewed:
            return f"INSERT OR REPLACE {insert}"
        updates = ", ".join(f"{name}=excluded.{name}" for name in (*self.columns[1:], "checksum"))
        return f"INSERT {insert} ON CONFLICT({self.columns[0]}) DO UPDATE SET {updates}"

    @cached_property
    def select(self) -> str:
        """Rows as rowid, checksum, columns; a condition may follow.

        As bytes, since a flipped bit may leave text that is not UTF-8.
        """
        columns = ", ".join(f"CAST({name} AS BLOB)" for name in self.columns)
        return f"SELECT rowid, CAST(checksum AS BLOB), {columns} FROM {self.name}"  # noqa: S608

    @cached_property
    def scan(self) -> str:
        """All rows, oldest first; by rowid and not through the key's index, which may be damaged
        while the row is whole."""
        return f"{self.select} ORDER BY rowid"

    @cached_property
    def remove(self) -> str:
        """Delete a row by its rowid."""
        return f"DELETE FROM {self.name} WHERE rowid = ?"  # noqa: S608


# Unique: an id names one message; a number, one of those that are not settled. The rest is what
# is asked for often: what has come and waits, what expires next, what may be dropped first.
MAIL_INDEXES = {
    "outbox": {
        "outbox_id": "CREATE UNIQUE INDEX outbox_id ON outbox(id)",
        "outbox_pending": "CREATE UNIQUE INDEX outbox_pending ON outbox(peer, seq) "
        "WHERE settled = 0",
        "outbox_expiry": "CREATE INDEX outbox_expiry ON outbox(expires_ms) "
        "WHERE expires_ms > 0 AND state < 2 AND settled = 0",
        "outbox_taken": "CREATE INDEX outbox_taken ON outbox(position) "
        "WHERE settled = 1 AND state < 2",
        "outbox_ended": "CREATE INDEX outbox_ended ON outbox(changed_ms, size) "
        "WHERE settled = 1 AND state >= 2",
    },
    "inbox": {
        "inbox_id": "CREATE UNIQUE INDEX inbox_id ON inbox(id, sender)",
        "inbox_open": "CREATE INDEX inbox_open ON inbox(position) WHERE state < 2",
        "inbox_ended": "CREATE INDEX inbox_ended ON inbox(changed_ms, size) "
        "WHERE state >= 2 AND state < 4",
        "inbox_receiving": "CREATE INDEX inbox_receiving ON inbox(position) WHERE state = 4",
    },
}

# Contentless: the text itself stays in the message's row. Filled when somebody searches.
TEXT_TABLES = {
    name: f"CREATE VIRTUAL TABLE {name} USING fts5(text, content='', contentless_delete=1, "
    "tokenize='unicode61 remove_diacritics 2')"
    for name in ("outbox_text", "inbox_text")
}

_NO_MARK = "x'" + "00" * 15 + "'"  # row_checksums.UNMARKED

SCHEMA_VERSION = 5  # 1 to 4 were those of 0.1.0, which kept some rows past the log
SCHEMA = (
    "CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL, checksum BLOB NOT NULL)",
    "CREATE TABLE peers(agent TEXT PRIMARY KEY, key BLOB NOT NULL, "
    "addresses TEXT NOT NULL, checksum BLOB NOT NULL)",
    "CREATE TABLE quarantine(id INTEGER PRIMARY KEY AUTOINCREMENT, origin TEXT NOT NULL, "
    "row_key TEXT NOT NULL, peer TEXT NOT NULL, message_id TEXT NOT NULL, reason TEXT NOT NULL, "
    "content BLOB NOT NULL, found_at TEXT NOT NULL)",
    "CREATE TABLE outbox(position INTEGER PRIMARY KEY AUTOINCREMENT, peer TEXT NOT NULL, "
    "seq INTEGER NOT NULL, id TEXT NOT NULL, expires_ms INTEGER NOT NULL, "
    "size INTEGER NOT NULL, checksum BLOB NOT NULL, state INTEGER NOT NULL DEFAULT 0, "
    "settled INTEGER NOT NULL DEFAULT 0, changed_ms INTEGER NOT NULL DEFAULT 0, "
    f"reason TEXT NOT NULL DEFAULT '', mark BLOB NOT NULL DEFAULT {_NO_MARK}, "
    "body BLOB NOT NULL)",
    "CREATE TABLE inbox(position INTEGER PRIMARY KEY AUTOINCREMENT, sender TEXT NOT NULL, "
    "id TEXT NOT NULL, received_ms INTEGER NOT NULL, size INTEGER NOT NULL, "
    "checksum BLOB NOT NULL, state INTEGER NOT NULL DEFAULT 0, "
    "failures INTEGER NOT NULL DEFAULT 0, changed_ms INTEGER NOT NULL DEFAULT 0, "
    f"mark BLOB NOT NULL DEFAULT {_NO_MARK}, body BLOB NOT NULL)",
    "CREATE TABLE streams(peer TEXT PRIMARY KEY, next_seq INTEGER NOT NULL, "
    "checksum BLOB NOT NULL)",
    "CREATE TABLE watermarks(key TEXT PRIMARY KEY, sender TEXT NOT NULL, "
    "epoch TEXT NOT NULL, seq INTEGER NOT NULL, last BLOB NOT NULL, "
    "exceptions TEXT NOT NULL, checksum BLOB NOT NULL)",
    "CREATE INDEX watermarks_sender ON watermarks(sender)",
    "CREATE TABLE attached(sha256 BLOB NOT NULL, direction TEXT NOT NULL, "
    "peer TEXT NOT NULL, id TEXT NOT NULL, PRIMARY KEY(sha256, direction, peer, id)) "
    "WITHOUT ROWID",
    *(sql for indexes in MAIL_INDEXES.values() for sql in indexes.values()),
    *TEXT_TABLES.values(),
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)


def _encode_peer(row: PeerRow) -> tuple[Value, ...]:
    return row.agent, row.key, json.dumps(row.addresses, ensure_ascii=False)


def _decode_peer(columns: Sequence[bytes]) -> PeerRow:
    agent, key, addresses = columns
    return PeerRow(agent.decode("utf-8"), key, tuple(json.loads(addresses)))


def _encode_meta(row: MetaRow) -> tuple[Value, ...]:
    return row.key, row.value


def _decode_meta(columns: Sequence[bytes]) -> MetaRow:
    key, value = columns
    return MetaRow(key.decode("utf-8"), value.decode("utf-8"))


def _encode_stream(row: StreamRow) -> tuple[Value, ...]:
    return row.peer, row.next_seq


def _decode_stream(columns: Sequence[bytes]) -> StreamRow:
    peer, next_seq = columns
    return StreamRow(peer.decode("utf-8"), int(next_seq))


def _encode_watermark(row: Watermark) -> tuple[Value, ...]:
    epoch = row.epoch.hex()
    exceptions = json.dumps(row.exceptions, ensure_ascii=False) if row.exceptions else ""
    return f"{epoch} {row.sender}", row.sender, epoch, row.seq, row.last, exceptions


def _decode_watermark(columns: Sequence[bytes]) -> Watermark:
    _, sender, epoch, seq, last, packed = columns
    exceptions = tuple((number, why) for number, why in json.loads(packed or b"[]"))
    return Watermark(
        sender.decode("utf-8"), bytes.fromhex(epoch.decode("ascii")), int(seq), last, exceptions
    )


TABLES: dict[type, Table] = {
    MetaRow: Table("meta", ("key", "value"), _encode_meta, _decode_meta),
    PeerRow: Table("peers", ("agent", "key", "addresses"), _encode_peer, _decode_peer, 0),
    StreamRow: Table("streams", ("peer", "next_seq"), _encode_stream, _decode_stream, 0),
    Watermark: Table(
        "watermarks",
        ("key", "sender", "epoch", "seq", "last", "exceptions"),
        _encode_watermark,
        _decode_watermark,
        peer_column=1,
        renewed=True,
    ),
}


def checksum(table: str, columns: Sequence[bytes]) -> bytes:
    """Over the table's name and each column with its length, so that no two rows look alike."""
    digest = hashlib.blake2b(table.encode("ascii"), digest_size=CHECKSUM_BYTES)
    for column in columns:
        digest.update(b"%d:" % len(column))
        digest.update(column)
    return digest.digest()


def encode_row(row: Row | MetaRow | StreamRow) -> tuple[str, tuple[Value, ...]]:
    """The statement that keeps this row, and its bindings."""
    table = TABLES[type(row)]
    values = table.encode(row)
    return table.put, (*values, checksum(table.name, [_as_blob(value) for value in values]))


def _as_blob(value: Value) -> bytes:
    """What SQLite's CAST(… AS BLOB) gives for the value, which is what the reader checks."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8")
