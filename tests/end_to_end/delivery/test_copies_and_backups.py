"""A copied folder, yesterday's database, none at all: explained; no message is taken for old."""

from __future__ import annotations

import json
import shlex
import shutil
import time
from pathlib import Path

import pytest
from end_to_end.delivery.post import Post
from end_to_end.processes.harness import Node, wait_until

pytestmark = pytest.mark.process

FILES = ("mesh.db", "mesh.db-wal", "mesh.db-shm", "mesh.db-commits")


def words(name: str, count: int = 5) -> list[str]:
    return [f"{name} {number}" for number in range(count)]


class Disk:
    """One agent's database, to be kept and put back."""

    def __init__(self, post: Post, agent: str) -> None:
        self.folder = next(
            each / agent
            for each in (post.folder.agents, post.elsewhere.agents)
            if (each / agent).is_dir()
        )
        self._kept: Path = post.root / f"yesterday-{agent}"

    def keep(self) -> None:
        self._kept.mkdir()
        for name in FILES:
            if (self.folder / name).exists():
                shutil.copy2(self.folder / name, self._kept / name)

    def delete(self) -> None:
        for name in FILES:
            (self.folder / name).unlink(missing_ok=True)

    def put_back(self) -> None:
        self.delete()
        for path in self._kept.iterdir():
            shutil.copy2(path, self.folder / path.name)


def _pair(post: Post) -> tuple[Node, Node]:
    sender, peer = post.start("tester"), post.start("backend")
    sender.wait_for_peer(peer.agent, "alive")
    return sender, peer


def test_the_second_of_two_copies_refuses_and_mail_goes_on(post: Post) -> None:
    sender, peer = _pair(post)
    agent = sender.agent
    copy = post.elsewhere.agents / agent
    shutil.copytree(post.folder.agents / agent, copy)
    second = post.join_elsewhere("tester", peer)
    assert second.wait(15.0) == 5
    told = json.loads(second.err)["error"]
    assert f"Another node already runs as {agent}, from a copy of its folder" in told["message"]
    assert "join here with another --role or --name" in told["hint"]
    assert "a copied folder" in _diagnosis(post)
    assert "a copy of this agent runs elsewhere" in (copy / "node.log").read_text()
    assert sender.process.poll() is None
    post.send(agent, peer.agent, *words("after"))
    post.wait_for_texts(peer.agent, words("after"))


def test_a_copy_that_takes_over_loses_nothing_to_false_dedup(post: Post) -> None:
    """Both copies have sent under the same numbers, one after the other."""
    sender, peer = _pair(post)
    agent = sender.agent
    post.send(agent, peer.agent, *words("both"))
    post.wait_for_texts(peer.agent, words("both"))
    post.leave(sender)
    shutil.copytree(post.folder.agents / agent, post.elsewhere.agents / agent)
    sender = post.start("tester")
    post.send(agent, peer.agent, *words("first copy"))
    post.wait_for_texts(peer.agent, [*words("both"), *words("first copy")])
    post.leave(sender)
    second = post.join_elsewhere("tester", peer)
    assert second.agent == agent
    post.send(agent, peer.agent, *words("second copy"))
    post.wait_for_texts(peer.agent, [*words("both"), *words("first copy"), *words("second copy")])


@pytest.mark.parametrize(
    ("fate", "waiting"),
    [
        ("put back", False),
        ("put back", True),
        ("deleted", False),
        pytest.param("deleted", True, marks=pytest.mark.long),
    ],
)
def test_new_mail_of_a_sender_whose_database_is_old_is_not_taken_for_old(
    post: Post, fate: str, waiting: bool
) -> None:
    sender, peer = _pair(post)
    agent, reader = sender.agent, peer.agent
    post.send(agent, reader, *words("yesterday"))
    post.wait_for_texts(reader, words("yesterday"))
    post.leave(sender)
    disk = Disk(post, agent)
    disk.keep()
    sender = post.start("tester")
    post.send(agent, reader, *words("today"))
    wanted = [*words("yesterday"), *words("today")]
    post.wait_for_texts(reader, wanted)
    post.leave(sender)
    disk.put_back() if fate == "put back" else disk.delete()
    if waiting:
        post.leave(peer)
    sender = post.start("tester")
    assert sender.agent == agent
    post.send(agent, reader, *words("tomorrow", 8))
    if waiting:
        post.start("backend")
    post.wait_for_texts(reader, [*wanted, *words("tomorrow", 8)])
    wait_until(
        lambda: post.ask(agent, "status")["outbox"] == {"queued": 0, "sent": 0}, "every answer"
    )
    _assert_explained(post, sender, fate)


def _assert_explained(post: Post, sender: Node, fate: str) -> None:
    """What the person is told of the database: by the join, the log, `status` and `doctor`."""
    log = (post.folder.agents / sender.agent / "node.log").read_text()
    if fate == "deleted":
        for told in (sender.err, log):
            assert "mesh.db is gone" in told
            assert "no longer knows what came and what waited" in told
            assert "meshagent restore" in told
    else:
        assert sender.err == ""
        assert "it is an older copy; what waits was numbered anew, and nothing is lost" in log
        assert "numbers from another day" in post.say(sender.agent, "status").out
        assert "its database is an older copy" in _diagnosis(post)


def _diagnosis(post: Post) -> str:
    return " ".join(post.run("doctor", env={"COLUMNS": "200"}).out.split())


def test_old_files_in_the_spool_hide_no_new_message(post: Post) -> None:
    """They hold the numbers that a sender with yesterday's database gives again."""
    sender, peer = _pair(post)
    agent, reader = sender.agent, peer.agent
    last = post.send(agent, reader, *words("yesterday"))[-1]
    post.wait_for_state(agent, last, "delivered")
    post.leave(sender)
    disk = Disk(post, agent)
    disk.keep()
    post.leave(peer)
    sender = post.start("tester")
    post.send(agent, reader, *words("today"))
    post.leave(sender)
    spooled = {path: path.read_bytes() for path in post.spool.rglob("*.mail")}
    assert spooled
    peer = post.start("backend")
    post.wait_for_texts(reader, [*words("yesterday"), *words("today")])
    post.leave(peer)
    disk.put_back()
    for path, content in spooled.items():  # as if it had come over the wire, and the file stayed
        path.write_bytes(content)
    sender = post.start("tester")
    post.send(agent, reader, *words("tomorrow", 8))
    post.start("backend")
    post.wait_for_texts(reader, [*words("yesterday"), *words("today"), *words("tomorrow", 8)])


@pytest.mark.parametrize("fate", ["put back", "deleted"])
def test_a_recipient_whose_database_is_old_gets_all_that_is_new(post: Post, fate: str) -> None:
    sender, peer = _pair(post)
    agent, reader = sender.agent, peer.agent
    last = post.send(agent, reader, *words("yesterday"))[-1]
    post.wait_for_texts(reader, words("yesterday"))
    post.wait_for_state(agent, last, "delivered")
    post.leave(peer)
    disk = Disk(post, reader)
    disk.keep()
    started = time.monotonic()
    peer = post.start("backend")
    # Else the spool may get a copy too, which rightly comes again when the database is lost.
    sender.wait_for_peer(reader, "alive", since=started)
    last = post.send(agent, reader, *words("today"))[-1]
    post.wait_for_texts(reader, [*words("yesterday"), *words("today")])
    post.wait_for_state(agent, last, "delivered")  # else it would rightly come again
    post.leave(peer)
    post.send(agent, reader, *words("while it was away"))
    disk.put_back() if fate == "put back" else disk.delete()
    post.start("backend")
    post.send(agent, reader, *words("tomorrow"))
    kept = words("yesterday") if fate == "put back" else []
    post.wait_for_texts(reader, [*kept, *words("while it was away"), *words("tomorrow")])
    assert "mail of a lost database" in post.say(reader, "status").out
    assert "once had mail that its database does not hold" in _diagnosis(post)


def test_a_restored_backup_gives_new_mail_new_numbers(post: Post) -> None:
    sender, peer = _pair(post)
    agent, reader = sender.agent, peer.agent
    post.send(agent, reader, *words("yesterday"))
    post.wait_for_texts(reader, words("yesterday"))
    file = post.root / "backup.db"
    made = post.say(agent, "backup", str(file))
    assert made.code == 0, made.err
    post.send(agent, reader, *words("today"))
    wanted = [*words("yesterday"), *words("today")]
    post.wait_for_texts(reader, wanted)
    restored = post.say(agent, "restore", str(file))
    assert restored.code == 0, restored.err
    post.send(agent, reader, *words("tomorrow"))
    post.wait_for_texts(reader, [*wanted, *words("tomorrow")])


def test_a_restore_takes_only_its_own_backup_and_can_be_undone(post: Post) -> None:
    sender, peer = _pair(post)
    agent, reader = sender.agent, peer.agent
    file = post.root / "backup.db"
    assert post.say(agent, "backup", str(file)).code == 0
    post.send(reader, agent, *words("today"))
    post.wait_for_texts(agent, words("today"))
    refused = post.say(reader, "restore", str(file))
    assert refused.code != 0
    assert f"belongs to {agent}, and this agent is {reader}" in refused.err
    assert "nothing was changed" in refused.err
    restored = post.say(agent, "restore", str(file))
    assert restored.code == 0, restored.err
    assert post.inbox(agent) == []
    (back,) = [line for line in restored.out.splitlines() if line.startswith("To go back to it:")]
    undone = post.say(agent, *shlex.split(back.split("meshagent ")[1]))
    assert undone.code == 0, undone.err
    post.wait_for_texts(agent, words("today"))
