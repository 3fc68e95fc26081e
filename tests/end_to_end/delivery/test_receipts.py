"""Receipts tell the truth, live and in the log; taking back and expiry are visible ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from end_to_end.delivery.post import Post, texts
from end_to_end.processes.harness import Node, wait_until

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def pair(shared: Post) -> tuple[Node, Node]:
    sender, backend = shared.start("tester"), shared.start("backend")
    sender.wait_for_peer(backend.agent, "alive")
    return sender, backend


def test_read_gives_seen_and_done_gives_done(shared: Post, pair: tuple[Node, Node]) -> None:
    sender, backend = (each.agent for each in pair)
    sent = shared.say(sender, "send", "backend", "have a look", "--json").json
    assert sent["state"] == "delivered"
    ident = sent["id"]
    assert _logged(shared, sender, ident) == "delivered"
    assert _logged(shared, backend, ident) == "unread"

    read = shared.say(backend, "read", ident[:6])
    assert (read.code, "have a look" in read.out) == (0, True)
    shared.wait_for_state(sender, ident, "seen")
    assert _logged(shared, sender, ident) == "seen"
    assert ident not in [each["id"] for each in _unread(shared, backend)]
    assert shared.inbox(backend)[-1]["state"] == "seen"
    assert shared.say(backend, "read", ident, "--json").json["state"] == "seen"

    done = shared.say(backend, "done", ident)
    assert (done.code, done.out) == (0, f"{ident} from {sender}: done\n")
    shared.wait_for_state(sender, ident, "done")
    assert _logged(shared, sender, ident) == "done"
    assert _logged(shared, backend, ident) == "done"
    assert ident not in [each["id"] for each in _unread(shared, backend)]
    assert shared.say(backend, "done", ident).code == 0


def test_a_join_tells_of_each_message_as_it_comes(post: Post) -> None:
    absent = post.make_agent("backend").agent
    sender = post.start("tester")
    post.send(sender.agent, absent, "was waiting")
    backend = post.join("backend")
    backend.wait_for(lambda event: event.get("text") == "was waiting", "what was waiting")
    (ident,) = post.send(sender.agent, absent, "is new")
    seen = backend.wait_for(lambda event: event.get("text") == "is new", "what is new")
    assert seen.event["event"] == "message"
    assert (seen.event["id"], seen.event["from"], seen.event["to"], seen.event["state"]) == (
        ident, sender.agent, absent, "unread",
    )  # fmt: skip


def test_receipts_for_an_absent_sender_come_at_its_return(post: Post) -> None:
    sender, backend = post.start("tester"), post.start("backend")
    writer = sender.agent
    sender.wait_for_peer(backend.agent, "alive")
    (ident,) = post.send(writer, backend.agent, "and then I leave")
    post.wait_for_state(writer, ident, "delivered")
    post.leave(sender)
    assert post.run("done", ident).code == 0
    post.start("tester")
    post.wait_for_state(writer, ident, "done")


@contextmanager
def with_a_stopped_recipient(post: Post) -> Iterator[tuple[Node, Node]]:
    """What is sent now is on the wire, and has no answer before this is left."""
    sender, backend = post.start("tester"), post.start("backend")
    sender.wait_for_peer(backend.agent, "alive")
    (first,) = post.send(sender.agent, backend.agent, "the first asks how much it has")
    post.wait_for_state(sender.agent, first, "delivered")
    backend.signal(signal.SIGSTOP)
    try:
        yield sender, backend
    finally:
        backend.signal(signal.SIGCONT)


def test_a_message_on_the_wire_is_sent_and_not_yet_delivered(post: Post) -> None:
    with with_a_stopped_recipient(post) as (sender, backend):
        (ident,) = post.send(sender.agent, backend.agent, "on its way")
        wait_until(
            lambda: post.ask(sender.agent, "status")["outbox"] == {"queued": 0, "sent": 1},
            "it to be on the wire",
            2.0,
        )
        assert post.state(sender.agent, ident) in ("queued", "sent")
        refused = post.say(sender.agent, "cancel", ident)
        assert refused.code == 2
        assert "is sent and can't be taken back" in refused.err
    post.wait_for_state(sender.agent, ident, "delivered")


def test_a_message_on_the_wire_is_not_called_expired_before_its_recipient_has_answered(
    post: Post,
) -> None:
    with with_a_stopped_recipient(post) as (sender, backend):
        ran = post.say(
            sender.agent, "send", backend.agent, "soon", "--ttl", "1s", "--wait", "0", "--json"
        )
        time.sleep(1.3)  # its time is up, and its link still there
        shown = post.ask(sender.agent, "outbox")
        assert [(each["id"], each["state"]) for each in shown] == [(ran.json["id"], "sent")]
    post.wait_for_state(sender.agent, ran.json["id"], "delivered")
    assert texts(post.inbox(backend.agent))[-1] == "soon"


def test_a_cancelled_message_never_arrives(post: Post) -> None:
    sender = post.start("tester")
    absent = post.make_agent("backend").agent
    kept, taken_back, more = post.send(sender.agent, absent, "one", "two", "three")
    time.sleep(0.3)  # the spool has them
    ran = post.say(sender.agent, "cancel", taken_back)
    assert (ran.code, ran.out) == (0, f"{taken_back} to {absent}: cancelled\n")
    assert post.state(sender.agent, taken_back) == "cancelled"
    assert texts(post.ask(sender.agent, "outbox")) == ["one", "three"]
    again = post.say(sender.agent, "cancel", taken_back)
    assert again.code == 2
    assert "cancelled" in again.err

    post.leave(sender)  # so that only the spool can bring them
    post.start("backend")
    post.wait_for_texts(absent, ["one", "three"])
    sender = post.start("tester")
    for ident in (kept, more):
        post.wait_for_state(sender.agent, ident, "delivered")
    post.send(sender.agent, absent, "four")
    post.wait_for_texts(absent, ["one", "three", "four"])
    assert post.state(sender.agent, taken_back) == "cancelled"


def test_a_cancelled_message_for_another_machine_never_arrives(post: Post) -> None:
    sender = post.start("tester")
    absent = post.make_agent("backend", post.elsewhere).agent
    ids = post.send(sender.agent, absent, "one", "two", "three")
    assert post.say(sender.agent, "cancel", ids[1]).code == 0
    post.join_elsewhere("backend", sender)
    post.wait_for_texts(absent, ["one", "three"])
    assert post.state(sender.agent, ids[1]) == "cancelled"


def test_a_delivered_message_is_not_taken_back(shared: Post, pair: tuple[Node, Node]) -> None:
    sender = pair[0].agent
    ident = shared.say(sender, "send", "backend", "too late", "--json").json["id"]
    ran = shared.say(sender, "cancel", ident)
    assert ran.code == 2
    assert f"The message {ident} is delivered and can't be taken back" in ran.err
    assert shared.state(sender, ident) == "delivered"
    unknown = shared.say(sender, "cancel", "nosuchid")
    assert (unknown.code, "no message 'nosuchid'" in unknown.err) == (4, True)


@pytest.mark.parametrize("sender_runs", [True, False])
def test_a_message_past_its_time_expires_visibly_and_never_arrives(
    post: Post, sender_runs: bool
) -> None:
    sender = post.start("tester")
    writer = sender.agent
    absent = post.make_agent("backend").agent
    ran = post.say(writer, "send", "backend", "soon stale", "--ttl", "1s", "--json")
    assert ran.json["state"] == "queued"
    post.send(writer, absent, "fresh")
    if sender_runs:
        took = wait_until(lambda: post.state(writer, ran.json["id"]) == "expired", "its end", 5.0)
        assert took < 3.0
    else:
        time.sleep(0.3)
        sender.end()
        time.sleep(1.0)
    post.start("backend")
    post.wait_for_texts(absent, ["fresh"])
    if not sender_runs:
        post.start("tester")
    post.wait_for_state(writer, ran.json["id"], "expired")
    post.send(writer, absent, "fresher")
    post.wait_for_texts(absent, ["fresh", "fresher"])
    assert post.state(writer, ran.json["id"]) == "expired"


def test_a_message_for_who_never_returns_expires_or_waits_in_sight(post: Post) -> None:
    writer = post.start("tester").agent
    absent = post.make_agent("backend").agent
    lasting = post.say(writer, "send", "backend", "no matter when", "--json").json["id"]
    ran = post.say(
        writer, "send", "backend", "only now", "--ttl", "1s", "--strict", "--wait", "10", "--json"
    )
    assert (ran.code, ran.json["state"]) == (3, "expired")
    assert 900 < ran.json["elapsed_ms"] < 4000
    assert f"Not delivered: expired for {absent}" in ran.err
    stale = ran.json["id"]
    waits = post.say(writer, "outbox", "--json").json
    assert [(each["id"], each["state"]) for each in waits] == [(lasting, "queued")]
    ends = {lasting: "queued", stale: "expired"}
    for listing in (("outbox", "--all"), ("log",)):
        shown = post.say(writer, *listing, "--json").json
        assert {each["id"]: each["state"] for each in shown} == ends
        lines = post.say(writer, *listing).out.splitlines()
        assert ["expired" in line for line in lines] == [False, True]
    assert post.ask(writer, "status")["outbox"] == {"queued": 1, "sent": 0}


def test_a_bad_span_of_time_is_a_usage_error(shared: Post, pair: tuple[Node, Node]) -> None:
    for span in ("0", "soon", "-1", "5y"):
        ran = shared.say(pair[0].agent, "send", "backend", "x", f"--ttl={span}")
        assert (ran.code, "span of time" in ran.err) == (2, True)


def test_receipts_take_no_place_in_the_log_or_the_inbox(
    shared: Post, pair: tuple[Node, Node]
) -> None:
    sender, backend = (each.agent for each in pair)
    ids = shared.send(sender, backend, *[f"one of many {number}" for number in range(8)])
    shared.wait_for_state(sender, ids[-1], "delivered")
    assert [each["id"] for each in _unread(shared, backend)][-8:] == ids
    for ident in ids[:6]:
        shared.ask(backend, "done", ident=ident)
    shared.wait_for_state(sender, ids[5], "done")
    for agent in (sender, backend):  # six receipts are newer than any of these
        logged = shared.say(agent, "log", "--limit", "5", "--json").json
        assert [each["id"] for each in logged] == ids[-5:]
    came = shared.say(backend, "inbox", "--limit", "3", "--json").json
    assert [each["id"] for each in came] == ids[-3:]
    unread = shared.say(backend, "inbox", "--unread", "--limit", "3", "--json").json
    assert [each["id"] for each in unread][-2:] == ids[-2:]
    assert not {each["id"] for each in unread} & set(ids[:6])


def _logged(post: Post, agent: str, ident: str) -> str:
    found = [each for each in post.ask(agent, "log") if each["id"] == ident]
    assert len(found) == 1
    return str(found[0]["state"])


def _unread(post: Post, agent: str) -> list[dict[str, str]]:
    messages: list[dict[str, str]] = post.ask(agent, "inbox", unread=True)
    return messages
