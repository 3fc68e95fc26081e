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

from meshagent.core.model.messages import (
    DATA_DEPTH_MAX,
    HEADERS_MAX,
    INLINE_BYTES_MAX,
    SHORT_TEXT_CHARACTERS,
    Message,
    MessageIds,
    Texts,
    body_hash,
    is_id,
    pack_body,
    parse_body,
    parse_texts,
)
from meshagent.core.model.peers import AgentId
from meshagent.core.wire.codec import pack
from meshagent.errors import LimitReached, RemoteProtocolError, UsageError

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
    assert parse_texts([body]) == []
    assert parse_texts([pack_body(PLAIN), body, pack_body(PLAIN)]) == []


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
def test_what_is_more_than_a_text_is_not_taken_for_one(other: dict[str, Any]) -> None:
    texts = [PLAIN, PLAIN._replace(id="n", text="", created_ms=0)]
    bodies = [pack_body(each) for each in texts]
    assert parse_texts(bodies) == texts
    assert parse_texts(bodies[1:]) == texts[1:]
    for strange in (pack_body(PLAIN._replace(**other)), b"", pack(3), pack((*PLAIN, "later"))):
        assert parse_texts([strange]) == []
        for at in range(3):
            assert parse_texts([*bodies[:at], strange, *bodies[at:]]) == []


@given(st.binary(max_size=200))
def test_whatever_the_bytes_only_a_protocol_error_is_raised(data: bytes) -> None:
    try:
        message = parse_body(data)
    except RemoteProtocolError:
        assert parse_texts([data]) == []
        return
    json.dumps(message.data)


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


def test_texts_have_the_bodies_of_the_messages_that_they_are() -> None:
    ids, texts = ["m1", "m2", "m3"], ["", "grüße", "x" * SHORT_TEXT_CHARACTERS]
    each = [
        pack_body(Message(ident, "text", text, 7)) for ident, text in zip(ids, texts, strict=True)
    ]
    assert Texts(AgentId("bob-fyvvtb2k"), ids, texts, 7).bodies() == each


def test_the_longest_text_that_counts_as_short_fits_whatever_its_characters() -> None:
    body = pack_body(Message("m", "text", "\U0001f600" * SHORT_TEXT_CHARACTERS, 7))
    assert len(body) <= INLINE_BYTES_MAX
