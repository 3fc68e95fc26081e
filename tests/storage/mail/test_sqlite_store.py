"""What the store on disk promises beyond the port: crashes, decay, newer files, its thread."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import apsw
import pytest
from storage.mail.mail_rows import out, torn_copy

from meshagent.core.model.rows import PeerRow
from meshagent.errors import CorruptFile, LimitReached, MeshError, StorageError
from meshagent.storage.mail import sqlite_file as file_module
from meshagent.storage.mail import store_thread as thread_module
from meshagent.storage.mail.database import Database
from meshagent.storage.mail.schema import SCHEMA_VERSION, checksum
from meshagent.storage.mail.sqlite_errors import database_error
from meshagent.storage.mail.sqlite_file import WAL_BYTES_MAX
from meshagent.storage.mail.sqlite_store import SqliteStore

ROWS = [
    PeerRow(f"{name}-aaaaaaaa", name[0].encode() * 32, (f"{name}.example:7400",))
    for name in ("alpha", "beta", "gamma")
]
ALPHA, BETA, GAMMA = ROWS


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mesh.db"


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


def with_store(path: Path, script: Callable[[SqliteStore], Awaitable[None]]) -> None:
    async def live() -> None:
        store = SqliteStore(path)
        await store.open()
        try:
            await script(store)
        finally:
            await store.close()

    asyncio.run(live())


def fill(path: Path, rows: list[PeerRow]) -> None:
    with_store(path, lambda store: store.commit(rows))


def read(path: Path) -> tuple[set[PeerRow], dict[str, str]]:
    found: list[tuple[set[PeerRow], dict[str, str]]] = []

    async def script(store: SqliteStore) -> None:
        found.append((set(await store.peers()), dict(await store.facts())))

    with_store(path, script)
    return found[0]


def open_error(path: Path, kind: type[MeshError]) -> MeshError:
    async def script(_: SqliteStore) -> None:
        raise AssertionError("it opened")

    with pytest.raises(kind) as caught:
        with_store(path, script)
    return caught.value


# What is durable


def test_what_is_committed_is_there_in_a_file_that_is_private(path: Path) -> None:
    fill(path, ROWS)
    rows, facts = read(path)
    assert rows == set(ROWS)
    assert facts["journal_mode"] == "wal"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_database_that_would_not_sync_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Careless(apsw.Connection):
        def pragma(self, name: str, value: object = None, **more: object) -> object:
            if name == "synchronous" and value is not None:
                value = "OFF"
            return super().pragma(name, value) if value is not None else super().pragma(name)

    monkeypatch.setattr(apsw, "Connection", Careless)
    error = open_error(path, StorageError)
    assert "synchronous is 0 and not 1" in error.message


COMMIT_FOR_EVER = """
import asyncio, itertools, sys
from pathlib import Path
from meshagent.core.model.rows import (PeerRow)
from meshagent.storage.mail.sqlite_store import SqliteStore

async def worker(store, numbers):
    for number in numbers:
        rows = [PeerRow(f"{half}-{number}", b"k" * 32, ()) for half in ("left", "right")]
        await store.commit(rows)
        print(number, flush=True)

async def main():
    store = SqliteStore(Path(sys.argv[1]))
    await store.open()
    numbers = itertools.count(int(sys.argv[2]))
    await asyncio.gather(*(worker(store, numbers) for _ in range(4)))

asyncio.run(main())
"""


@pytest.mark.process
def test_every_acknowledged_commit_survives_kill_9(path: Path) -> None:
    acknowledged: set[int] = set()
    for kill_after in (1, 7, 60, 150):
        start = max(acknowledged, default=-1) + 1_000
        with subprocess.Popen(
            [sys.executable, "-c", COMMIT_FOR_EVER, str(path), str(start)],
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        ) as process:
            assert process.stdout is not None
            for _ in range(kill_after):
                acknowledged.add(int(process.stdout.readline()))
            process.send_signal(signal.SIGKILL)
            acknowledged.update(int(line) for line in process.stdout if line.endswith("\n"))
        rows, facts = read(path)
        halves = {half: {row.agent for row in rows if row.agent.startswith(half)} for half in "lr"}
        left = {int(agent.partition("-")[2]) for agent in halves["l"]}
        right = {int(agent.partition("-")[2]) for agent in halves["r"]}
        assert acknowledged <= left
        assert left == right, "a transaction was torn"
        assert facts["quarantined"] == "0"


def test_the_log_stays_bounded(path: Path) -> None:
    async def script(store: SqliteStore) -> None:
        for number in range(60):
            await store.commit([PeerRow("alpha-aaaaaaaa", b"k" * 32, (f"{number}" * 150_000,))])
        wal = path.with_name("mesh.db-wal").stat().st_size
        assert wal <= WAL_BYTES_MAX

    with_store(path, script)


# One thread, one order


def hold_first_write(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[int]]:
    """Let the first transaction wait for the event; the list gets each transaction's size."""
    release, sizes, real = threading.Event(), [], Database.write

    def write(database: Database, statements: list[object]) -> None:
        sizes.append(len(statements))
        assert release.wait(30)
        real(database, statements)

    monkeypatch.setattr(Database, "write", write)
    return release, sizes


def test_commits_that_wait_share_one_sync(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [PeerRow(f"p{number}-aaaaaaaa", b"k" * 32, ()) for number in range(100)]

    async def script(store: SqliteStore) -> None:
        release, sizes = hold_first_write(monkeypatch)
        waiting = [asyncio.ensure_future(store.commit([row])) for row in rows]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        release.set()
        await asyncio.gather(*waiting)
        assert len(sizes) <= 2
        assert sum(sizes) == 100
        assert set(await store.peers()) == set(rows)

    with_store(path, script)


def test_one_bad_commit_does_not_fail_its_neighbours(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = out(7)  # where 1 comes next

    async def script(store: SqliteStore) -> None:
        release, _ = hold_first_write(monkeypatch)
        groups = ([ALPHA], [BETA, bad], [GAMMA])
        waiting = [asyncio.ensure_future(store.commit(rows)) for rows in groups]
        await asyncio.sleep(0)
        release.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [type(None), StorageError, type(None)]
        assert set(await store.peers()) == {ALPHA, GAMMA}

    with_store(path, script)


def test_a_cancelled_commit_leaves_the_store_in_order(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(store: SqliteStore) -> None:
        release, _ = hold_first_write(monkeypatch)
        given_up = asyncio.ensure_future(store.commit([ALPHA, BETA]))
        await asyncio.sleep(0)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        release.set()
        await store.commit([GAMMA])
        assert set(await store.peers()) in ({GAMMA}, {ALPHA, BETA, GAMMA})

    with_store(path, script)


def test_the_number_of_waiting_writes_is_bounded(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_module, "PENDING_JOBS_MAX", 3)

    async def script(store: SqliteStore) -> None:
        release, _ = hold_first_write(monkeypatch)
        waiting = [asyncio.ensure_future(store.commit([ALPHA])) for _ in range(20)]
        await asyncio.sleep(0)
        release.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        refused = [result for result in results if isinstance(result, LimitReached)]
        assert refused
        assert len(refused) + results.count(None) == 20
        await store.commit([BETA])
        assert set(await store.peers()) == {ALPHA, BETA}

    with_store(path, script)


def test_closing_a_loop_without_the_store_harms_nobody(path: Path) -> None:
    store = SqliteStore(path)
    asyncio.run(store.open())
    thread = store._thread
    assert thread is not None
    thread._jobs.put(thread_module._Call(Database.close, lambda result, error: None, last=True))
    thread._thread.join(10)
    assert not thread._thread.is_alive()


def test_a_failed_open_may_be_tried_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def live() -> None:
        store = SqliteStore(path)
        with monkeypatch.context() as patch:
            patch.setattr(file_module, "mounted_filesystem", lambda _: "nfs4")
            with pytest.raises(StorageError):
                await store.open()
        await store.open()
        await store.commit([ALPHA])
        await store.close()

    asyncio.run(live())


# Decay


TABLE, INDEX = 0, 1  # which occurrence of a key in the file is which


def flip(path: Path, needle: bytes, occurrence: int = TABLE, bit: int = 0x01) -> None:
    data = bytearray(path.read_bytes())
    at = -1
    for _ in range(occurrence + 1):
        at = data.index(needle, at + 1)
    data[at + 1] ^= bit
    path.write_bytes(data)


@pytest.mark.parametrize("bit", [0x01, 0x80], ids=["still text", "not UTF-8"])
@pytest.mark.parametrize("needle", [b"beta.example", b"b" * 32, b"beta-aaaaaaaa"])
def test_a_flipped_bit_costs_one_row_which_is_named(path: Path, needle: bytes, bit: int) -> None:
    fill(path, ROWS)
    flip(path, needle, TABLE, bit)
    rows, facts = read(path)
    assert rows == {ALPHA, GAMMA}
    assert facts["quarantined"] == "1"
    assert facts["damaged_rows"].startswith("peers b")
    assert "checksum" in facts["damaged_rows"]
    fill(path, [BETA])
    rows, facts = read(path)
    assert (rows, facts["quarantined"]) == (set(ROWS), "1")


def test_a_flipped_bit_in_the_index_costs_nothing(path: Path) -> None:
    fill(path, ROWS)
    flip(path, b"beta-aaaaaaaa", INDEX)
    moved = PeerRow(BETA.agent, BETA.key, ("elsewhere:1",))
    assert read(path)[0] == set(ROWS)
    fill(path, [moved])
    assert read(path)[0] == {ALPHA, moved, GAMMA}


def test_a_flipped_bit_in_the_run_never_stops_the_node(path: Path) -> None:
    async def count(store: SqliteStore) -> None:
        await store.next_run(at_least=987_654_321)

    async def again(store: SqliteStore) -> None:
        assert await store.next_run(at_least=2_000_000_000) == 2_000_000_000
        facts = await store.facts()
        assert facts["damaged_rows"].startswith("meta run")

    with_store(path, count)
    flip(path, b"987654321")
    with_store(path, again)


def test_no_two_rows_have_the_same_canonical_form() -> None:
    forms = [
        checksum("peers", [b"ab", b"c"]),
        checksum("peers", [b"a", b"bc"]),
        checksum("peers", [b"abc"]),
        checksum("peers", [b"ab", b"c", b""]),
        checksum("meta", [b"ab", b"c"]),
    ]
    assert len(set(forms)) == len(forms)


def test_a_file_that_is_no_database_says_what_to_do(path: Path) -> None:
    path.write_bytes(b"not a database, but long enough to look at" * 100)
    error = open_error(path, CorruptFile)
    assert str(path) in error.message
    assert "move the file" in error.hint
    assert path.read_bytes().startswith(b"not a database")


def test_a_truncated_database_says_so_and_never_loops(path: Path) -> None:
    fill(path, [PeerRow(f"p{n}-aaaaaaaa", b"k" * 32, ("x" * 500,)) for n in range(500)])
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size // 2 // 4096 * 4096)
    for _ in range(2):
        with pytest.raises(CorruptFile, match="damaged"):
            read(path)


def test_a_truncated_log_costs_only_its_end(path: Path) -> None:
    copy = path.with_name("copy.db")

    async def script(store: SqliteStore) -> None:
        for row in ROWS:
            await store.commit([row])
        torn_copy(path, copy, "-commits")

    with_store(path, script)
    assert read(copy)[0] == {ALPHA, BETA}


# Schema


def test_a_database_of_a_newer_version_is_refused_untouched(path: Path) -> None:
    fill(path, ROWS)
    connection = apsw.Connection(str(path))
    connection.pragma("user_version", 99)
    connection.close()
    before = path.read_bytes()
    error = open_error(path, StorageError)
    assert "schema 99" in error.message
    assert f"knows {SCHEMA_VERSION}" in error.message
    assert "upgrade" in error.hint
    assert path.read_bytes() == before


def test_a_database_of_0_1_0_is_refused_untouched(path: Path) -> None:
    connection = apsw.Connection(str(path))
    connection.execute("CREATE TABLE migrations(version INTEGER PRIMARY KEY)")
    connection.close()
    before = path.read_bytes()
    error = open_error(path, StorageError)
    assert "0.1.0" in error.message
    assert "move the file" in error.hint
    assert path.read_bytes() == before


def test_each_database_has_an_epoch_of_its_own(path: Path) -> None:
    other = path.with_name("other.db")
    assert read(path)[1]["epoch"] != read(other)[1]["epoch"]


# Places


def test_a_network_filesystem_is_refused_before_anything_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_module, "mounted_filesystem", lambda _: "nfs4")
    error = open_error(path, StorageError)
    assert "network filesystem (nfs4)" in error.message
    assert "MESHAGENT_DIR" in error.hint
    assert not path.exists()


def test_a_place_without_a_folder_is_explained(path: Path) -> None:
    assert "does not exist" in open_error(path.parent / "no" / "mesh.db", StorageError).message
    path.write_bytes(b"")
    assert "not a folder" in open_error(path / "mesh.db", StorageError).message


@pytest.mark.parametrize(
    ("error", "number", "kind"),
    [
        (apsw.FullError(), 0, LimitReached),
        (apsw.IOError(), 28, LimitReached),
        (apsw.IOError(), 5, StorageError),
        (apsw.ReadOnlyError(), 0, StorageError),
        (apsw.CantOpenError(), 0, StorageError),
        (apsw.BusyError(), 0, StorageError),
        (apsw.CorruptError(), 0, CorruptFile),
        (apsw.NotADBError(), 0, CorruptFile),
        (apsw.SQLError("no such table"), 0, StorageError),
    ],
)
def test_each_database_error_has_a_meaning(
    error: apsw.Error, number: int, kind: type[MeshError]
) -> None:
    told = database_error(error, Path("/x/mesh.db"), "write to", number)
    assert type(told) is kind
    assert told.message.startswith("Can't write to /x/mesh.db: ")
    assert told.hint


def test_a_running_agents_file_is_nobody_elses_and_needs_no_companion_but_its_log(
    path: Path,
) -> None:
    async def script(store: SqliteStore) -> None:
        await store.commit([ALPHA])
        names = ["mesh.db", "mesh.db-commits", "mesh.db-wal"]
        assert sorted(each.name for each in path.parent.iterdir()) == names
        other = apsw.Connection(str(path))
        with pytest.raises(apsw.BusyError):
            other.execute("SELECT * FROM peers").fetchall()
        other.close()

    with_store(path, script)
    assert read(path)[0] == {ALPHA}
