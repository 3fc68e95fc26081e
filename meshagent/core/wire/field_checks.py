"""What a field of a frame may hold: one function per kind of field, with its limit.

A check returns the value, or raises RemoteProtocolError. It never looks at other fields and never
decides what a value means. The docstring of a check is its sentence in docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshagent.core.wire.payload import Payload, Pieces
from meshagent.errors import RemoteProtocolError

__all__ = [
    "CHUNK_BYTES",
    "FEATURES_MAX",
    "MESSAGE_BYTES_MAX",
    "PIECE_BYTES",
    "SIGNATURE_BYTES",
    "TEXT_CHARACTERS_MAX",
    "UPDATE_BYTES_MAX",
    "WHOLE_MAX",
    "FieldCheck",
    "chunk",
    "digest_entry",
    "exactly",
    "features",
    "grant",
    "mail_item",
    "many",
    "outcome",
    "signed_update",
    "text",
    "whole",
]

MESSAGE_BYTES_MAX = 1024 * 1024 + 4096  # text and data of 1 MiB, with the other fields
TEXT_CHARACTERS_MAX = 200  # ids, reasons and the like; people's texts have limits of their own
SIGNATURE_BYTES = 64
CHUNK_BYTES = 512 * 1024  # of a blob, in one frame: a text behind a few of them waits little
PIECE_BYTES = 128 * 1024  # of a chunk, in one part: what is encrypted at once fits a core's cache
UPDATE_BYTES_MAX = 4096  # one signed record with its addresses and capabilities
FEATURES_MAX = 256  # a newer node may name many that we do not know
WHOLE_MAX = 2**63 - 1

FieldCheck = Callable[[Any], Any]


def _wrong(expected: str, value: object) -> RemoteProtocolError:
    return RemoteProtocolError(f"A frame's field should be {expected}, not {type(value).__name__}.")


def whole(value: Any) -> int:
    """A number from 0 to 2^63-1."""
    if type(value) is not int or not 0 <= value <= WHOLE_MAX:
        raise _wrong("a whole number", value)
    return value


def text(value: Any) -> str:
    """A short text of at most 200 characters."""
    if type(value) is not str or len(value) > TEXT_CHARACTERS_MAX:
        raise _wrong("a short text", value)
    return value


def exactly(size: int) -> FieldCheck:
    """That many bytes."""

    def check(value: Any) -> bytes:
        if type(value) is not bytes or len(value) != size:
            raise _wrong(f"{size} bytes", value)
        return value

    return check


def signed_update(value: Any) -> bytes:
    """A signed update of at most 4096 bytes."""
    if type(value) is not bytes or len(value) > UPDATE_BYTES_MAX:
        raise _wrong(f"at most {UPDATE_BYTES_MAX} bytes", value)
    return value


def many(item: FieldCheck, limit: int) -> FieldCheck:
    """At most `limit` of `item`."""

    def check(value: Any) -> tuple[Any, ...]:
        if type(value) is not tuple or len(value) > limit:
            raise _wrong(f"a list of at most {limit}", value)
        return tuple([item(entry) for entry in value])

    return check


def features(value: Any) -> dict[str, int]:
    """Optional abilities of a node: a name and a number for each."""
    if type(value) is not dict or len(value) > FEATURES_MAX:
        raise _wrong("a features map", value)
    return {text(name): whole(number) for name, number in value.items()}


def digest_entry(value: Any) -> tuple[str, int, int]:
    """Agent id, incarnation, and 0 alive, 1 suspect, 2 gone, 3 left, or more in newer nodes."""
    if type(value) is not tuple or len(value) < 3:
        raise _wrong("a digest entry", value)
    agent, incarnation, state = value[:3]
    return text(agent), whole(incarnation), whole(state)


def mail_item(value: Any) -> bytes | None:
    """A message's body of at most 1 MiB and 4 KiB, or nil when it was cancelled or has expired."""
    if value is not None and (type(value) is not bytes or len(value) > MESSAGE_BYTES_MAX):
        raise _wrong("a message", value)
    return value


def outcome(value: Any) -> tuple[int, str]:
    """A message's number and why it was refused; no reason if it was cancelled or expired."""
    if type(value) is not tuple or len(value) < 2:
        raise _wrong("an outcome", value)
    return whole(value[0]), text(value[1])


def grant(value: Any) -> bytes:
    """A signature of at most 64 bytes; empty when the granter itself is asked."""
    if type(value) is not bytes or len(value) > SIGNATURE_BYTES:
        raise _wrong(f"at most {SIGNATURE_BYTES} bytes", value)
    return value


def chunk(value: Any) -> Payload:
    """At most 524288 bytes, in parts of 131072 and a rest; only the last chunk is shorter."""
    if not isinstance(value, bytes | memoryview | Pieces) or len(value) > CHUNK_BYTES:
        raise _wrong(f"at most {CHUNK_BYTES} bytes", value)
    if isinstance(value, Pieces):
        *full, last = value.parts
        if any(len(each) != PIECE_BYTES for each in full) or not 0 < len(last) <= PIECE_BYTES:
            raise _wrong(f"in parts of {PIECE_BYTES} bytes", value)
    return value
