"""Many rows in one statement.

SQLite runs a statement without Python's lock and needs it again after each; a thread that is busy
in Python then holds every single row up, for milliseconds. With a stretch of rows in one statement
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

STRETCHES = tuple(2**n for n in range(8))[::-1]
"""Rows per statement: few texts to prepare, and few statements for any number of rows."""


def write_rows(connection: apsw.Connection, sql: str, rows: Iterable[Sequence[Any]]) -> None:
    """Run `sql`, in which {rows} stands for VALUES of any number of rows."""
    waiting = list(rows)
    at = 0
    for stretch in STRETCHES:
        while len(waiting) - at >= stretch:
            part = waiting[at : at + stretch]
            connection.execute(_statement(sql, stretch, len(part[0])), list(chain(*part)))
            at += stretch


@lru_cache(maxsize=64)
def _statement(sql: str, rows: int, columns: int) -> str:
    row = f"({', '.join('?' * columns)})"
    return sql.format(rows=f"VALUES {', '.join([row] * rows)}")
