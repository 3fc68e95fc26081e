"""What was committed and does not stand in the tables yet.

A commit puts all its rows together at the end of one file, which is the least that a disk can make
durable. In a quiet moment, or before a question is answered, they are folded into the tables where
they can be found: many at once, and as they have ended by then. The tables know up to which commit
they hold all, and learn it in the transaction that brings it there; so what a crash left in the
file and not in the tables is folded before anything else. Decides nothing about what a row means.
Invariants: rows are folded once and in the order of their commits; one step does a bounded amount
of work; the file is written anew only when what it held is durable in the tables.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from meshagent.core.model.rows import (
    Arrived,
    Delivered,
    InBatch,
    InRow,
    InState,
    OutBatch,
    OutRow,
    OutState,
    ReceiptRow,
    Row,
    TurnedAway,
    Watermark,
    singly,
)
from meshagent.errors import MeshError
from meshagent.storage.folders.files import mapped_errors
from meshagent.storage.log.log_file import TAG_BYTES, Commit, LogFile
from meshagent.storage.mail.quarantine import Lost, close_gaps
from meshagent.storage.mail.schema import MetaRow, encode_row

if TYPE_CHECKING:
    import apsw

    from meshagent.storage.mail.database import Database

__all__ = [
    "LOG_BYTES_MAX",
    "LOG_ENDING",
    "LONG_BYTES",
    "NEVER_LONG_BYTES",
    "CommitLog",
    "is_long",
    "rows_in_table",
]

LOG_ENDING = "-commits"  # of the file's name, behind the database's

LOG_BYTES_MAX = 16 * 1024 * 1024  # in memory too: some 60,000 short messages
LONG_BYTES = 8 * 1024  # a row, on average of
MANY = 16  # at the least: the delay of one message counts more than what it takes to write it
NEVER_LONG_BYTES = LONG_BYTES * MANY  # however few the rows are
FOLD_BYTES = 256 * 1024  # at a time: some ms, then a commit that waits has its turn

_MARK_KEY = "journal"
_new = tuple.__new__  # a named tuple's own way takes twice as long

# A kind of row is kept as its place here: new ones come at the end.
_KINDS = (
    OutRow, OutState, Delivered, ReceiptRow, InRow, Arrived, TurnedAway, InState, Watermark,
    OutBatch, InBatch,
)  # fmt: skip
_OF_PEER = frozenset({OutRow, OutBatch, OutState, Delivered, ReceiptRow})
_CODES: dict[type, int] = {kind: code for code, kind in enumerate(_KINDS)}


class _Entry(NamedTuple):
    """One commit."""

    position: int
    size: int
    rows: Sequence[Row]


class CommitLog:
    """The commits of one agent that wait to be folded."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._file = LogFile(database.path.with_name(database.path.name + LOG_ENDING))
        self._tag = b""
        self._position = 0
        """Of the last commit, in the file or past it."""
        self._folded = -1
        """Up to here the tables hold all; less than nothing while nobody has looked."""
        self._pack = msgpack.Packer().pack
        self.has_room = self._file.has_room
        """Whether the file takes a commit of so many bytes."""
        self._waiting: deque[_Entry] = deque()
        self._gone = 0
        """How many have left it since it was made."""
        self.size = 0
        """In bytes; 0 when nothing waits."""
        self.overrun = False
        """More came than it holds: until there is a quiet moment all goes past it. To fold takes as
        long as to write the tables at once, and in a flood there is no better time for it."""
        self.between: Callable[[], None] = lambda: None
        """Called between the steps of a long fold: commits that wait have their turn."""

    def open(self, *, create: bool) -> None:
        """Know the file and its place; then `recover`, which looks at what it holds."""
        self._position, self._folded = 0, -1
        with mapped_errors(self._file.path, "open"):
            self._file.open(create=create)
        known = self._mark()
        if known is None:
            # It is new; or its mark was lost, and nobody can tell what of this the tables hold.
            self._begin(0, self._read(None))
            return
        news = self._news(*known)
        self._tag, self._folded = known
        self._position = news[-1].position if news else self._folded
        if news and news[0].is_sound and news[0].position != self._folded + 1:
            self._begin(self._folded)  # the tables are of another day: what lies between is nowhere

    def _begin(self, position: int, strange: Sequence[Commit] = ()) -> None:
        """With a tag that nothing in the file has; what is strange there is set aside and named."""
        self._tag = secrets.token_bytes(TAG_BYTES)
        with self._database.transaction("write to") as connection:
            self._set_mark(connection, position)
            for each in strange:
                name = b"%d" % each.position
                self._database.note_damage(connection, "journal", name, [each.content])
            if strange:
                self._database.mail.start_over(connection)
        self._position = self._folded = position
        self._file.rewind()

    def close(self) -> None:
        """Let go of the file, and remove it if it is not needed; does nothing when not open."""
        self._file.close()

    @property
    def used(self) -> int:
        """How much of the file was written since it was begun anew."""
        return self._file.used

    @property
    def is_empty(self) -> bool:
        """Whether the tables hold all; never while nobody has looked at what a crash has left."""
        return self._folded == self._position

    def rest(self) -> None:
        """What was written to the tables is durable: the file of an empty journal is begun anew."""
        if self.is_empty:
            self._file.rewind()

    def takes(self, rows: Sequence[Row]) -> bytes | None:
        """The rows as one commit, or None: then they go to the tables, with what waits here.

        So it is in a flood, with long messages, and when the file is at its end.
        """
        self.overrun = self.overrun or self.size > LOG_BYTES_MAX
        if self.overrun and self.size:
            self.fold_some()
        if self.overrun and not self.size:
            return None
        content = self.packed(rows)
        if not self.has_room(len(content)):
            return None
        return None if is_long(content, rows) and self.size <= FOLD_BYTES else content

    def packed(self, rows: Sequence[Row]) -> bytes:
        """The rows of a commit, as they are kept."""
        stretches: Iterable[tuple[type, Iterable[Any]]] = groupby(rows, type)
        content: bytes = self._pack([(_CODES[kind], list(stretch)) for kind, stretch in stretches])
        return content

    def append(self, content: bytes, rows: Sequence[Row]) -> None:
        """Durable on return, and waits to be folded; raises OSError, and then it is not there."""
        position = self._position + 1
        self._file.append(self._tag, position, content)
        self._position = position
        self._waiting.append(_new(_Entry, (position, len(content), rows)))
        self.size += len(content)

    def pending(self, peer: str, first: int, limit: int) -> list[OutRow]:
        """Messages for `peer` from this number on, if they wait here just as they were accepted;
        none when the tables have to be asked."""
        found: list[OutRow] = []
        for row in _all_rows(self._waiting):
            kind: type = type(row)
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

    def fold_all(self, *, alone: bool = False) -> None:
        """Afterwards the tables hold all that was committed before.

        `alone`: nothing comes between, and the journal is empty.
        """
        last = self._gone + len(self._waiting)
        while self._gone < last:
            self.fold_some()
            if self._gone < last and not alone:
                self.between()  # which may empty the journal by itself

    def fold_some(self) -> None:
        """Bring the oldest commits into the tables."""
        entries: list[_Entry] = []
        size = 0
        for entry in self._waiting:
            entries.append(entry)
            size += entry.size
            if size >= FOLD_BYTES:
                break
        if entries:
            self._fold(entries)
        for _ in entries:
            self._waiting.popleft()
        self._gone += len(entries)
        self.size -= size

    def fold_within(self, connection: apsw.Connection) -> None:
        """As `fold_all`, in a transaction that writes more, which is a commit too; when that has
        succeeded, call `clear`."""
        assert self._folded + len(self._waiting) == self._position, (
            "what a crash left is passed over"
        )
        self._set_mark(connection, self._position + 1)
        if self._waiting:
            self._database.mail.write(connection, _all_rows(self._waiting))

    def clear(self) -> None:
        """All that was here stands in the tables, durably."""
        self._gone += len(self._waiting)
        self._waiting.clear()
        self.size = 0
        self._position = self._folded = self._position + 1
        self._file.rewind()

    def recover(self) -> None:
        """Go on with what an earlier run has left, and name what was damaged of it."""
        known = self._mark()
        assert known is not None, "opened"
        found = [_opened(each) for each in self._news(*known)]
        self._tag, self._folded = known
        self._position = found[-1][0].position if found else self._folded
        sound = [entry for entry, content in found if content is None]
        damaged = [(entry, content) for entry, content in found if content is not None]
        if damaged:
            self._fold(sound, damaged)
            return
        self._waiting = deque(sound)
        self.size = sum(entry.size for entry in sound)
        self._database.mail.note_numbers(
            {row.peer: row.seq + 1 for row in singly(_all_rows(sound)) if isinstance(row, OutRow)}
        )
        with contextlib.suppress(MeshError):  # a full disk: it stays here, where it is safe
            self.fold_all(alone=True)

    def damaged(self) -> list[str]:
        """Every commit of an earlier run that is not what it was; nothing is changed."""
        news = self._news(self._tag, self._folded)
        return [f"journal {each.position}" for each in news if not each.is_sound]

    def _news(self, tag: bytes, folded: int) -> list[Commit]:
        """What stands in the file and not in the tables."""
        return [each for each in self._read(tag) if each.position > folded]

    def _read(self, tag: bytes | None) -> list[Commit]:
        with mapped_errors(self._file.path, "read"):
            return self._file.read(tag)

    def _mark(self) -> tuple[bytes, int] | None:
        """Whose commits are in the file, and up to which the tables hold all."""
        words = self._database.meta().get(_MARK_KEY, "").split()
        return (bytes.fromhex(words[0]), int(words[1])) if words else None

    def _set_mark(self, connection: apsw.Connection, position: int) -> None:
        """Say in the tables that they hold all up to this commit."""
        connection.execute(*encode_row(MetaRow(_MARK_KEY, f"{self._tag.hex()} {position}")))

    def _fold(
        self, entries: Sequence[_Entry], damaged: Sequence[tuple[_Entry, bytes]] = ()
    ) -> None:
        try:
            self._fold_by(self._database.mail.write, entries, damaged)
        except Exception as error:
            if not _is_of_a_row(error):
                raise
            self._fold_by(self._write_singly, entries, damaged)

    def _fold_by(
        self,
        write: Callable[[apsw.Connection, Sequence[Row]], None],
        entries: Sequence[_Entry],
        damaged: Sequence[tuple[_Entry, bytes]],
    ) -> None:
        last = max(entry.position for entry in (*entries, *(entry for entry, _ in damaged)))
        with self._database.unsynced("write to") as connection:
            self._set_mark(connection, last)
            write(connection, _all_rows(entries))
            for entry, content in damaged:
                name = b"%d" % entry.position
                self._database.note_damage(connection, "journal", name, [content])
            if damaged:  # it may have given numbers: nobody knows which are taken
                self._database.mail.start_over(connection)
        self._folded = last

    def _write_singly(self, connection: apsw.Connection, rows: Sequence[Row]) -> None:
        """One row that can't be kept must not stop all others: it is set aside, and named."""
        lost: list[Lost] = []
        for row in singly(rows):
            try:
                with connection:
                    self._database.mail.write(connection, [row])
            except Exception as error:
                if not _is_of_a_row(error):
                    raise
                name = str(getattr(row, "id", "?")).encode()
                self._database.note_damage(connection, "journal", name, [row], repr(error))
                if isinstance(row, OutRow):
                    lost.append(Lost(row.peer.encode(), row.seq, name, 0))
        close_gaps(connection, lost)


def is_long(content: bytes, rows: Sequence[Row]) -> bool:
    """Whether it takes longer to write these rows twice than to find their places."""
    return len(content) > LONG_BYTES * (MANY + _many(rows))


def _many(rows: Sequence[Row]) -> int:
    """How many there are, each message for itself."""
    return sum([
        len(row.ids) if type(row) is OutBatch or type(row) is InBatch else 1 for row in rows
    ])  # fmt: skip


def _is_of_a_row(error: Exception) -> bool:
    """Whether it comes from what a row says, and not from the disk."""
    import apsw

    if isinstance(error, MeshError):
        return error.data.get("sqlite") == apsw.ConstraintError.__name__
    return isinstance(error, apsw.ConstraintError) or not isinstance(error, apsw.Error)


def _all_rows(entries: Iterable[_Entry]) -> list[Row]:
    return [row for entry in entries for row in entry.rows]


def rows_in_table(connection: apsw.Connection) -> list[Row]:
    """What a version has left that kept its commits in a table."""
    found: list[Any] = connection.execute(
        "SELECT content FROM journal ORDER BY position"
    ).fetchall()
    return [row for (content,) in found for row in _rows(content)]


def _opened(commit: Commit) -> tuple[_Entry, bytes | None]:
    """As it waits, and if it is damaged what is left of it."""
    position, content, is_sound = commit
    if not is_sound:
        return _Entry(position, len(content), ()), content
    return _Entry(position, len(content), _rows(content)), None


def _rows(content: bytes) -> list[Row]:
    stretches = msgpack.unpackb(content, use_list=False, strict_map_key=False)
    return [_KINDS[code](*row) for code, stretch in stretches for row in stretch]
