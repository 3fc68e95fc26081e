"""Every write and every sync of a life may fail, tear, or be the last before a power cut: what was
said to be durable is there once, nothing that failed is there in part, and the store goes on.

The workload has few operations, and all kinds of them: each of its writes and syncs is tried, not a
sample. `--long` tries a longer one.
"""

from __future__ import annotations

import contextlib
import errno
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from storage.fault_disk import ENDINGS, Fault, FaultDisk, Files, edges
from storage.mail.mail_rows import PEER, out
from storage.mail.reference import RandomRows, ranked

from meshagent.core.delivery.mailbox import MailboxModel
from meshagent.core.model.rows import PeerRow, Row
from meshagent.errors import MeshError
from meshagent.storage.mail.database import Database

SEED = 17
STEPS = 17
LONG_STEPS = 80
STEPS_AFTER = 4  # are looked at one by one, after a fault
MANY = 10_000
PLACE = "/dev/shm" if Path("/dev/shm").is_dir() else None  # no real disk's time is needed


@dataclass
class Expected:
    """What the store has said that it keeps."""

    mail: MailboxModel
    peers: dict[str, PeerRow] = field(default_factory=dict)
    run: int = 0
    may_drop: set[str] = field(default_factory=set)
    """Ids that retention has dropped, or may have: that is not promised to be durable."""

    def copy(self) -> Expected:
        return Expected(self.mail.copy(), dict(self.peers), self.run, set(self.may_drop))

    def mark(self) -> int:
        """The same for the same."""
        mail = self.mail
        return hash((
            mail.epoch, tuple(mail.out.values()), tuple(mail.came.values()), self.run,
            tuple(mail.marks.values()), tuple(self.peers.values()), frozenset(self.may_drop),
        ))  # fmt: skip


class Life:
    """One database on a disk that may fail, and what it has promised."""

    def __init__(self, disk: FaultDisk, database: Database, steps: int) -> None:
        self.disk, self.database = disk, database
        self.kept = Expected(MailboxModel(database.epoch()))
        self.tried: list[Expected] = []
        """What it would be if something of which it was said that it failed were there."""
        self.rng, self.steps = random.Random(SEED), steps

    def live(self, after: Callable[[], None] = lambda: None) -> None:
        """The workload; what fails is left behind, as a node does."""
        for step in range(self.steps):
            with contextlib.suppress(MeshError):
                self._do(step)
            after()

    def _do(self, step: int) -> None:
        match step % 8:
            case 1 | 2:
                seq = self.kept.mail.next_seq.get(PEER, 1)
                self._commit([out(seq, f"long {step}", text="x" * 4_000)])
            case 3:
                peer = PeerRow(f"p{step % 3}-aaaaaaaa", b"k" * 32, (f"10.0.0.{step}:7",))
                self._commit([peer])
            case 4:
                after = self.kept.copy()
                after.run = self.database.next_run(0)
                self.kept = after
            case 5:
                while self.database.has_chores():
                    self.database.do_chore()
            case 6 if step % 16 > 8:
                self._retain(step)
            case 7 if step % 16 > 8:
                self.database.folded().search.index_some()
            case 7:
                self.database.folded()
            case _:
                after = self.kept.copy()
                rows = RandomRows(self.rng, after.mail)
                rows.step = step * 100
                self._commit(rows.several() or [out(after.mail.next_seq.get(PEER, 1), f"x{step}")])

    def _commit(self, rows: list[Row]) -> None:
        after = self.kept.copy()
        after.mail.write([row for row in rows if not isinstance(row, PeerRow)])
        after.peers.update({row.agent: row for row in rows if isinstance(row, PeerRow)})
        self.tried.append(after)
        self.database.write(rows)
        self.kept = after
        self.tried.clear()

    def _retain(self, step: int) -> None:
        left = self.kept.mail.copy()
        left.retain(step * 1_000 + 1_000_000, 0, 0)
        gone = set(self.kept.mail.out) - set(left.out)
        gone |= {key[1] for key in set(self.kept.mail.came) - set(left.came)}
        self.kept.may_drop |= gone
        self.database.folded().history.retain(step * 1_000 + 1_000_000, 0, 0)


def differences(database: Database, kept: Expected) -> list[str]:
    """What is not as it was promised."""
    mail, found = kept.mail, database.look(lambda each: each.reader.start())
    wanted = mail.start()
    ours = [each for each in mail.out.values() if each.id not in kept.may_drop]
    theirs = database.look(lambda each: each.reader.outbox(MANY, True))
    theirs = [each for each in theirs if each.id not in kept.may_drop]
    came = [each for each in mail.came.values() if each.id not in kept.may_drop]
    visible = database.look(lambda each: each.reader.inbox(0, MANY, False))
    held = database.look(lambda each: each.reader.receiving())
    here = [each for each in sorted([*visible, *held]) if each.id not in kept.may_drop]
    compared: dict[str, tuple[Any, Any]] = {
        "epoch": (found.epoch, wanted.epoch),
        "streams": (set(found.streams), set(wanted.streams)),
        "watermarks": (set(found.watermarks), set(wanted.watermarks)),
        "unread": (found.unread, wanted.unread),
        "outbox": (theirs, ours),
        "inbox": (ranked(here, here), ranked(came, came)),
        "peers": ({each.agent: each for each in database.look(Database.peers)}, kept.peers),
        "damage": (database.damage(), []),
    }
    return [
        f"{name}: {is_} instead of {was}" for name, (is_, was) in compared.items() if is_ != was
    ]


class Judge:
    """Opens what a disk was left with; what was judged already is not judged again."""

    def __init__(self, disk: FaultDisk) -> None:
        self.disk = disk
        self._judged: set[int] = set()

    def judge(self, files: Files, *allowed: Expected | None) -> None:
        """On a sound disk these files hold one of what is allowed (None: an empty database), and
        take more."""
        marks = [0 if each is None else each.mark() for each in allowed]
        mark = hash((tuple(sorted(files.items())), *marks))
        if mark in self._judged:
            return
        self._judged.add(mark)
        self.disk.is_sound = True
        try:
            _assert_promised(self.disk.path.with_name("risen.db"), files, *allowed)
        finally:
            self.disk.is_sound = False

    @property
    def count(self) -> int:
        return len(self._judged)


def _assert_promised(path: Path, files: Files, *wanted: Expected | None) -> None:
    for ending in ENDINGS:
        path.with_name(path.name + ending).unlink(missing_ok=True)
    for ending, data in files.items():
        path.with_name(path.name + ending).write_bytes(data)
    database = Database(path)
    database.open()
    allowed = [each or Expected(MailboxModel(database.epoch())) for each in wanted]
    faults = [differences(database, each) for each in allowed]
    assert [] in faults, faults[0]
    kept = allowed[faults.index([])].copy()
    run = database.next_run(0)
    assert run > kept.run, "a run number was given twice"
    more = out(kept.mail.next_seq.get(PEER, 1), "one more")
    database.write([more])
    kept.mail.write([more])
    database.close()
    database.open()
    assert differences(database, kept) == [], "it does not go on"
    assert database.integrity() == []
    database.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=PLACE) as folder:
        yield Path(folder)


@pytest.fixture(params=["directly", "by the cache"])
def disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[FaultDisk]:
    disk = FaultDisk(folder / "mesh.db", monkeypatch, direct=request.param == "directly")
    yield disk
    disk.close()


@pytest.fixture(params=[STEPS, pytest.param(LONG_STEPS, marks=pytest.mark.long)])
def steps(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def begun(disk: FaultDisk, steps: int) -> Life:
    """A new database, on a disk that has not failed yet."""
    disk.forget()
    database = Database(disk.path)
    database.open()
    return Life(disk, database, steps)


def end(life: Life) -> None:
    """As the end of its process."""
    life.database.log.close(remove=False)
    with contextlib.suppress(MeshError):
        life.database.disconnect()


def test_the_workload_does_all_kinds_of_things(disk: FaultDisk, steps: int) -> None:
    life = begun(disk, steps)
    rewound = 0
    rewind = life.database.log.rewind

    def count() -> None:
        nonlocal rewound
        rewound += 1
        rewind()

    chores: list[int] = []
    do_chore = life.database.do_chore

    def do() -> None:
        before = rewound
        do_chore()
        chores.extend([1] * (rewound - before))

    life.database.log.rewind = count  # type: ignore[method-assign]
    life.database.do_chore = do  # type: ignore[method-assign]
    life.live()
    assert rewound > len(chores) > 0, "it was begun anew in a quiet moment, and because it was full"
    assert life.kept.may_drop
    assert life.kept.peers
    assert life.kept.run
    assert life.kept.mail.out_blobs
    assert differences(life.database, life.kept) == []
    end(life)


@pytest.mark.timeout(600)
def test_a_power_cut_at_any_moment_leaves_what_was_promised(
    disk: FaultDisk, steps: int, folder: Path
) -> None:
    life = begun(disk, steps)
    states: list[Files] = []

    def cut() -> None:
        states.extend((disk.after_power_cut(), disk.after_kill(), *disk.torn()))

    judge = Judge(disk)
    before = life.kept

    def check() -> None:
        nonlocal before
        disk.cut = lambda: None
        checked, states[:] = list(states), []
        for files in checked:
            judge.judge(files, before, life.kept)
        before, disk.cut = life.kept, cut

    check()
    life.live(check)
    end(life)
    assert judge.count > disk.operations / 2


FAULTS = {
    "nothing is done": Fault(0),
    "the disk is full": Fault(0, errno.ENOSPC),
    "all is done": Fault(0, done=-1),
    "for good": Fault(0, lasts=True),
    "all is done, and for good": Fault(0, done=-1, lasts=True),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_new", [True, False], ids=["new", "after a crash"])
def test_an_opening_that_fails_anywhere_harms_nothing(
    disk: FaultDisk, steps: int, is_new: bool
) -> None:
    files, kept = left_by_a_crash(disk, steps)
    judge = Judge(disk)
    for fault in FAULTS.values():
        at, is_over = 0, False
        while not is_over:
            disk.forget()
            disk.load({} if is_new else files)
            disk.fault = replace(fault, at=at)
            database = Database(disk.path)
            with contextlib.suppress(MeshError):
                database.open()
            is_over, at = disk.operations <= at, at + 1
            for left in (disk.after_kill(), disk.after_power_cut()):
                judge.judge(left, None if is_new else kept)
            database.log.close(remove=False)
            with contextlib.suppress(MeshError):
                database.disconnect()
    assert at > 10


def left_by_a_crash(disk: FaultDisk, steps: int) -> tuple[Files, Expected]:
    """What waits in the log, and tables that do not have it."""
    life = begun(disk, steps)
    life.live()
    for number in range(3):
        life._commit([out(life.kept.mail.next_seq.get(PEER, 1), f"last {number}")])
    files = disk.after_kill()
    end(life)
    return files, life.kept


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kind",
    [*list(FAULTS)[:-1], pytest.param("all is done, and for good", marks=pytest.mark.long)],
)
def test_whichever_operation_fails_all_that_was_promised_is_there(
    disk: FaultDisk, steps: int, kind: str
) -> None:
    judge = Judge(disk)
    for at, _ in recorded(disk, steps):
        assert_lives_through(judge, steps, replace(FAULTS[kind], at=at))


@pytest.mark.timeout(600)
def test_wherever_a_write_is_torn_all_that_was_promised_is_there(
    disk: FaultDisk, steps: int
) -> None:
    judge = Judge(disk)
    for at, size in recorded(disk, steps):
        for done in edges(0, size):
            assert_lives_through(judge, steps, Fault(at, done=done))


def recorded(disk: FaultDisk, steps: int) -> list[tuple[int, int]]:
    """Each operation of a life in which nothing fails, and how many bytes it writes; those of
    SQLite once, since they are the same however the log is written."""
    life = begun(disk, steps)
    first = disk.operations
    life.live()
    life.database.close()
    return [
        (at, size)
        for at, (ending, size) in enumerate(disk.done)
        if at >= first and (disk.is_direct or ending in ("-commits", "folder"))
    ]


def assert_lives_through(judge: Judge, steps: int, fault: Fault) -> None:
    """A life with this fault, and what would come after it if it ended soon afterwards, at the end
    of its work, or after it was closed."""
    disk = judge.disk
    life = begun(disk, steps)
    disk.fault = fault
    left = STEPS_AFTER

    def look() -> None:
        nonlocal left
        if disk.operations > fault.at and left:
            left -= 1
            judge.judge(disk.after_kill(), *allowed())
            judge.judge(disk.after_power_cut(), *allowed())

    def allowed() -> list[Expected]:
        return [life.kept, *(life.tried if fault.lasts else ())]

    try:
        life.live(look)
        if not fault.lasts:
            assert differences(life.database, life.kept) == []
        left = max(left, 1)
        look()
        with contextlib.suppress(MeshError):
            life.database.close()
        assert disk.operations > fault.at, "it did not happen"
        left = 1
        look()
    except BaseException as error:
        error.add_note(f"{fault}")
        raise
    finally:
        disk.fault = None
        end(life)
