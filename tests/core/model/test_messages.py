"""A message as bytes: what is refused at the sender, and that nothing else ever comes back."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshagent.core.model.attachments import Attachment
from meshagent.core.model.messages import (
    DATA_DEPTH_MAX,
    HEADERS_MAX,
    INLINE_BYTES_MAX,
    Message,
    MessageIds,
    Outgoing,
    body_hash,
    is_id,
    pack_body,
    pack_columns,
    parse_bodies,
    parse_body,
)
from meshagent.core.model.peers import AgentId
from meshagent.core.wire.codec import pack
from meshagent.errors import LimitReached, MeshError, RemoteProtocolError, UsageError

PLAIN = Message("m", "text", "hello", 1)

json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False,
    allow_infinity=False) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4
    ),
    max_leaves=12,
)  # fmt: skip


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@given(json_like, st.text(st.characters(exclude_categories=["Cs"])))
def test_what_json_can_say_comes_back_and_can_be_printed(data: Any, text: str) -> None:
    message = PLAIN._replace(data=data, text=text, headers={"a": "b"}, thread="t", reply_to="r")
    body = pack_body(message)
    back = parse_body(body)
    assert (back.id, back.text, back.headers, back.thread) == ("m", text, {"a": "b"}, "t")
    assert json.loads(json.dumps(back.data)) == data
    assert body_hash(body) == body_hash(pack_body(message))


@pytest.mark.parametrize(
    "data",
    [
        float("nan"),
        [float("inf")],
        {"a": b"bytes"},
        {b"key": 1},
        {1: 2},
        {(1, 2): 3},
        msgpack.ExtType(5, b"x"),
        msgpack.Timestamp(1),
        datetime(2026, 1, 1, tzinfo=UTC),
        {1, 2},
        object(),
        2**64,
        "\ud800",
        nested(DATA_DEPTH_MAX),
        nested(5000),
        [0] * 10_000,
    ],
    ids=lambda data: type(data).__name__,
)
def test_data_that_nobody_could_print_is_refused_at_the_sender_with_a_sentence(data: Any) -> None:
    with pytest.raises(UsageError) as caught:
        pack_body(PLAIN._replace(data=data))
    assert caught.value.message.startswith("The message")
    assert "JSON" in (caught.value.hint or "")
    assert parse_body(pack_body(PLAIN)) == PLAIN  # nothing of it is left in the next one


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": ""},
        {"id": "x" * 201},
        {"id": "a\nb"},
        {"kind": ""},
        {"thread": "\x1b"},
        {"reply_to": "x" * 201},
        {"created_ms": -1},
        {"expires_ms": 2**63},
        {"hops": True},
        {"headers": {str(at): "" for at in range(HEADERS_MAX + 1)}},
        {"headers": {"a": 1}},
        {"expires_ms": False},
        {"hops": 0.0},
        {"attachments": (b"bytes",)},
    ],
    ids=str,
)
def test_a_field_of_the_wrong_form_is_refused_on_both_sides(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        pack_body(PLAIN._replace(**wrong))
    fields = PLAIN._replace(**wrong)
    body = msgpack.packb(
        [
            fields.id, fields.kind, fields.text, fields.created_ms, fields.data, fields.thread,
            fields.reply_to, fields.headers, fields.attachments, fields.expires_ms, fields.hops,
        ]
    )  # fmt: skip
    with pytest.raises(RemoteProtocolError):
        parse_body(body)
    for at in range(3):
        bodies: list[bytes | None] = [pack_body(PLAIN)] * 2
        bodies.insert(at, body)
        found = list(parse_bodies(bodies))
        assert isinstance(found.pop(at), RemoteProtocolError), "it alone"
        assert found == [PLAIN] * 2


@pytest.mark.parametrize(
    "other",
    [
        {"kind": "receipt", "data": {}},
        {"data": 0},
        {"thread": "t"},
        {"reply_to": "r"},
        {"headers": {"a": "b"}},
        {"expires_ms": 9},
        {"hops": 1},
    ],
    ids=str,
)
def test_what_is_more_than_a_text_comes_back_whole_wherever_it_stands(
    other: dict[str, Any],
) -> None:
    strange = PLAIN._replace(**other)
    for at in range(3):
        messages = [PLAIN, PLAIN._replace(id="n", text="", created_ms=0)]
        messages.insert(at, strange)
        assert list(parse_bodies([pack_body(each) for each in messages])) == messages
        assert pack_columns(list(zip(*messages, strict=True))) == list(map(pack_body, messages))


def test_each_body_is_judged_alone() -> None:
    later = pack((*PLAIN, "later"))
    bodies = [pack_body(PLAIN), None, b"", pack(3), later, pack_body(PLAIN)]
    found = parse_bodies(bodies)
    assert [found[0], found[1], found[4], found[5]] == [PLAIN, None, PLAIN, PLAIN]
    assert isinstance(found[2], RemoteProtocolError)
    assert isinstance(found[3], RemoteProtocolError)
    assert parse_bodies([None, None]) == [None, None]
    assert list(parse_bodies([])) == []


@given(st.binary(max_size=200))
def test_whatever_the_bytes_only_a_protocol_error_is_raised(data: bytes) -> None:
    try:
        message = parse_body(data)
    except RemoteProtocolError:
        _, found, _ = parse_bodies([pack_body(PLAIN), data, None])
        assert isinstance(found, RemoteProtocolError)
        return
    json.dumps(message.data)
    assert list(parse_bodies([data])) == [message]


def test_a_text_of_a_mebibyte_passes_and_one_more_byte_does_not() -> None:
    assert len(parse_body(pack_body(PLAIN._replace(text="x" * INLINE_BYTES_MAX))).text) == 2**20
    with pytest.raises(LimitReached, match="1048577"):
        pack_body(PLAIN._replace(text="x" * (INLINE_BYTES_MAX + 1)))
    with pytest.raises(LimitReached):
        pack_body(PLAIN._replace(text="x" * 600_000, data="y" * 600_000))


def test_fields_of_a_later_version_are_ignored() -> None:
    fields = msgpack.unpackb(pack_body(PLAIN))
    assert parse_body(msgpack.packb([*fields, "news"])) == PLAIN


def test_ids_are_short_typable_and_do_not_meet() -> None:
    make = MessageIds(random.Random(1))
    ids = [make.next(now_ms) for now_ms in (5, 5, 4, 6) for _ in range(10_000)]
    ids += make.take(6, 3) + make.take(70_000, 100) + make.take(70_000, 1) + make.take(4, 40_000)
    assert len(set(ids)) == len(ids)
    assert ids == sorted(ids), "whatever the clock does"
    assert all(len(each) == 12 and each.isalnum() and is_id(each) for each in ids)


def test_ids_that_are_taken_together_go_on_beyond_their_beginning() -> None:
    make = MessageIds(random.Random(1))
    make._last = (5 << 30) - 20
    ids = make.take(0, 40)
    assert ids == sorted(set(ids))
    assert len({each[:6] for each in ids}) == 2


def test_a_batch_has_the_bodies_of_the_messages_that_it_holds() -> None:
    texts = ["", "grüße", "x" * 100_000]
    messages = [Message(f"m{at}", "text", text, 7) for at, text in enumerate(texts)]
    bob = AgentId("bob-fyvvtb2k")
    batch = Outgoing.of([bob] * 3, list(zip(*messages, strict=True)))
    assert batch == Outgoing([bob] * 3, ("m0", "m1", "m2"), list(map(pack_body, messages)))
    file = Attachment("a", 5, "text/plain", bytes(32))
    messages[1] = messages[1]._replace(expires_ms=9, attachments=(file, file))
    batch = Outgoing.of([bob] * 3, list(zip(*messages, strict=True)))
    assert tuple(batch.expires) == (0, 9, 0)
    assert list(batch.blobs) == [(), (bytes(32),), ()], "each file once"


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize(
    "wrong", [{"text": "x" * (INLINE_BYTES_MAX + 1)}, {"text": 7}, {"id": ""}, {"created_ms": -1}]
)
def test_a_batch_is_refused_for_any_message_that_would_be_refused_alone(
    at: int, wrong: dict[str, Any]
) -> None:
    messages = [PLAIN] * 3
    messages[at] = PLAIN._replace(**wrong)
    with pytest.raises(MeshError):
        pack_body(messages[at])
    with pytest.raises(MeshError):
        pack_columns(list(zip(*messages, strict=True)))
