"""Frames to bytes and back. Decoding hostile bytes can raise RemoteProtocolError only.

Never touches a link. Invariant: `decode(encode(frame)) == frame`, and every frame is plain
msgpack that any msgpack library can read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import msgpack

from meshagent.core.wire.field_checks import PIECE_BYTES
from meshagent.core.wire.frames import (
    FRAMES,
    HEADER_BYTES_MAX,
    OPTIONAL_FROM,
    PARTS_MAX,
    Frame,
    field_names,
)
from meshagent.core.wire.payload import Payload, Pieces
from meshagent.errors import RemoteProtocolError

__all__ = ["decode", "encode", "pack", "pack_all", "unpack", "unpack_short"]

CONTAINER_ITEMS_MAX = 8192  # the largest list in the grammar is a Sync digest of 4096

# The fields of a frame and its code. With the code attrgetter always returns a tuple.
_values = {kind: attrgetter(*field_names(kind), "code") for kind in FRAMES.values()}


class _Packing(threading.local):
    """One packer per thread: creating one takes longer than packing a message."""

    def __init__(self) -> None:
        self.pack: Callable[[object], bytes] = msgpack.Packer(use_bin_type=True).pack


_packing = _Packing()


def pack(value: object) -> bytes:
    """Plain msgpack."""
    return _packing.pack(value)


def pack_all(values: Iterable[object]) -> list[bytes]:
    """As `pack`, for many values in one call."""
    return list(map(_packing.pack, values))


def unpack(data: bytes | memoryview, limit: int = HEADER_BYTES_MAX) -> Any:
    """The one msgpack value in `data`, with lists as tuples. Every size is limited."""
    if len(data) > limit:
        raise RemoteProtocolError(f"A header of {len(data)} bytes exceeds the limit of {limit}.")
    try:
        if len(data) <= CONTAINER_ITEMS_MAX:  # nothing in it can be larger than it is itself
            return _unpack(data)
        return msgpack.unpackb(
            data,
            use_list=False,
            raw=False,
            strict_map_key=True,
            ext_hook=_refuse_extension,
            max_str_len=limit,
            max_bin_len=limit,
            max_array_len=CONTAINER_ITEMS_MAX,
            max_map_len=CONTAINER_ITEMS_MAX,
            max_ext_len=limit,
        )
    except RemoteProtocolError:
        raise
    except Exception as error:
        # msgpack raises ValueError, TypeError, its own and, for deep nesting, RecursionError:
        # the list is not part of its contract, so anything it raises means bad bytes.
        raise RemoteProtocolError(
            f"The bytes are not one msgpack value: {type(error).__name__}."
        ) from None


def unpack_short(datas: Sequence[bytes | None]) -> list[Any]:
    """As `unpack`, for many; an empty list when one is long, missing or malformed."""
    try:
        if None in datas or max(map(len, datas)) > CONTAINER_ITEMS_MAX:  # type: ignore[arg-type]
            return []
        return list(map(_unpack, datas))
    except Exception:  # as above
        return []


def encode(frame: Frame) -> list[bytes | memoryview]:
    """The parts of `frame` as they go on the wire."""
    if isinstance(frame, tuple):
        return [pack((frame.code, *frame))]
    *values, code = _values[type(frame)](frame)
    if frame.parts == 1:
        return [pack((code, *values))]
    payload = values.pop()
    return [pack((code, *values)), *_pieces(payload)]


def _pieces(payload: Payload) -> Sequence[bytes | memoryview]:
    if isinstance(payload, Pieces):
        return payload.parts
    if len(payload) <= PIECE_BYTES:
        return [payload]
    view = memoryview(payload)
    return [view[at : at + PIECE_BYTES] for at in range(0, len(view), PIECE_BYTES)]


def decode(parts: Sequence[bytes | memoryview]) -> Frame | None:
    """The frame in `parts`; None when it is optional and unknown here."""
    if not 1 <= len(parts) <= PARTS_MAX:
        raise RemoteProtocolError(
            f"A frame of {len(parts)} parts exceeds the limit of {PARTS_MAX}."
        )
    header = unpack(parts[0])
    if type(header) is not tuple or not header or type(header[0]) is not int:
        raise RemoteProtocolError("A frame begins with a list whose first item is its code.")
    kind = FRAMES.get(header[0])
    if kind is None:
        if header[0] >= OPTIONAL_FROM:
            return None
        raise RemoteProtocolError(f"Frame code {header[0]} is required and not known here.")
    if min(len(parts), 2) != kind.parts:
        raise RemoteProtocolError(f"A {kind.__name__} does not have {len(parts)} parts.")
    values = header[1:]
    if kind.parts > 1:
        payload = parts[1] if len(parts) == 2 else Pieces(parts[1:])
        values = (*values[: len(kind.checks) - 1], payload)
    if len(values) < len(kind.checks):
        raise RemoteProtocolError(f"A {kind.__name__} lacks fields.")
    return kind(*[check(value) for check, value in zip(kind.checks, values, strict=False)])


def _refuse_extension(code: int, data: bytes) -> Any:
    raise RemoteProtocolError(f"Extension type {code} has no meaning here.")


_unpack = partial(msgpack.unpackb, use_list=False, ext_hook=_refuse_extension)
