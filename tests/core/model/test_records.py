"""Signed words: whole ones pass, everything else is refused before anybody believes it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from core.made import MESH_ID, OTHER_SECRET, accusation, identity, record_of, word_of
from hypothesis import given, settings
from hypothesis import strategies as st

from meshagent.core.model.identity import Identity, verify
from meshagent.core.model.peers import PeerState
from meshagent.core.model.presence import Presence
from meshagent.core.model.records import (
    ADDRESSES_MAX,
    CAPABILITIES_MAX,
    Accusation,
    Record,
    parse_update,
    sign_accusation,
    sign_record,
)
from meshagent.core.wire.codec import pack, unpack
from meshagent.core.wire.frames import UPDATE_BYTES_MAX
from meshagent.errors import LocalProtocolError, RemoteProtocolError

A, B = identity("a"), identity("b")

_name = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,31}", fullmatch=True)
_line = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=32)
_records = st.builds(
    Record, st.just(A.agent), st.just(A.key), st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1),
    st.booleans(), _name, st.lists(_name, max_size=16).map(tuple),
    st.lists(_line, max_size=16).map(tuple), _line, st.sampled_from(Presence), _line, _line,
)  # fmt: skip


def forge(signer: Identity = A, **changes: Any) -> bytes:
    """A record with absurd contents and a good signature: what a hostile member can make."""
    values = [getattr(record_of(A), field.name) for field in fields(Record)]
    for name, value in changes.items():
        values[[field.name for field in fields(Record)].index(name)] = value
    body = pack(values)
    return pack((1, body, signer.sign(b"meshagent record 1" + MESH_ID + body)))


@settings(max_examples=100, deadline=None)
@given(_records)
def test_a_record_survives_the_wire_and_its_signature_holds(record: Record) -> None:
    word = parse_update(sign_record(record, A, MESH_ID).data)
    assert word.statement == record
    assert word.is_genuine(A.key, MESH_ID, verify)


@pytest.mark.parametrize("state", [PeerState.SUSPECT, PeerState.GONE])
def test_an_accusation_survives_the_wire_and_its_signature_holds(state: PeerState) -> None:
    said = Accusation(A.agent, 7, state, B.agent)
    word = parse_update(sign_accusation(said, B, MESH_ID).data)
    assert word.statement == said
    assert word.is_genuine(B.key, MESH_ID, verify)


def test_a_word_holds_for_its_own_key_mesh_and_kind_only() -> None:
    word = word_of(A)
    assert word.is_genuine(A.key, MESH_ID, verify)
    assert not word.is_genuine(B.key, MESH_ID, verify)
    assert not word.is_genuine(A.key, OTHER_SECRET.mesh_id, verify)
    said = parse_update(accusation(A, B)).statement
    assert not replace(word, statement=said).is_genuine(A.key, MESH_ID, verify)


def test_a_word_signed_by_somebody_else_is_not_genuine() -> None:
    assert not parse_update(forge(signer=B)).is_genuine(A.key, MESH_ID, verify)
    in_my_name = parse_update(accusation(A, B, signer=A))
    assert not in_my_name.is_genuine(B.key, MESH_ID, verify)


def test_no_altered_byte_goes_unnoticed() -> None:
    for whole in (word_of(A).data, accusation(A, B)):
        said = parse_update(whole).statement
        for at in range(len(whole)):
            altered = bytearray(whole)
            altered[at] ^= 0x01
            try:
                word = parse_update(bytes(altered))
            except RemoteProtocolError:
                continue
            key = A.key if isinstance(said, Record) else B.key
            assert not word.is_genuine(key, MESH_ID, verify)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("agent", "a"), ("agent", B.agent), ("agent", "A-" + A.agent[-8:]), ("agent", 1),
        ("agent", A.agent + "\n"), ("agent", "x" * 33 + A.agent[-9:]),
        ("key", B.key), ("key", A.key[:-1]), ("key", "x" * 32), ("key", b""),
        ("incarnation", -1), ("incarnation", 2**63), ("incarnation", True), ("incarnation", 1.0),
        ("started_ms", -1), ("started_ms", None), ("started_ms", float("nan")),
        ("left", 0), ("left", None), ("left", "yes"),
        ("role", "two words"), ("role", ""), ("role", "Tester"), ("role", "x" * 33), ("role", 1),
        ("role", "tester\n"), ("role", "\x1b[31m"),
        ("capabilities", "python"), ("capabilities", ["two words"]), ("capabilities", [1]),
        ("capabilities", ["x"] * (CAPABILITIES_MAX + 1)), ("capabilities", {"a": 1}),
        ("addresses", ["10.0.0.1:1"] * (ADDRESSES_MAX + 1)), ("addresses", ["x" * 129]),
        ("addresses", ["10.0.0.1:1\n"]), ("addresses", [b"x"]), ("addresses", None),
        ("host", "x" * 65), ("host", "a\tb"), ("host", b"x"),
        ("presence", "x" * 33), ("presence", "two\nlines"), ("presence", ""), ("presence", 1),
        ("presence", ["idle"]),
        ("status", "\x1b[2J"), ("status", "two\nlines"), ("status", "\x07"), ("status", "x" * 201),
        ("status", "\u202egnihtemos"), ("status", "\u2028"), ("status", "\x9b31m"),
        ("status", b"x"),
        ("version", "x" * 33), ("version", "\r"), ("version", None),
    ],
)  # fmt: skip
def test_absurd_contents_are_refused_even_when_well_signed(field: str, value: object) -> None:
    assert parse_update(forge()).statement == record_of(A)
    with pytest.raises(RemoteProtocolError, match="bad"):
        parse_update(forge(**{field: value}))


@pytest.mark.parametrize(
    "said",
    [
        ("a", 1, 1, B.agent), (A.agent, -1, 1, B.agent), (A.agent, 1, 0, B.agent),
        (A.agent, 1, 3, B.agent), (A.agent, 1, True, B.agent), (A.agent, 1, 1, "b"),
        (A.agent, 1, 1), (), None, {},
    ],
)  # fmt: skip
def test_absurd_accusations_are_refused(said: object) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_update(pack((2, pack(said), bytes(64))))


@pytest.mark.parametrize(
    "update",
    [
        None, 1, (), (1, b""), (1, b"", bytes(63)), (1, b"", bytes(64)), ("1", b"", bytes(64)),
        (0, pack(()), bytes(64)), (3, pack(()), bytes(64)), (1, pack(()), bytes(64), 0),
        (1, pack((1,) * 12), bytes(64)), (1, b"\xc1", bytes(64)), (1, b"\x91" * 5000, bytes(64)),
    ],
)  # fmt: skip
def test_what_is_no_update_is_refused(update: object) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_update(pack(update))


def test_an_update_beyond_the_limit_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="limit"):
        parse_update(pack((1, bytes(UPDATE_BYTES_MAX), bytes(64))))


def test_fields_that_a_later_version_adds_are_ignored() -> None:
    body = pack((*unpack(word_of(A).body), "later"))
    signature = A.sign(b"meshagent record 1" + MESH_ID + body)
    word = parse_update(pack((1, body, signature)))
    assert word.statement == record_of(A)
    assert word.is_genuine(A.key, MESH_ID, verify)


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "two\nlines"}, {"status": "x" * 201}, {"addresses": ("x",) * 17},
        {"host": "x" * 65}, {"role": "two words"}, {"incarnation": 2**63},
        {"addresses": ("\N{EARTH GLOBE EUROPE-AFRICA}" * 128,) * 16},
    ],
)  # fmt: skip
def test_what_peers_would_refuse_is_never_signed(changes: dict[str, Any]) -> None:
    # Otherwise the agent would vanish from everybody's view for a status it set, without a word.
    with pytest.raises(LocalProtocolError):
        sign_record(record_of(A, **changes), A, MESH_ID)
