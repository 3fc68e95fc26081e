"""Memory for chunks that are read, used again and again. Never gives out what somebody looks at.

New memory for each chunk would be asked of the system, cleared and given back each time.
"""

from __future__ import annotations

__all__ = ["BufferPool"]

KEPT_MAX = 8  # blocks: as many as are read at once; beyond it new ones are not kept


class BufferPool:
    """BufferPool of one size. For one thread; what it gave out may be used and let go in others."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: list[bytearray] = []

    def take(self) -> memoryview:
        """A block with whatever is in it, which is kept for the taker until every view is gone."""
        for block in self._kept:
            try:
                block.append(0)  # refused as long as there is any view of it
            except BufferError:
                continue
            del block[-1]
            return memoryview(block)
        block = bytearray(self._size)
        if len(self._kept) < KEPT_MAX:
            self._kept.append(block)
        return memoryview(block)
