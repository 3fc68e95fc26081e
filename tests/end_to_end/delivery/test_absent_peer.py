"""What waits for an absent peer arrives at its return, whoever restarted or moved meanwhile."""

from __future__ import annotations

import time

import pytest
from end_to_end.delivery.post import Post, texts
from end_to_end.processes.harness import Node

from meshagent.core.links.remembered_peers import SAVE_PEERS_S

pytestmark = pytest.mark.process

QUEUED_MS_MAX = 1000.0
ARRIVAL_S_MAX = 1.0
COUNT = 30
WORDS = [f"word {number}" for number in range(COUNT)]


def test_a_message_for_an_absent_peer_is_queued_at_once(post: Post) -> None:
    sender = post.start("tester").agent
    absent = post.make_agent("backend").agent
    ran = post.say(sender, "send", "backend", "hello", "--json")
    assert (ran.code, ran.err) == (0, "")
    receipt = ran.json
    assert (receipt["to"], receipt["state"]) == (absent, "queued")
    assert receipt["elapsed_ms"] < QUEUED_MS_MAX
    plain = post.say(sender, "send", absent, "hello again")
    assert plain.code == 0
    assert "queued" in plain.out
    assert "goes out by itself" in plain.err
    assert "never met" not in plain.err
    assert texts(post.say(sender, "outbox", "--json").json) == ["hello", "hello again"]


def test_an_id_that_nobody_ever_met_is_queued_with_a_word_of_doubt(post: Post) -> None:
    sender = post.start("tester").agent
    ran = post.say(sender, "send", "backend-aaaaaaaa", "hello")
    assert (ran.code, "queued" in ran.out) == (0, True)
    assert "backend-aaaaaaaa was never met here" in ran.err
    assert "meshagent peers" in ran.err
    ran = post.say(sender, "send", "backend-aaaaaaaa", "hello", "--json")
    assert sorted(ran.json) == ["elapsed_ms", "id", "reason", "state", "to"]


def test_strict_says_so_when_it_was_not_delivered_in_time(post: Post) -> None:
    sender = post.start("tester").agent
    post.make_agent("backend")
    started = time.monotonic()
    ran = post.say(sender, "send", "backend", "hello", "--strict", "--wait", "1")
    assert ran.code == 3
    assert "queued" in ran.out
    assert "Not delivered within 1 s" in ran.err
    assert 1.0 <= time.monotonic() - started < 3.0


def test_a_peer_that_is_here_is_waited_for(post: Post) -> None:
    sender, backend = post.start("tester"), post.join("backend")
    sender.wait_for_peer(backend.agent, "alive")
    ran = post.say(sender.agent, "send", "backend", "hello", "--strict", "--json")
    assert (ran.code, ran.json["state"]) == (0, "delivered")


@pytest.mark.parametrize("restarts", ["nobody", "sender", "both"])
def test_a_peer_on_another_machine_gets_all_at_its_return(post: Post, restarts: str) -> None:
    sender = post.start("tester")
    peer = post.join_elsewhere("backend", sender)
    agent = peer.agent
    _meet(sender, peer)
    post.leave(peer)
    post.send(sender.agent, agent, *WORDS)
    if restarts != "nobody":
        post.leave(sender)
    if restarts == "sender":
        sender = post.start("tester")
    back = post.join_elsewhere("backend")
    if restarts == "both":
        sender = post.start("tester")
    _arrives(post, back, sender)


def test_a_peer_that_comes_back_at_another_address_gets_all(post: Post) -> None:
    sender = post.start("tester")
    peer = post.join_elsewhere("backend", sender)
    agent = peer.agent
    _meet(sender, peer)
    post.leave(peer)
    post.send(sender.agent, agent, *WORDS)
    back = post.join_elsewhere("backend", arguments=("--listen", "127.0.0.2"))
    assert back.joined.event["addresses"][0].startswith("127.0.0.2:")
    _arrives(post, back, sender)


def test_a_peer_that_was_killed_gets_all_at_its_return(post: Post) -> None:
    sender = post.start("tester")
    peer = post.join_elsewhere("backend", sender)
    agent = peer.agent
    _meet(sender, peer)
    peer.end()
    post.send(sender.agent, agent, *WORDS)
    sender.end()
    sender = post.start("tester")
    back = post.join_elsewhere("backend")
    _arrives(post, back, sender)


def test_an_agent_that_was_never_seen_gets_what_was_sent_to_its_id(post: Post) -> None:
    sender = post.start("tester")
    invite = post.run("invite").out.splitlines()[-1]
    home = post.root / "home"
    guest = post.run(
        "join", "--role", "guest", "--invite", "-", "--json", "--detach", "--discovery", "none",
        cwd=home, text=f"{invite}\n",
    )  # fmt: skip
    assert guest.code == 0, guest.err
    post.run("leave", cwd=home)
    other = post.make_agent("backend", post.elsewhere).agent
    ran = post.say(sender.agent, "send", other, WORDS[0], "--json")
    assert (ran.code, ran.json["state"]) == (0, "queued")
    post.send(sender.agent, other, *WORDS[1:])
    back = post.join_elsewhere("backend", sender)
    assert back.agent == other
    _arrives(post, back, sender)


@pytest.mark.parametrize("end", ["leaves", "is killed"])
def test_mail_of_a_sender_that_no_longer_runs_arrives_from_the_spool(post: Post, end: str) -> None:
    sender = post.start("tester")
    writer = sender.agent
    absent = post.make_agent("backend").agent
    ids = post.send(writer, absent, *WORDS)
    if end == "leaves":
        post.leave(sender)
    else:
        time.sleep(0.5)  # a drop may be under way; accepted is durable here, dropped comes after
        sender.end()
    back = post.join("backend")
    came = post.wait_for_texts(absent, WORDS)
    assert came - back.joined.at < ARRIVAL_S_MAX
    assert [each["from"] for each in post.inbox(absent)] == [writer] * COUNT

    sender = post.start("tester")
    for ident in ids:
        post.wait_for_state(writer, ident, "delivered")
    post.send(writer, absent, "after")
    post.wait_for_texts(absent, [*WORDS, "after"])
    assert not list(post.spool.rglob("*.mail"))


def test_spool_and_wire_together_deliver_once(post: Post) -> None:
    sender = post.start("tester")
    absent = post.make_agent("backend").agent
    wanted: list[str] = []
    for turn in range(3):
        words = [f"turn {turn} word {number}" for number in range(COUNT)]
        post.send(sender.agent, absent, *words)
        wanted += words
        back = post.join("backend")
        more = [f"turn {turn} while it starts {number}" for number in range(COUNT)]
        post.send(sender.agent, absent, *more)
        wanted += more
        back.joined  # noqa: B018 - waits
        post.wait_for_texts(absent, wanted)
        back.end()


def test_what_is_sent_just_while_a_peer_comes_back_is_not_late(post: Post) -> None:
    """Commits, answers and new messages cross each other then; frames must keep their order."""
    sender = post.start("tester")
    wanted: list[str] = []
    for turn in range(5):
        back = post.start("backend")
        if turn == 0:
            sender.wait_for_peer(back.agent, "alive")
        words = [f"turn {turn} word {number}" for number in range(5)]
        post.send(sender.agent, back.agent, *words)
        sent = time.monotonic()
        wanted += words
        assert post.wait_for_texts(back.agent, wanted) - sent < ARRIVAL_S_MAX
        post.leave(back)


def _meet(sender: Node, peer: Node) -> None:
    """Long enough to remember each other's address."""
    sender.wait_for_peer(peer.agent, "alive")
    peer.wait_for_peer(sender.agent, "alive")
    time.sleep(SAVE_PEERS_S + 0.2)


def _arrives(post: Post, back: Node, sender: Node) -> None:
    """Within a second of the moment when both are here, in order, with nobody's help."""
    both = max(back.joined.at, sender.joined.at)
    came = post.wait_for_texts(back.agent, WORDS)
    assert came - both < ARRIVAL_S_MAX
    outbox = post.ask(sender.agent, "outbox", ended=True)
    assert texts(outbox) == WORDS
