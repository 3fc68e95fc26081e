"""How a blob is cut into chunks. Pure formulas: both sides count the same from the size alone."""

from __future__ import annotations

from meshagent.core.wire.frames import CHUNK_BYTES

__all__ = [
    "BLOB_BYTES_MAX",
    "CHUNK_BYTES",
    "FULL_LINK_S",
    "bytes_in",
    "chunk_count",
    "chunk_length",
]

BLOB_BYTES_MAX = 2**50  # no file here is a petabyte: beyond it a size is a lie
FULL_LINK_S = 0.01  # the transport does not say when it is writable again: it is, in less


def bytes_in(chunks: int, size: int) -> int:
    """How many bytes the first `chunks` chunks hold."""
    return min(chunks * CHUNK_BYTES, size)


def chunk_count(size: int) -> int:
    """How many chunks make a blob of `size` bytes: none for an empty one."""
    return -(-size // CHUNK_BYTES)


def chunk_length(size: int, index: int) -> int:
    """The bytes of chunk `index`: all are full but the last."""
    return min(CHUNK_BYTES, size - index * CHUNK_BYTES)
