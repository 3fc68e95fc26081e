"""What an earlier run has left in the commit log, and what is done when some of it is missing.

Decides which commits the tables take as they are, and which as good as it can be done. Never
drops a sound commit, and never leaves a missing one unnamed. Invariant: a number that somebody
may have seen under an epoch is never given again under it: behind anything missing, all numbers
begin anew under a new epoch.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from meshagent.core.model.rows import Delivered, NewEpoch, OutRow, OutState, Row, singly
from meshagent.errors import MeshError
from meshagent.storage.log.log_file import HEADER_BYTES, TAG_BYTES, Commit
from meshagent.storage.mail.quarantine import write_singly
from meshagent.storage.mail.row_codec import UnknownRows, names_in, unpack_rows

if TYPE_CHECKING:
    import apsw

    from meshagent.storage.mail.database import Database

__all__ = ["recover"]

_UNSOUND = "its checksum does not fit"
_UNKNOWN = "it holds a kind of row that this version does not know"
_GAP = "these commits are missing: the tables are older than the commit log"
_NO_FILE = "the commit log is missing after an unclean stop: what it held is lost"


class _FoundCommit(NamedTuple):
    """A commit in the log that the tables do not hold."""

    commit: Commit
    rows: Sequence[Any]
    fault: str = ""


def recover(database: Database) -> None:
    """Open the log and go on with what is in it; name what is missing."""
    was_there = database.log.open()
    mark = database.log_mark()
    commits = database.log.read(mark.tag if mark else None)
    found = [_opened(each) for each in commits if mark is None or each.position > mark.position]
    lost_file = mark is not None and mark.is_running and not was_there
    if mark is None or lost_file or "epoch" not in database.meta():
        # A new database; or nobody can tell what of this the tables hold, and what was given out.
        database.log.begin(secrets.token_bytes(TAG_BYTES), 0)
        _mend(database, (), found, lost_file=lost_file)
        return
    whole = _whole(found, mark.position)
    database.log.begin(mark.tag, mark.position)
    if whole == len(found):
        if not mark.is_running:
            database.mark_running(mark.position)
        _go_on(database, found)
    else:
        database.log.begin(mark.tag, found[-1].commit.position)
        _mend(database, found[:whole], found[whole:])


def _opened(commit: Commit) -> _FoundCommit:
    if not commit.is_sound:
        return _FoundCommit(commit, (), _UNSOUND)
    try:
        return _FoundCommit(commit, unpack_rows(commit.content))
    except UnknownRows:
        return _FoundCommit(commit, (), _UNKNOWN)


def _whole(found: Sequence[_FoundCommit], position: int) -> int:
    """How many follow each other and this position, with no fault."""
    for count, each in enumerate(found):
        if each.fault or each.commit.position != position + 1 + count:
            return count
    return len(found)


def _go_on(database: Database, found: Sequence[_FoundCommit]) -> None:
    """Nothing is missing."""
    for each in found:
        database.log.keep(each.commit, each.rows)
    try:
        database.log.fold_all(alone=True)
    except MeshError:  # a full disk: it stays where it is safe
        with database.trial() as connection:
            numbers = database.mail.numbers_by_trial(connection, database.log.rows_waiting())
        database.mail.note_numbers(numbers)


def _mend(
    database: Database,
    whole: Sequence[_FoundCommit],
    behind: Sequence[_FoundCommit],
    *,
    lost_file: bool = False,
) -> None:
    """Something is missing: the commits `behind` it are taken as good as that can be done."""
    with database.transaction("repair") as connection:
        write_singly(database, connection, [row for each in whole for row in each.rows])
        database.mail.start_over(connection)
        _name_missing(database, connection, whole, behind, lost_file)
        adoption = _Adoption(database, connection)
        for each in behind:
            adoption.add(each.rows)
        write_singly(database, connection, adoption.rows)
        database.mail.start_over(connection)  # some of them have ended: no number is missing
        database.set_mark(connection)
    database.log.rewind()


def _name_missing(
    database: Database,
    connection: apsw.Connection,
    whole: Sequence[_FoundCommit],
    behind: Sequence[_FoundCommit],
    lost_file: bool,
) -> None:
    if lost_file:
        database.note_damage(connection, "log", b"file", b"", reason=_NO_FILE)
    mark = database.log_mark()
    last = whole[-1].commit.position if whole else mark.position if mark else None
    for each in behind:
        position, content, _ = each.commit
        if each.fault:
            names = names_in(content) or names_in(content[HEADER_BYTES:]) or [("", "")]
            for at, (peer, ident) in enumerate(names):
                database.note_damage(
                    connection, "log", b"%d" % position, b"" if at else content,
                    peer.encode(), ident.encode(), each.fault,
                )  # fmt: skip
        elif last is not None and position > last + 1:
            key = b"%d to %d" % (last + 1, position - 1)
            database.note_damage(connection, "log", key, b"", reason=_GAP)
        last = None if each.fault else position  # one that is not sound stands for all up to next


class _Adoption:
    """Rows from behind something missing, as they can be taken under the new epoch.

    Messages that the tables do not have get the next numbers; what was said of messages by their
    old numbers is said of them by their ids, and of those whose ids are not known not at all: then
    they are sent once more, and their recipients know them by their ids.
    """

    def __init__(self, database: Database, connection: apsw.Connection) -> None:
        self._database, self._connection = database, connection
        self._ids: dict[tuple[str, int], str] = {}
        self._numbers: dict[str, int] = {}
        self.rows: list[Row] = []

    def add(self, rows: Sequence[Row]) -> None:
        """Of the next commit."""
        for row in singly(rows):
            if isinstance(row, OutRow):
                self._add_message(row)
            elif isinstance(row, Delivered):
                ids = [
                    ident for (peer, number), ident in self._ids.items()
                    if peer == row.peer and row.first <= number <= row.last
                ]  # fmt: skip
                self.rows += [
                    OutState(row.peer, 0, ident, "delivered", "", row.at_ms) for ident in ids
                ]
            elif isinstance(row, NewEpoch):
                self._ids.clear()  # their numbers mean nothing from here on
            else:
                self.rows.append(row)

    def _add_message(self, row: OutRow) -> None:
        self._ids[row.peer, row.seq] = row.id
        known = self._connection.execute("SELECT 1 FROM outbox WHERE id = ?", (row.id,)).fetchall()
        if not known:
            number = self._numbers.get(row.peer) or self._database.mail.next_seq(
                self._connection, row.peer
            )
            self._numbers[row.peer] = number + 1
            self.rows.append(row._replace(seq=number))
