"""Many rows in one statement: all of them, in order, whatever their number."""

from __future__ import annotations

import apsw
import pytest

from meshagent.storage.mail.bulk_statements import ROWS_MAX, write_rows


@pytest.mark.parametrize(
    "count", [0, 1, 2, 3, 7, ROWS_MAX - 1, ROWS_MAX, ROWS_MAX + 1, 2 * ROWS_MAX + 5]
)
def test_every_row_is_written_once_and_in_order(count: int) -> None:
    connection = apsw.Connection(":memory:")
    connection.execute("CREATE TABLE t(at INTEGER PRIMARY KEY AUTOINCREMENT, a NOT NULL, b)")
    rows = [(f"row {number}", None if number % 3 else number) for number in range(count)]
    write_rows(connection, "INSERT INTO t(a, b) {rows}", rows)
    assert connection.execute("SELECT a, b FROM t ORDER BY at").fetchall() == rows


def test_rows_of_one_text_share_it_up_to_twice_their_number() -> None:
    connection = apsw.Connection(":memory:")
    connection.execute("CREATE TABLE t(a)")
    texts: list[str] = []
    connection.exec_trace = lambda cursor, sql, values: not texts.append(sql)
    for count in (65, 100, 128):
        write_rows(connection, "INSERT INTO t(a) {rows}", [(number,) for number in range(count)])
    assert len(texts) == 3
    assert len(set(texts)) == 1
