"""Outbox, inbox, streams and watermarks as tables: how rows change them, and what can be asked.

Decides what each row means for what is kept; never begins a transaction for a write, and never
decides what is sent. Invariants: the numbers of a stream have no gap and are never given twice in
one epoch; a state is replaced only by one of a larger rank; a message that came is kept once.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from meshagent.core.delivery.mailbox import FOUND_MAX, WATERMARKS_PER_SENDER_MAX, misnumbered
from meshagent.core.model.rows import (
    Arrived,
    Delivered,
    InBatch,
    InEntry,
    InRow,
    InState,
    MailStart,
    NewEpoch,
    OutBatch,
    OutEntry,
    OutRow,
    OutState,
    ReceiptRow,
    Row,
    TurnedAway,
    Watermark,
)
from meshagent.errors import CorruptFile
from meshagent.storage.mail.attachment_index import hold, note_sent, release
from meshagent.storage.mail.bulk_statements import write_rows
from meshagent.storage.mail.quarantine import quarantine, stream_start
from meshagent.storage.mail.row_checksums import (
    IN_CODES,
    IN_COLUMNS,
    IN_DONE,
    IN_OPEN,
    IN_RECEIVING,
    IN_UNREAD,
    OUT_CODES,
    OUT_COLUMNS,
    OUT_DELIVERED,
    OUT_WAITING,
    REPLACES_BELOW,
    UNMARKED,
    advanced,
    delivered_mark,
    in_mark,
    in_values,
    out_mark,
    out_values,
    read_in,
    read_out,
    renumbered,
    settled,
)
from meshagent.storage.mail.schema import (
    TABLES,
    MetaRow,
    StreamRow,
    checksum,
    encode_row,
)

if TYPE_CHECKING:
    import apsw

    from meshagent.storage.mail.database import Database

__all__ = ["EPOCH_BYTES", "MailTables"]

EPOCH_BYTES = 8
RENUMBER_ROWS = 1_000  # read at once, so that memory stays flat whatever waits
POSITION_MAX = 2**63 - 1
UNFIT = b"?"  # no checksum has this length

_PUT_OUT = (
    "INSERT INTO outbox(peer, seq, id, expires_ms, size, checksum, body, state, settled, "
    "changed_ms, mark) {rows}"
)
_QUEUED = (0, 0, 0, UNMARKED)  # state, settled, changed_ms, mark
_ADVANCE_OUT = (
    "UPDATE outbox SET state = ?1, settled = ?2, changed_ms = ?3, reason = ?4, mark = ?5 "
    "WHERE id = ?6 AND peer = ?7 AND state < ?8 AND ?9 >= 0"
)
# By its number, a message stands beside its neighbours, which are settled with it; by its id, in
# an index whose every page is touched.
_ADVANCE_PENDING = (
    "UPDATE outbox INDEXED BY outbox_pending SET state = new.column1, settled = new.column2, "
    "changed_ms = new.column3, reason = new.column4, mark = new.column5 FROM ({rows}) AS new "
    "WHERE peer = new.column7 AND seq = new.column9 AND outbox.settled = 0 AND id = new.column6 "
    "AND outbox.state < new.column8"
)
_DELIVER = (
    "UPDATE outbox INDEXED BY outbox_pending "  # noqa: S608
    f"SET state = {OUT_DELIVERED}, settled = 1, changed_ms = ?4, reason = '', mark = ?5 "
    f"WHERE peer = ?1 AND seq BETWEEN ?2 AND ?3 AND settled = 0 AND state < {OUT_DELIVERED}"
)
_SETTLE_RANGE = (
    "UPDATE outbox INDEXED BY outbox_pending SET settled = 1, mark = settled(CAST(mark AS BLOB), "
    "id, state, changed_ms, reason) WHERE peer = ?1 AND seq BETWEEN ?2 AND ?3 AND settled = 0"
)
_ADVANCE_RECEIPT = (
    "UPDATE outbox SET mark = advanced(CAST(mark AS BLOB), id, state, settled, changed_ms, reason, "
    "?1, ?2, ?6), state = ?1, changed_ms = ?2, reason = ?6 "
    "WHERE id = ?3 AND peer = ?4 AND state < ?5"
)
_SETTLE_OUT = (
    "UPDATE outbox SET settled = 1, mark = settled(CAST(mark AS BLOB), id, state, changed_ms, "
    "reason) WHERE id = ? AND peer = ? AND state >= ? AND settled = 0"
)
_RENUMBER_OUT = (
    "UPDATE outbox SET checksum = renumbered(CAST(checksum AS BLOB), peer, seq, ?1, id, "
    "expires_ms, body), seq = ?1 WHERE position = ?2"
)
_PUT_IN = (
    "INSERT INTO inbox(sender, id, received_ms, size, checksum, body, mark) {rows} "
    "ON CONFLICT(id, sender) DO NOTHING"
)
_ADVANCE_IN = (
    "UPDATE inbox SET state = ?, failures = ?, changed_ms = ?, mark = ? "  # noqa: S608
    f"WHERE id = ? AND sender = ? AND state < {IN_DONE}"
)
# In place when it is the sender's youngest already: a row that is put anew changes two indexes too.
_MOVE_WATERMARK = (
    "UPDATE watermarks SET seq = ?4, last = ?5, exceptions = ?6, checksum = ?7 WHERE key = ?1 "
    "AND rowid = (SELECT max(rowid) FROM watermarks WHERE sender = ?2) AND epoch = ?3"
)
_DROP_OLD_WATERMARKS = (
    "DELETE FROM watermarks WHERE sender = ?1 AND rowid <= (SELECT rowid FROM watermarks "
    "WHERE sender = ?1 ORDER BY rowid DESC LIMIT 1 OFFSET ?2)"
)

_VISIBLE = f"AND state < {IN_RECEIVING}"

Entry = TypeVar("Entry", OutEntry, InEntry)


def _on_damage(function: Callable[..., bytes]) -> Callable[..., bytes]:
    """For SQL: a cell that is not what it was written as must leave a row that does not fit."""

    def guarded(*cells: Any) -> bytes:
        try:
            return function(*cells)
        except (AttributeError, TypeError, ValueError):
            return UNFIT

    return guarded


class MailTables:
    """The messages of one agent, both ways."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._numbers: dict[str, int] = {}

    def prepare(self, connection: apsw.Connection) -> None:
        """Give the connection the functions that the statements use."""
        self.forget_numbers()
        for function, arguments in ((advanced, 9), (renumbered, 7), (settled, 5)):
            connection.create_scalar_function(
                function.__name__, _on_damage(function), arguments, deterministic=True
            )

    def forget_numbers(self) -> None:
        """The tables know them: the journal is empty."""
        self._numbers.clear()

    # -- writing, inside a transaction --------------------------------------------------------

    def numbers_after(self, connection: apsw.Connection, rows: Sequence[Row]) -> dict[str, int]:
        """The next number for each peer once these are kept; all must be next in line."""
        after: dict[str, int] = {}
        for row in rows:
            if type(row) is OutBatch:
                ident, first, end = row.ids[0], row.first, row.first + len(row.ids)
            elif type(row) is OutRow:
                ident, first, end = row.id, row.seq, row.seq + 1
            else:
                continue
            known = after.get(row.peer) or self._numbers.get(row.peer)
            expected = known or self._next_seq(connection, row.peer)
            if first != expected:
                raise misnumbered(row.peer, ident, first, expected)
            after[row.peer] = end
        return after

    def note_numbers(self, numbers: Mapping[str, int]) -> None:
        """Rows have got these: their commit has succeeded."""
        self._numbers.update(numbers)

    def write_anew(self, connection: apsw.Connection, rows: Sequence[Row]) -> None:
        """Rows among which numbers begin anew; the journal is empty."""
        for anew, stretch in groupby(rows, lambda row: type(row) is NewEpoch):
            part = list(stretch)
            if not anew:
                self.note_numbers(self.numbers_after(connection, part))
                self.write(connection, part)
            for row in part:
                if isinstance(row, NewEpoch):
                    self._renumber(connection, row.epoch)

    def write(self, connection: apsw.Connection, rows: Sequence[Row]) -> None:
        """Rows of one kind go together; kinds whose order means nothing pass each other."""
        new_out: list[OutRow] = []
        out_news: list[OutState | Delivered | ReceiptRow] = []
        new_in: list[InRow] = []
        in_news: list[InState] = []
        marks: dict[tuple[str, bytes], Watermark] = {}
        places: dict[type, list[Any]] = {
            OutRow: new_out, InRow: new_in, InState: in_news,
            OutState: out_news, Delivered: out_news, ReceiptRow: out_news,
        }  # fmt: skip
        stretches: Iterable[tuple[type, Iterable[Any]]] = groupby(rows, type)
        for kind, stretch in stretches:
            if kind is Watermark:
                for row in stretch:
                    marks.pop((row.sender, row.epoch), None)
                    marks[row.sender, row.epoch] = row
            elif kind is Arrived or kind is TurnedAway:
                self._write_in(connection, new_in, in_news)  # all that came before stands before
                new_in.clear()
                in_news.clear()
                for row in stretch:
                    release(self._database, connection, row)
            elif kind is OutBatch or kind is InBatch:
                together = new_out if kind is OutBatch else new_in
                for row in stretch:
                    together += row.rows()
            else:
                places[kind] += stretch
        self._write_out(connection, new_out, out_news)
        self._write_in(connection, new_in, in_news)
        self._write_watermarks(connection, list(marks.values()))

    def _write_in(
        self, connection: apsw.Connection, new: Sequence[InRow], news: Sequence[InState]
    ) -> None:
        for held, rows in groupby(new, lambda row: bool(row.blobs)):
            if held:
                hold(connection, list(rows))
            else:
                write_rows(connection, _PUT_IN, [(*in_values(row), UNMARKED) for row in rows])
        if news:
            connection.executemany(_ADVANCE_IN, map(_in_news, news))

    def _write_out(
        self,
        connection: apsw.Connection,
        new: Sequence[OutRow],
        news: Sequence[OutState | Delivered | ReceiptRow],
    ) -> None:
        first = {each.peer: each.seq for each in reversed(new)}
        if new:
            self._write_streams(connection, new)
            _put_out(connection, new, first, [r for r in news if isinstance(r, Delivered)])
            note_sent(connection, [row for row in new if row.blobs])
        for (kind, withdrawn), rows in groupby(news, _kind_of_news):
            if kind is Delivered:
                for row in rows:
                    self._deliver(connection, row, first)  # type: ignore[arg-type]
            elif kind is ReceiptRow:
                connection.executemany(_ADVANCE_RECEIPT, map(_receipt, rows))  # type: ignore[arg-type]
            elif withdrawn:
                for row in rows:
                    self._withdraw(connection, row)  # type: ignore[arg-type]
            else:
                self._advance(connection, list(rows))  # type: ignore[arg-type]

    def _write_streams(self, connection: apsw.Connection, new: Sequence[OutRow]) -> None:
        for peer, last in {row.peer: row.seq for row in new}.items():
            connection.execute(*encode_row(StreamRow(peer, last + 1)))

    def _next_seq(self, connection: apsw.Connection, peer: str) -> int:
        table = TABLES[StreamRow]
        for _, found, *cells in connection.execute(f"{table.select} WHERE peer = ?", (peer,)):
            if found != checksum(table.name, [cell or b"" for cell in cells]):
                raise CorruptFile(
                    f"The number of the next message for {peer} was damaged on disk.",
                    hint="All that waits gets new numbers when delivery begins again.",
                )
            number: int = table.decode(cells).next_seq
            return number
        return 1

    def _advance(self, connection: apsw.Connection, rows: Sequence[OutState]) -> None:
        before = connection.total_changes()
        write_rows(connection, _ADVANCE_PENDING, map(_out_news, rows))
        if connection.total_changes() - before < len(rows):
            connection.executemany(_ADVANCE_OUT, map(_out_news, rows))
            # A receipt came before the answer: the state stays, and the number is settled.
            settling = [r for r in rows if r.taken or OUT_CODES[r.state] >= OUT_DELIVERED]
            connection.executemany(
                _SETTLE_OUT, [(row.id, row.peer, REPLACES_BELOW[row.state]) for row in settling]
            )

    def _deliver(self, connection: apsw.Connection, row: Delivered, new: Mapping[str, int]) -> None:
        """Those below the number from which on they are `new`: these were put as delivered."""
        last = min(row.last, new.get(row.peer, row.last + 1) - 1)
        if last < row.first:
            return
        before = connection.total_changes()
        bounds = (row.peer, row.first, last)
        connection.execute(_DELIVER, (*bounds, row.at_ms, delivered_mark(row.at_ms)))
        if connection.total_changes() - before < last + 1 - row.first:
            # A receipt came before the answer: the state stays, and the number is settled.
            connection.execute(_SETTLE_RANGE, bounds)

    def _withdraw(self, connection: apsw.Connection, row: OutState) -> None:
        """The first word takes the message back; the second says that the recipient knows."""
        before = connection.total_changes()
        connection.execute(_ADVANCE_OUT, _out_news(row))
        if connection.total_changes() == before:
            connection.execute(_SETTLE_OUT, (row.id, row.peer, OUT_WAITING))

    def _write_watermarks(self, connection: apsw.Connection, marks: Sequence[Watermark]) -> None:
        for mark in marks:
            put, values = encode_row(mark)
            before = connection.total_changes()
            connection.execute(_MOVE_WATERMARK, values)
            if connection.total_changes() == before:
                connection.execute(put, values)
                connection.execute(_DROP_OLD_WATERMARKS, (mark.sender, WATERMARKS_PER_SENDER_MAX))

    def start_over(self, connection: apsw.Connection) -> None:
        """Numbers can't be trusted any more: all that waits gets new ones, in a new epoch."""
        self._renumber(connection, secrets.token_bytes(EPOCH_BYTES))

    def _renumber(self, connection: apsw.Connection, epoch: bytes) -> None:
        self.forget_numbers()
        connection.execute(*encode_row(MetaRow("epoch", epoch.hex())))
        found: list[Any] = connection.execute(
            "SELECT CAST(peer AS BLOB) FROM streams "
            "UNION SELECT CAST(peer AS BLOB) FROM outbox WHERE settled = 0"
        ).fetchall()
        connection.execute("DELETE FROM streams")
        for (cell,) in found:
            peer = cell.decode("utf-8", "replace")
            number = self._renumber_one(connection, peer)
            connection.execute(*encode_row(StreamRow(peer, number)))

    def _renumber_one(self, connection: apsw.Connection, peer: str) -> int:
        """The next number afterwards. Upwards, a new number is never larger than the old one, so
        it never meets one that is still to be changed."""
        number, last = 1, 0
        while True:
            rows: list[Any] = connection.execute(
                "SELECT position, CAST(seq AS INTEGER) FROM outbox WHERE peer = ? AND settled = 0 "
                "AND seq > ? ORDER BY seq LIMIT ?",
                (peer, last, RENUMBER_ROWS),
            ).fetchall()
            if not rows:
                return number
            numbered = [(new, at) for new, (at, _) in enumerate(rows, number)]
            connection.executemany(_RENUMBER_OUT, numbered)
            number, last = number + len(rows), rows[-1][1]

    # -- asking -------------------------------------------------------------------------------

    def start(self) -> MailStart:
        """Where delivery stands."""
        streams: list[StreamRow] = self._database.scan(TABLES[StreamRow], self.start_over)
        marks: list[Watermark] = self._database.scan(TABLES[Watermark])
        with self._database.mapped("read"):
            floors = [stream_start(self._database.connected(), row) for row in streams]
        unread = self._database.value(
            f"SELECT count(*) FROM inbox WHERE state < {IN_OPEN}"  # noqa: S608
        )
        rows = self.read_out(f"settled = 1 AND state < {OUT_WAITING}", ())
        taken = [(each.peer, each.id) for each in rows]
        return MailStart(self._database.epoch(), tuple(floors), tuple(marks), unread, tuple(taken))

    def pending(self, peer: str, first: int, limit: int) -> list[OutEntry]:
        """Not settled, from a number on."""
        where = "peer = ? AND settled = 0 AND seq >= ? ORDER BY seq LIMIT ?"
        return self.read_out(where, (peer, first, limit))

    def due(self, now_ms: int, limit: int) -> list[OutEntry]:
        """Their time is up, and no answer has come."""
        where = (
            "expires_ms > 0 AND expires_ms <= ? AND state < 2 AND settled = 0 "
            "ORDER BY expires_ms LIMIT ?"
        )
        return self.read_out(where, (now_ms, limit))

    def next_expiry(self) -> int | None:
        """The earliest time at which `due` has something."""
        found: int | None = self._database.value(
            "SELECT min(expires_ms) FROM outbox WHERE expires_ms > 0 AND state < 2 AND settled = 0"
        )
        return found

    def outbox(self, limit: int, ended: bool) -> list[OutEntry]:
        """By age."""
        if ended:
            return self.read_out("TRUE ORDER BY position LIMIT ?", (limit,))
        where = (
            "position IN (SELECT position FROM outbox INDEXED BY outbox_pending "  # noqa: S608
            f"WHERE settled = 0 AND state < {OUT_WAITING} UNION ALL SELECT position FROM outbox "
            f"WHERE settled = 1 AND state < {OUT_WAITING} ORDER BY position LIMIT ?) "
            "ORDER BY position"
        )
        return self.read_out(where, (limit,))

    def withdrawn(self) -> int:
        """Those that ended here, and whose numbers are not settled."""
        return int(
            self._database.value(
                "SELECT count(*) FROM outbox INDEXED BY outbox_pending "  # noqa: S608
                f"WHERE settled = 0 AND state >= {OUT_WAITING} AND state < {OUT_DELIVERED}"
            )
        )

    def outgoing(self, prefix: str) -> list[OutEntry]:
        """Those whose id begins so."""
        return self.read_out("id >= ? AND id < ? ORDER BY id LIMIT ?", _range(prefix))

    def inbox(self, after: int, limit: int, unread: bool) -> list[InEntry]:
        """Beyond a position."""
        still = f"AND state < {IN_OPEN if unread else IN_RECEIVING}"
        return self.read_in(f"position > ? {still} ORDER BY position LIMIT ?", (after, limit))

    def recent(self, limit: int, upto: int | None, unseen: bool) -> list[InEntry]:
        """The newest up to a position, oldest of them first."""
        # The index holds what is open; SQLite takes it when the query has the same words.
        still = f"AND state < {IN_OPEN} AND state = {IN_UNREAD}" if unseen else _VISIBLE
        where = f"position <= ? {still} ORDER BY position DESC LIMIT ?"
        bound = POSITION_MAX if upto is None else upto
        return self.read_in(where, (bound, limit))[::-1]

    def newest(self) -> int:
        """The largest position in the inbox."""
        return int(self._database.value("SELECT coalesce(max(position), 0) FROM inbox"))

    def receiving(self) -> list[InEntry]:
        """Those that are held, oldest first."""
        return self.read_in(f"state = {IN_RECEIVING} ORDER BY position", ())

    def incoming(self, prefix: str) -> list[InEntry]:
        """Those whose id begins so."""
        return self.read_in("id >= ? AND id < ? ORDER BY id LIMIT ?", _range(prefix))

    def read_out(self, where: str, values: tuple[Any, ...]) -> list[OutEntry]:
        """The sound rows of the outbox that fit."""
        sql = f"SELECT {OUT_COLUMNS} FROM outbox WHERE {where}"  # noqa: S608
        return self._read("outbox", sql, values, read_out)

    def read_in(self, where: str, values: tuple[Any, ...]) -> list[InEntry]:
        """The sound rows of the inbox that fit."""
        sql = f"SELECT {IN_COLUMNS} FROM inbox WHERE {where}"  # noqa: S608
        return self._read("inbox", sql, values, read_in)

    def _read(
        self,
        table: str,
        sql: str,
        values: tuple[Any, ...],
        open_row: Callable[[Sequence[Any]], Entry | None],
    ) -> list[Entry]:
        while True:
            with self._database.mapped("read"):
                rows = self._database.connected().execute(sql, values).fetchall()
            entries = [open_row(row) for row in rows]
            damaged = [row for row, entry in zip(rows, entries, strict=True) if entry is None]
            if not damaged:
                return [entry for entry in entries if entry is not None]
            # Each round removes some, so this ends; the rest of what was asked for moves up.
            quarantine(self._database, table, damaged)


def _put_out(
    connection: apsw.Connection,
    new: Sequence[OutRow],
    first: Mapping[str, int],
    delivered: Sequence[Delivered],
) -> None:
    """New messages, and as delivered at once those that have arrived meanwhile."""
    ends: dict[str, dict[int, tuple[Any, ...]]] = {peer: {} for peer in first}
    for row in delivered:
        if row.last >= first.get(row.peer, row.last + 1):
            numbers = range(max(row.first, first[row.peer]), row.last + 1)
            end = (OUT_DELIVERED, 1, row.at_ms, delivered_mark(row.at_ms))
            ends[row.peer].update(dict.fromkeys(numbers, end))
    values = [out_values(row) + ends[row.peer].get(row.seq, _QUEUED) for row in new]
    write_rows(connection, _PUT_OUT, values)


def _kind_of_news(row: OutState | Delivered | ReceiptRow) -> tuple[type, bool]:
    if isinstance(row, Delivered):
        return Delivered, False
    code = OUT_CODES[row.state]
    return type(row), OUT_WAITING <= code < OUT_DELIVERED


def _out_news(row: OutState) -> tuple[Any, ...]:
    code = OUT_CODES[row.state]
    ends = int(row.taken or code >= OUT_DELIVERED)
    mark = out_mark(row.id, code, ends, row.at_ms, row.reason)
    below = REPLACES_BELOW[row.state]
    return code, ends, row.at_ms, row.reason, mark, row.id, row.peer, below, row.seq


def _receipt(row: ReceiptRow) -> tuple[Any, ...]:
    code, below = OUT_CODES[row.state], REPLACES_BELOW[row.state]
    return code, row.at_ms, row.id, row.peer, below, row.reason


def _in_news(row: InState) -> tuple[Any, ...]:
    code = IN_CODES[row.state]
    mark = in_mark(row.id, code, row.failures, row.at_ms)
    return code, row.failures, row.at_ms, mark, row.id, row.sender


def _range(prefix: str) -> tuple[str, str, int]:
    """Ids that begin so, as bounds: an index finds them."""
    clean = prefix.encode("utf-8", "replace").decode("utf-8")
    return clean, clean + "\U0010ffff", FOUND_MAX
