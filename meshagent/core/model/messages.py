"""A message as a value: its fields, its limits, its bytes. Never decides where it goes.

Invariant: the bytes of a message never change once it is accepted, so their hash names it.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import repeat
from typing import Any, NamedTuple

from meshagent.core.model.attachments import Attachment, parse_attachments
from meshagent.core.model.peers import AgentId
from meshagent.core.wire.codec import pack, pack_all, unpack, unpack_short
from meshagent.core.wire.frames import MESSAGE_BYTES_MAX
from meshagent.errors import LimitReached, RemoteProtocolError, UsageError

__all__ = [
    "Message",
    "MessageIds",
    "Texts",
    "body_hash",
    "is_id",
    "made_of",
    "pack_bodies",
    "pack_body",
    "parse_body",
    "parse_texts",
]

INLINE_BYTES_MAX = 1024 * 1024  # text and data together; beyond that it is an attachment
SHORT_CHARACTERS_MAX = 200  # kind, thread, ids
SHORT_TEXT_CHARACTERS = INLINE_BYTES_MAX // 8  # whatever they are, a body of them has room for all
HEADERS_MAX = 32
DATA_DEPTH_MAX = 64  # lists in lists: whoever prints it as JSON has a stack
HASH_BYTES = 16
_NUMBERS_END = 2**63
_USUAL_KIND = "text"
_MALFORMED = "A message has a field of the wrong form."
_DATA_HINT = "Data may hold what JSON can: texts, numbers, lists, objects, true, false, null."
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = tuple(high + low for high in _ALPHABET for low in _ALPHABET)
_TAIL_BITS = 25  # another run in the same millisecond, a clock set back: one in 33 million

RECEIPT_KIND = "receipt"
"""A message of this kind tells a sender how far its message has come; no person sees it."""


class Message(NamedTuple):
    """What one agent says to another. Times are milliseconds since the epoch."""

    id: str
    kind: str
    text: str
    created_ms: int
    data: Any = None
    thread: str = ""
    reply_to: str = ""
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed, as nothing of a message is
    attachments: tuple[Attachment, ...] = ()
    expires_ms: int = 0
    hops: int = 0


_NOTHING_ELSE = Message("", "", "", 0)[4:]
_FIELDS = len(Message._fields)

made_of = partial(tuple.__new__, Message)
"""A message of all its fields: a named tuple's own way takes twice as long."""


_UNPACKABLE = (TypeError, ValueError, OverflowError, RecursionError)
"""What msgpack raises for data that it has no form for."""


class Texts(NamedTuple):
    """Messages to one peer with nothing but a text, field by field: most are of this kind."""

    peer: AgentId
    ids: Sequence[str]
    texts: Sequence[str]
    created_ms: int

    def bodies(self) -> list[bytes]:
        """As `pack_body` gives them; only for texts of at most `SHORT_TEXT_CHARACTERS`."""
        try:
            return pack_all(zip(
                self.ids, repeat(_USUAL_KIND), self.texts, repeat(self.created_ms),
                *map(repeat, _NOTHING_ELSE), strict=False,
            ))  # fmt: skip
        except _UNPACKABLE as error:
            raise _unsendable(error) from None


class MessageIds:
    """Ids that sort by the time they were made, so that an index grows at its end.

    Seven characters count milliseconds, and five are random; within one millisecond they count on.
    A few characters suffice to tell apart two messages that a person has sent.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._last = 0
        self._age, self._aged = -1, ""

    def next(self, now_ms: int) -> str:
        """An id that was never given before."""
        (ident,) = self.take(now_ms, 1)
        return ident

    def take(self, now_ms: int, count: int) -> list[str]:
        """So many ids that were never given before, in their order."""
        first = self._last + 1
        if now_ms > self._last >> _TAIL_BITS:  # half of the room is for counting
            first = now_ms << _TAIL_BITS | self._rng.getrandbits(_TAIL_BITS - 1)
        end = first + count
        self._last = end - 1
        ids: list[str] = []
        while first < end:  # a stretch with one beginning
            if first >> 30 != self._age:  # that is 32 ms long the same
                self._age = first >> 30
                self._aged = "".join([_PAIRS[self._age >> at & 1023] for at in (20, 10, 0)])
            beginning = self._aged + _PAIRS[first >> 20 & 1023] + _PAIRS[first >> 10 & 1023]
            at = first & 1023
            stretch = min(end - first, 1024 - at)
            ids += [beginning + pair for pair in _PAIRS[at : at + stretch]]
            first += stretch
        return ids


def body_hash(body: bytes) -> bytes:
    """Names a body on the wire: an ack carries it, so that no ack can be for another message."""
    return hashlib.sha256(body).digest()[:HASH_BYTES]


def pack_body(message: Message) -> bytes:
    """The bytes that travel and are kept; a message too large for them is refused here."""
    try:
        body = pack(message)
    except _UNPACKABLE as error:
        raise _unsendable(error) from None
    if len(body) > INLINE_BYTES_MAX or not _is_only_text(message):
        _check(message, body)
    return body


def pack_bodies(messages: Sequence[Message]) -> list[bytes]:
    """As `pack_body`, for many."""
    try:
        bodies = pack_all(messages)
    except _UNPACKABLE as error:
        raise _unsendable(error) from None
    if not _are_only_texts(messages) or max(map(len, bodies)) > INLINE_BYTES_MAX:
        for message, body in zip(messages, bodies, strict=True):
            _check(message, body)
    return bodies


def _unsendable(error: Exception) -> UsageError:
    return UsageError(f"The message's data can't be sent: {error}.", hint=_DATA_HINT)


def _check(message: Message, body: bytes) -> None:
    """Raise unless every recipient will take it."""
    if len(body) > INLINE_BYTES_MAX:
        size = len(message.text.encode()) + (0 if message.data is None else len(pack(message.data)))
        if size > INLINE_BYTES_MAX or len(body) > MESSAGE_BYTES_MAX:
            raise LimitReached(
                f"Text and data have {size} bytes and may have {INLINE_BYTES_MAX}; with all other "
                f"fields it is {len(body)} of {MESSAGE_BYTES_MAX}.",
                hint="Send it as an attachment instead.",
            )
    if message.data is None and not message.headers and not message.attachments:
        if not _is_well_formed(*message):
            raise UsageError(f"The message can't be sent: {_MALFORMED}")
        return
    try:
        parse_body(body)  # what others made of the caller's data is what counts
    except RemoteProtocolError as error:
        raise UsageError(f"The message can't be sent: {error.message}", hint=_DATA_HINT) from None


def parse_body(body: bytes) -> Message:
    """The message in `body`; whatever the bytes, only RemoteProtocolError is raised."""
    fields = unpack(body, MESSAGE_BYTES_MAX)
    if type(fields) is not tuple or len(fields) < _FIELDS:
        raise RemoteProtocolError("A message lacks fields.")
    if len(fields) > _FIELDS:
        fields = fields[:_FIELDS]
    if not _is_well_formed(*fields):
        raise RemoteProtocolError(_MALFORMED)
    message = made_of(fields)
    if message.attachments:
        return message._replace(attachments=parse_attachments(message.attachments))
    return message


def parse_texts(bodies: Sequence[bytes | None]) -> list[Message]:
    """The messages in these, if each is nothing but a text, as most are; else none."""
    found = unpack_short(bodies)
    if set(map(type, found)) != {tuple} or set(map(len, found)) != {_FIELDS}:
        return []
    return list(map(made_of, found)) if _are_only_texts(found) else []


def _are_only_texts(messages: Sequence[tuple[Any, ...]]) -> bool:
    """Whether these are messages, well-formed, with nothing but a text: that is seen at a glance.

    Field by field for all of them, with no line of Python for each; one alone is sooner looked at.
    """
    many = len(messages)
    if many <= 1:
        return many == 1 and _is_only_text(messages[0])
    fields = tuple(zip(*messages, strict=True))
    ids, kinds, texts, created = fields[:4]
    return (
        kinds.count(_USUAL_KIND) == many
        and fields[4:] == _nothing_else(many)
        and set(map(type, ids + texts)) == {str}
        and set(map(type, created + fields[9] + fields[10])) == {int}
        and min(created) >= 0
        and max(created) < _NUMBERS_END
        and all(map(str.isprintable, ids))
        and min(map(len, ids)) > 0
        and max(map(len, ids)) <= SHORT_CHARACTERS_MAX
    )


def _is_only_text(fields: tuple[Any, ...]) -> bool:
    ident, kind, text, created, *_, expires, hops = fields
    return (
        kind == _USUAL_KIND
        and fields[4:] == _NOTHING_ELSE
        and type(ident) is type(text) is str
        and type(created) is type(expires) is type(hops) is int
        and 0 <= created < _NUMBERS_END
        and 0 < len(ident) <= SHORT_CHARACTERS_MAX
        and ident.isprintable()
    )


@lru_cache(maxsize=4)  # a whole frame, what is left of a crowd
def _nothing_else(many: int) -> tuple[tuple[Any, ...], ...]:
    return tuple([(each,) * many for each in _NOTHING_ELSE])


def _is_well_formed(
    ident: Any, kind: Any, text: Any, created: Any, data: Any, thread: Any, reply_to: Any,
    headers: Any, attached: Any, expires: Any, hops: Any,
) -> bool:  # fmt: skip
    return (
        is_id(ident)
        and (kind == _USUAL_KIND or is_id(kind))
        and type(text) is str
        and (thread == "" or is_id(thread))
        and (reply_to == "" or is_id(reply_to))
        and type(created) is type(expires) is type(hops) is int
        and 0 <= created < _NUMBERS_END
        and 0 <= expires < _NUMBERS_END
        and 0 <= hops < _NUMBERS_END
        and type(headers) is dict
        and (not headers or _are_headers(headers))
        and type(attached) is tuple
        and (data is None or _is_plain(data))
    )


def _are_headers(headers: dict[Any, Any]) -> bool:
    return len(headers) <= HEADERS_MAX and all(
        type(key) is str and type(value) is str for key, value in headers.items()
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
            elif type(each) is float:
                if not math.isfinite(each):
                    return False
            elif each is not None and type(each) not in (str, int, bool):
                return False  # bytes, or msgpack's own kind of time
        if not below:
            return True
        layer = below
    return False
