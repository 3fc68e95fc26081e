"""Frames survive the wire; hostile bytes raise RemoteProtocolError and nothing else."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import msgpack
import pytest
from core.made import EXAMPLES
from core.wire.fuzz_codec import fuzz
from hypothesis import given, settings
from hypothesis import strategies as st

from meshagent.core.model.records import parse_update
from meshagent.core.wire import frames
from meshagent.core.wire.codec import CONTAINER_ITEMS_MAX, decode, encode, pack, unpack
from meshagent.core.wire.field_checks import FEATURES_MAX, PIECE_BYTES
from meshagent.core.wire.frames import FRAMES, Frame, field_names
from meshagent.errors import RemoteProtocolError

KINDS = sorted(FRAMES.values(), key=lambda kind: kind.code)
NAMED = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)

_whole = st.integers(0, frames.WHOLE_MAX)
_text = st.text(st.characters(codec="utf-8"), max_size=frames.TEXT_CHARACTERS_MAX)
_blob = st.binary(max_size=frames.UPDATE_BYTES_MAX)
_updates = st.lists(st.binary(max_size=40), max_size=frames.UPDATES_MAX).map(tuple)
_key, _nonce, _signature = (st.binary(min_size=n, max_size=n) for n in (32, 16, 64))
_features = st.dictionaries(_text, _whole, max_size=FEATURES_MAX)
_digest = st.lists(st.tuples(_text, _whole, st.integers(0, 3)), max_size=50).map(tuple)
_epoch = st.binary(min_size=8, max_size=8)
_items = st.lists(st.none() | st.binary(max_size=40), max_size=frames.MAIL_ITEMS_MAX).map(tuple)
_exceptions = st.lists(st.tuples(_whole, _text), max_size=20).map(tuple)
_grant = st.binary(max_size=frames.SIGNATURE_BYTES)

FIELDS: dict[type[Frame], tuple[st.SearchStrategy[Any], ...]] = {
    frames.Hello: (
        _whole, _whole, _features, _text, _key, _text, _nonce, _whole, _blob, _signature,
    ),
    frames.Welcome: (_whole, _features, _text, _key, _nonce, _nonce, _blob, _signature),
    frames.Refuse: (_text, _text, _blob),
    frames.Bye: (_text,),
    frames.Check: (_nonce,),
    frames.Here: (_nonce, _whole, _signature),
    frames.Ping: (_whole, _updates),
    frames.Ack: (_whole, _updates),
    frames.PingReq: (_whole, _text, _updates),
    frames.Nack: (_whole,),
    frames.Gossip: (_updates,),
    frames.Sync: (_whole, _digest),
    frames.Mail: (_epoch, _whole, _whole, _items),
    frames.MailAck: (_epoch, _whole, _nonce, _whole, _exceptions),
    frames.BlobAsk: (_whole, _key, _whole, _text, _grant, _whole, _whole),
    frames.BlobMore: (_whole, _whole),
    frames.BlobChunk: (_whole, _whole, st.binary(max_size=4096)),
    frames.BlobEnd: (_whole, _text, _text),
    frames.BlobStop: (_whole,),
}  # fmt: skip

NAN = float("nan")
DEEP = b"\x91" * 100_000 + b"\x90"

WRONG: dict[str, list[object]] = {
    "int": [None, True, -1, 2**63, 2**64 - 1, 1.5, NAN, "1", b"1", [], {}],
    "str": [None, 1, NAN, b"x", "é" * 201, [], {}],
    "bytes": [None, 1, "x", b"x" * 4097, [], {}],
    "dict[str, int]": [
        None, 1, "x", [], {"a": -1}, {"a": "b"}, {"a": NAN}, {b"a": 1}, {"x" * 201: 1},
        {f"f{n}": 1 for n in range(FEATURES_MAX + 1)},
    ],
    "tuple[bytes, ...]": [
        None, 1, "x", b"x", {}, [1], ["x"], [[b"x"]], [b"x" * 4097],
        [b""] * (frames.UPDATES_MAX + 1),
    ],
    "tuple[bytes | None, ...]": [
        None, 1, "x", b"x", {}, [1], ["x"], [[b"x"]], [b"x" * (frames.MESSAGE_BYTES_MAX + 1)],
        [b""] * (frames.MAIL_ITEMS_MAX + 1),
    ],
    "tuple[tuple[int, str], ...]": [
        None, 1, "x", b"x", {}, [1], [[]], [[1]], [[1, 2]], [["a", "b"]],
        [[-1, "x"]], [[1, "x" * 201]], [[1, ""]] * (frames.MAIL_ITEMS_MAX + 1),
    ],
    "tuple[tuple[str, int, int], ...]": [
        None, 1, "x", b"x", {}, [1], [[]], [["a", 1]],
        [["a", -1, 0]], [["a", 1, True]], [[1, 1, 1]], [["a", NAN, 0]], [["x" * 201, 1, 0]],
        [["a", 1, 0]] * (frames.MEMBERS_MAX + 1),
    ],
}  # fmt: skip
SIZES = {
    "epoch": 8, "last": 16, "key": 32, "nonce": 16, "their_nonce": 16, "signature": 64,
    "sha256": 32,
}  # fmt: skip


def header_of(frame: Frame) -> list[Any]:
    return list(msgpack.unpackb(encode(frame)[0], use_list=False))


def is_refused(*parts: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(parts)


def test_every_frame_of_the_grammar_is_tested_here() -> None:
    assert set(FIELDS) == set(FRAMES.values()) == set(EXAMPLES)


@NAMED
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_frame_survives_the_wire(kind: type[Frame], data: st.DataObject) -> None:
    frame = kind(*(data.draw(each) for each in FIELDS[kind]))
    there = decode(encode(frame))
    assert (there, type(there)) == (frame, kind)


@NAMED
def test_any_msgpack_library_can_read_a_frame(kind: type[Frame]) -> None:
    header, *payload = encode(EXAMPLES[kind])
    code, *values = msgpack.unpackb(header)
    assert code == kind.code
    assert len(values) + len(payload) == len(field_names(kind))


@settings(max_examples=500, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_bytes_are_a_protocol_error_or_nothing(parts: list[bytes]) -> None:
    with suppress(RemoteProtocolError):
        decode(parts)
    for part in parts:
        with suppress(RemoteProtocolError):
            parse_update(part)


@NAMED
def test_a_frame_cut_short_anywhere_is_refused(kind: type[Frame]) -> None:
    header, *payload = encode(EXAMPLES[kind])
    for size in range(len(header)):
        is_refused(header[:size], *payload)


@NAMED
def test_a_flipped_bit_never_raises_anything_else(kind: type[Frame]) -> None:
    header, *payload = encode(EXAMPLES[kind])
    for bit in range(len(header) * 8):
        changed = bytearray(header)
        changed[bit // 8] ^= 1 << bit % 8
        with suppress(RemoteProtocolError):
            decode([bytes(changed), *payload])


def type_of(kind: type[Frame], name: str) -> str:
    """As it is written."""
    said = next(found for each in kind.mro() if name in (found := _annotated(each)))
    return str(getattr(said[name], "__forward_arg__", said[name]))


def _annotated(kind: type) -> dict[str, Any]:
    found: dict[str, Any] = vars(kind).get("__annotations__", {})
    return found


@NAMED
def test_a_wrong_type_in_any_field_is_refused(kind: type[Frame]) -> None:
    header, payload = header_of(EXAMPLES[kind]), encode(EXAMPLES[kind])[1:]
    packed = field_names(kind)[: len(header) - 1]
    for at, name in enumerate(packed, start=1):
        wrong = list(WRONG[type_of(kind, name)])
        if name in SIZES:
            size = SIZES[name]
            wrong += [b"", bytes(size - 1), bytes(size + 1)]
        for value in wrong:
            changed = [*header[:at], value, *header[at + 1 :]]
            with pytest.raises(RemoteProtocolError):
                print(name, repr(value)[:60], decode([pack(changed), *payload]))


@NAMED
def test_a_missing_field_is_refused_and_an_extra_one_ignored(kind: type[Frame]) -> None:
    header, payload = header_of(EXAMPLES[kind]), encode(EXAMPLES[kind])[1:]
    is_refused(pack(header[:-1]), *payload)
    for extra in (None, "later", {"a": [1]}, NAN):
        assert decode([pack([*header, extra]), *payload]) == EXAMPLES[kind]


@NAMED
def test_bytes_after_the_value_are_refused(kind: type[Frame]) -> None:
    header, *payload = encode(EXAMPLES[kind])
    is_refused(header + b"\x00", *payload)
    is_refused(header + header, *payload)


@NAMED
def test_payload_parts_that_the_grammar_does_not_know_are_refused(kind: type[Frame]) -> None:
    is_refused(*encode(EXAMPLES[kind]), b"")


def test_a_chunk_travels_beside_its_header_and_within_its_limit() -> None:
    data = random.Random(3).randbytes(frames.CHUNK_BYTES)
    header, *parts = encode(frames.BlobChunk(1, 2, data))
    assert len(header) < 32
    assert {len(each) for each in parts} == {PIECE_BYTES}
    assert all(isinstance(e, memoryview) and e.obj is data for e in parts), "bulk is not copied"
    back = decode([header, *parts])
    assert isinstance(back, frames.BlobChunk)
    assert (len(back.data), bytes(back.data)) == (len(data), data)
    assert encode(back) == [header, *parts], "a chunk is passed on in the parts it came in"
    assert decode([header, data]) == frames.BlobChunk(1, 2, data)
    assert decode([header, b""]) == frames.BlobChunk(1, 2, b"")
    is_refused(header)
    is_refused(header, data + b"x")
    is_refused(header, data, b"")
    is_refused(header, *parts, b"")
    is_refused(header, *parts, b"x")
    is_refused(header, *parts[:-1], b"")
    is_refused(header, b"x", *parts[1:])
    is_refused(header, parts[0], bytes(parts[1]) + b"x")
    is_refused(pack([50, 1, 2, b"packed"]))


def test_the_number_of_parts_is_bounded() -> None:
    optional = pack([frames.OPTIONAL_FROM])
    assert decode([optional] * frames.PARTS_MAX) is None
    is_refused(*[optional] * (frames.PARTS_MAX + 1))
    is_refused()


@pytest.mark.parametrize("code", [0, 7, 15, 22, frames.OPTIONAL_FROM - 1, -1, -(2**63)])
def test_an_unknown_required_frame_is_refused(code: int) -> None:
    assert code not in FRAMES
    is_refused(pack([code, "whatever"]))


@pytest.mark.parametrize("code", [frames.OPTIONAL_FROM, 200, 2**64 - 1])
def test_an_unknown_optional_frame_is_ignored(code: int) -> None:
    assert decode([pack([code, "whatever"])]) is None


@pytest.mark.parametrize(
    "header", [1, True, None, "x", b"x", {}, {1: 2}, [], [True], ["1"], [None], [1.0], [NAN], [[1]]]
)
def test_what_is_not_a_list_with_a_code_is_refused(header: object) -> None:
    is_refused(pack(header))


HOSTILE = {
    "deep lists": DEEP,
    "deep maps": b"\x81\xa1a" * 100_000 + b"\x90",
    "a deep extra field": b"\x92\x13" + DEEP,
    "a list that says it holds 2^32-1": b"\xdd\xff\xff\xff\xff",
    "a map that says it holds 2^32-1": b"\xdf\xff\xff\xff\xff",
    "a text that says it holds 2^32-1": b"\xdb\xff\xff\xff\xff",
    "bytes that say they hold 2^32-1": b"\xc6\xff\xff\xff\xff",
    "an extension that says it holds 2^32-1": b"\xc9\xff\xff\xff\xff\x01",
    "a list beyond the limit": pack([0] * (CONTAINER_ITEMS_MAX + 1)),
    "a list beyond the limit where nobody looks": pack([19, 1, [0] * (CONTAINER_ITEMS_MAX + 1)]),
    "a header beyond the limit": pack([19, 1, bytes(frames.HEADER_BYTES_MAX)]),
    "an extension type": pack([19, msgpack.ExtType(5, b"x")]),
    "a timestamp": pack([19, msgpack.Timestamp(1)]),
    "a timestamp that is none": b"\x92\x13\xd4\xff\x00",
    "a list as a map's key": b"\x92\x13\x81\x90\x01",
    "a number as a map's key": pack([19, {1: 1}]),
    "text that is not UTF-8": b"\x92\x04\xa2\xff\xfe",
    "a byte that msgpack never uses": b"\x92\x13\xc1",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_msgpack_is_refused(data: bytes) -> None:
    is_refused(data)
    with pytest.raises(RemoteProtocolError):
        parse_update(data)


def test_what_is_unpacked_has_lists_as_tuples() -> None:
    assert unpack(pack([1, [2, [3]]])) == (1, (2, (3,)))


def test_an_error_text_never_repeats_the_bytes() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode([pack([4, "\x1b[31mred" * 50])])
    assert "red" not in str(caught.value)


@pytest.mark.parametrize("seed", range(4))
def test_a_mutation_fuzzer_finds_nothing(seed: int) -> None:
    assert fuzz(seed, iterations=400) == 400


@pytest.mark.parametrize(
    "items",
    [(b"x" * (frames.MESSAGE_BYTES_MAX + 1),), (b"",) * (frames.MAIL_ITEMS_MAX + 1)],
    ids=["long", "many"],
)
def test_mail_beyond_its_limits_is_refused(items: tuple[bytes, ...]) -> None:
    with pytest.raises(RemoteProtocolError):
        decode([pack((frames.Mail.code, b"epoch--1", 1, 1, items))])
