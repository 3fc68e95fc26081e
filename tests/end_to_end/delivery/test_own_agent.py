"""The person's own agent: started by the first `send` that needs it, once, and gone when idle."""

from __future__ import annotations

import time

import pytest
from end_to_end.delivery.post import Post, texts
from end_to_end.processes.harness import finish

from meshagent.session import running_agents

pytestmark = pytest.mark.process

IDLE_S = 2.0  # also on a busy machine the test's session is there by then

CALLERS = 20


def test_twenty_sends_at_the_same_instant_start_exactly_one_node(post: Post) -> None:
    absent = post.make_agent("backend").agent
    calls = [post.command("send", "backend", f"{each}", "--json") for each in range(CALLERS)]
    ran = [finish(each) for each in calls]
    assert [(each.code, each.err) for each in ran] == [(0, "")] * CALLERS
    assert len({each.json["id"] for each in ran}) == CALLERS
    assert {each.json["state"] for each in ran} == {"queued"}

    own = [each for each in post.folder.agents.iterdir() if each.name.startswith("user-")]
    running = running_agents(post.folder.registry)
    assert [each.agent for each in running] == [each.name for each in own]
    assert len(own) == 1

    back = post.start("backend")
    post.ask(running[0].agent, "leave")
    came = sorted(texts(post.inbox(back.agent)), key=int)
    assert came == [f"{each}" for each in range(CALLERS)]
    assert back.agent == absent


def test_a_send_says_queued_soon_though_it_starts_the_node(post: Post) -> None:
    post.make_agent("backend")
    ran = post.run("send", "backend", "first words", "--json")
    assert (ran.code, ran.json["state"]) == (0, "queued")
    again = post.run("send", "backend", "more", "--json")
    assert again.json["elapsed_ms"] < 1000.0


def test_a_person_is_told_once_that_an_agent_is_started_to_send_as(post: Post) -> None:
    post.make_agent("backend")
    told = [post.run("send", "backend", text, "--wait", "0").err for text in ("first", "second")]
    assert ["your own agent, user" in each for each in told] == [True, False]


def test_a_send_that_starts_the_node_reaches_who_is_here(post: Post) -> None:
    backend, other = post.start("backend"), post.start("other")
    ran = post.run("send", "backend", "hello", "--json", "--strict")
    assert (ran.code, ran.err, ran.json["state"]) == (0, "", "delivered")
    assert texts(post.inbox(backend.agent)) == ["hello"]
    assert post.inbox(other.agent) == []


def test_an_idle_node_ends_only_when_its_outbox_is_empty(post: Post) -> None:
    own = post.start("user", "--until-idle", str(IDLE_S))
    backend = post.make_agent("backend").agent
    post.send(own.agent, backend, "not yet delivered")
    time.sleep(IDLE_S + 1.5)
    assert own.process.poll() is None
    post.start("backend")
    assert own.wait() == 0
    assert texts(post.inbox(backend)) == ["not yet delivered"]


@pytest.mark.parametrize("end", ["cancelled", "expired"])
def test_what_was_taken_back_keeps_no_node_alive(post: Post, end: str) -> None:
    own = post.start("user", "--until-idle", str(IDLE_S))
    post.make_agent("backend")
    with post.session(own.agent) as session:
        ttl = 0.1 if end == "expired" else None
        (receipt,) = session.ask("send", to="backend", text="x", ttl_s=ttl)
        if end == "cancelled":
            assert session.ask("cancel", ident=receipt["id"])["state"] == "cancelled"
        else:
            post.wait_for_state(own.agent, receipt["id"], "expired")
        assert session.ask("status")["outbox"] == {"queued": 0, "sent": 0}
    assert own.wait() == 0
