"""One SQLite file, used by one thread.

Decides how rows become durable and what a damaged one means. Never touches an event loop.
Invariant: `write` returns only after a commit with synchronous=FULL; a row whose checksum does
not fit is never returned, but moved to `quarantine` and named in `facts`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshagent.core.ports import PeerRow
from meshagent.errors import CorruptFile, LimitReached, MeshError, StorageError
from meshagent.storage.files import mapped_errors
from meshagent.storage.mounts import is_network_filesystem, mounted_filesystem
from meshagent.storage.schema import (
    MIGRATIONS,
    SCHEMA_VERSION,
    TABLES,
    MetaRow,
    Table,
    Value,
    checksum,
    encode_row,
)

if TYPE_CHECKING:
    import apsw

__all__ = ["Database", "database_error"]

BUSY_TIMEOUT_MS = 5_000  # ours is the only writer; this is patience with somebody's backup tool
WAL_PAGES_MAX = 1_000  # about 4 MiB between checkpoints: short recovery, few syncs
WAL_BYTES_MAX = 8 * 1024 * 1024  # what a burst leaves of the log after a checkpoint
QUARANTINE_NAMED_MAX = 20  # as many damaged rows are named in `facts`; all are counted
SYNCHRONOUS_FULL = 2

_MOVE_AWAY = (
    "Stop the node, move the file and its -wal and -shm companions away, and join again: the agent "
    "keeps its identity. Restore the file from a backup if you have one."
)
_FREE_SPACE = "Free some space; it goes on by itself."

# apsw's exception -> which error it is here, the reason and the next step for a person.
_MEANINGS: dict[str, tuple[type[MeshError], str, str]] = {
    "BusyError": (StorageError, "another program keeps it locked", "Close that program."),
    "CantOpenError": (StorageError, "it can't be opened", "Check the folder and its permissions."),
    "CorruptError": (CorruptFile, "the file is damaged", _MOVE_AWAY),
    "FullError": (LimitReached, "the disk is full", _FREE_SPACE),
    "IOError": (StorageError, "the disk failed", "Check the disk; the system log says more."),
    "NoMemError": (LimitReached, "the memory is used up", "Close some programs."),
    "NotADBError": (CorruptFile, "the file is not a database", _MOVE_AWAY),
    "PermissionsError": (StorageError, "permission is denied", "Check the file's permissions."),
    "ReadOnlyError": (StorageError, "the file or its disk is read-only", "Make it writable."),
    "TooBigError": (LimitReached, "a row is too large", "Send it as an attachment."),
}


def database_error(error: apsw.Error, path: Path, doing: str, system_errno: int = 0) -> MeshError:
    """What a failed statement means: the one place where apsw's errors become ours."""
    name = type(error).__name__
    # SQLite reports a full disk as an I/O error when it happens in the log's index.
    if name == "IOError" and system_errno in (errno.ENOSPC, errno.EDQUOT):
        name = "FullError"
    fallback = (StorageError, str(error), "Run 'meshagent doctor'.")
    kind, reason, hint = _MEANINGS.get(name, fallback)
    return kind(f"Can't {doing} {path}: {reason}.", hint=hint, path=str(path), sqlite=name)


class Database:
    """The rows of one agent. Every method may raise StorageError, CorruptFile or LimitReached."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection: apsw.Connection | None = None

    def open(self) -> None:
        """Open or create the file, make sure that it syncs, and bring its schema up to date."""
        import apsw

        _refuse_network_filesystem(self.path)
        with mapped_errors(self.path, "open"):
            # Made here for its mode, and for a better reason than SQLite gives when it can't be.
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
            os.close(os.open(self.path, flags, 0o600))
        with self._mapped("open"):
            self._connection = apsw.Connection(str(self.path), flags=apsw.SQLITE_OPEN_READWRITE)
            self._connection.set_busy_timeout(BUSY_TIMEOUT_MS)
            self._refuse_newer_schema()
            self._set_pragmas()
            self._migrate()
            self._ensure_epoch()

    def close(self) -> None:
        """Release the file; does nothing when it is not open."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with self._mapped("close"):
                connection.close()

    def write(self, statements: Sequence[tuple[str, tuple[Value, ...]]]) -> None:
        """Run all of them in one transaction, durable on return."""
        with self._transaction("write to") as connection:
            for sql, values in statements:
                connection.execute(sql, values)

    def next_run(self, at_least: int) -> int:
        """A number larger than any before; durable on return."""
        last = self._meta().get("run", "0")
        run = max(int(last) + 1, at_least)
        self.write([encode_row(MetaRow("run", str(run)))])
        return run

    def peers(self) -> list[PeerRow]:
        """All remembered peers; the newest row where a damaged index let one in twice."""
        rows: list[PeerRow] = self._scan(TABLES[PeerRow])
        return list({row.agent: row for row in rows}.values())

    def facts(self) -> dict[str, str]:
        """What `doctor` shows."""
        meta = self._meta()
        connection = self._connected()
        with self._mapped("read"):
            facts = {
                "path": str(self.path),
                "journal_mode": str(connection.pragma("journal_mode")),
                "synchronous": _sync_name(connection.pragma("synchronous")),
                "schema": str(self._schema_version()),
                "sqlite": connection.execute("SELECT sqlite_version()").get,
                "epoch": meta.get("epoch", ""),
                "quarantined": str(connection.execute("SELECT count(*) FROM quarantine").get),
            }
            damaged = connection.execute(
                "SELECT origin || ' ' || row_key || ': ' || reason FROM quarantine "
                "ORDER BY id DESC LIMIT ?",
                (QUARANTINE_NAMED_MAX,),
            ).fetchall()
        if damaged:
            facts["damaged_rows"] = "; ".join(str(name) for (name,) in damaged)
        return facts

    def _set_pragmas(self) -> None:
        connection = self._connected()
        with self._mapped("open"):
            for name, value in (
                ("journal_mode", "WAL"),
                ("synchronous", "FULL"),
                ("fullfsync", 1),  # on macOS a plain fsync leaves the data in the drive's cache
                ("checkpoint_fullfsync", 1),
                ("wal_autocheckpoint", WAL_PAGES_MAX),
                ("journal_size_limit", WAL_BYTES_MAX),
                ("trusted_schema", 0),
                ("cell_size_check", 1),
            ):
                connection.pragma(name, value)
            self._require("journal_mode", connection.pragma("journal_mode"), "wal")
            self._require("synchronous", connection.pragma("synchronous"), SYNCHRONOUS_FULL)

    def _require(self, name: str, found: object, wanted: object) -> None:
        if found != wanted:
            raise StorageError(
                f"Can't open {self.path}: {name} is {found!r} and not {wanted!r}, so what is "
                "written might not survive a power cut.",
                hint="Move the mesh to a local disk.",
                path=str(self.path),
            )

    def _schema_version(self) -> int:
        connection = self._connected()
        with self._mapped("read"):
            if not connection.table_exists(None, "migrations"):
                return 0
            version = connection.execute("SELECT coalesce(max(version), 0) FROM migrations").get
            return int(version)

    def _refuse_newer_schema(self) -> None:
        version = self._schema_version()
        if version > SCHEMA_VERSION:
            raise StorageError(
                f"Can't open {self.path}: a newer meshagent wrote it (schema {version}; this one "
                f"knows {SCHEMA_VERSION}), and going back could lose messages.",
                hint="Install the newer version again: pip install --upgrade meshagent-p2p.",
                path=str(self.path),
                schema=version,
            )

    def _migrate(self) -> None:
        if self._schema_version() == SCHEMA_VERSION:
            return
        with self._transaction("migrate") as connection:
            connection.execute(
                "CREATE TABLE IF NOT EXISTS migrations(version INTEGER PRIMARY KEY, "
                "name TEXT NOT NULL, applied_at TEXT NOT NULL)"
            )
        for migration in MIGRATIONS[self._schema_version() :]:
            with self._transaction("migrate") as connection:
                for statement in migration.statements:
                    connection.execute(statement)
                connection.execute(
                    "INSERT INTO migrations VALUES(?, ?, ?)",
                    (migration.version, migration.name, _now()),
                )

    def _ensure_epoch(self) -> None:
        if "epoch" not in self._meta():
            self.write([encode_row(MetaRow("epoch", secrets.token_hex(8)))])

    def _meta(self) -> dict[str, str]:
        rows: list[MetaRow] = self._scan(TABLES[MetaRow])
        return {row.key: row.value for row in rows}

    def _scan(self, table: Table) -> list[Any]:
        """The sound rows of a table; the others go to quarantine."""
        sound: list[Any] = []
        damaged: list[tuple[int, str, list[bytes]]] = []
        connection = self._connected()
        with self._mapped("read"):
            for rowid, found, *columns in connection.execute(table.scan):
                cells = [cell or b"" for cell in columns]
                if found == checksum(table.name, cells):
                    sound.append(table.decode(cells))
                else:
                    damaged.append((rowid, "its checksum does not fit", cells))
        if damaged:
            self._quarantine(table, damaged)
        return sound

    def _quarantine(self, table: Table, damaged: Sequence[tuple[int, str, list[bytes]]]) -> None:
        """Move rows out of the way, content and all, for a person to look at."""
        with self._transaction("repair") as connection:
            # The flipped bit may be in the key, which the index then does not know.
            connection.execute(f"REINDEX {table.name}")
            for rowid, reason, cells in damaged:
                connection.execute(
                    "INSERT INTO quarantine(origin, row_key, reason, content, found_at) "
                    "VALUES(?, ?, ?, ?, ?)",
                    (table.name, _printable(cells[0]), reason, repr(cells).encode(), _now()),
                )
                connection.execute(table.remove, (rowid,))

    @contextlib.contextmanager
    def _transaction(self, doing: str) -> Iterator[apsw.Connection]:
        connection = self._connected()
        with self._mapped(doing):
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                # Some errors (a full disk, for one) have rolled back already.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _mapped(self, doing: str) -> Iterator[None]:
        import apsw

        try:
            yield
        except apsw.Error as error:
            number = self._connection.system_errno if self._connection is not None else 0
            raise database_error(error, self.path, doing, number) from error

    def _connected(self) -> apsw.Connection:
        assert self._connection is not None, "the database is not open"
        return self._connection


def _refuse_network_filesystem(path: Path) -> None:
    kind = mounted_filesystem(path.parent)
    if is_network_filesystem(kind):
        raise StorageError(
            f"Can't keep {path} on a network filesystem ({kind}): its locks and its memory maps "
            "don't reach other machines, and messages would be lost.",
            hint="Put the mesh on a local disk: --dir or MESHAGENT_DIR names one.",
            path=str(path),
            filesystem=kind,
        )


def _sync_name(level: object) -> str:
    return {0: "off", 1: "normal", SYNCHRONOUS_FULL: "full", 3: "extra"}.get(
        level if isinstance(level, int) else -1, str(level)
    )


def _printable(cell: bytes) -> str:
    text = cell.decode("utf-8", "replace")
    return "".join(character if character.isprintable() else "?" for character in text)[:64]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
