"""An attachment as a message names it, and what a recipient takes. Never touches its bytes.

Invariant: whatever a sender claims, its name is one line of printable text and its numbers are in
bounds; what it holds is known only when it is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from meshagent.core.model.file_names import DISPLAY_CHARACTERS_MAX, display_name
from meshagent.core.model.peers import AgentId
from meshagent.core.wire.codec import pack
from meshagent.errors import RemoteProtocolError

__all__ = ["Attachment", "AttachmentLimits", "grant_words", "parse_attachments"]

ATTACHMENTS_MAX = 256  # in any message, whatever a recipient's own limit is
MIME_CHARACTERS_MAX = 100
SHA256_BYTES = 32
GRANT_BYTES_MAX = 64
PIXELS_MAX = 2**31
SIZE_MAX = 2**50  # more than any disk here; keeps sums exact everywhere

MIB = 1024 * 1024
GIB = 1024 * MIB


class Attachment(NamedTuple):
    """A file that travels with a message, by reference.

    `grant` is the sender's signature that the recipient may have it: see `grant_words`.
    """

    name: str
    size: int
    mime: str
    sha256: bytes
    width: int = 0
    height: int = 0
    grant: bytes = b""


def parse_attachments(raw: Any) -> tuple[Attachment, ...]:
    """What a message names; RemoteProtocolError says which of them is not acceptable, and why."""
    if type(raw) is not tuple or len(raw) > ATTACHMENTS_MAX:
        raise RemoteProtocolError(f"A message has at most {ATTACHMENTS_MAX} attachments.")
    attachments = tuple(_parse(number, each) for number, each in enumerate(raw, 1))
    sizes: dict[bytes, int] = {}
    for number, each in enumerate(attachments, 1):
        if sizes.setdefault(each.sha256, each.size) != each.size:
            raise RemoteProtocolError(f"Attachment {number} is a file with two sizes.")
    return attachments


def _parse(number: int, raw: Any) -> Attachment:
    if not isinstance(raw, tuple) or len(raw) < len(Attachment._fields):
        raise RemoteProtocolError(f"Attachment {number} lacks fields.")
    attachment = Attachment(*raw[: len(Attachment._fields)])
    name, size, mime, sha256, width, height, grant = attachment
    if type(name) is not str or len(name) > DISPLAY_CHARACTERS_MAX or display_name(name) != name:
        raise RemoteProtocolError(f"The name of attachment {number} is not acceptable.")
    if type(mime) is not str or len(mime) > MIME_CHARACTERS_MAX or not _is_mime(mime):
        raise RemoteProtocolError(f"The type of attachment {number} is not acceptable.")
    if type(size) is not int or not 0 <= size <= SIZE_MAX:
        raise RemoteProtocolError(f"The size of attachment {number} is not acceptable.")
    pixels = all(type(each) is int and 0 <= each < PIXELS_MAX for each in (width, height))
    grants = type(grant) is bytes and len(grant) <= GRANT_BYTES_MAX
    if not (pixels and grants and type(sha256) is bytes and len(sha256) == SHA256_BYTES):
        raise RemoteProtocolError(f"Attachment {number} has a field of the wrong form.")
    return attachment


def _is_mime(text: str) -> bool:
    kind, slash, rest = text.partition("/")
    return bool(slash and kind and rest) and text.isascii() and text.isprintable()


def grant_words(mesh_id: bytes, granter: AgentId, to: AgentId, sha256: bytes) -> bytes:
    """What a sender signs, so that `to` may have the blob from others who hold it."""
    return pack(("meshagent blob", mesh_id, granter, to, sha256))


@dataclass(frozen=True, slots=True)
class AttachmentLimits:
    """What a recipient takes; settings of its mesh."""

    eager_bytes: int = 100 * MIB
    """Fetched at once up to this size; larger ones when somebody asks for them."""
    each_bytes: int = 10 * GIB
    """A larger one is refused."""
    count: int = 32
    """More in one message are refused."""
    types: tuple[str, ...] = ()
    """If any are named, all others are refused: `image/*`, `application/pdf`."""

    def refusal(self, attachments: Sequence[Attachment]) -> str:
        """Why they are not taken, with the figures; nothing when they are."""
        if len(attachments) > self.count:
            return f"{len(attachments)} attachments; {self.count} are allowed"
        for each in attachments:
            if each.size > self.each_bytes:
                return f"{each.name!r} has {each.size} bytes; {self.each_bytes} are allowed"
            if not self.allows(each.mime):
                return f"{each.name!r} is {each.mime}; allowed: {', '.join(self.types)}"
        return ""

    def allows(self, mime: str) -> bool:
        """Whether this type is taken."""
        return not self.types or any(fnmatchcase(mime, each) for each in self.types)

    def is_eager(self, attachment: Attachment) -> bool:
        """Whether it is fetched before the message is handed out."""
        return attachment.size <= self.eager_bytes
