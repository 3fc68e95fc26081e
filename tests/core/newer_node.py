"""A node of a later release, as this one may meet it: it says more than this one can know."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from meshagent.core.model.identity import Identity
from meshagent.core.model.records import Record
from meshagent.core.wire.codec import encode, pack, unpack
from meshagent.core.wire.frames import NONCE_BYTES, OPTIONAL_FROM, Frame, Hello

VERSIONS = (0, 7)
PRESENCE = "in a meeting"
FEATURES = {"telepathy": 3, **{f"later-{number}": number for number in range(100)}}
KIND = "x-later/poll"
UNKNOWN_UPDATE_KIND = 9
UNKNOWN_STATE = 7


def record_bytes(record: Record, who: Identity, mesh_id: bytes) -> bytes:
    """A signed record with a presence and fields that only later releases know."""
    values = [getattr(record, name) for name in Record.__dataclass_fields__]
    values[list(Record.__dataclass_fields__).index("presence")] = PRESENCE
    return signed(1, (*values, "mood", {"depth": 2}), b"meshagent record 1", who, mesh_id)


def signed(kind: int, body: tuple[Any, ...], label: bytes, who: Identity, mesh_id: bytes) -> bytes:
    packed = pack(body)
    return pack((kind, packed, who.sign(label + mesh_id + packed)))


def unknown_updates(who: Identity, mesh_id: bytes) -> tuple[bytes, ...]:
    """A statement of a kind, and an accusation of a state, that came later."""
    label = b"meshagent accusation 1"
    accusation = (who.agent, 1, UNKNOWN_STATE, who.agent)
    return (
        signed(UNKNOWN_UPDATE_KIND, ("a vote",), b"meshagent vote 1", who, mesh_id),
        signed(2, accusation, label, who, mesh_id),
    )


def hello_of(
    record: Record, who: Identity, mesh_id: bytes, features: Mapping[str, int] = FEATURES
) -> Hello:
    """It speaks the versions 0 to 7, and names features that nobody here has heard of.

    Signed as docs/protocol.md says, and not with this release's own code.
    """
    nonce, started_ms = os.urandom(NONCE_BYTES), record.started_ms
    words = pack((
        "meshagent hello 1", mesh_id, who.agent, "", nonce, who.curve_public, started_ms,
        *VERSIONS, sorted(features.items()),
    ))  # fmt: skip
    return Hello(
        *VERSIONS, dict(features), who.agent, who.key, "", nonce, started_ms,
        record_bytes(record, who, mesh_id), who.sign(words),
    )  # fmt: skip


def with_more_fields(frame: Frame) -> list[bytes]:
    """The frame's parts, with fields at its end that came later."""
    header, *parts = encode(frame)
    return [pack((*unpack(header), "later", {"and": "more"})), *map(bytes, parts)]


def optional_frame() -> list[bytes]:
    """Of a kind that came later, and that nobody needs to know."""
    return [pack((OPTIONAL_FROM + 3, "rumour", {"depth": 2})), b"and a payload"]


def required_frame() -> list[bytes]:
    """Of a kind that came later, and without which nothing makes sense."""
    return [pack((99, "vital"))]


def message_body(ident: str, text: str) -> bytes:
    """A message of a kind, and with fields, that came later."""
    data = {"question": "which branch?", "choices": ("main", "next")}
    return pack((ident, KIND, text, 1_000, data, "", "", {}, (), 0, 0, "later", {"and": "more"}))
