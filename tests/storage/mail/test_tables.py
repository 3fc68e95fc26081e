"""What the store on disk promises about messages beyond the port: decay, crashes, older files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import apsw
import pytest
from storage.mail.mail_rows import (
    EPOCH,
    OTHER,
    PEER,
    became,
    came,
    live,
    out,
    outs,
    receipt,
    torn_copy,
    word,
)

from meshagent.core.model.body_summary import summarize
from meshagent.core.model.message_states import MessageState
from meshagent.core.model.rows import Delivered, NewEpoch, PeerRow, Watermark
from meshagent.errors import CorruptFile, StorageError
from meshagent.storage.log.commit_log import CommitLog
from meshagent.storage.mail import database as database_module
from meshagent.storage.mail import search as texts_module
from meshagent.storage.mail import sqlite_store as sqlite_module
from meshagent.storage.mail.database import WAL_BYTES_MAX, Database
from meshagent.storage.mail.schema import MIGRATIONS, SCHEMA_VERSION
from meshagent.storage.mail.sqlite_store import SqliteStore

Script = Callable[[SqliteStore], Awaitable[None]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mesh.db"


def alter(path: Path, sql: str, *values: object) -> None:
    """Change a file behind the store's back, as decay would."""
    connection = apsw.Connection(str(path))
    connection.execute(sql, values)
    connection.close()


# Decay


@pytest.mark.parametrize(
    "damage",
    [
        "body = CAST(x'00' || substr(body, 2) AS BLOB)",
        "body = NULL",
        "peer = 'beta-bbbbbbbc'",
        "peer = CAST(x'ff6265' AS TEXT)",
        "seq = 7",
        "seq = 'x'",
        "id = 'b9'",
        "expires_ms = 1",
        "state = 4",
        "state = 99",
        "settled = 1",
        "changed_ms = 5",
        "reason = 'x'",
        "mark = x'0000000000000000'",
        "checksum = x''",
    ],
)
def test_a_damaged_message_of_ours_is_named_and_never_stops_its_stream(
    path: Path, damage: str
) -> None:
    async def send(store: SqliteStore) -> None:
        await store.commit([*outs(4), word("b1", "delivered")])

    async def look(store: SqliteStore) -> None:
        await store.outbox(100, ended=True)
        found = await store.pending(PEER, 1, 10)
        # Where it stood may not be known; at the lowest number nobody waits for it then.
        lost = damage.startswith(("peer", "seq", "settled"))
        assert [entry.seq for entry in found] == ([3, 4] if lost else [2, 3, 4])
        by_id = {entry.id: entry for entry in found}
        assert by_id["b3"].state == by_id["b4"].state == "queued"
        for entry in found:
            if entry.seq == 2:
                assert entry.state == MessageState.CANCELLED
                assert "damaged" in entry.reason
        facts = await store.facts()
        assert facts["quarantined"] == "1"
        assert facts["damaged_rows"].startswith("outbox b")
        await store.commit([out(5, "b5"), *(word(e.id, "delivered") for e in found)])
        assert len(await store.pending(PEER, 1, 10)) <= 2

    live(SqliteStore(path), send)
    drop_rules(path, "outbox")
    alter(path, f"UPDATE outbox SET {damage} WHERE id = 'b2'")
    live(SqliteStore(path), look)


def drop_rules(path: Path, table: str) -> None:
    """Decay does not respect NOT NULL."""
    connection = apsw.Connection(str(path))
    connection.execute("PRAGMA writable_schema = ON")
    connection.execute(
        "UPDATE sqlite_schema SET sql = replace(sql, ' NOT NULL', '') WHERE name = ?", (table,)
    )
    connection.execute("PRAGMA writable_schema = RESET")
    connection.close()


@pytest.mark.parametrize("damage", ["sender = 'x'", "id = 'y'", "state = 3", "failures = 2"])
def test_a_damaged_message_that_came_is_named_and_the_rest_served(path: Path, damage: str) -> None:
    async def take(store: SqliteStore) -> None:
        await store.commit([came(f"m{n}") for n in range(4)])

    async def look(store: SqliteStore) -> None:
        assert [entry.id for entry in await store.inbox(0, 2)] == ["m0", "m2"]
        facts = await store.facts()
        assert (facts["quarantined"], facts["damaged_rows"][:6]) == ("1", "inbox ")
        await store.commit([came("m1")])
        assert len(await store.inbox(0, 9)) == 4

    live(SqliteStore(path), take)
    alter(path, f"UPDATE inbox SET {damage} WHERE id = 'm1'")
    live(SqliteStore(path), look)


def test_a_flipped_bit_in_the_file_costs_one_message(path: Path) -> None:
    async def take(store: SqliteStore) -> None:
        await store.commit([came(f"m{n}", text=f"content of {n}") for n in range(4)])

    async def look(store: SqliteStore) -> None:
        assert [entry.id for entry in await store.inbox(0, 9)] == ["m0", "m1", "m3"]
        assert (await store.facts())["damaged_rows"].startswith("inbox m2")

    live(SqliteStore(path), take)
    data = bytearray(path.read_bytes())
    data[data.index(b"content of 2") + 3] ^= 0x04
    path.write_bytes(data)
    live(SqliteStore(path), look)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_bit_flips_nothing_wrong_is_ever_served(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    rows = [out(n, text="a text of ours " * 9, expires_ms=50) for n in range(1, 60)]
    mail = [came(f"c{n}", text="one that came " * 9) for n in range(60)]
    marks = [Watermark(PEER, EPOCH, 5, bytes(16)), Watermark(OTHER, EPOCH, 7, bytes(16))]
    bodies = {row.body for row in rows} | {row.body for row in mail} | {b""}
    news = [word(f"b{n}", "delivered") for n in range(1, 9)]
    live(SqliteStore(path), lambda store: store.commit([*rows, *mail, *marks, *news]))
    whole = path.read_bytes()

    async def look(store: SqliteStore) -> None:
        start = await store.mail_start()
        assert set(start.watermarks) <= set(marks)
        found = [*await store.outbox(99, ended=True), *await store.due(99, 99)]
        found += await store.pending(PEER, 1, 99)
        assert {entry.body for entry in found} <= bodies
        assert {entry.body for entry in await store.inbox(0, 99)} <= bodies
        assert {entry.body for entry in await store.log(99, search="text")} <= bodies
        start = await store.mail_start()
        for stream in start.streams:
            waiting = [entry.seq for entry in await store.pending(stream.peer, 1, 99)]
            assert waiting == list(range(stream.floor, stream.next_seq)), "the stream would stop"

    for _ in range(15):
        data = bytearray(whole)
        data[rng.randrange(4096, len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        # A page that makes no sense is found by SQLite; the file as a whole is then damaged.
        with contextlib.suppress(CorruptFile):
            live(SqliteStore(path), look)
        for ending in ("-wal", "-shm"):
            path.with_name(f"mesh.db{ending}").unlink(missing_ok=True)


def test_a_settled_row_that_decays_is_not_made_whole_by_news_of_it(path: Path) -> None:
    async def send(store: SqliteStore) -> None:
        await store.commit(outs(3))

    async def news(store: SqliteStore) -> None:
        await store.commit([receipt("b1", "seen"), NewEpoch(b"epoch--2")])
        found = await store.outbox(9, ended=True)
        assert [entry.id for entry in found if entry.state != "cancelled"] == ["b2", "b3"]
        assert (await store.facts())["quarantined"] == "1"

    live(SqliteStore(path), send)
    alter(path, "UPDATE outbox SET settled = 1 WHERE id = 'b1'")
    live(SqliteStore(path), news)


@pytest.mark.parametrize("damaged", ["streams", "meta"])
def test_numbers_that_are_not_certain_any_more_are_given_anew(path: Path, damaged: str) -> None:
    epochs: list[bytes] = []

    async def send(store: SqliteStore) -> None:
        await store.commit([*outs(4), *outs(2, OTHER), word("b1", "delivered")])
        epochs.append((await store.mail_start()).epoch)

    async def look(store: SqliteStore) -> None:
        start = await store.mail_start()
        assert start.epoch != epochs[0]
        assert {(each.peer, each.floor, each.next_seq) for each in start.streams} == {
            (PEER, 1, 4), (OTHER, 1, 3)
        }  # fmt: skip
        assert [entry.id for entry in await store.pending(PEER, 1, 9)] == ["b2", "b3", "b4"]
        assert await store.mail_start() == start

    live(SqliteStore(path), send)
    column, where = ("next_seq", f"peer = '{PEER}'") if damaged == "streams" else (
        "value", "key = 'epoch'"
    )  # fmt: skip
    alter(path, f"UPDATE {damaged} SET {column} = '00' WHERE {where}")
    live(SqliteStore(path), look)


def test_a_damaged_counter_takes_no_message_until_it_was_looked_at(path: Path) -> None:
    async def send(store: SqliteStore) -> None:
        await store.commit(outs(2))

    async def look(store: SqliteStore) -> None:
        with pytest.raises(StorageError, match="damaged"):
            await store.commit([out(3, "b3")])
        await store.mail_start()
        await store.commit([out(3, "b3")])

    live(SqliteStore(path), send)
    alter(path, "UPDATE streams SET next_seq = 1")
    live(SqliteStore(path), look)


def test_a_damaged_watermark_is_forgotten_and_named(path: Path) -> None:
    marks = [Watermark(peer, EPOCH, 9, b"h" * 16, ((2, "no"),)) for peer in (PEER, OTHER)]

    async def look(store: SqliteStore) -> None:
        assert (await store.mail_start()).watermarks == (marks[1],)
        assert "watermarks" in (await store.facts())["damaged_rows"]

    live(SqliteStore(path), lambda store: store.commit(marks))
    alter(path, f"UPDATE watermarks SET seq = 99 WHERE sender = '{PEER}'")
    live(SqliteStore(path), look)


def test_a_damaged_index_of_words_is_made_anew(path: Path) -> None:
    async def fill(store: SqliteStore) -> None:
        await store.commit([out(n, text=f"needle {n}") for n in range(1, 9)])
        assert len(await store.log(99, search="needle")) == 8

    async def look(store: SqliteStore) -> None:
        assert len(await store.log(99, search="needle")) == 8

    live(SqliteStore(path), fill)
    alter(path, "DELETE FROM outbox_text_data WHERE id > 10")
    live(SqliteStore(path), look)


def test_a_truncated_log_costs_only_its_last_commit(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_module, "QUIET_S", 600.0)  # else a fold may be what is cut off
    copy = path.with_name("copy.db")

    async def script(store: SqliteStore) -> None:
        for row in outs(3):
            await store.commit([row])
        torn_copy(path, copy, "-commits")

    async def look(store: SqliteStore) -> None:
        assert [entry.seq for entry in await store.pending(PEER, 1, 9)] == [1, 2]
        (stream,) = (await store.mail_start()).streams
        assert (stream.floor, stream.next_seq) == (1, 3)
        assert (await store.facts())["quarantined"] == "0"

    live(SqliteStore(path), script)
    live(SqliteStore(copy), look)


# Crashes


SEND_FOR_EVER = """
import asyncio, sys
from pathlib import Path
from storage.mail.mail_rows import PEER, came, out
from meshagent.core.model.rows import (Watermark)
from meshagent.storage.mail.sqlite_store import SqliteStore

async def main():
    store = SqliteStore(Path(sys.argv[1]))
    await store.open()
    streams = {stream.peer: stream for stream in (await store.mail_start()).streams}
    seq = streams[PEER].next_seq if PEER in streams else 1
    waiting = set()
    while True:
        rows = [out(seq + n, f"m{seq + n}") for n in range(3)]
        rows += [came(f"c{seq}"), Watermark(PEER, bytes(8), seq, bytes(16))]
        task = asyncio.ensure_future(store.commit(rows))
        task.add_done_callback(lambda _, last=seq + 2: print(last, flush=True))
        waiting.add(task)
        seq += 3
        if len(waiting) == 4:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)

asyncio.run(main())
"""


@pytest.mark.process
def test_every_accepted_message_survives_kill_9(path: Path) -> None:
    tests = str(Path(__file__).parent.parent.parent)
    acknowledged = 0

    async def look(store: SqliteStore) -> None:
        found = [entry.seq for entry in await store.pending(PEER, 1, 100_000)]
        assert found == list(range(1, len(found) + 1))
        assert len(found) >= acknowledged
        assert len(found) % 3 == 0, "a transaction was torn"
        start = await store.mail_start()
        assert start.streams[0].next_seq == len(found) + 1
        assert len(await store.inbox(0, 100_000)) == start.unread == len(found) // 3
        assert start.watermarks[0].seq == len(found) - 2
        assert (await store.facts())["quarantined"] == "0"

    for kill_after in (1, 9, 40, 120):
        with subprocess.Popen(
            [sys.executable, "-c", SEND_FOR_EVER, str(path)],
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": tests},
        ) as process:
            assert process.stdout is not None
            for _ in range(kill_after):
                acknowledged = int(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
            told = [int(line) for line in process.stdout if line.endswith("\n")]
            acknowledged = max([acknowledged, *told])
        live(SqliteStore(path), look)


# Many rows


def test_one_commit_is_all_or_nothing(path: Path) -> None:
    async def script(store: SqliteStore) -> None:
        await store.commit([out(1, "m")])
        before = await store.mail_start()
        rows = [out(2, "n"), word("m", "delivered"), came("c"), Watermark(PEER, EPOCH, 1, b"")]
        with pytest.raises(StorageError):
            await store.commit([*rows, became("c", "done"), NewEpoch(bytes(8)), out(9, "bad")])
        assert await store.mail_start() == before
        assert [entry.state for entry in await store.outbox(9, ended=True)] == ["queued"]

    live(SqliteStore(path), script)


def test_a_large_commit_does_not_share_its_transaction(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_module, "GROUP_BYTES_MAX", 1_000)
    sizes: list[int] = []
    real = Database.write

    def write(database: Database, rows: list[object]) -> None:
        sizes.append(len(rows))
        real(database, rows)  # type: ignore[arg-type]

    async def script(store: SqliteStore) -> None:
        monkeypatch.setattr(Database, "write", write)
        rows = [out(n, text="x" * 400) for n in range(1, 21)]
        await asyncio.gather(*(store.commit([row]) for row in rows))
        assert max(sizes) <= 2
        assert sum(sizes) == 20
        assert len(await store.pending(PEER, 1, 99)) == 20

    live(SqliteStore(path), script)


def test_the_log_stays_bounded_while_others_read(path: Path) -> None:
    async def script(store: SqliteStore) -> None:
        for batch in range(40):
            rows = [out(batch * 50 + n, text="x" * 4_000) for n in range(1, 51)]
            await asyncio.gather(store.commit(rows), store.outbox(10), store.log(10))
            assert int((await store.facts())["wal"]) <= 2 * WAL_BYTES_MAX
        assert int((await store.facts())["wal"]) <= WAL_BYTES_MAX

    live(SqliteStore(path), script)


def test_what_is_asked_often_is_answered_from_an_index(path: Path) -> None:
    asked = {
        "SELECT * FROM outbox WHERE peer = 'x' AND settled = 0 AND seq >= 5 ORDER BY seq LIMIT 9",
        "SELECT min(seq) FROM outbox WHERE peer = 'x' AND settled = 0",
        "SELECT min(expires_ms) FROM outbox WHERE expires_ms > 0 AND state < 2 AND settled = 0",
        "SELECT * FROM outbox WHERE settled = 1 AND state < 2",
        "SELECT * FROM inbox WHERE state = 4 ORDER BY position",
        "UPDATE outbox SET state = 4 WHERE id = 'x' AND peer = 'y' AND state < 4",
        "UPDATE inbox SET state = 3 WHERE id = 'x' AND sender = 'y' AND state < 3",
        "SELECT count(*) FROM inbox WHERE state < 2",
        "SELECT * FROM inbox WHERE position > 5 AND state < 2 ORDER BY position LIMIT 5",
        "SELECT * FROM outbox WHERE id >= 'a' AND id < 'b' ORDER BY id LIMIT 8",
    }
    live(SqliteStore(path), lambda store: store.commit(outs(2)))
    connection = apsw.Connection(str(path))
    for sql in asked:
        plan = " ".join(str(row[3]) for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}"))
        assert "INDEX" in plan or "PRIMARY KEY" in plan, (sql, plan)
        assert "TEMP B-TREE" not in plan, (sql, plan)
    connection.close()


@pytest.mark.parametrize("search", ["", "word"])
def test_a_trail_of_many_pages_is_looked_through_to_its_end(
    path: Path, search: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts_module, "PAGE_ROWS_MAX", 3)
    monkeypatch.setattr(texts_module, "INDEX_ROWS", 4)

    async def script(store: SqliteStore) -> None:
        kinds = ["task" if n in (1, 2, 9) else "text" for n in range(1, 21)]
        rows = [out(n, text="word", kind=kind, at_ms=n) for n, kind in enumerate(kinds, 1)]
        await store.commit(rows)
        found = await store.log(5, search=search)
        assert [entry.id for entry in found] == ["b16", "b17", "b18", "b19", "b20"]
        assert len(await store.log(99, search=search)) == 20
        found = await store.log(2, search=search, kind="task")
        assert [entry.id for entry in found] == ["b2", "b9"]

    live(SqliteStore(path), script)


# Older files


@pytest.mark.parametrize(
    "damage", ["DELETE FROM migrations", "UPDATE migrations SET version = -version"]
)
def test_a_damaged_record_of_versions_is_explained(path: Path, damage: str) -> None:
    live(SqliteStore(path), lambda store: store.commit(outs(2)))
    alter(path, f"{damage} WHERE version = 2")
    alter(path, f"{damage} WHERE version = 1")
    with pytest.raises(CorruptFile, match="versions"):
        live(SqliteStore(path), lambda store: store.commit([]))


def test_a_database_of_version_1_keeps_its_peers_run_and_epoch(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = PeerRow("alpha-aaaaaaaa", b"a" * 32, ("10.0.0.1:7400",))
    epochs: list[str] = []

    async def old(store: SqliteStore) -> None:
        await store.commit([peer])
        assert await store.next_run(41) == 41
        facts = await store.facts()
        assert facts["schema"] == "1"
        epochs.append(facts["epoch"])

    async def new(store: SqliteStore) -> None:
        assert list(await store.peers()) == [peer]
        facts = await store.facts()
        assert (facts["schema"], facts["epoch"]) == (str(SCHEMA_VERSION), epochs[0])
        start = await store.mail_start()
        assert (start.epoch.hex(), start.streams, start.unread) == (epochs[0], (), 0)
        assert await store.next_run() == 42
        await store.commit([*outs(2), came("c")])
        assert len(await store.log(9)) == 3

    with monkeypatch.context() as patch:
        patch.setattr(database_module, "MIGRATIONS", MIGRATIONS[:1])
        patch.setattr(database_module, "SCHEMA_VERSION", 1)
        patch.setattr(database_module.MailTables, "start_over", epoch_only)
        patch.setattr(database_module.CommitLog, "recover", lambda _: None)
        live(SqliteStore(path), old)
    live(SqliteStore(path), new)


def test_a_database_of_version_2_keeps_its_messages(path: Path) -> None:
    async def old(store: SqliteStore) -> None:
        await store.commit([*outs(2), came("c")])

    async def new(store: SqliteStore) -> None:
        assert (await store.facts())["schema"] == str(SCHEMA_VERSION)
        await store.commit([out(3), word("b1", "delivered")])
        assert [entry.seq for entry in await store.pending(PEER, 1, 9)] == [2, 3]
        assert [entry.id for entry in await store.inbox(0, 9)] == ["c"]

    live(SqliteStore(path), old)
    alter(path, "DELETE FROM migrations WHERE version > 2")
    live(SqliteStore(path), new)


def test_a_database_that_kept_its_commits_in_a_table_keeps_them(path: Path) -> None:
    async def old(store: SqliteStore) -> None:
        await store.commit(outs(2))

    async def new(store: SqliteStore) -> None:
        assert [entry.seq for entry in await store.pending(PEER, 1, 9)] == [1, 2, 3]
        assert [entry.id for entry in await store.inbox(0, 9)] == ["c"]
        await store.commit([out(4)])

    live(SqliteStore(path), old)
    alter(path, MIGRATIONS[2].statements[0])
    content = CommitLog(Database(path)).packed([out(3), came("c")])
    alter(path, f"INSERT INTO journal VALUES(1, x'00', x'{content.hex()}')")
    alter(path, "DELETE FROM migrations WHERE version > 3")
    live(SqliteStore(path), new)


def epoch_only(_: object, connection: apsw.Connection) -> None:
    """As version 1 made it: a row in meta, and no outbox to number."""
    row = database_module.MetaRow("epoch", "0123456789abcdef")
    connection.execute(*database_module.encode_row(row))


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x94\x01\x02\x03\x04", b"x"])
def test_a_body_that_says_nothing_is_kept_all_the_same(body: bytes) -> None:
    assert summarize(body) == ("", "", 0, False)
    assert summarize(body + bytes(5_000)) == ("", "", 0, False)


def test_a_message_that_ends_well_is_changed_where_it_stands(path: Path) -> None:
    """Else its body would be written again, and most of what a flood costs is that."""
    database = Database(path)
    database.open()
    database.write([out(seq, text="x" * 5_000) for seq in range(1, 101)])
    database.write([came(f"c{seq}", text="x" * 5_000) for seq in range(100)])
    database.journal.fold_all(alone=True)
    before = database._log_pages
    database.write([Delivered(PEER, 1, 100, 1_700_000_000_000)])
    database.write([became(f"c{seq}", "done", at_ms=1_700_000_000_000) for seq in range(100)])
    database.journal.fold_all(alone=True)
    assert database._log_pages - before < 100, "200 bodies of more than a page each"
    assert [entry.state for entry in database.mail.outgoing("b1")][:1] == ["delivered"]
    assert not database.damaged()
    database.close()


def test_rows_of_earlier_days_whose_mark_is_empty_are_sound(path: Path) -> None:
    async def fill(store: SqliteStore) -> None:
        await store.commit([*outs(3), came("c")])

    async def look(store: SqliteStore) -> None:
        await store.commit([Delivered(PEER, 1, 1, 7), word("b2", "cancelled"), became("c", "seen")])
        assert [entry.state for entry in await store.outbox(9, ended=True)] == [
            "delivered", "cancelled", "queued",
        ]  # fmt: skip
        assert [entry.state for entry in await store.inbox(0, 9)] == ["seen"]
        assert (await store.facts())["quarantined"] == "0"

    live(SqliteStore(path), fill)
    alter(path, "UPDATE outbox SET mark = x''")
    alter(path, "UPDATE inbox SET mark = x''")
    live(SqliteStore(path), look)
