"""Whom a person means."""

from __future__ import annotations

import pytest

from meshagent.core.model.addressing import KnownAgent, resolve
from meshagent.core.model.peers import AgentId
from meshagent.errors import AmbiguousPeer, NoSuchPeer

ME = AgentId("tester-aaaaaaaa")
BOB, EVE = AgentId("bob-bbbbbbbb"), AgentId("eve-cccccccc")
BOB2 = AgentId("bob-dddddddd")
KNOWN = [
    KnownAgent(ME, "tester", "alive"),
    KnownAgent(BOB, "backend", "gone"),
    KnownAgent(EVE, "backend", "alive"),
    KnownAgent(BOB2, "tester", ""),
]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (BOB, [BOB]),
        ("eve", [EVE]),
        ("bob-b", [BOB]),
        ("e", [EVE]),
        ("tester", [ME]),
        ("@backend", [EVE, BOB]),
        ("any:backend", [EVE]),
        ("@tester", [BOB2]),
        ("@all", [EVE, BOB, BOB2]),
        ("any:all", [EVE]),
        ("new-2345abcd", ["new-2345abcd"]),
    ],
)
def test_a_name_means(text: str, meant: list[AgentId]) -> None:
    assert resolve(text, KNOWN, ME) == meant


def test_a_role_means_its_only_bearer_and_never_us_when_there_is_another() -> None:
    known = [KnownAgent(ME, "qa", "alive"), KnownAgent(EVE, "qa", "alive")]
    assert resolve("qa", known, ME) == [EVE]


def test_those_who_cannot_be_told_apart_are_listed_who_is_here_first() -> None:
    with pytest.raises(AmbiguousPeer) as caught:
        resolve("backend", KNOWN, ME)
    assert f"{EVE} (alive), {BOB} (gone)" in caught.value.message
    with pytest.raises(AmbiguousPeer, match="never met"):
        resolve("bob", KNOWN, ME)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("evve", "'eve'"),
        ("@backnd", "'backend'"),
        ("zzzzzz", "Known: "),
        ("", "Known: "),
        ("@", "Known: "),
        ("any:", "Known: "),
    ],
)
def test_nobody_is_made_up_and_the_next_best_is_suggested(text: str, hint: str) -> None:
    with pytest.raises(NoSuchPeer) as caught:
        resolve(text, KNOWN, ME)
    assert hint in (caught.value.hint or "")


def test_alone_in_the_mesh_there_is_nobody_to_mean() -> None:
    with pytest.raises(NoSuchPeer, match="Nobody else"):
        resolve("@all", KNOWN[:1], ME)
    with pytest.raises(NoSuchPeer) as caught:
        resolve("bob", [], ME)
    assert "meshagent peers" in (caught.value.hint or "")
