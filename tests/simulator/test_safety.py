"""Goal: whatever happens to links, disks, clocks and processes, no promise is broken at any step.

Nothing is acknowledged, sent, handed out or reported before it is durable; every id that was
reported as accepted is in the recipient's inbox exactly once and in order, or its end is there to
be seen; when the trouble is over, nothing waits any more. The mutants at the end patch the modules
that ship, and show that these checks fail when a promise is broken.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence

import pytest
from simulator.bounds import check_bounds
from simulator.scenarios import (
    backup_and_spool,
    backup_before_cancel,
    backup_twice,
    lasting_link,
    restored_databases,
)

from meshagent.core.delivery import send_stream
from meshagent.core.delivery.conversations import Conversation
from meshagent.core.delivery.incomplete_messages import Ended, IncompleteMessages
from meshagent.core.delivery.mailbox import MailboxModel
from meshagent.core.delivery.receive_stream import ReceiveStream
from meshagent.core.delivery.receiving import Receiving
from meshagent.core.delivery.send_stream import LinkPhase, SendStream
from meshagent.core.delivery.sending import Sending
from meshagent.core.effects import Accepted, Deliver, Durable, Effect, TakenBack, Transmit
from meshagent.core.links.dialing import Dialing
from meshagent.core.model.message_states import MessageState
from meshagent.core.model.peers import AgentId
from meshagent.core.model.rows import InRow, Row, singly
from meshagent.core.turns import NOTHING, Turn, TurnQueue
from meshagent.core.wire.frames import Mail, MailAck
from meshagent.simulator.disk import Disk
from meshagent.simulator.driver import SimDriver
from meshagent.simulator.modes import Trouble, liveness, safety, settle, transcript
from meshagent.simulator.small_limits import small_chunks, small_windows

CAUGHT_WITHIN = 40  # seeds: a check that needs more luck than that is too weak


def whole_trouble(seed: int) -> None:
    safety(seed, check_bounds)


def test_whatever_goes_wrong_each_message_comes_once_and_in_order(seeds: range) -> None:
    for seed in seeds:
        whole_trouble(seed)


def test_a_healthy_pair_settles_while_everything_else_is_broken(seeds: range) -> None:
    for seed in seeds:
        liveness(seed, check_bounds)


def test_numbers_alone_keep_each_message_once() -> None:
    for seed in range(1, 60, 3):  # without lies, clocks and backups nothing starts over
        with small_chunks(), small_windows():
            trouble = Trouble(seed, check_bounds)
            trouble.has_liars = trouble.clocks_jump = trouble.has_backups = False
            with transcript(trouble.mesh):
                for _ in range(4):
                    trouble.phase(trouble.mesh.nodes)
                trouble.mesh.heal()
                settle(trouble.mesh, trouble.promises)
                assert [node.disk.repeats for node in trouble.mesh.nodes if node.disk.repeats] == []


SAME_RUN = """
import hashlib
from meshagent.simulator.modes import liveness, safety
for seed in (1, 2, 5):
    world = safety(seed).world
    print(world.events, hashlib.sha256(world.transcript().encode()).hexdigest(), liveness(seed))
"""


@pytest.mark.process
def test_a_seed_makes_the_same_run_in_every_process() -> None:
    runs = set()
    for hash_seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", SAME_RUN],
            env=environment, cwd="/", capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        runs.add(done.stdout)
    assert len(runs) == 1
    lines = runs.pop().splitlines()
    assert len(lines) == len(set(lines)) == 3


# -- tests of these tests: each mutant breaks a promise, and must be found ------------------------


add, committed = TurnQueue.add, TurnQueue.committed
commit, crash = Disk.commit, SimDriver.crash
take, answered, durable = Receiving.take, Sending.answered, Sending.durable
write = MailboxModel.write


def goes_early(is_early: Callable[[Effect], bool]) -> Callable[[TurnQueue, Turn], Sequence[Effect]]:
    """What rests on rows does not wait for them."""

    def mutant(self: TurnQueue, turn: Turn) -> Sequence[Effect]:
        early = [each for each in turn.after if is_early(each)]
        rest = [each for each in turn.after if not is_early(each)]
        return [*early, *add(self, turn._replace(after=rest))]

    return mutant


def is_answer(effect: Effect) -> bool:
    return isinstance(effect, Transmit) and isinstance(effect.frame, MailAck)


def passes_what_it_covers(self: TurnQueue, turn: Turn) -> Sequence[Effect]:
    return add(self, turn) if turn.rows else [*turn.free, *turn.after]


def gives_out_what_comes_later(self: TurnQueue) -> list[Effect]:
    later, self._next.after = self._next.after, []
    return [*committed(self), *later]


UNSYNCED: dict[int, Disk] = {}


def commits_without_sync(disk: Disk, rows: Sequence[Row]) -> None:
    UNSYNCED[id(disk)] = disk.copy()
    commit(disk, rows)


def crashes_with_unsynced_rows(node: SimDriver, *, silently: bool = False) -> None:
    crash(node, silently=silently)
    node.disk = UNSYNCED.pop(id(node.disk), node.disk)


def shuffles(self: MailboxModel, rows: Iterable[Row]) -> None:
    rows = list(singly(rows))
    came = [each for each in rows if isinstance(each, InRow)]
    write(self, [*(each for each in rows if not isinstance(each, InRow)), *reversed(came)])


def jumps_gaps(
    self: Receiving, mail: Mail, peer: AgentId, now_ms: int, spooled: bool = False
) -> Turn:
    stream = self._all.with_peer(peer).stream_of(mail.epoch)
    stream.seq = max(stream.seq, mail.first - 1)
    return take(self, mail, peer, now_ms, spooled)


def greeted_by_any(self: Sending, ack: MailAck, peer: AgentId, now: float, now_ms: int) -> Turn:
    self._all.with_peer(peer).out.answered()
    return answered(self, ack, peer, now, now_ms)


def whatever_the_epoch(self: Sending, peer: AgentId, epoch: bytes, upto: int, now: float) -> Turn:
    return durable(self, peer, self._all.with_peer(peer).out.epoch, upto, now)


def forgets_without_a_word(self: ReceiveStream, floor: int) -> None:
    self.exceptions = {seq: why for seq, why in self.exceptions.items() if seq >= floor}


def needs_no_files(self: IncompleteMessages, sender: AgentId, ident: str) -> list[Ended]:
    held = (sender, ident) in self._held
    return [self._end((sender, ident), MessageState.DELIVERED)] if held else []


def does_nothing(*_: object) -> None:
    pass


Mutant = tuple[Callable[[int], object], list[tuple[object, str, object]]]
MUTANTS: dict[str, Mutant] = {
    "acknowledges before the commit": (whole_trouble, [(TurnQueue, "add", goes_early(is_answer))]),
    "sends before the commit": (
        whole_trouble, [(TurnQueue, "add", goes_early(lambda each: type(each) is Durable))],
    ),
    "tells what was taken back before the commit": (
        whole_trouble, [(TurnQueue, "add", goes_early(lambda each: type(each) is TakenBack))],
    ),
    "delivers before the commit": (
        whole_trouble, [(TurnQueue, "add", goes_early(lambda each: type(each) is Deliver))],
    ),
    "reports accepted before the commit": (
        whole_trouble, [(TurnQueue, "add", goes_early(lambda each: type(each) is Accepted))],
    ),
    "lets an answer pass what it covers": (
        whole_trouble, [(TurnQueue, "add", passes_what_it_covers)],
    ),
    "gives out what rests on the next commit": (
        whole_trouble, [(TurnQueue, "committed", gives_out_what_comes_later)],
    ),
    "loses what was not synced": (
        whole_trouble,
        [
            (Disk, "commit", commits_without_sync),
            (SimDriver, "crash", crashes_with_unsynced_rows),
        ],
    ),
    "forgets what has come": (
        whole_trouble, [(MailboxModel, "_move_watermark", does_nothing)],
    ),
    "keeps no order within a commit": (whole_trouble, [(MailboxModel, "write", shuffles)]),
    "takes what comes after a gap": (whole_trouble, [(Receiving, "take", jumps_gaps)]),
    "never goes back": (lasting_link, [(SendStream, "rewind", lambda self, after: None)]),
    "sends what was withdrawn": (whole_trouble, [(send_stream, "WITHDRAWN", frozenset())]),
    "never starts over": (
        restored_databases, [(Sending, "_start_over", lambda self, known, now: NOTHING)],
    ),
    "believes numbers without their hash": (
        restored_databases, [(Conversation, "is_unproven", False)],
    ),
    "does not look whether numbers mean the same": (
        backup_and_spool, [(ReceiveStream, "contradicts", lambda self, mail: False)],
    ),
    "is greeted by a word about another epoch, and does not look either": (
        backup_twice,
        [
            (Sending, "answered", greeted_by_any),
            (ReceiveStream, "contradicts", lambda self, mail: False),
        ],
    ),
    "vouches for what it has forgotten": (
        backup_before_cancel, [(ReceiveStream, "forget_below", forgets_without_a_word)],
    ),
    "takes a word about old numbers for one about the new ones": (
        restored_databases, [(Sending, "durable", whatever_the_epoch)],
    ),
    "keeps messages for those who are away": (
        whole_trouble,
        [(SendStream, "disconnected", lambda self: setattr(self, "link", LinkPhase.AWAY))],
    ),
    "hands out messages without their files": (
        whole_trouble, [(IncompleteMessages, "complete", needs_no_files)],
    ),
    "does not dial again whom it lost": (liveness, [(Dialing, "unlinked", does_nothing)]),
}  # fmt: skip


def first_failure(scenario: Callable[[int], object]) -> str:
    """What the first seed that fails says."""
    for seed in range(CAUGHT_WITHIN):
        try:
            scenario(seed)
        except AssertionError as error:
            return f"seed {seed}: {error}".splitlines()[0]
    return ""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_promise_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, changes = MUTANTS[name]
    for owner, attribute, mutant in changes:
        monkeypatch.setattr(owner, attribute, mutant)
    found = first_failure(scenario)
    print(found)
    assert found, f"a node that {name} passes"
