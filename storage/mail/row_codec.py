"""The rows of a commit as bytes, and back.

Decides which kinds of rows a commit can hold. Never touches a file. Invariant: a kind keeps its
code for ever, so a commit says the same to every version that knows its kinds; one that is not
known is an error here, and never a guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import msgpack

from meshagent.core.model.rows import (
    Arrived,
    Delivered,
    InBatch,
    InRow,
    InState,
    NewEpoch,
    OutBatch,
    OutRow,
    OutState,
    PeerRow,
    ReceiptRow,
    Row,
    TurnedAway,
    Watermark,
    singly,
)
from meshagent.storage.mail.schema import MetaRow

__all__ = ["RowPacker", "UnknownRows", "names_in", "unpack_rows"]

# A kind is kept as its place here: new ones come at the end.
_KINDS = (
    OutRow, OutState, Delivered, ReceiptRow, InRow, Arrived, TurnedAway, InState, Watermark,
    OutBatch, InBatch, PeerRow, NewEpoch, MetaRow,
)  # fmt: skip
_CODES: dict[type, int] = {kind: code for code, kind in enumerate(_KINDS)}
_OF_CODE: dict[Any, Any] = dict(enumerate(_KINDS))


class UnknownRows(Exception):
    """A commit that is whole holds what this version does not know."""


def _fields(row: Any) -> tuple[Any, ...]:
    """Of the kinds that are no tuples."""
    return tuple(getattr(row, name) for name in row.__slots__)


class RowPacker:
    """Packs the rows of a commit; one for each thread."""

    def __init__(self) -> None:
        self._pack = msgpack.Packer(default=_fields).pack  # with a buffer that is used again

    def pack(self, rows: Sequence[Row | MetaRow]) -> bytes:
        """For `unpack_rows`."""
        stretches: Iterable[tuple[type, Iterable[Any]]] = groupby(rows, type)
        content: bytes = self._pack([(_CODES[kind], list(rows)) for kind, rows in stretches])
        return content


def unpack_rows(content: bytes) -> list[Any]:
    """The rows of a commit; raises UnknownRows."""
    try:
        return [_OF_CODE[code](*row) for code, stretch in _unpacked(content) for row in stretch]
    except (KeyError, TypeError, ValueError, msgpack.UnpackException) as error:
        raise UnknownRows(repr(error)) from error


def names_in(content: bytes) -> list[tuple[str, str]]:
    """Peer and id of each message in a commit that may be damaged, as far as that can be read; of
    a commit without a message, of each row that has them."""
    try:
        stretches = [(_OF_CODE.get(code), stretch) for code, stretch in _unpacked(content)]
        rows = [kind(*row) for kind, stretch in stretches if kind is not None for row in stretch]
        messages = [row for row in singly(rows) if isinstance(row, OutRow | InRow)]
        return list(dict.fromkeys(_names(messages or rows)))
    except (TypeError, ValueError, msgpack.UnpackException):
        return []


def _names(rows: Iterable[Any]) -> Iterator[tuple[str, str]]:
    for row in rows:
        peer = getattr(row, "peer", "") or getattr(row, "sender", "") or getattr(row, "agent", "")
        if peer:
            yield str(peer), str(getattr(row, "id", ""))


def _unpacked(content: bytes) -> Any:
    return msgpack.unpackb(content, use_list=False, strict_map_key=False)
