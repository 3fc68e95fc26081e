"""Ids belong to keys; the secret opens the door and shows nowhere."""

from __future__ import annotations

import base64

import pytest
import zmq
from core.made import OTHER_SECRET, SECRET, identity
from hypothesis import given, settings
from hypothesis import strategies as st
from zmq.utils import z85

from meshagent.core.model.identity import (
    Identity,
    MeshSecret,
    agent_id_for,
    curve_key_of,
    id_matches_key,
    verify,
)
from meshagent.core.model.peers import is_agent_id
from meshagent.errors import LocalProtocolError, UsageError

SEED = bytes(range(32))
SECRET_BYTES = b"nobody may see this"


def forms_of(data: bytes) -> list[str]:
    """How bytes could show in a text."""
    return [data.hex(), base64.b64encode(data).decode(), base64.b32encode(data).decode(), str(data)]


def test_an_id_belongs_to_one_key() -> None:
    a, b = Identity("same", SEED), Identity("same", bytes(32))
    assert a.agent != b.agent
    assert id_matches_key(a.agent, a.key)
    assert not id_matches_key(a.agent, b.key)
    assert a.agent == agent_id_for("same", a.key) == Identity("same", SEED).agent


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=32, max_size=32))
def test_an_id_made_here_reads_as_one(seed: bytes) -> None:
    agent = Identity("tester", seed).agent
    assert is_agent_id(agent)
    assert agent.startswith("tester-")


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=32, max_size=32))
def test_the_curve_key_is_the_one_that_libzmq_computes(seed: bytes) -> None:
    who = Identity("tester", seed)
    public = z85.decode(zmq.curve_public(z85.encode(who.curve_secret)))
    assert public == who.curve_public == curve_key_of(who.key)


def test_the_door_key_is_the_one_that_libzmq_computes() -> None:
    public, secret = SECRET.door()
    assert z85.decode(zmq.curve_public(z85.encode(secret))) == public


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(33), b"\xff" * 32, bytes(32)])
def test_a_key_that_is_no_point_has_no_curve_key(key: bytes) -> None:
    assert curve_key_of(key) is None


def test_a_signature_holds_for_its_words_and_key_only() -> None:
    a, b = identity("a"), identity("b")
    signature = a.sign(b"words")
    assert verify(a.key, b"words", signature)
    assert not verify(a.key, b"other", signature)
    assert not verify(b.key, b"words", signature)


@pytest.mark.parametrize("signature", [b"", bytes(63), bytes(64), bytes(65), b"\xff" * 64])
@pytest.mark.parametrize("key", [b"", bytes(32), b"\xff" * 32, identity("a").key])
def test_a_bad_signature_is_false_whatever_its_shape(key: bytes, signature: bytes) -> None:
    assert verify(key, b"words", signature) is False


@pytest.mark.parametrize("size", [0, 31, 33, 64])
def test_a_seed_of_another_size_is_our_callers_error(size: int) -> None:
    with pytest.raises(LocalProtocolError):
        Identity("tester", bytes(size))


@pytest.mark.parametrize("name", ["", "Tester", "a b", "-x", "é", "x" * 33, "a/b", "a\n"])
def test_a_name_that_no_id_can_hold_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        Identity(name, SEED)


@pytest.mark.parametrize("size", [0, 15])
def test_a_secret_that_could_be_guessed_is_refused(size: int) -> None:
    with pytest.raises(LocalProtocolError):
        MeshSecret(bytes(size))


def test_no_text_form_shows_the_secret_or_the_seed() -> None:
    secret, who = MeshSecret(SECRET_BYTES), Identity("tester", SEED)
    for text in (repr(secret), str(secret), f"{secret}", secret.tag, repr(who), str(who), f"{who}"):
        for hidden in (SECRET_BYTES, secret.door()[0], secret.door()[1], SEED, who.curve_secret):
            assert not any(form in text for form in forms_of(hidden))
        assert "nobody" not in text


def test_what_is_derived_differs_by_label_and_by_secret() -> None:
    values: list[object] = []
    for secret in (SECRET, OTHER_SECRET):
        values += [secret.mesh_id, secret.mesh_id[:8].hex(), secret.tag, *secret.door()]
        values += [secret.door()[1][:8].hex(), secret.reveal()]
    assert len(set(values)) == len(values)


def test_the_same_secret_opens_the_same_door() -> None:
    again = MeshSecret(SECRET.reveal())
    assert (again.mesh_id, again.tag, again.door()) == (SECRET.mesh_id, SECRET.tag, SECRET.door())
