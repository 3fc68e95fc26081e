"""A node of a later release is welcomed, shown and talked to; only what is vital is refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from core import newer_node
from core.made import (
    EXAMPLES,
    MESH_ID,
    closes,
    identity,
    mesh_of,
    open_link,
    record_of,
    sent,
    word_of,
)

from meshagent.core.effects import Dial
from meshagent.core.links.handshake import common_features, make_hello, make_welcome
from meshagent.core.links.links_config import LinksConfig
from meshagent.core.mesh import Mesh
from meshagent.core.model.identity import verify
from meshagent.core.model.messages import parse_body
from meshagent.core.model.peers import Candidate, LinkId, PeerState
from meshagent.core.model.records import Record, parse_update
from meshagent.core.turns import Turn, join_turns
from meshagent.core.wire.codec import decode, encode, pack
from meshagent.core.wire.frames import (
    FRAMES,
    Ack,
    Frame,
    Gossip,
    Hello,
    MailAck,
    Ping,
    Refuse,
    Sync,
    Welcome,
)
from meshagent.node.views import peer_view

ME, NEWER = identity("me"), identity("newer")
L1 = LinkId(1)


def met() -> tuple[Mesh, Turn]:
    """This node, which a newer one has dialled."""
    mesh = mesh_of(ME)
    mesh.opened(L1, NEWER.curve_public, 0.0)
    hello = newer_node.hello_of(record_of(NEWER), NEWER, MESH_ID)
    return mesh, mesh.received_parts(L1, newer_node.with_more_fields(hello), 0.0)


def test_a_newer_node_is_welcomed_and_shown_as_it_describes_itself() -> None:
    mesh, effects = met()
    assert [each.version for each in sent(effects, L1) if isinstance(each, Welcome)] == [1]
    (peer,) = mesh.peers()
    assert (peer.agent, peer.state) == (NEWER.agent, PeerState.ALIVE)
    assert peer.presence == newer_node.PRESENCE
    assert peer_view(peer, 0.0)["presence"] == newer_node.PRESENCE
    assert not mesh.refused()


def test_what_a_newer_node_says_of_itself_is_relayed_as_it_was_signed() -> None:
    mesh, _ = met()
    other = identity("other")
    opened = open_link(mesh, other, 2, 0.0)
    asked = mesh.received_parts(LinkId(2), encode(Sync(1, ())), 0.0)
    effects = join_turns([opened, asked])
    words = [data for each in sent(effects, 2) if isinstance(each, Gossip) for data in each.updates]
    (relayed,) = [
        word
        for word in map(parse_update, words)
        if isinstance(word.statement, Record) and word.statement.agent == NEWER.agent
    ]
    assert relayed.statement.presence == newer_node.PRESENCE
    assert relayed.data == newer_node.record_bytes(record_of(NEWER), NEWER, MESH_ID)
    assert relayed.is_genuine(NEWER.key, MESH_ID, verify)


def test_what_is_optional_and_unknown_is_passed_over_and_blamed_on_nobody() -> None:
    mesh, _ = met()
    unknown = Gossip(newer_node.unknown_updates(NEWER, MESH_ID))
    digest = pack((Sync.code, 0, ((ME.agent, 1 << 32, 0, "later"), ("x-00000000", 1, 7))))
    for parts in (newer_node.optional_frame(), encode(unknown), [digest]):
        assert not closes(mesh.received_parts(L1, parts, 1.0), 1)
    answer = mesh.received_parts(L1, newer_node.with_more_fields(Ping(5)), 1.0)
    assert [each.seq for each in sent(answer, L1) if isinstance(each, Ack)] == [5]
    assert not mesh.refused()


def test_what_is_required_and_unknown_is_refused_with_the_reason() -> None:
    mesh, _ = met()
    effects = mesh.received_parts(L1, newer_node.required_frame(), 1.0)
    (refuse,) = [each for each in sent(effects, L1) if isinstance(each, Refuse)]
    assert refuse.why == "protocol"
    assert "99" in refuse.reason
    assert closes(effects, 1)


@pytest.mark.parametrize("kind", FRAMES.values(), ids=lambda kind: kind.__name__)
def test_fields_that_a_later_release_adds_to_a_frame_are_ignored(kind: type[Frame]) -> None:
    frame = EXAMPLES[kind]
    assert decode(newer_node.with_more_fields(frame)) == decode(encode(frame))


def test_fields_that_a_later_release_adds_within_a_list_are_ignored() -> None:
    entry, outcome = ("a-00000000", 3, 1), (4, "too large")
    longer = decode([pack((Sync.code, 1, ((*entry, "later"),)))])
    assert longer == Sync(1, (entry,))
    ack = decode([pack((MailAck.code, bytes(8), 5, bytes(16), 0, ((*outcome, "later"),)))])
    assert ack == MailAck(bytes(8), 5, bytes(16), 0, (outcome,))


def test_a_message_of_an_unknown_kind_is_a_message() -> None:
    message = parse_body(newer_node.message_body("abc", "a poll"))
    assert (message.id, message.kind, message.text) == ("abc", newer_node.KIND, "a poll")
    assert message.data["choices"] == ("main", "next")


# -- features -------------------------------------------------------------------------------------


def offering(who: str, features: dict[str, int]) -> Mesh:
    me = identity(who)
    return Mesh(
        record_of(me), me, MESH_ID, verify, random.Random(1), 0.0,
        links=LinksConfig(features=features),
    )  # fmt: skip


def test_both_ends_of_a_link_know_what_both_can_do() -> None:
    dialler = offering("newer", {"receipts": 2, "telepathy": 1})
    dialled = offering("me", {"receipts": 1, "colours": 1})
    dialler.found(Candidate("", ("10.9.9.9:1",), "static"), 0.0)
    (dial,) = [each for each in dialler.on_timer(0.0).free if isinstance(each, Dial)]
    dialler.dialled(dial.attempt, L1)
    (hello,) = sent(dialler.opened(L1, None, 0.0))
    assert dialled.links.features(NEWER.agent) == {}
    dialled.opened(L1, NEWER.curve_public, 0.0)
    answer = sent(dialled.received_parts(L1, encode(hello), 0.0), L1)
    (welcome,) = [each for each in answer if isinstance(each, Welcome)]
    dialler.received_parts(L1, encode(welcome), 0.0)
    assert dialled.links.features(NEWER.agent) == {"receipts": 1}
    assert dialler.links.features(ME.agent) == {"receipts": 1}
    dialled.closed(L1, "", 1.0)
    assert dialled.links.features(NEWER.agent) == {}


@pytest.mark.parametrize(
    ("ours", "theirs", "common"),
    [
        ({}, {}, {}),
        ({}, {"a": 1}, {}),
        ({"a": 1}, {}, {}),
        ({"a": 1}, {"b": 1}, {}),
        ({"a": 3}, {"a": 2}, {"a": 2}),
        ({"a": 2}, {"a": 3, "b": 1}, {"a": 2}),
    ],
)
def test_a_feature_counts_when_both_have_it(
    ours: dict[str, int], theirs: dict[str, int], common: dict[str, int]
) -> None:
    assert common_features(ours, theirs) == common


HELLO = make_hello(NEWER, MESH_ID, "", bytes(16), 1000, word_of(NEWER).data, {"receipts": 1})


@pytest.mark.parametrize(
    "altered",
    [
        replace(HELLO, features={}),
        replace(HELLO, features={"receipts": 2}),
        replace(HELLO, features={"receipts": 1, "telepathy": 1}),
        replace(HELLO, version_high=2),
        replace(HELLO, version_low=0),
    ],
)
def test_nobody_can_alter_what_a_hello_offers(altered: Hello) -> None:
    for hello, refused in ((HELLO, {}), (altered, {"forged": 1})):
        mesh = mesh_of(ME)
        mesh.opened(L1, NEWER.curve_public, 0.0)
        mesh.received_parts(L1, encode(hello), 0.0)
        assert mesh.refused() == refused


@pytest.mark.parametrize("changes", [{"features": {}}, {"features": {"receipts": 2}}])
def test_nobody_can_alter_what_a_welcome_offers(changes: dict[str, dict[str, int]]) -> None:
    for altered, refused in (({}, {}), (changes, {"forged": 1})):
        mesh = mesh_of(ME)
        mesh.found(Candidate("", ("10.9.9.9:1",), "static"), 0.0)
        (dial,) = [each for each in mesh.on_timer(0.0).free if isinstance(each, Dial)]
        mesh.dialled(dial.attempt, L1)
        (hello,) = sent(mesh.opened(L1, None, 0.0))
        assert isinstance(hello, Hello)
        welcome = make_welcome(
            NEWER, MESH_ID, hello, ME.curve_public, bytes(16), word_of(NEWER).data, {"receipts": 1}
        )
        mesh.received_parts(L1, encode(replace(welcome, **altered)), 0.0)
        assert mesh.refused() == refused
