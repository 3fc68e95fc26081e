"""A member can't speak as another member, and pays for breaking the protocol with its link only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import fields, replace

import msgpack
import pytest
import zmq
from end_to_end.intruders.attacker import Attacker, record_of
from end_to_end.intruders.conftest import Attacked

from meshagent.bench.nodes import NodeProcess
from meshagent.core.model.invites import Invite, format_invite
from meshagent.core.model.peers import AgentId, PeerState
from meshagent.core.model.records import Accusation, Record, Signed, sign_accusation
from meshagent.core.wire.codec import decode, encode, pack
from meshagent.core.wire.frames import FRAMES, Gossip, Hello, Refuse

pytestmark = pytest.mark.process

MIB = 1 << 20


@pytest.fixture
def mallory(attacked: Attacked) -> Attacker:
    return Attacker(attacked.secret)


# -- speaking as another ----------------------------------------------------------------------


def test_another_agents_id_is_refused(attacked: Attacked, mallory: Attacker) -> None:
    victim = attacked.friend.agent
    with mallory.dial(attacked.address) as wire:
        wire.send(replace(mallory.hello(), agent=victim))
        assert wire.refusal() == "impostor"
    assert attacked.printed_refused()["impostor"] == attacked.before.get("impostor", 0) + 1


def test_another_agents_key_over_ones_own_link_is_refused(
    attacked: Attacked, mallory: Attacker
) -> None:
    with mallory.member(attacked.address) as wire:
        theirs = record_of(wire, attacked.friend.agent)
    assert isinstance(theirs.statement, Record)
    with mallory.dial(attacked.address) as wire:
        wire.send(
            replace(
                mallory.hello(),
                agent=theirs.statement.agent,
                key=theirs.statement.key,
                record=theirs.data,
            )
        )
        assert wire.refusal() == "impostor"
    attacked.until_refused(1, "impostor")


def test_another_agents_record_under_ones_own_id_is_refused(
    attacked: Attacked, mallory: Attacker
) -> None:
    with mallory.member(attacked.address) as wire:
        theirs = record_of(wire, attacked.friend.agent)
    with mallory.dial(attacked.address) as wire:
        wire.send(replace(mallory.hello(), record=theirs.data))
        assert wire.refusal() == "forged"
    attacked.until_refused(1, "forged")


def test_a_signature_that_does_not_hold_is_refused(attacked: Attacked, mallory: Attacker) -> None:
    with mallory.dial(attacked.address) as wire:
        wire.send(replace(mallory.hello(), signature=os.urandom(64)))
        assert wire.refusal() == "forged"
    attacked.until_refused(1, "forged")


@contextlib.contextmanager
def victim_of(attacked: Attacked, address: str) -> Iterator[NodeProcess]:
    """A member on another machine, as it were, that knows nobody but the attacker's address."""
    project = attacked.nodes.folder / f"elsewhere-{address.rpartition(':')[2]}"
    project.mkdir()
    code = format_invite(Invite(attacked.secret.reveal(), "attacked", attacked.node.agent, ()))
    words = ("--invite", "-", "--discovery", "none", "--peer", address)
    victim = attacked.nodes.join(project, "victim", *words, text=code)
    try:
        yield victim
    finally:
        attacked.nodes.end(victim)


def captured_hello(router: zmq.Socket[bytes]) -> tuple[bytes, Hello]:
    """What a real member says to whom it takes for a member, since it knows the secret."""
    assert router.poll(5000)
    route, *parts = router.recv_multipart()
    hello = decode(parts)
    assert isinstance(hello, Hello)
    assert hello.to == ""  # so it is not refused for being meant for another
    return route, hello


def test_a_replayed_hello_is_refused(attacked: Attacked, mallory: Attacker) -> None:
    with mallory.listen() as (router, address), victim_of(attacked, address):
        _, hello = captured_hello(router)
        for _ in range(3):
            with mallory.dial(attacked.address) as wire:
                wire.send(hello)
                assert wire.refusal() == "impostor"
    attacked.until_refused(3, "impostor")
    assert not attacked.newcomers


def test_a_hello_relayed_in_the_middle_is_refused(attacked: Attacked, mallory: Attacker) -> None:
    """Live, between a member that dials the attacker and the node it would like to reach."""
    with mallory.listen() as (router, address), victim_of(attacked, address) as victim:
        route, hello = captured_hello(router)
        with mallory.dial(attacked.address) as wire:
            wire.send(hello)
            assert wire.refusal() == "impostor"

        # The other way round: the node's answer to the attacker's own HELLO, handed on.
        with mallory.dial(attacked.address) as wire:
            wire.send(mallory.hello(nonce=hello.nonce))
            router.send_multipart([route, *encode(wire.welcome())])
        answer = None
        while not isinstance(answer, Refuse):
            assert router.poll(5000)
            answer = decode(router.recv_multipart()[1:])
        assert answer.why == "forged"
        assert victim.view == {}
    attacked.until_refused(1, "impostor")
    assert attacked.newcomers == {mallory.identity.agent}  # who was a member all the time


# -- speaking about another -------------------------------------------------------------------


def body_of(word: Signed, **changes: object) -> tuple[object, ...]:
    """A record's fields as they are signed, with some of them changed."""
    record = word.statement
    assert isinstance(record, Record)
    values = {each.name: getattr(record, each.name) for each in fields(record)} | changes
    return tuple(values.values())


@pytest.mark.parametrize(
    "changes", [{"role": "janitor"}, {"left": True}, {"addresses": ("127.0.0.1:1",)}]
)
def test_a_forged_record_of_another_is_refused(
    attacked: Attacked, mallory: Attacker, changes: dict[str, object]
) -> None:
    with mallory.member(attacked.address) as wire:
        theirs = record_of(wire, attacked.friend.agent)
        assert isinstance(theirs.statement, Record)
        newer = {**changes, "incarnation": theirs.statement.incarnation + 1}
        body = pack(body_of(theirs, **newer))
        wire.send(
            Gossip(
                (
                    mallory.forged(theirs, body_of(theirs, **newer)),  # signed by the attacker
                    pack((1, body, theirs.signature)),  # with the signature of the former words
                )
            )
        )
        attacked.until_refused(2, "forged update")
    assert attacked.node.view[attacked.friend.agent]["role"] == "otherrole"


def test_accusations_in_anothers_name_are_refused(attacked: Attacked, mallory: Attacker) -> None:
    made_up = Attacker(attacked.secret, "nobody").identity
    with mallory.member(attacked.address) as wire:
        theirs = record_of(wire, attacked.friend.agent)
        assert isinstance(theirs.statement, Record)
        subject, incarnation = theirs.statement.agent, theirs.statement.incarnation
        for state in (PeerState.SUSPECT, PeerState.GONE):
            by_nobody = Accusation(subject, incarnation, state, made_up.agent)
            by_target = Accusation(subject, incarnation, state, AgentId(attacked.node.agent))
            by_itself = Accusation(subject, incarnation, state, subject)
            mesh_id = attacked.secret.mesh_id
            words = [
                sign_accusation(by_nobody, made_up, mesh_id),
                sign_accusation(by_target, mallory.identity, mesh_id),
                sign_accusation(by_itself, mallory.identity, mesh_id),
            ]
            wire.send(Gossip(tuple(word.data for word in words)))
        attacked.until_refused(2, "unknown accuser")
        attacked.until_refused(2, "forged update")
    assert attacked.node.states_of(attacked.friend, attacked.since) == []


def test_malformed_updates_are_refused(attacked: Attacked, mallory: Attacker) -> None:
    bad = [b"", b"\xc1", os.urandom(200), pack((1, b"", bytes(64))), pack(("9", b"x", bytes(64)))]
    with mallory.member(attacked.address) as wire:
        wire.send(Gossip(tuple(bad)))
        attacked.until_refused(len(bad), "malformed update")
        wire.answers(1)  # what others say is not held against who passes it on


# -- breaking the protocol --------------------------------------------------------------------

DEEP = b"\x91" * 50_000 + b"\x00"
MALFORMED: dict[str, list[bytes]] = {
    "nothing": [b""],
    "not msgpack": [b"\xc1\xc1"],
    "a number": [msgpack.packb(16)],
    "a map": [msgpack.packb({16: 1})],
    "an empty list": [msgpack.packb([])],
    "deep nesting": [DEEP],
    "a length that is a lie": [b"\xdd\xff\xff\xff\xff"],
    "a text length that is a lie": [b"\x92\x10\xdb\xff\xff\xff\xff"],
    "trailing bytes": [msgpack.packb([16, 1, []]) + b"\x00"],
    "an extension": [msgpack.packb([16, msgpack.ExtType(5, b"x"), []])],
    "an unknown required code": [msgpack.packb([99, 1])],
    "a negative code": [msgpack.packb([-1, 1])],
    "a payload that is not allowed": [msgpack.packb([16, 1, []]), b"payload"],
    "a second hello": [b"HELLO"],
    "a welcome from the dialler": [b"WELCOME"],
    "too many updates": [msgpack.packb([20, [b""] * 257])],
    "an update that is too long": [msgpack.packb([20, [bytes(4097)]])],
    "a digest that is too long": [msgpack.packb([21, 1, [["a", 1, 0]] * 4097])],
    "a header that is too long": [bytes(600 * 1024)],
    "lone surrogates": [b"\x93\x12\x01\xa3\xed\xa0\x80\x90"],
} | {
    f"{kind.__name__} {what}": [msgpack.packb([code, *values])]
    for code, kind in FRAMES.items()
    for what, values in {
        "without fields": [],
        "of wrong types": [[[]]] * len(kind.checks),
        "of huge numbers": [2**64 - 1] * len(kind.checks),
    }.items()
}


def test_malformed_frames_cost_their_sender_the_link(attacked: Attacked) -> None:
    for number, (what, parts) in enumerate(MALFORMED.items(), 1):
        mallory = Attacker(attacked.secret, "mallory")
        with mallory.member(attacked.address) as wire:
            if parts == [b"HELLO"]:
                parts = encode(mallory.hello())
            elif parts == [b"WELCOME"]:
                values = (1, {}, "a", bytes(32), bytes(16), bytes(16), b"", bytes(64))
                parts = [msgpack.packb([2, *values])]
            wire.dealer.send_multipart(parts)
            assert wire.refusal() == "protocol", what
        assert attacked.count("protocol") == number, what


def test_an_unknown_optional_frame_is_ignored(attacked: Attacked, mallory: Attacker) -> None:
    with mallory.member(attacked.address) as wire:
        wire.dealer.send_multipart([msgpack.packb([200, "later"]), b"payload"])
        wire.answers(7)
    assert attacked.count("protocol") == 0


@pytest.mark.parametrize("size", [int(1.1 * MIB), int(1.2 * MIB), 8 * MIB])
def test_an_oversize_frame_costs_its_sender_the_link(
    attacked: Attacked, mallory: Attacker, size: int
) -> None:
    with mallory.member(attacked.address) as wire:
        monitor = wire.dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        wire.dealer.send(bytes(size))
        assert monitor.poll(5000), "cut off"
        wire.dealer.disable_monitor()
        monitor.close()
    # libzmq cuts a frame off at its length prefix when it is far too long: nobody can count it,
    # and nothing of it was read. From one who has not said a word, it counts as an outsider.
    if size < int(1.2 * MIB):
        attacked.until_refused(1, "oversize")
    with mallory.dial(attacked.address) as wire:
        wire.dealer.send(bytes(size))
        attacked.until_refused(1, "oversize" if size < int(1.2 * MIB) else "outsider")


def test_a_message_of_10000_parts_costs_its_sender_the_link(
    attacked: Attacked, mallory: Attacker
) -> None:
    with mallory.member(attacked.address) as wire:
        wire.dealer.send_multipart([b"x"] * 10_000)
        attacked.until_refused(1, "parts")


# -- floods -----------------------------------------------------------------------------------

FLOOD_FRAMES = 5_000
FLOOD_LINKS = 200


def test_a_flood_of_hellos_with_random_ids_is_refused(attacked: Attacked) -> None:
    for _ in range(FLOOD_LINKS):
        mallory = Attacker(attacked.secret)
        with mallory.dial(attacked.address) as wire:
            hello = mallory.hello()
            for _ in range(FLOOD_FRAMES // FLOOD_LINKS):
                agent = f"m{os.urandom(4).hex()}-{'abcdefgh'}"
                wire.send(replace(hello, agent=agent))
            assert wire.refusal() == "impostor"
    attacked.until_refused(FLOOD_LINKS, "impostor")
    assert not attacked.newcomers


def test_members_made_up_by_the_thousand_are_bounded(attacked: Attacked) -> None:
    """Each with a key of its own, and so as good as real: memory and the members stay well."""
    crowd = [Attacker(attacked.secret, f"m{number}").record().data for number in range(2_000)]
    mallory = Attacker(attacked.secret)
    with mallory.member(attacked.address) as wire:
        for at in range(0, len(crowd), 64):
            wire.send(Gossip(tuple(crowd[at : at + 64])))
        wire.answers(99)
