"""Nothing leaves, is acknowledged or is handed out before the disk has it.

Each promise has one check, which is run on a node as it ships and on mutants of it: the same check
must name their fault. In the checks of the order, the disk holds back one commit for as long as the
test likes, and whatever was sent or told too early would have arrived before a change of status
that follows it on the same link or feed: so nobody waits for nothing to happen.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from end_to_end.delivery.post import Post, texts
from end_to_end.delivery.tracing import require_strace, traced
from end_to_end.processes.harness import Node, wait_until

from meshagent.errors import NotRunning

pytestmark = pytest.mark.process

HELD = "held back"
COUNT = 5  # messages whose way to the disk is followed
ABSENT = "backend-k3f9a2qd"

# The disk takes everything but this one text, which never gets there.
STUCK_DISK = f"""
import threading
from pathlib import Path
from meshagent.storage.log.log_file import LogFile

append = LogFile.append

def stuck(self, tag, position, content):
    if {HELD.encode()!r} in content:
        Path("stuck").touch()
        threading.Event().wait()
    append(self, tag, position, content)

LogFile.append = stuck
"""

# A recipient that tells all its events, as a program sees them.
EVERY_EVENT = """
import asyncio, json, meshagent

def tell(kind, **data):
    print(json.dumps({"event": kind, **data}), flush=True)

async def main():
    async with meshagent.join("backend", discovery="file") as node:
        tell("joined", agent=node.agent)
        async for event in node.events():
            tell(event.kind, **event.data)

asyncio.run(main())
"""

NO_ORDER = """
from meshagent.core.turns import TurnQueue

add = TurnQueue.add
TurnQueue.add = lambda self, turn: [*add(self, turn._replace(after=())), *turn.after]
"""

SENDS_BEFORE_COMMIT = """
from meshagent.core.delivery.sending import Sending
from meshagent.core.turns import join_turns

accept = Sending.accept

def early(self, outgoing, now, *more, **options):
    turn = accept(self, outgoing, now, *more, **options)
    sent = [self.durable(each.peer, each.epoch, each.upto, now) for each in turn.after]
    return join_turns([turn, *sent])

Sending.accept = early
"""

# Of what rests on the rows of mail that came, one kind of effect does not wait for them.
_EARLY = """
from meshagent.core.delivery.receiving import Receiving
from meshagent.core.effects import {effect} as Early

take = Receiving.take

def early(self, *arguments, **options):
    free, rows, after, may_wait = turn = take(self, *arguments, **options)
    now = [each for each in after if isinstance(each, Early)]
    return turn._replace(free=[*free, *now], after=[each for each in after if each not in now])

Receiving.take = early
"""
ACKS_BEFORE_COMMIT = _EARLY.format(effect="Send")
DELIVERS_BEFORE_COMMIT = _EARLY.format(effect="Deliver")

THROUGH_THE_CACHE = """
from meshagent.storage.log import log_file

log_file.open_direct = lambda path: None
"""

NO_SYNC = """
import os, types
from meshagent.storage.log import direct_io, log_file

direct_io.os = types.SimpleNamespace(**{**vars(os), "O_DSYNC": 0})
log_file.sync_data = lambda descriptor: None
"""

SENT = "it left before the disk had it"
ANSWERED = "its sender was told that it is kept"
ACKED = "it was acknowledged before the disk had it"
HANDED_OUT = "it was handed out before the disk had it"
LOST = "it was delivered, and is not there"
NOT_SYNCED = "it was answered before it was synced"


# -- what leaves ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mutant", "faults"),
    [("", set()), (SENDS_BEFORE_COMMIT, {SENT}), (NO_ORDER, {SENT, ANSWERED})],
    ids=["as it ships", "sends before its commit", "no order"],
)
def test_nothing_leaves_before_the_disk_has_it(post: Post, mutant: str, faults: set[str]) -> None:
    sender, recipient = post.join_changed("tester", STUCK_DISK + mutant), post.start("backend")
    met(sender, recipient)
    assert set(faults_of_sender(post, sender, recipient)) == faults


def faults_of_sender(post: Post, sender: Node, recipient: Node) -> Iterator[str]:
    """It is killed while the commit of a message is under way; one before, one after are kept."""
    post.send(sender.agent, recipient.agent, "before")
    post.wait_for_texts(recipient.agent, ["before"])  # from now on nothing has to be asked first
    send = lambda: post.ask(sender.agent, "send", to=recipient.agent, text=HELD)  # noqa: E731
    with meanwhile(send) as answers:
        wait_until((post.project / "stuck").exists, "the commit")
        pass_a_word(post, sender, recipient)
        if HELD in texts(post.inbox(recipient.agent)):
            yield SENT
        if answers:
            yield ANSWERED
        kill(sender)
    again = post.start("tester")
    post.send(again.agent, recipient.agent, "after")
    wait_until(lambda: "after" in texts(post.inbox(recipient.agent)), "the one after it")
    if texts(post.inbox(recipient.agent)) != ["before", "after"]:
        yield SENT


# -- what is answered and handed out --------------------------------------------------------------


@pytest.mark.parametrize(
    ("mutant", "faults"),
    [
        ("", set()),
        (ACKS_BEFORE_COMMIT, {ACKED, LOST}),
        (DELIVERS_BEFORE_COMMIT, {HANDED_OUT}),
        (NO_ORDER, {ACKED, LOST, HANDED_OUT}),
    ],
    ids=["as it ships", "acks before its commit", "delivers before its commit", "no order"],
)
def test_nothing_is_acknowledged_or_handed_out_before_the_disk_has_it(
    post: Post, mutant: str, faults: set[str]
) -> None:
    sender, recipient = post.start("tester"), post.run_program(STUCK_DISK + mutant + EVERY_EVENT)
    met(sender, recipient)
    assert set(faults_of_recipient(post, sender, recipient)) == faults


def faults_of_recipient(post: Post, sender: Node, recipient: Node) -> Iterator[str]:
    """It is killed while the commit of a message is under way; then it runs on a sound disk."""
    (ident,) = post.send(sender.agent, recipient.agent, HELD)
    with meanwhile(lambda: texts(post.inbox(recipient.agent))) as inboxes:
        wait_until((post.project / "stuck").exists, "the commit")
        pass_a_word(post, recipient, sender)
        if post.state(sender.agent, ident) != "sent":
            yield ACKED
        pass_a_word(post, sender, recipient)
        if recipient.events("mail") or [HELD] in inboxes:
            yield HANDED_OUT
        kill(recipient)
    if post.state(sender.agent, ident) not in ("queued", "sent"):
        yield ACKED
    again = post.start("backend")
    post.wait_for_state(sender.agent, ident, "delivered")
    post.send(sender.agent, again.agent, "after")
    wait_until(lambda: "after" in texts(post.inbox(again.agent)), "the one after it")
    if texts(post.inbox(again.agent)) != [HELD, "after"]:
        yield LOST


# -- what the disk was told -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        ("", set()),
        (THROUGH_THE_CACHE, set()),
        (NO_SYNC, {NOT_SYNCED}),
        (THROUGH_THE_CACHE + NO_SYNC, {NOT_SYNCED}),
    ],
    ids=["as it ships", "without direct writes", "no sync", "no sync without direct writes"],
)
def test_no_send_is_answered_before_its_commit_is_synced(
    post: Post, change: str, faults: set[str]
) -> None:
    require_strace()
    node, trace = post.join_changed("tester", change), post.root / "trace"
    (log,) = (post.folder.agents / node.agent).glob("*-commits")
    with traced(node, "pwrite64,fdatasync,fsync,sendto", "-y", "-s", "256", into=str(trace)):
        idents = post.send(node.agent, ABSENT, *map(str, range(COUNT)))
    assert set(faults_of_trace(trace.read_text(), idents, str(log), node)) == faults


def faults_of_trace(trace: str, idents: list[str], log: str, node: Node) -> Iterator[str]:
    """Each answer stands behind a write to the log, and behind its sync, of its own."""
    answers, is_written, is_synced = 0, False, False
    for begins, call, descriptor, path, words in calls(trace):
        if call == "sendto" and begins and any(each in words for each in idents):
            answers += 1
            if not is_synced:
                yield NOT_SYNCED
            is_written = is_synced = False
        elif path == log and not begins:
            is_written |= call == "pwrite64"
            is_synced |= is_written and (call != "pwrite64" or is_synchronous(node, descriptor))
    assert answers == len(idents), trace


def calls(trace: str) -> Iterator[tuple[bool, str, str, str, str]]:
    """Whether it begins or has ended well, its name, its descriptor, its file, and the rest."""
    unfinished: dict[str, tuple[str, str, str, str]] = {}
    for line in trace.splitlines():
        thread, _, rest = line.partition(" ")
        if found := re.match(r"\s*(\w+)\((\d+)<([^>]*)>(.*)", rest):
            call, descriptor, path, words = found.groups()
            unfinished[thread] = (call, descriptor, path, words)
            yield True, *unfinished[thread]
        if re.search(r"\) += \d+$", rest) and thread in unfinished:
            yield False, *unfinished.pop(thread)


def is_synchronous(node: Node, descriptor: str) -> bool:
    """Whether a write to it returns when the disk has it."""
    facts = Path(f"/proc/{node.pid}/fdinfo/{descriptor}").read_text()
    (flags,) = re.findall(r"^flags:\s*([0-7]+)$", facts, re.MULTILINE)
    return bool(int(flags, 8) & os.O_DSYNC)


# -- what the checks have in common ---------------------------------------------------------------


def met(one: Node, other: Node) -> None:
    one.wait_for_peer(other.agent, "alive")
    other.wait_for_peer(one.agent, "alive")


def pass_a_word(post: Post, one: Node, other: Node) -> None:
    """Returns when the other has heard, and told, what `one` says after all that it said before."""
    word = f"{one.agent} says so"
    post.ask(one.agent, "status", text=word)
    other.wait_for(lambda event: event.get("status") == word, "word to pass")


@contextlib.contextmanager
def meanwhile(ask: Callable[[], Any]) -> Iterator[list[Any]]:
    """Asks in a thread of its own while the block runs, which ends with the death of who is asked;
    what was answered."""
    answers: list[Any] = []

    def run() -> None:
        with contextlib.suppress(NotRunning):
            answers.append(ask())

    asker = threading.Thread(target=run)
    asker.start()
    try:
        yield answers
    finally:
        asker.join()


def kill(node: Node) -> None:
    node.signal(signal.SIGKILL)
    node.wait()
