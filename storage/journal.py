"""What was committed and does not stand in the tables yet.

A commit puts all its rows into one row at the end of one table, which is the least that SQLite can
make durable. In a quiet moment, or before a question is answered, they are folded into the tables
where they can be found: many at once, and as they have ended by then. What a crash left here is
folded before anything else. Decides nothing about what a row means. Invariants: rows are folded
once and in the order of their commits; one step does a bounded amount of work.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import msgpack

from meshagent.core.ports import (
    Arrived,
    Delivered,
    InRow,
    InState,
    OutRow,
    OutState,
    Receipt,
    Row,
    TurnedAway,
    Watermark,
)
from meshagent.errors import MeshError
from meshagent.storage.decay import Lost, close_gaps

if TYPE_CHECKING:
    import apsw

    from meshagent.storage.database import Database

__all__ = ["JOURNAL_BYTES_MAX", "Journal", "is_long"]

JOURNAL_BYTES_MAX = 4 * 1024 * 1024  # in memory too: some 12,000 short messages
LONG_BYTES = 1024  # a row, on average of
MANY = 16  # at the least: the delay of one message counts more than what it takes to write it
FOLD_BYTES = 256 * 1024  # at a time: some ms, then a commit that waits has its turn

# A kind of row is kept as its place here: new ones come at the end.
_KINDS = (
    OutRow, OutState, Delivered, Receipt, InRow, Arrived, TurnedAway, InState, Watermark
)  # fmt: skip
_CODES: dict[type, int] = {kind: code for code, kind in enumerate(_KINDS)}


class _Entry(NamedTuple):
    """One commit."""

    position: int
    size: int
    rows: Sequence[Row]


class Journal:
    """The commits of one agent that wait to be folded."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._pack = msgpack.Packer().pack
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

    def takes(self, rows: Sequence[Row]) -> bytes | None:
        """The rows as one cell, or None: then they go to the tables, with what waits here.

        So it is in a flood, and with long messages.
        """
        self.overrun = self.overrun or self.size > JOURNAL_BYTES_MAX
        if self.overrun and self.size:
            self.fold_some()
        if self.overrun and not self.size:
            return None
        content = self.packed(rows)
        return None if is_long(content, len(rows)) and self.size <= FOLD_BYTES else content

    def packed(self, rows: Sequence[Row]) -> bytes:
        """The rows of a commit as one cell."""
        stretches: Iterable[tuple[type, Iterable[Any]]] = groupby(rows, type)
        content: bytes = self._pack([(_CODES[kind], list(stretch)) for kind, stretch in stretches])
        return content

    def append(self, connection: apsw.Connection, content: bytes) -> None:
        """Durable with the transaction; then call `add`."""
        connection.execute(
            "INSERT INTO journal(checksum, content) VALUES(?, ?)", (_seal(content), content)
        )

    def add(self, position: int, content: bytes, rows: Sequence[Row]) -> None:
        """These were committed, and wait to be folded."""
        self._waiting.append(_Entry(position, len(content), rows))
        self.size += len(content)

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
        """As `fold_all`, in a transaction; when that has succeeded, call `clear`."""
        if self._waiting:
            connection.execute("DELETE FROM journal")
            self._database.mail.write(connection, _all_rows(self._waiting))

    def clear(self) -> None:
        """All that was here stands in the tables."""
        self._gone += len(self._waiting)
        self._waiting.clear()
        self.size = 0

    def recover(self) -> None:
        """Go on with what an earlier run has left, and name what was damaged of it."""
        found = self._left()
        sound = [entry for entry, content in found if content is None]
        damaged = [(entry, content) for entry, content in found if content is not None]
        if damaged:
            self._fold(sound, damaged)
            return
        self._waiting = deque(sound)
        self.size = sum(entry.size for entry in sound)
        self._database.mail.note_numbers(
            {row.peer: row.seq + 1 for row in _all_rows(sound) if isinstance(row, OutRow)}
        )
        with contextlib.suppress(MeshError):  # a full disk: it stays here, where it is safe
            self.fold_all(alone=True)

    def damaged(self) -> list[str]:
        """Every commit of an earlier run that does not fit its checksum; nothing is changed."""
        return [f"journal {entry.position}" for entry, content in self._left() if content]

    def _left(self) -> list[tuple[_Entry, bytes | None]]:
        """All that stands on the disk, and of the damaged ones what is left of them."""
        with self._database.mapped("read"):
            found: list[Any] = (
                self._database.connected()
                .execute(
                    "SELECT position, CAST(checksum AS BLOB), CAST(content AS BLOB) FROM journal "
                    "ORDER BY position"
                )
                .fetchall()
            )
        return [_opened(position, seal, content or b"?") for position, seal, content in found]

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
            # First: the room that they took is used again.
            connection.execute("DELETE FROM journal WHERE position <= ?", (last,))
            write(connection, _all_rows(entries))
            for entry, content in damaged:
                name = b"%d" % entry.position
                self._database.note_damage(connection, "journal", name, [content])
            if damaged:  # it may have given numbers: nobody knows which are taken
                self._database.mail.start_over(connection)

    def _write_singly(self, connection: apsw.Connection, rows: Sequence[Row]) -> None:
        """One row that can't be kept must not stop all others: it is set aside, and named."""
        lost: list[Lost] = []
        for row in rows:
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


def is_long(content: bytes, rows: int) -> bool:
    """Whether it takes longer to write these rows twice than to find their places."""
    return len(content) > LONG_BYTES * (MANY + rows)


def _is_of_a_row(error: Exception) -> bool:
    """Whether it comes from what a row says, and not from the disk."""
    import apsw

    if isinstance(error, MeshError):
        return error.data.get("sqlite") == apsw.ConstraintError.__name__
    return isinstance(error, apsw.ConstraintError) or not isinstance(error, apsw.Error)


def _all_rows(entries: Iterable[_Entry]) -> list[Row]:
    return [row for entry in entries for row in entry.rows]


def _seal(content: bytes) -> bytes:
    """Against decay in the moment until it is folded: a quarter of the time that a hash takes."""
    return crc32(content).to_bytes(4, "big")


def _opened(position: int, seal: bytes, content: bytes) -> tuple[_Entry, bytes | None]:
    if seal == _seal(content):
        stretches = msgpack.unpackb(content, use_list=False, strict_map_key=False)
        rows = [_KINDS[code](*row) for code, stretch in stretches for row in stretch]
        return _Entry(position, len(content), rows), None
    return _Entry(position, len(content), ()), content
