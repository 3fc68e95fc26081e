"""What an attachment is by its contents, in place of what its sender says.

Decides what a session is told once a blob is here. Never blocks the loop: the store looks in its
own thread, once for each blob, for contents under one hash never change. Invariant: what is not
here keeps its sender's claim, and what is here never does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from meshagent.errors import MeshError

if TYPE_CHECKING:
    from meshagent.storage.blobs.store import Stored

__all__ = ["UNKNOWN", "FileTypes"]

KNOWN_MAX = 10_000  # blobs; some 4 MB
UNKNOWN = "application/octet-stream"


class FileTypes:
    """Remembers what `describe` said of each blob."""

    def __init__(self, describe: Callable[[bytes], Awaitable[Stored]]) -> None:
        self._describe = describe
        self._known: dict[bytes, tuple[str, int, int]] = {}

    async def look(self, sha256: bytes) -> tuple[str, int, int]:
        """The MIME type, width and height of a blob that is here; 0 by 0 when it is no picture."""
        known = self._known.get(sha256)
        if known is not None:
            return known
        try:
            found = await self._describe(sha256)
        except MeshError:  # it went, or can't be read: then nobody has looked
            return UNKNOWN, 0, 0
        if len(self._known) >= KNOWN_MAX:
            del self._known[next(iter(self._known))]
        self._known[sha256] = found.mime, found.width, found.height
        return self._known[sha256]

    async def correct(self, message: dict[str, Any]) -> dict[str, Any]:
        """The view of a message, with the truth about each attachment that is here."""
        for each in message["attachments"]:
            if each["state"] == "ready":
                mime, width, height = await self.look(bytes.fromhex(each["sha256"]))
                each |= {"mime": mime, "width": width or None, "height": height or None}
        return message

    async def correct_all(self, messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """The same for each of a list."""
        return [await self.correct(each) for each in messages]
