"""A message as a value: its fields, its limits, its bytes. Never decides where it goes.

Invariant: the bytes of a message never change once it is accepted, so their hash names it.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from meshagent.core.codec import pack, unpack
from meshagent.core.frames import MESSAGE_BYTES_MAX
from meshagent.core.types import AgentId
from meshagent.errors import LimitReached, RemoteProtocolError, UsageError

__all__ = [
    "Message",
    "MessageState",
    "body_hash",
    "is_id",
    "new_message_id",
    "pack_body",
    "parse_body",
]

INLINE_BYTES_MAX = 1024 * 1024  # text and data together; beyond that it is an attachment
SHORT_CHARACTERS_MAX = 200  # kind, thread, ids
HEADERS_MAX = 32
DATA_DEPTH_MAX = 64  # lists in lists: whoever prints it as JSON has a stack
HASH_BYTES = 16
ID_CHARACTERS = 12  # 60 random bits: a million messages a day collide once in 3,000 years
_DATA_HINT = "Data may hold what JSON can: texts, numbers, lists, objects, true, false, null."
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"

RECEIPT_KIND = "receipt"
"""A message of this kind tells a sender how far its message has come; no person sees it."""


class MessageState(StrEnum):
    """How far a message has come, in this order; then the ends other than `done`."""

    QUEUED = "queued"
    SENT = "sent"
    DELIVERED = "delivered"
    SEEN = "seen"
    DONE = "done"
    EXPIRED = "expired"
    REFUSED = "refused"
    CANCELLED = "cancelled"


PROGRESS = {
    MessageState.QUEUED: 0,
    MessageState.SENT: 1,
    MessageState.DELIVERED: 3,
    MessageState.SEEN: 4,
    MessageState.DONE: 5,
    # Decided here without an answer: a later word from the recipient still counts.
    MessageState.EXPIRED: 2,
    MessageState.CANCELLED: 2,
    MessageState.REFUSED: 5,
}
"""A state replaces one of a smaller rank only, so late and repeated news change nothing."""


@dataclass(frozen=True, slots=True)
class Message:
    """What one agent says to another. Times are milliseconds since the epoch."""

    id: str
    kind: str
    text: str
    created_ms: int
    data: Any = None
    thread: str = ""
    reply_to: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    attachments: tuple[Any, ...] = ()
    expires_ms: int = 0
    hops: int = 0


@dataclass(frozen=True, slots=True)
class Received:
    """A message as the recipient keeps it."""

    sender: AgentId
    message: Message
    received_ms: int


def new_message_id(rng: random.Random) -> str:
    """Short enough to type, long enough never to meet another."""
    number = rng.getrandbits(5 * ID_CHARACTERS)
    return "".join(_ALPHABET[number >> shift & 31] for shift in range(0, 5 * ID_CHARACTERS, 5))


def body_hash(body: bytes) -> bytes:
    """Names a body on the wire: an ack carries it, so that no ack can be for another message."""
    return hashlib.sha256(body).digest()[:HASH_BYTES]


def pack_body(message: Message) -> bytes:
    """The bytes that travel and are kept; a message too large for them is refused here."""
    try:
        body = pack(
            (
                message.id, message.kind, message.text, message.created_ms, message.data,
                message.thread, message.reply_to, message.headers, message.attachments,
                message.expires_ms, message.hops,
            )
        )  # fmt: skip
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"The message's data can't be sent: {error}.", hint=_DATA_HINT) from None
    if len(body) > INLINE_BYTES_MAX:
        size = len(message.text.encode()) + (0 if message.data is None else len(pack(message.data)))
        if size > INLINE_BYTES_MAX or len(body) > MESSAGE_BYTES_MAX:
            raise LimitReached(
                f"Text and data have {size} bytes and may have {INLINE_BYTES_MAX}; with all other "
                f"fields it is {len(body)} of {MESSAGE_BYTES_MAX}.",
                hint="Send it as an attachment instead.",
            )
    try:
        parse_body(body)
    except RemoteProtocolError as error:
        raise UsageError(f"The message can't be sent: {error.message}", hint=_DATA_HINT) from None
    return body


def parse_body(body: bytes) -> Message:
    """The message in `body`; whatever the bytes, only RemoteProtocolError is raised."""
    fields = unpack(body, MESSAGE_BYTES_MAX)
    if type(fields) is not tuple or len(fields) < 11:
        raise RemoteProtocolError("A message lacks fields.")
    ident, kind, text, created, data, thread, reply_to, headers, attached, expires, hops = fields[
        :11
    ]
    _require(all(each == "" or is_id(each) for each in (thread, reply_to)))
    _require(is_id(ident) and is_id(kind) and type(text) is str)
    _require(all(type(each) is int and 0 <= each < 2**63 for each in (created, expires, hops)))
    _require(type(headers) is dict and len(headers) <= HEADERS_MAX)
    _require(all(type(key) is str and type(value) is str for key, value in headers.items()))
    _require(type(attached) is tuple and _is_plain(data) and _is_plain(attached))
    return Message(
        ident, kind, text, created, data, thread, reply_to, headers, attached, expires, hops
    )


def is_id(value: object) -> bool:
    """Whether `value` may stand as an id, a kind or a thread: short, printable and not empty."""
    return type(value) is str and 0 < len(value) <= SHORT_CHARACTERS_MAX and value.isprintable()


def _is_plain(value: Any) -> bool:
    """Whether `value` can be shown as JSON: a message that no session can print helps nobody."""
    layer = [value]
    for _ in range(DATA_DEPTH_MAX):
        below: list[Any] = []
        for each in layer:
            if type(each) is tuple:
                below += each
            elif type(each) is dict:
                below += each.keys()
                below += each.values()
            elif type(each) is bytes or (type(each) is float and not math.isfinite(each)):
                return False
        if not below:
            return True
        layer = below
    return False


def _require(holds: bool) -> None:
    if not holds:
        raise RemoteProtocolError("A message has a field of the wrong form.")
