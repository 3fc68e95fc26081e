"""Many rows in one statement.

SQLite runs a statement without Python's lock and needs it again after each; a thread that is busy
in Python then holds every single row up, for milliseconds. With hundreds of rows in one statement
that happens once for all of them. Decides nothing about what is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import apsw

__all__ = ["write_rows"]

ROWS_MAX = 256  # in one statement


def write_rows(connection: apsw.Connection, sql: str, rows: Iterable[Sequence[Any]]) -> None:
    """Run `sql`, in which {rows} stands for a query that gives any number of rows.

    No row begins with None.
    """
    waiting = list(rows)
    for at in range(0, len(waiting), ROWS_MAX):
        part = waiting[at : at + ROWS_MAX]
        columns, places = len(part[0]), 1 << (len(part) - 1).bit_length()
        values = list(chain.from_iterable(part))
        values += [None] * (columns * (places - len(part)))
        connection.execute(_statement(sql, places, columns), values)


@lru_cache(maxsize=64)
def _statement(sql: str, places: int, columns: int) -> str:
    """With places for twice as many rows as for the text before it: so there are few texts to
    prepare, and those places that are empty give no row."""
    row = f"({', '.join('?' * columns)})"
    values = ", ".join([row] * places)
    rows = f"SELECT * FROM (VALUES {values}) WHERE column1 IS NOT NULL"  # noqa: S608 - only marks
    return sql.format(rows=rows)
