"""What the database holds: its tables, how each kind of row is written and checked, and how an
older file becomes a current one.

Never runs a statement. Invariants: a migration that has shipped is never edited, only followed by
another; a row's checksum covers every column that its reader looks at.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshagent.core.ports import PeerRow, Row

__all__ = [
    "MIGRATIONS",
    "SCHEMA_VERSION",
    "TABLES",
    "MetaRow",
    "Migration",
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


@dataclass(frozen=True)
class Table:
    """How one kind of row is kept. The first column is the row's key.

    The statements are made once, from names in this file only: nobody's input is in them.
    """

    name: str
    columns: tuple[str, ...]
    encode: Callable[[Any], tuple[Value, ...]]
    decode: Callable[[Sequence[bytes]], Any]

    @cached_property
    def put(self) -> str:
        """Insert a row, or replace the one with the same key."""
        columns = ", ".join(self.columns)
        holders = ", ".join("?" * len(self.columns))
        updates = ", ".join(f"{name}=excluded.{name}" for name in (*self.columns[1:], "checksum"))
        return (
            f"INSERT INTO {self.name}({columns}, checksum) VALUES({holders}, ?) "
            f"ON CONFLICT({self.columns[0]}) DO UPDATE SET {updates}"
        )

    @cached_property
    def scan(self) -> str:
        """All rows, oldest first: rowid, checksum, columns.

        As bytes, since a flipped bit may leave text that is not UTF-8; and by rowid, not through
        the key's index, which may be damaged while the row is whole.
        """
        columns = ", ".join(f"CAST({name} AS BLOB)" for name in self.columns)
        return (
            f"SELECT rowid, CAST(checksum AS BLOB), {columns} "  # noqa: S608
            f"FROM {self.name} ORDER BY rowid"
        )

    @cached_property
    def remove(self) -> str:
        """Delete a row by its rowid."""
        return f"DELETE FROM {self.name} WHERE rowid = ?"  # noqa: S608


@dataclass(frozen=True, slots=True)
class Migration:
    """One step from a schema to the next, in a transaction of its own."""

    version: int
    name: str
    statements: tuple[str, ...]


MIGRATIONS = (
    Migration(
        1,
        "peers, runs and quarantine",
        (
            "CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL, checksum BLOB NOT NULL)",
            "CREATE TABLE peers(agent TEXT PRIMARY KEY, key BLOB NOT NULL, "
            "addresses TEXT NOT NULL, checksum BLOB NOT NULL)",
            "CREATE TABLE quarantine(id INTEGER PRIMARY KEY AUTOINCREMENT, origin TEXT NOT NULL, "
            "row_key TEXT NOT NULL, reason TEXT NOT NULL, content BLOB NOT NULL, "
            "found_at TEXT NOT NULL)",
        ),
    ),
)
SCHEMA_VERSION = MIGRATIONS[-1].version


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


TABLES: dict[type, Table] = {
    MetaRow: Table("meta", ("key", "value"), _encode_meta, _decode_meta),
    PeerRow: Table("peers", ("agent", "key", "addresses"), _encode_peer, _decode_peer),
}


def checksum(table: str, columns: Sequence[bytes]) -> bytes:
    """Over the table's name and each column with its length, so that no two rows look alike."""
    digest = hashlib.blake2b(table.encode("ascii"), digest_size=CHECKSUM_BYTES)
    for column in columns:
        digest.update(b"%d:" % len(column))
        digest.update(column)
    return digest.digest()


def encode_row(row: Row | MetaRow) -> tuple[str, tuple[Value, ...]]:
    """The statement that keeps this row, and its bindings."""
    table = TABLES[type(row)]
    values = table.encode(row)
    return table.put, (*values, checksum(table.name, [_as_blob(value) for value in values]))


def _as_blob(value: Value) -> bytes:
    """What SQLite's CAST(… AS BLOB) gives for the value, which is what the reader checks."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8")
