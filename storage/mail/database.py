"""One SQLite file, used by one thread.

Decides how rows become durable and what a damaged one means. Never touches an event loop.
Invariant: `write` returns only after a commit with synchronous=FULL; a row whose checksum does
not fit is never returned, but moved to `quarantine` and named in `facts`.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from meshagent.core.delivery.mailbox import queued_entry
from meshagent.core.model.rows import NewEpoch, OutEntry, PeerRow, Row
from meshagent.errors import CorruptFile, LimitReached, MeshError, StorageError
from meshagent.storage.folders.files import mapped_errors, storage_error
from meshagent.storage.folders.mounts import is_network_filesystem, mounted_filesystem
from meshagent.storage.log.commit_log import (
    LOG_BYTES_MAX,
    NEVER_LONG_BYTES,
    CommitLog,
    is_long,
    rows_in_table,
)
from meshagent.storage.mail.backup import Snapshot
from meshagent.storage.mail.quarantine import damaged_mail
from meshagent.storage.mail.retention import Retention
from meshagent.storage.mail.schema import (
    MIGRATIONS,
    SCHEMA_VERSION,
    TABLES,
    MetaRow,
    Table,
    checksum,
    encode_row,
)
from meshagent.storage.mail.search import SearchIndex
from meshagent.storage.mail.tables import MailTables

if TYPE_CHECKING:
    import apsw

__all__ = ["AT_ONCE_ROWS_MAX", "Database", "database_error"]

T = TypeVar("T")

BUSY_TIMEOUT_MS = 5_000  # ours is the only writer; this is patience with somebody's backup tool
LOG_PAGES_MAX = 1_000  # about 4 MiB between checkpoints in a flood: short recovery, few syncs
REST_BYTES = 1024 * 1024  # of the journal's file: when it is empty it is begun anew
WAL_BYTES_MAX = 8 * 1024 * 1024  # what a burst leaves of the log after a checkpoint
CACHE_KIB_MAX = 16 * 1024  # holds the index over the ids of half a million messages
QUARANTINE_NAMED_MAX = 20  # as many damaged rows are named in `facts`; all are counted
SYNCHRONOUS_FULL = 2
JOURNAL_FILE_VERSION = 4  # of the schema: what the table before it held goes to where it belongs
AT_ONCE_ROWS_MAX = 512  # of a commit in the loop's thread; a crowd is one, its bytes count
AT_ONCE_BYTES_MAX = 256 * 1024  # of such a commit: half a ms beside the sync
_SMALL = {PeerRow, MetaRow}  # few, and found by their keys: they go to their tables at once
_APART = {*_SMALL, NewEpoch}  # what no journal takes

_MOVE_AWAY = (
    "Stop the node, move the file and those beside it whose names begin like its own away, and "
    "join again: the agent keeps its identity. Restore the file from a backup if you have one."
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

# SQLite calls these an I/O error: a full disk when it meets it in the log's index, a read-only one
# when the disk became so under an open file.
_BY_ERRNO = {
    errno.ENOSPC: "FullError",
    errno.EDQUOT: "FullError",
    errno.EROFS: "ReadOnlyError",
}


def database_error(error: apsw.Error, path: Path, doing: str, system_errno: int = 0) -> MeshError:
    """What a failed statement means: the one place where apsw's errors become ours."""
    name = type(error).__name__
    if name == "IOError":
        name = _BY_ERRNO.get(system_errno, name)
    fallback = (StorageError, str(error), "Run 'meshagent doctor'.")
    kind, reason, hint = _MEANINGS.get(name, fallback)
    return kind(f"Can't {doing} {path}: {reason}.", hint=hint, path=str(path), sqlite=name)


class Database:
    """The rows of one agent. Every method may raise StorageError, CorruptFile or LimitReached."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mail = MailTables(self)
        self.search = SearchIndex(self)
        self.history = Retention(self)
        self.journal = CommitLog(self)
        self.snapshots: set[Snapshot] = set()
        self._connection: apsw.Connection | None = None
        self._log_pages = 0
        self._unsure = self._unsynced = self._logged = False

    def open(self, *, create: bool = True) -> None:
        """Open or create the file, make sure that it syncs, and bring its schema up to date."""
        import apsw

        _refuse_network_filesystem(self.path)
        with mapped_errors(self.path, "open"):
            # Made here for its mode, and for a better reason than SQLite gives when it can't be.
            flags = os.O_RDWR | (os.O_CREAT if create else 0) | getattr(os, "O_CLOEXEC", 0)
            os.close(os.open(self.path, flags, 0o600))
        with self.mapped("open"):
            self._connection = apsw.Connection(str(self.path), flags=apsw.SQLITE_OPEN_READWRITE)
            self._connection.set_busy_timeout(BUSY_TIMEOUT_MS)
            # Nobody else has a use for a running agent's file: no locks, and no index of the log on
            # the disk, for each commit. Before the first read, which would make that index.
            self._connection.pragma("locking_mode", "EXCLUSIVE")
            self._connection.set_wal_hook(self._note_log)  # instead of SQLite's own checkpoints
            self.mail.prepare(self._connection)
            self._refuse_newer_schema()
            self._set_pragmas()
            self._migrate()
            self.journal.open(create=create)
            self._ensure_epoch()

    def close(self) -> None:
        """Release the file; does nothing when it is not open."""
        if self._connection is not None:
            with contextlib.suppress(MeshError):  # then the next run does it
                self.journal.fold_all(alone=True)
                if self.journal.used and self.journal.is_empty:
                    self._sync()
        self.journal.close()
        for snapshot in list(self.snapshots):
            snapshot.abandon()
        connection, self._connection = self._connection, None
        if connection is not None:
            with self.mapped("close"):
                connection.close()

    def write(self, rows: Sequence[Row | MetaRow]) -> bool:
        """All of them in one transaction, durable on return; whether one that `write_at_once`
        would make, as far as it depends on them."""
        self.make_sure()
        kinds = set(map(type, rows))
        small = [row for row in rows if type(row) in _SMALL] if kinds & _SMALL else []
        mail: Sequence[Any] = [row for row in rows if type(row) not in _SMALL] if small else rows
        if NewEpoch in kinds:
            self._write_anew(small, mail)
            return False
        content = self.journal.takes(mail) if mail and not small else None
        if content is not None:
            self._append(content, mail)
            return not self.journal.overrun and _is_short(content, mail)
        with self.transaction("write to") as connection:
            _put(connection, small)
            numbers = self.mail.numbers_after(connection, mail)
            if mail:
                self.journal.fold_within(connection)
                self.mail.write(connection, mail)
        if mail:
            self.mail.note_numbers(numbers)
            self.journal.clear()
        return False

    def write_at_once(self, rows: Sequence[Row]) -> bool:
        """As `write`, if that takes no longer than the disk needs for a sync; else False."""
        if (
            len(rows) > AT_ONCE_ROWS_MAX
            or self._unsure
            or self.journal.overrun
            or self.journal.size > LOG_BYTES_MAX - AT_ONCE_BYTES_MAX
            or not self.journal.has_room(AT_ONCE_BYTES_MAX)
            or not _APART.isdisjoint(map(type, rows))
        ):
            return False
        content = self.journal.packed(rows)
        if len(content) > NEVER_LONG_BYTES and not _is_short(content, rows):
            return False
        self._append(content, rows)
        return True

    def _note_log(self, connection: apsw.Connection, name: str, pages: int) -> int:
        """Called when a transaction has changed something; else SQLite does not touch the disk."""
        self._log_pages, self._logged = pages, True
        return 0

    def wants_rest(self) -> bool:
        """Whether `rest` has something to do."""
        return self._log_pages >= LOG_PAGES_MAX or (
            self.journal.used >= REST_BYTES and self.journal.is_empty
        )

    def rest(self) -> None:
        """Make sure that the tables are on the disk: then the journal's file is begun anew. And
        copy the log into the tables' file if it is long."""
        if self.journal.used >= REST_BYTES and self.journal.is_empty:
            self._sync()
        if self._log_pages >= LOG_PAGES_MAX:
            self.checkpoint()

    def _sync(self) -> None:
        """What was folded is not on the disk for certain: a transaction that changes something sees
        to that."""
        with self.transaction("write to") as connection:
            self.journal.fold_within(connection)
        self.journal.clear()

    def checkpoint(self) -> None:
        """Copy the log into the tables' file: after a commit, and not within it."""
        import apsw

        if self._connection is not None:
            with contextlib.suppress(apsw.Error):  # a full disk: what is in the log is safe there
                self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
            self._log_pages = 0

    def make_sure(self) -> None:
        """That what is known of the journal is what the disk has: an interrupt may have come
        between a commit and the note of it."""
        if self._unsure and self._connection is not None:
            self.journal.recover()
            self._unsure = False

    def _append(self, content: bytes, rows: Sequence[Row]) -> None:
        """To the journal."""
        connection = self._connection
        if connection is None or connection.in_transaction:
            connection = self._writable("write to")
        self._unsure = True
        try:
            numbers = self.mail.numbers_after(connection, rows)
            self.journal.append(content, rows)
        except OSError as error:
            raise storage_error(error, self.path, "write to") from error
        except Exception as error:  # asked for by name only then: the import costs at each commit
            if type(error).__module__ != "apsw":
                raise
            raise self._error(error, "write to") from error
        if numbers:
            self.mail.note_numbers(numbers)
        self._unsure = False

    def _write_anew(self, small: Sequence[Any], mail: Sequence[Row]) -> None:
        """Among these rows numbers begin anew: what waits is of those before."""
        self.journal.fold_all(alone=True)
        try:
            with self.transaction("write to") as connection:
                _put(connection, small)
                self.journal.fold_within(connection)
                self.mail.write_anew(connection, mail)
        except BaseException:
            self.mail.forget_numbers()  # what it has counted never was
            raise
        self.journal.clear()

    def folded(self) -> Database:
        """This, when all that was committed stands in the tables."""
        self.journal.fold_all()
        return self

    def pending(self, peer: str, first: int, limit: int) -> list[OutEntry]:
        """Not settled, from a number on. A peer that is slower than we are asks for what has just
        come: that needs no tables."""
        if waiting := self.journal.pending(peer, first, limit):
            return list(map(queued_entry, waiting))
        return self.look(lambda database: database.mail.pending(peer, first, limit))

    def look(self, ask: Callable[[Database], T]) -> T:
        """The answer to who only reads: as `folded`, and also while nothing can be written."""
        try:
            self.journal.fold_all()
        except MeshError:
            return self._look_within(ask)
        return ask(self)

    def _look_within(self, ask: Callable[[Database], T]) -> T:
        """In a transaction that is given up once it is answered."""
        connection = self.connected()
        with self.mapped("read"):
            connection.execute("BEGIN IMMEDIATE")
            try:
                self.journal.fold_within(connection)
                return ask(self)
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def next_run(self, at_least: int) -> int:
        """A number larger than any before; durable on return."""
        last = self.meta().get("run", "0")
        run = max(int(last) + 1, at_least)
        self.write([MetaRow("run", str(run))])
        return run

    def peers(self) -> list[PeerRow]:
        """All remembered peers; the newest row where a damaged index let one in twice."""
        rows: list[PeerRow] = self.scan(TABLES[PeerRow])
        return list({row.agent: row for row in rows}.values())

    def facts(self) -> dict[str, str]:
        """What `doctor` shows."""
        meta = self.meta()
        connection = self.connected()
        with self.mapped("read"):
            facts = {
                "path": str(self.path),
                "journal_mode": str(connection.pragma("journal_mode")),
                "synchronous": _sync_name(connection.pragma("synchronous")),
                "schema": str(self._schema_version()),
                "sqlite": connection.execute("SELECT sqlite_version()").get,
                "epoch": meta.get("epoch", ""),
                "wal": str(_size(self.path.with_name(f"{self.path.name}-wal"))),
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
        connection = self.connected()
        with self.mapped("open"):
            for name, value in (
                ("journal_mode", "WAL"),
                ("synchronous", "FULL"),
                ("fullfsync", 1),  # on macOS a plain fsync leaves the data in the drive's cache
                ("checkpoint_fullfsync", 1),
                ("journal_size_limit", WAL_BYTES_MAX),
                ("cache_size", -CACHE_KIB_MAX),
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
        connection = self.connected()
        with self.mapped("read"):
            if not connection.table_exists(None, "migrations"):
                return 0
            version = connection.execute("SELECT coalesce(max(version), 0) FROM migrations").get
            return int(version)

    def _check_versions(self) -> None:
        """Migrating by a damaged record would make the damage worse."""
        connection = self.connected()
        recorded = []
        if connection.table_exists(None, "migrations"):
            found = connection.execute("SELECT version FROM migrations ORDER BY version")
            recorded = [version for (version,) in found]
        whole = recorded == list(range(1, len(recorded) + 1))
        if not whole or (not recorded and connection.table_exists(None, "meta")):
            raise CorruptFile(
                f"Can't open {self.path}: its record of versions is damaged.",
                hint=_MOVE_AWAY,
                path=str(self.path),
            )

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
        self._check_versions()
        if self._schema_version() == SCHEMA_VERSION:
            return
        with self.transaction("migrate") as connection:
            connection.execute(
                "CREATE TABLE IF NOT EXISTS migrations(version INTEGER PRIMARY KEY, "
                "name TEXT NOT NULL, applied_at TEXT NOT NULL)"
            )
        for migration in MIGRATIONS[self._schema_version() :]:
            with self.transaction("migrate") as connection:
                if migration.version == JOURNAL_FILE_VERSION:
                    self.mail.write(connection, rows_in_table(connection))
                for statement in migration.statements:
                    connection.execute(statement)
                connection.execute(
                    "INSERT INTO migrations VALUES(?, ?, ?)",
                    (migration.version, migration.name, _now()),
                )

    def _ensure_epoch(self) -> None:
        if "epoch" not in self.meta():
            # It was lost: what the numbers in the outbox mean is known to nobody any more.
            self.journal.recover()
            self.journal.fold_all(alone=True)
            with self.transaction("migrate") as connection:
                self.mail.start_over(connection)

    def epoch(self) -> bytes:
        """Which database this is, to those whom it sends to."""
        return bytes.fromhex(self.meta()["epoch"])

    def meta(self) -> dict[str, str]:
        """What the database knows about itself."""
        rows: list[MetaRow] = self.scan(TABLES[MetaRow])
        return {row.key: row.value for row in rows}

    def scan(
        self, table: Table, repair: Callable[[apsw.Connection], None] | None = None
    ) -> list[Any]:
        """The sound rows of a table; the others go to quarantine, and `repair` makes up for them.

        A repair that changes the table is read again.
        """
        sound: list[Any] = []
        damaged: list[tuple[int, list[bytes]]] = []
        with self.mapped("read"):
            for rowid, found, *columns in self.connected().execute(table.scan):
                cells = [cell or b"" for cell in columns]
                if found == checksum(table.name, cells):
                    sound.append(table.decode(cells))
                else:
                    damaged.append((rowid, cells))
        if not damaged:
            return sound
        self.journal.fold_all(alone=True)  # what it holds has the numbers from before a repair
        with self.transaction("repair") as connection:
            # The flipped bit may be in the key, which the index then does not know.
            connection.execute(f"REINDEX {table.name}")
            for rowid, cells in damaged:
                self.note_damage(connection, table.name, cells[0], cells)
                connection.execute(table.remove, (rowid,))
            if repair is not None:
                repair(connection)
        return self.scan(table) if repair is not None else sound

    def value(self, sql: str, values: tuple[Any, ...] = ()) -> Any:
        """The one value that a query gives."""
        with self.mapped("read"):
            return self.connected().execute(sql, values).get

    def note_damage(
        self,
        connection: apsw.Connection,
        table: str,
        key: bytes,
        cells: Sequence[Any],
        reason: str = "its checksum does not fit",
    ) -> None:
        """Keep a damaged row, content and all, for a person to look at."""
        connection.execute(
            "INSERT INTO quarantine(origin, row_key, reason, content, found_at) "
            "VALUES(?, ?, ?, ?, ?)",
            (table, _printable(key), reason, repr(cells).encode(), _now()),
        )

    def integrity(self) -> list[str]:
        """What is wrong with the file as such; nothing is changed."""
        with self.mapped("check"):
            found = self.connected().execute("PRAGMA integrity_check(5)").fetchall()
        return [str(problem) for (problem,) in found if problem != "ok"]

    def damaged(self) -> list[str]:
        """Every row that does not fit its checksum, by name; nothing is changed."""
        found = []
        with self.mapped("read"):
            for table in TABLES.values():
                for _, seal, *columns in self.connected().execute(table.scan):
                    cells = [cell or b"" for cell in columns]
                    if seal != checksum(table.name, cells):
                        found.append(f"{table.name} {_printable(cells[0])}")
        return found + damaged_mail(self) + self.journal.damaged()

    @contextlib.contextmanager
    def transaction(self, doing: str) -> Iterator[apsw.Connection]:
        """All that the block does, or nothing; durable when it is left."""
        connection = self._writable(doing)
        self._logged = False
        with self.mapped(doing):
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                # Some errors (a full disk, for one) have rolled back already.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        if self._logged and not self._unsynced:  # it was synced, and all that was before it
            self.journal.rest()

    def _writable(self, doing: str) -> apsw.Connection:
        connection = self.connected()
        if connection.in_transaction:  # that of `look`, of which nothing stays
            raise StorageError(f"Can't {doing} {self.path}: the disk takes nothing now.")
        return connection

    @contextlib.contextmanager
    def unsynced(self, doing: str) -> Iterator[apsw.Connection]:
        """As `transaction`, for what can be done again after a crash: the next one syncs it too."""
        connection = self.connected()
        connection.pragma("synchronous", "NORMAL")
        self._unsynced = True
        try:
            with self.transaction(doing):
                yield connection
        finally:
            self._unsynced = False
            connection.pragma("synchronous", "FULL")

    @contextlib.contextmanager
    def mapped(self, doing: str, path: Path | None = None) -> Iterator[None]:
        """Turn apsw's errors into ours, about this file or another."""
        import apsw

        try:
            yield
        except apsw.Error as error:
            raise self._error(error, doing, path) from error

    def _error(self, error: Any, doing: str, path: Path | None = None) -> MeshError:
        number = self._connection.system_errno if self._connection is not None else 0
        return database_error(error, path or self.path, doing, number)

    def connected(self) -> apsw.Connection:
        """The open connection."""
        if self._connection is None:
            # A restore that failed half-way may leave it so.
            raise StorageError(f"The store {self.path} is not open.", path=str(self.path))
        return self._connection


def _put(connection: apsw.Connection, rows: Sequence[Any]) -> None:
    for row in rows:
        connection.execute(*encode_row(row))


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


def _is_short(content: bytes, rows: Sequence[Row]) -> bool:
    """Whether these rows, packed, take no longer to write than the disk needs for a sync."""
    return (
        len(rows) <= AT_ONCE_ROWS_MAX
        and len(content) <= AT_ONCE_BYTES_MAX
        and not is_long(content, rows)
    )


def _sync_name(level: object) -> str:
    return {0: "off", 1: "normal", SYNCHRONOUS_FULL: "full", 3: "extra"}.get(
        level if isinstance(level, int) else -1, str(level)
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _printable(cell: bytes) -> str:
    text = cell.decode("utf-8", "replace")
    return "".join(character if character.isprintable() else "?" for character in text)[:64]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
