"""One SQLite file and its commit log, used by one thread.

Decides how rows become durable and what a damaged one means. Never touches an event loop.
Invariants: `write` returns only after its rows were synced to the commit log, and that is the only
way in; the tables hold what the log held, up to a mark that they change together with it; a row
whose checksum does not fit is never returned, but moved to `quarantine` and named by `damage`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from meshagent.core.delivery.mailbox import queued_entry
from meshagent.core.model.rows import NewEpoch, OutEntry, PeerRow, Row
from meshagent.core.ports import Damage
from meshagent.errors import MeshError
from meshagent.storage.log.commit_log import LOG_ENDING, CommitLog
from meshagent.storage.mail.backup import Snapshot
from meshagent.storage.mail.quarantine import close_gaps, damaged_mail, write_singly
from meshagent.storage.mail.recovery import recover
from meshagent.storage.mail.retention import Retention
from meshagent.storage.mail.row_codec import RowPacker
from meshagent.storage.mail.schema import (
    SCHEMA,
    TABLES,
    MetaRow,
    Table,
    checksum,
    encode_row,
)
from meshagent.storage.mail.search import SearchIndex
from meshagent.storage.mail.sqlite_errors import is_about_a_row
from meshagent.storage.mail.sqlite_file import SqliteFile
from meshagent.storage.mail.table_reader import TableReader, pending_among
from meshagent.storage.mail.tables import MailTables

if TYPE_CHECKING:
    import apsw

__all__ = ["Database", "LogMark"]

log = logging.getLogger(__name__)

T = TypeVar("T")

WAL_PAGES_MAX = 1_000  # about 4 MiB between checkpoints in a flood: short recovery, few syncs
REWIND_BYTES = 1024 * 1024  # of the commit log's file: in a quiet moment it is begun anew
QUARANTINE_NAMED_MAX = 20  # as many damaged rows are named in `facts`; all are counted
DAMAGE_MAX = 1_000  # as many, of the newest, are given by `damage`
_MARK_KEY = "log"


class LogMark(NamedTuple):
    """What the tables know of the commit log."""

    tag: bytes
    position: int
    """Up to this commit they hold all."""
    is_running: bool
    """Whether its file has to be there."""


class Database(SqliteFile):
    """The rows of one agent. Every method may raise StorageError, CorruptFile or LimitReached."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.mail = MailTables(self)
        self.reader = TableReader(self)
        self.search = SearchIndex(self)
        self.history = Retention(self)
        self.log = CommitLog(path.with_name(path.name + LOG_ENDING), self)
        self.snapshots: set[Snapshot] = set()
        self.damage_found = 0
        """How often something was set aside, or was to be: another thread may look at this."""
        self._packer = RowPacker()
        self._is_recovered = False

    # -- its life -----------------------------------------------------------------------------

    def open(self, *, create: bool = True) -> None:
        """Open or create the file, and go on with what an earlier run left in the commit log."""
        is_new = self.connect(create=create)
        self.mail.prepare(self.connected())
        if is_new:
            with self.transaction("create") as connection:
                for statement in SCHEMA:
                    connection.execute(statement)
        recover(self)
        self._is_recovered = True

    def close(self) -> None:
        """Release the files; does nothing when they are not open."""
        for snapshot in list(self.snapshots):
            snapshot.abandon()
        is_stopped = self._is_recovered and self._stop()
        self._is_recovered = False
        self.log.close(remove=is_stopped)
        self.disconnect()

    def _stop(self) -> bool:
        """Say durably that the tables have all, and that nobody has to look for a log."""
        try:
            self.log.fold_all(alone=True)
            self.make_durable()  # on a full disk this fails, and the mark stays as it is
            with self.repair() as connection:
                self.note_stopped(connection)
        except MeshError as error:  # then the next run does it
            log.warning("the commit log stays: %s", error)
            return False
        return True

    # -- commits ------------------------------------------------------------------------------

    def write(self, rows: Sequence[Row | MetaRow]) -> None:
        """All of them or none, durable on return: they are in the commit log."""
        if NewEpoch in map(type, rows):
            self.log.fold_all(alone=True)
            with self.trial() as connection:
                numbers = self.mail.numbers_by_trial(connection, rows)
        else:
            with self.mapped("write to"):
                numbers = self.mail.numbers_after(self._writable("write to"), rows)
        self.log.append(self._packer.pack(rows), rows)
        self.mail.note_numbers(numbers)

    def fold(self, rows: Sequence[Any], position: int) -> None:
        """Bring commits into the tables: for the log."""
        try:
            with self.transaction("write to") as connection:
                self.set_mark(connection, position)
                self.mail.write(connection, rows)
        except Exception as error:
            if not is_about_a_row(error):
                raise
            with self.transaction("write to") as connection:
                self.set_mark(connection, position)
                close_gaps(connection, write_singly(self, connection, rows))
        if self.wal_pages >= WAL_PAGES_MAX:
            with contextlib.suppress(MeshError):  # it was logged; the commit log has it all
                self.make_durable()

    def has_chores(self) -> bool:
        """Whether `do_chore` has something to do."""
        return self._is_recovered and (self.log.size > 0 or self.log.used >= REWIND_BYTES)

    def do_chore(self) -> None:
        """A bounded step, for a quiet moment: fold some commits, or begin the log's file anew."""
        if self.log.size:
            self.log.fold_some()
        else:
            self.log.rewind()

    def log_mark(self) -> LogMark | None:
        """What the tables know of the commit log; None when they are new, or it was lost."""
        words = self.meta().get(_MARK_KEY, "").split()
        return LogMark(bytes.fromhex(words[0]), int(words[1]), words[2] == "on") if words else None

    def set_mark(
        self, connection: apsw.Connection, position: int | None = None, word: str = "on"
    ) -> None:
        """Say in the tables that they hold all up to this commit, or up to the last."""
        at = self.log.position if position is None else position
        connection.execute(*encode_row(MetaRow(_MARK_KEY, f"{self.log.tag.hex()} {at} {word}")))

    def note_stopped(self, connection: apsw.Connection) -> None:
        """Say in these tables, or in a copy, that they are complete without a commit log."""
        self.set_mark(connection, word="off")

    def mark_running(self, position: int) -> None:
        """Say durably that from now on the commit log is needed, which begins behind this."""
        with self.repair() as connection:
            self.set_mark(connection, position)

    def next_run(self, at_least: int) -> int:
        """A number larger than any before; durable on return."""
        last = self.folded().meta().get("run", "0")
        run = max(int(last) + 1, at_least)
        self.write([MetaRow("run", str(run))])
        return run

    # -- questions ----------------------------------------------------------------------------

    def folded(self) -> Database:
        """This, when all that was committed stands in the tables."""
        self.log.fold_all()
        return self

    def look(self, ask: Callable[[Database], T]) -> T:
        """The answer to who only reads: as `folded`, and also while nothing can be written."""
        try:
            self.log.fold_all()
        except MeshError:
            with self.trial() as connection:
                self.mail.write(connection, self.log.rows_waiting())
                return ask(self)
        return ask(self)

    def pending(self, peer: str, first: int, limit: int) -> list[OutEntry]:
        """Not settled, from a number on. A peer that is slower than we are asks for what has just
        come: that needs no tables."""
        if waiting := pending_among(self.log.rows_waiting(), peer, first, limit):
            return list(map(queued_entry, waiting))
        return self.look(lambda database: database.reader.pending(peer, first, limit))

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
                "schema": str(connection.pragma("user_version")),
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

    def damage(self) -> list[Damage]:
        """What was set aside, oldest first."""
        with self.mapped("read"):
            rows = self.connected().execute(
                "SELECT id, origin, peer, message_id, reason, found_at FROM quarantine "
                "ORDER BY id DESC LIMIT ?",
                (DAMAGE_MAX,),
            )
            return [Damage(int(number), *map(str, row)) for number, *row in rows][::-1]

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
        self.log.fold_all(alone=True)  # what waits has the numbers from before a repair
        with self.repair() as connection:
            # The flipped bit may be in the key, which the index then does not know.
            connection.execute(f"REINDEX {table.name}")
            for rowid, cells in damaged:
                peer = b"" if table.peer_column is None else cells[table.peer_column]
                self.note_damage(connection, table.name, cells[0], cells, peer)
                connection.execute(table.remove, (rowid,))
            if repair is not None:
                repair(connection)
        return self.scan(table) if repair is not None else sound

    def note_damage(
        self,
        connection: apsw.Connection,
        origin: str,
        key: bytes,
        content: object,
        peer: bytes = b"",
        message_id: bytes = b"",
        reason: str = "its checksum does not fit",
    ) -> None:
        """Keep what is damaged, content and all, for a person to look at."""
        kept = content if isinstance(content, bytes) else repr(content).encode()
        connection.execute(
            "INSERT INTO quarantine(origin, row_key, peer, message_id, reason, content, found_at) "
            "VALUES(?, ?, ?, ?, ?, ?, ?)",
            (origin, *map(_printable, (key, peer, message_id)), reason, kept,
             datetime.now(UTC).isoformat(timespec="seconds")),
        )  # fmt: skip
        self.damage_found += 1

    def damaged(self) -> list[str]:
        """Every row that does not fit its checksum, by name; nothing is changed."""
        found = []
        with self.mapped("read"):
            for table in TABLES.values():
                for _, seal, *columns in self.connected().execute(table.scan):
                    cells = [cell or b"" for cell in columns]
                    if seal != checksum(table.name, cells):
                        found.append(f"{table.name} {_printable(cells[0])}")
        return found + damaged_mail(self)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _printable(cell: bytes) -> str:
    text = cell.decode("utf-8", "replace")
    return "".join(character if character.isprintable() else "?" for character in text)[:64]
