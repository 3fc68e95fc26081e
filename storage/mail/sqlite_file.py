"""One SQLite file that nobody else uses: how it is opened, and when what was written is durable.

Decides nothing about what the tables hold. Never touches the commit log. Invariant: a transaction
is all or nothing, and durable once `make_durable` has returned.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshagent.errors import MeshError, StorageError
from meshagent.storage.folders.files import mapped_errors
from meshagent.storage.folders.mounts import is_network_filesystem, mounted_filesystem
from meshagent.storage.mail.schema import SCHEMA_VERSION
from meshagent.storage.mail.sqlite_errors import MOVE_AWAY, database_error

if TYPE_CHECKING:
    import apsw

__all__ = ["SqliteFile"]

log = logging.getLogger(__name__)

BUSY_TIMEOUT_MS = 5_000  # ours is the only writer; this is patience with somebody's backup tool
WAL_BYTES_MAX = 8 * 1024 * 1024  # what a burst leaves of the WAL after a checkpoint
CACHE_KIB_MAX = 16 * 1024  # holds the index over the ids of half a million messages
SYNCHRONOUS_NORMAL = 1  # a checkpoint syncs, a transaction does not: the commit log has it


class SqliteFile:
    """A connection. Every method may raise StorageError, CorruptFile or LimitReached."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.wal_pages = 0
        """How long the WAL is."""
        self._connection: apsw.Connection | None = None

    def connect(self, *, create: bool) -> bool:
        """Open the file, or create it; whether it is new, without a table. Refuses one that this
        version can't read, untouched."""
        import apsw

        _refuse_network_filesystem(self.path)
        with mapped_errors(self.path, "open"):
            # Made here for its mode, and for a better reason than SQLite gives when it can't be.
            flags = os.O_RDWR | (os.O_CREAT if create else 0) | getattr(os, "O_CLOEXEC", 0)
            os.close(os.open(self.path, flags, 0o600))
        with self.mapped("open"):
            self._connection = apsw.Connection(str(self.path), flags=apsw.SQLITE_OPEN_READWRITE)
            self._connection.set_busy_timeout(BUSY_TIMEOUT_MS)
            # Nobody else has a use for a running agent's file: no locks, and no index of the WAL on
            # the disk. Before the first read, which would make that index.
            self._connection.pragma("locking_mode", "EXCLUSIVE")
            self._connection.set_wal_hook(self._note_wal)  # instead of SQLite's own checkpoints
            is_new = self._is_new()
            self._set_pragmas()
        return is_new

    def disconnect(self) -> None:
        """Let go of the file; does nothing when it is not open."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with self.mapped("close"):
                connection.close()

    def _is_new(self) -> bool:
        connection = self.connected()
        version = connection.pragma("user_version")
        if version == SCHEMA_VERSION:
            return False
        if not version and not connection.execute("SELECT count(*) FROM sqlite_schema").get:
            return True
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise StorageError(
                f"Can't open {self.path}: a newer meshagent wrote it (schema {version}; this one "
                f"knows {SCHEMA_VERSION}), and going back could lose messages.",
                hint="Install the newer version again: pip install --upgrade meshagent-p2p.",
                path=str(self.path),
                schema=version,
            )
        raise StorageError(
            f"Can't open {self.path}: meshagent 0.1.0 wrote it, and this version can't read that.",
            hint=MOVE_AWAY,
            path=str(self.path),
        )

    def _set_pragmas(self) -> None:
        connection = self.connected()
        for name, value in (
            ("journal_mode", "WAL"),
            ("synchronous", "NORMAL"),
            ("checkpoint_fullfsync", 1),  # on macOS a plain fsync leaves it in the drive's cache
            ("journal_size_limit", WAL_BYTES_MAX),
            ("cache_size", -CACHE_KIB_MAX),
            ("trusted_schema", 0),
            ("cell_size_check", 1),
        ):
            connection.pragma(name, value)
        self._require("journal_mode", connection.pragma("journal_mode"), "wal")
        self._require("synchronous", connection.pragma("synchronous"), SYNCHRONOUS_NORMAL)

    def _require(self, name: str, found: object, wanted: object) -> None:
        if found != wanted:
            raise StorageError(
                f"Can't open {self.path}: {name} is {found!r} and not {wanted!r}, so what is "
                "written might not survive a power cut.",
                hint="Move the mesh to a local disk.",
                path=str(self.path),
            )

    def make_durable(self) -> None:
        """Copy the WAL into the tables' file, synced: on return all that was written is there.

        A sync that fails may leave pages that no later one writes; a checkpoint that has failed
        writes all of its pages again. So nothing else counts as durable here.
        """
        import apsw

        try:
            with self.mapped("write to"):
                pages, copied = self.connected().wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
            if copied < pages:
                raise StorageError(f"Can't write to {self.path}: somebody reads its WAL.")
        except MeshError as error:
            log.error("the tables are not on the disk, so the commit log stays: %s", error)
            raise
        self.wal_pages = 0

    def _note_wal(self, connection: apsw.Connection, name: str, pages: int) -> int:
        self.wal_pages = pages
        return 0

    def value(self, sql: str, values: tuple[Any, ...] = ()) -> Any:
        """The one value that a query gives."""
        with self.mapped("read"):
            return self.connected().execute(sql, values).get

    def integrity(self) -> list[str]:
        """What is wrong with the file as such; nothing is changed."""
        with self.mapped("check"):
            found = self.connected().execute("PRAGMA integrity_check(5)").fetchall()
        return [str(problem) for (problem,) in found if problem != "ok"]

    @contextlib.contextmanager
    def transaction(self, doing: str) -> Iterator[apsw.Connection]:
        """All that the block does, or nothing; durable after the next checkpoint."""
        connection = self._writable(doing)
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

    @contextlib.contextmanager
    def repair(self) -> Iterator[apsw.Connection]:
        """As `transaction`, for what does not come from the commit log: durable when it is left."""
        with self.transaction("repair") as connection:
            yield connection
        self.make_durable()

    @contextlib.contextmanager
    def trial(self) -> Iterator[apsw.Connection]:
        """What the block writes is given up when it is left."""
        connection = self._writable("read")
        with self.mapped("read"):
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def _writable(self, doing: str) -> apsw.Connection:
        connection = self.connected()
        if connection.in_transaction:  # a trial, of which nothing stays
            raise StorageError(f"Can't {doing} {self.path}: the disk takes nothing now.")
        return connection

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
