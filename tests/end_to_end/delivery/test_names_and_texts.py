"""Whom a name means, which texts travel, and what `log --search` finds."""

from __future__ import annotations

import pytest
from end_to_end.delivery.post import Post, texts
from end_to_end.processes.harness import Node

pytestmark = pytest.mark.process

LIMIT = 1024 * 1024
ENVELOPE = 200  # id, kind and times take a few bytes of the limit


@pytest.fixture(scope="module")
def me(shared: Post) -> str:
    return shared.start("tester").agent


@pytest.fixture(scope="module")
def backend(shared: Post, me: str) -> Node:
    node = shared.start("backend", "--name", "bob")
    node.wait_for_peer(me, "alive")
    return node


@pytest.fixture(scope="module")
def reviewers(shared: Post, me: str) -> list[str]:
    nodes = [shared.start("reviewer", "--name", each) for each in ("rita", "rosa")]
    return sorted(each.agent for each in nodes)


def _to(shared: Post, me: str, peer: str) -> list[str]:
    ran = shared.say(me, "send", peer, "hello", "--json", "--wait", "0")
    assert ran.code == 0, ran.err
    receipts = ran.json if isinstance(ran.json, list) else [ran.json]
    return [each["to"] for each in receipts]


def test_a_peer_is_meant_by_id_prefix_name_or_role(
    shared: Post, me: str, backend: Node, reviewers: list[str]
) -> None:
    agent = backend.agent
    for word in (agent, agent[:-3], "bob", "backend", "any:backend", "@backend"):
        assert _to(shared, me, word) == [agent], word
    assert sorted(_to(shared, me, "@reviewer")) == reviewers
    assert sorted(_to(shared, me, "@all")) == sorted([agent, *reviewers])
    (one,) = _to(shared, me, "any:reviewer")
    assert one in reviewers


def test_who_can_not_be_told_apart_is_listed(shared: Post, me: str, reviewers: list[str]) -> None:
    for word in ("reviewer", "r"):
        ran = shared.say(me, "send", word, "hello")
        assert (ran.code, ran.out) == (4, "")
        assert all(each in ran.err for each in reviewers)
    assert "@reviewer" in shared.say(me, "send", "reviewer", "hello").err


def test_who_is_not_known_is_guessed(shared: Post, me: str, backend: Node) -> None:
    ran = shared.say(me, "send", "bakend", "hello")
    assert (ran.code, ran.out) == (4, "")
    assert "Did you mean 'backend'?" in ran.err
    assert shared.say(me, "send", "@nobodies", "hello").code == 4
    assert shared.say(me, "send", "", "hello").code == 4


TEXTS = {
    "unicode": "Grüße, 世界 🎉 \u202eright to left",
    "lines": "one\ntwo\n\n  three\t.\r\nfour\n",
    "empty": "",
    "escapes": "before\x1b]0;owned\x07\x1b[2J\x1b[31mred\x9b31m\x00\x08after",
    "looks like an option": "--strict",
    "long": "word " * 20_000,
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_arrives_as_it_was_written(shared: Post, me: str, backend: Node, name: str) -> None:
    text = TEXTS[name]
    ran = shared.say(me, "send", "bob", "-", "--json", text=text)
    assert (ran.code, ran.json["state"]) == (0, "delivered"), ran.err
    ident = ran.json["id"]
    read = shared.say(backend.agent, "read", ident, "--json").json
    assert read["text"] == text
    shown = shared.say(backend.agent, "read", ident).out
    listed = shared.say(backend.agent, "inbox", "--limit", "1").out
    for screen in (shown, listed, shared.say(backend.agent, "log", "--limit", "1").out):
        assert not [each for each in screen if each != "\n" and not each.isprintable()]
    assert listed.count("\n") == 1


def test_a_list_shows_the_beginning_of_a_long_text(shared: Post, me: str, backend: Node) -> None:
    ran = shared.say(me, "send", "bob", "-", "--json", text="begins so, " + "on it goes " * 1000)
    (line,) = [
        each
        for each in shared.say(backend.agent, "inbox").out.splitlines()
        if each.startswith(ran.json["id"])
    ]
    assert "begins so, on it goes" in line
    assert (len(line) < 600, line[-1]) == (True, "…")


def test_a_text_after_two_dashes_is_a_text(shared: Post, me: str, backend: Node) -> None:
    ran = shared.run("send", "--as", me, "--json", "--", "bob", "--strict")
    assert ran.code == 0
    assert shared.inbox(backend.agent)[-1]["text"] == "--strict"


@pytest.mark.parametrize("letter", ["x", "世", "\x01"])
def test_a_mebibyte_is_sent_and_more_is_refused(
    shared: Post, me: str, backend: Node, letter: str
) -> None:
    width = len(letter.encode())
    largest = letter * ((LIMIT - ENVELOPE) // width)
    ran = shared.say(me, "send", "bob", "-", "--json", text=largest)
    assert (ran.code, ran.err) == (0, "")
    assert ran.json["state"] == "delivered"
    assert shared.ask(backend.agent, "read", ident=ran.json["id"])["text"] == largest
    for times in (LIMIT // width + 1, 9 * LIMIT // width):
        ran = shared.say(me, "send", "bob", "-", "--json", text=letter * times)
        assert (ran.code, ran.out) == (6, ""), ran.err
        assert "attachment" in ran.err


def test_bytes_that_are_no_text_are_a_usage_error(shared: Post, me: str, backend: Node) -> None:
    call = shared.command("send", "bob", "-", "--as", me, stdin=-1, errors="surrogateescape")
    out, err = call.communicate("\udcff\udcfe bad", 20.0)
    assert (call.returncode, out) == (2, "")
    assert "Traceback" not in err


def test_search_finds_both_directions_whatever_the_words(
    shared: Post, me: str, backend: Node
) -> None:
    there = shared.say(me, "send", "bob", 'the "login" page AND the (logout) page*', "--json").json
    back = shared.say(
        backend.agent, "send", "tester", "login works: it's done", "--reply-to", there["id"],
        "--json",
    ).json  # fmt: skip
    found = _search(shared, me, "login")
    assert found == ['the "login" page AND the (logout) page*', "login works: it's done"]
    log = shared.say(me, "log", "--search", "login", "--json").json
    assert [each["from"] for each in log] == [me, backend.agent]
    assert log[1]["reply_to"] == there["id"]
    assert back["state"] == "delivered"
    words = [
        '"login', "login*", "AND", 'login" OR "x', "NEAR(login", "text:login", "-login", "(",
        "it's", "login; DROP TABLE inbox", "*", "''", "\x00", "login AND NOT page", "^login",
        "{a b}: c",
    ]  # fmt: skip
    for word in words:
        if "\x00" not in word:
            ran = shared.say(me, "log", f"--search={word}", "--json")
            assert ran.code == 0, (word, ran.err)
        shared.ask(me, "log", search=word)
    assert texts(shared.ask(me, "log", search="AND")) == [found[0]]
    assert texts(shared.ask(me, "log", search='"login" page')) == [found[0]]
    assert _search(shared, me, "nosuchword") == []
    assert shared.say(me, "log", "--search", "nosuchword").err == "Nothing matches.\n"
    assert len(_search(shared, me, "login", "--peer", "bob")) == 2


def _search(shared: Post, agent: str, words: str, *more: str) -> list[str]:
    return texts(shared.say(agent, "log", "--search", words, *more, "--json").json)
