"""A message that its recipient can't take ends as refused, with the reason, wherever one looks."""

from __future__ import annotations

import asyncio

import pytest
from end_to_end.delivery.post import Post, texts
from end_to_end.processes.harness import Node

import meshagent

pytestmark = pytest.mark.process

# A recipient of another version: what we may put into a field is too long for it.
OTHER_VERSION = """
import meshagent.core.model.messages as messages
messages.SHORT_CHARACTERS_MAX = 20
"""
LONG_THREAD = "more than twenty characters"
REASON = "A message has a field of the wrong form."


def _pair(post: Post) -> tuple[Node, Node]:
    sender, backend = post.start("tester"), post.join_changed("backend", OTHER_VERSION)
    sender.wait_for_peer(backend.agent, "alive")
    return sender, backend


def test_a_refused_message_says_why_in_send_outbox_and_log(post: Post) -> None:
    sender, backend = _pair(post)
    writer = sender.agent
    refused = ("send", "backend", "not for you", "--thread", LONG_THREAD)
    ran = post.say(writer, *refused, "--json")
    assert (ran.code, ran.json["state"], ran.json["reason"]) == (3, "refused", REASON)
    assert f"Not delivered: refused for {backend.agent}" in ran.err
    ident = ran.json["id"]
    plain = post.say(writer, *refused)
    assert plain.code == 3
    assert f"refused ({REASON})" in plain.out
    after = post.say(writer, "send", "backend", "for you", "--strict", "--json")
    assert (after.code, after.json["state"]) == (0, "delivered")
    assert texts(post.inbox(backend.agent)) == ["for you"]
    assert post.ask(backend.agent, "status")["refused"]["malformed message"] == 2

    assert post.ask(writer, "outbox") == []
    post.leave(sender)
    post.start("tester")  # it is as durable as any other end
    for listing in (("outbox", "--all"), ("log",)):
        shown = post.say(writer, *listing, "--json").json
        found = {each["id"]: (each["state"], each["reason"]) for each in shown}
        assert found[ident] == ("refused", REASON)
        line = post.say(writer, *listing, env={"COLUMNS": "200"}).out.splitlines()[0]
        assert ident in line
        assert "refused" in line
        assert f"({REASON}) not for you" in line


def test_a_refused_message_says_why_to_a_program(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(post.runtime))
    backend = post.join_changed("backend", OTHER_VERSION)
    backend.joined  # noqa: B018 - waits

    async def body() -> None:
        options = {"dir": post.folder.path, "listen": "127.0.0.1", "discovery": "file"}
        async with meshagent.join("tester", **options) as node:  # type: ignore[arg-type]
            receipt = await node.send(backend.agent, "not for you", thread=LONG_THREAD)
            with pytest.raises(meshagent.MeshError, match="was refused") as raised:
                await receipt.delivered(timeout=10)
            assert REASON in str(raised.value)
            assert (receipt.state, receipt.reason) == ("refused", REASON)
            await (await node.send(backend.agent, "for you")).delivered(timeout=10)

    asyncio.run(body())
