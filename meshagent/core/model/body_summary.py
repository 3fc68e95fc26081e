"""What a store reads of a message's bytes: the fields that it shows, filters and searches by.

Never checks a message: `parse_body` does. Invariant: whatever the bytes, nothing is raised, and
of a large body only the beginning is decoded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgpack

from meshagent.core.model.messages import Message

__all__ = ["BodySummary", "summarize"]

SMALL_BODY_BYTES = 4096  # decoded whole: that is quicker than field by field

_KIND, _TEXT, _CREATED, _ATTACHMENTS = (
    Message._fields.index(name) for name in ("kind", "text", "created_ms", "attachments")
)


class BodySummary(NamedTuple):
    """The fields of a message that a store looks at; all empty when the bytes are no message."""

    kind: str
    text: str
    created_ms: int
    attached: bool


_NOTHING = BodySummary("", "", 0, False)


def summarize(body: bytes) -> BodySummary:
    """As far as the bytes say."""
    try:
        fields = _decode(body)
        kind, text, created_ms = fields[_KIND], fields[_TEXT], fields[_CREATED]
        attached = bool(fields[_ATTACHMENTS])
    except (IndexError, TypeError, ValueError, msgpack.UnpackException):
        return _NOTHING
    if type(kind) is str and type(text) is str and type(created_ms) is int:
        return BodySummary(kind, text, created_ms, attached)
    return _NOTHING


def _decode(body: bytes) -> Any:
    """The fields up to the attachments, of which a large body gives only the count."""
    if len(body) <= SMALL_BODY_BYTES:
        return msgpack.unpackb(body, strict_map_key=False)
    reader = msgpack.Unpacker(max_buffer_size=len(body), strict_map_key=False)
    reader.feed(body)
    reader.read_array_header()
    fields = [reader.unpack() for _ in range(_CREATED + 1)]
    for _ in range(_CREATED + 1, _ATTACHMENTS):
        reader.skip()
        fields.append(None)
    return [*fields, reader.read_array_header()]
