"""The bytes of a chunk as they travel: one part of a frame, or several. Never copies them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Payload", "Pieces"]


class Pieces:
    """A payload in several parts, as they arrived. Joining them would copy them."""

    __slots__ = ("_length", "parts")

    def __init__(self, parts: Sequence[bytes | memoryview]) -> None:
        self.parts = tuple(parts)
        self._length = sum(map(len, parts))

    def __len__(self) -> int:
        return self._length

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)


Payload = bytes | memoryview | Pieces
