"""A message as a value: its fields, its limits, its bytes. Never decides where it goes.

Invariant: the bytes of a message never change once it is accepted, so their hash names it.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, NamedTuple

from meshagent.core.model.attachments import Attachment, parse_attachments
from meshagent.core.model.peers import AgentId
from meshagent.core.wire.codec import pack, pack_all, unpack, unpack_short
from meshagent.core.wire.frames import MESSAGE_BYTES_MAX
from meshagent.errors import LimitReached, RemoteProtocolError, UsageError

__all__ = [
    "Message",
    "MessageIds",
    "Outgoing",
    "blobs_of",
    "body_hash",
    "is_id",
    "made_of",
    "pack_body",
    "pack_columns",
    "parse_bodies",
    "parse_body",
]

INLINE_BYTES_MAX = 1024 * 1024  # text and data together; beyond that it is an attachment
SHORT_CHARACTERS_MAX = 200  # kind, thread, ids
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


class Outgoing(NamedTuple):
    """Messages on their way out, as columns: a batch of one is made the same way as many.

    `expires` and `blobs` are empty when no message of the batch expires or has attachments.
    """

    peers: Sequence[AgentId]
    ids: Sequence[str]
    bodies: Sequence[bytes]
    expires: Sequence[int] = ()
    blobs: Sequence[tuple[bytes, ...]] = ()

    @classmethod
    def of(cls, peers: Sequence[AgentId], columns: Sequence[tuple[Any, ...]]) -> Outgoing:
        """Messages given field by field, in the order of Message's fields, each to its peer."""
        attachments, expires = columns[8], columns[9]
        return cls(
            peers,
            columns[0],
            pack_columns(columns),
            expires if any(expires) else (),
            tuple(map(blobs_of, attachments)) if any(attachments) else (),
        )

    def by_peer(self) -> Iterator[tuple[AgentId, Outgoing]]:
        """Stretches to one peer; most often that is all."""
        peers = self.peers
        if peers and peers.count(peers[0]) == len(peers):
            yield peers[0], self
            return
        at = 0
        for peer, stretch in groupby(peers):
            end = at + sum(1 for _ in stretch)
            part = slice(at, end)
            yield (
                peer,
                Outgoing(
                    peers[part],
                    self.ids[part],
                    self.bodies[part],
                    self.expires[part],
                    self.blobs[part],
                ),
            )
            at = end


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


def pack_columns(columns: Sequence[tuple[Any, ...]]) -> list[bytes]:
    """The bytes that travel and are kept, of messages given field by field.

    A message that no recipient would take is refused here.
    """
    try:
        bodies = pack_all(zip(*columns, strict=True))
    except _UNPACKABLE as error:
        raise _unsendable(error) from None
    if not _are_only_texts(columns) or max(map(len, bodies)) > INLINE_BYTES_MAX:
        for fields, body in zip(zip(*columns, strict=True), bodies, strict=True):
            _check(made_of(fields), body)
    return bodies


def pack_body(message: Message) -> bytes:
    """The bytes of one message."""
    (body,) = pack_columns([(field,) for field in message])
    return body


def blobs_of(attachments: Sequence[Attachment]) -> tuple[bytes, ...]:
    """The SHA-256 of each file, once."""
    return tuple(dict.fromkeys(each.sha256 for each in attachments))


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


def parse_bodies(
    bodies: Sequence[bytes | None],
) -> Sequence[Message | RemoteProtocolError | None]:
    """The message in each, or why there is none; None stays None."""
    found = unpack_short(bodies)
    # Most frames hold plain texts: these are checked by column, without a call for each.
    whole = set(map(type, found)) == {tuple} and set(map(len, found)) == {_FIELDS}
    if whole and _are_only_texts(tuple(zip(*found, strict=True))):
        return list(map(made_of, found))
    return [None if body is None else _message_or_error(body) for body in bodies]


def _message_or_error(body: bytes) -> Message | RemoteProtocolError:
    try:
        return parse_body(body)
    except RemoteProtocolError as error:
        return error


def _are_only_texts(columns: Sequence[tuple[Any, ...]]) -> bool:
    """Whether these are well-formed messages with nothing but a text, as most are."""
    ids, kinds, texts, created = columns[:4]
    many = len(ids)
    return (
        kinds.count(_USUAL_KIND) == many
        and tuple(columns[4:]) == _nothing_else(many)
        and set(map(type, ids + texts)) == {str}
        and set(map(type, created + columns[9] + columns[10])) == {int}
        and min(created) >= 0
        and max(created) < _NUMBERS_END
        and all(map(str.isprintable, ids))
        and min(map(len, ids)) > 0
        and max(map(len, ids)) <= SHORT_CHARACTERS_MAX
    )


@lru_cache(maxsize=8)  # one, a whole frame, what is left of a burst
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
