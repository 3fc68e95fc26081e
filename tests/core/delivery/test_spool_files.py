"""Mail as a file: only its sender could have written it, for us, in this mesh."""

from __future__ import annotations

from typing import Any

import pytest
from core.made import MESH_ID, OTHER_SECRET, identity
from hypothesis import given
from hypothesis import strategies as st

from meshagent.core.delivery.spool_files import DROP_BYTES_MAX, Drop, _words, pack_drop, parse_drop
from meshagent.core.model.identity import verify
from meshagent.core.wire.codec import encode, pack, unpack
from meshagent.core.wire.frames import Mail, Ping
from meshagent.errors import RemoteProtocolError

ALICE, BOB, EVE = identity("alice"), identity("bob"), identity("eve")
MAIL = Mail(b"theepoch", 1, 3, (b"a message", None))
GOOD = pack_drop(ALICE, MESH_ID, BOB.agent, MAIL)


def parse(data: bytes) -> Drop:
    return parse_drop(data, BOB.agent, MESH_ID, verify)


def changed(**fields: Any) -> bytes:
    names = ("version", "sender", "key", "frame", "signature")
    return pack(tuple((dict(zip(names, unpack(GOOD), strict=True)) | fields).values()))


def test_a_drop_is_read_as_it_was_written() -> None:
    assert parse(GOOD) == Drop(ALICE.agent, ALICE.key, MAIL)


def test_a_drop_is_for_one_recipient_in_one_mesh() -> None:
    for me, mesh in ((EVE.agent, MESH_ID), (BOB.agent, OTHER_SECRET.mesh_id)):
        with pytest.raises(RemoteProtocolError, match="signature"):
            parse_drop(GOOD, me, mesh, verify)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"version": 2}, "not a drop"),
        ({"sender": EVE.agent}, "another key"),
        ({"sender": EVE.agent, "key": EVE.key}, "signature"),
        ({"sender": "nobody"}, "wrong form"),
        ({"key": b"short"}, "wrong form"),
        ({"signature": b"short"}, "wrong form"),
        ({"signature": bytes(64)}, "signature"),
        ({"frame": encode(Mail(b"theepoch", 1, 3, (b"another",)))[0]}, "signature"),
        ({"frame": None}, "not a drop"),
    ],
    ids=str,
)
def test_a_drop_that_was_changed_is_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        parse(changed(**fields))


def test_a_drop_carries_nothing_but_mail() -> None:
    (frame,) = encode(Ping(1))
    signature = ALICE.sign(_words(MESH_ID, ALICE.agent, BOB.agent, frame))
    with pytest.raises(RemoteProtocolError, match="no mail"):
        parse(changed(frame=frame, signature=signature))


@given(st.binary(max_size=300), st.integers(0, len(GOOD) - 1))
def test_whatever_the_file_holds_only_a_protocol_error_is_raised(data: bytes, at: int) -> None:
    for bad in (data, GOOD[:at], GOOD[:at] + bytes([GOOD[at] ^ 1]) + GOOD[at + 1 :]):
        with pytest.raises(RemoteProtocolError):
            parse(bad)


def test_a_file_without_end_is_not_looked_at() -> None:
    with pytest.raises(RemoteProtocolError, match="limit"):
        parse(GOOD + bytes(DROP_BYTES_MAX))
