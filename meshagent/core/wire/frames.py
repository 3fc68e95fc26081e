"""The grammar of the wire: every frame, with a sentence and a limit for each field.

A frame is a msgpack array `[code, field, …]`, then its payload parts: only BlobChunk has them, its
last field, which travels as it is so that bulk is neither packed nor copied. Codes below
`OPTIONAL_FROM` are required: a peer that does not know one refuses it. Codes from there on are
optional and ignored by those who do not know them. Fields beyond those listed are ignored, so a
field can be added at the end; one that exists never changes its meaning.

docs/protocol.md is written from this file and a test keeps them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, NamedTuple

from meshagent.errors import RemoteProtocolError

__all__ = [
    "CHUNK_BYTES",
    "FRAMES",
    "OPTIONAL_FROM",
    "Ack",
    "BlobAsk",
    "BlobChunk",
    "BlobEnd",
    "BlobMore",
    "BlobStop",
    "Bye",
    "Check",
    "Frame",
    "Gossip",
    "Hello",
    "Here",
    "Mail",
    "MailAck",
    "Nack",
    "Pieces",
    "Ping",
    "PingReq",
    "Refuse",
    "Sync",
    "Welcome",
    "field_names",
]

OPTIONAL_FROM = 128

HEADER_BYTES_MAX = 1024 * 1024 + 64 * 1024  # one message of 1 MiB, or a Sync of 4096 members
MESSAGE_BYTES_MAX = 1024 * 1024 + 4096  # text and data of 1 MiB, with the other fields
MAIL_ITEMS_MAX = 512  # messages in one frame when there is a backlog
EPOCH_BYTES = 8
HASH_BYTES = 16
PARTS_MAX = 64  # a header and its payload parts
TEXT_CHARACTERS_MAX = 200  # ids, reasons and the like; people's texts have limits of their own
KEY_BYTES = 32
NONCE_BYTES = 16
SIGNATURE_BYTES = 64
SHA256_BYTES = 32
CHUNK_BYTES = 512 * 1024  # of a blob, in one frame: a text behind a few of them waits little
PIECE_BYTES = 128 * 1024  # of a chunk, in one part: what is encrypted at once fits a core's cache
CREDIT_CHUNKS_MAX = 32  # how far ahead of what was sent a puller may let us send: 16 MiB
UPDATE_BYTES_MAX = 4096  # one signed record with its addresses and capabilities
UPDATES_MAX = 256  # updates in one frame
MEMBERS_MAX = 4096  # members that a node keeps, hence digest entries
FEATURES_MAX = 256  # a newer node may name many that we do not know
WHOLE_MAX = 2**63 - 1

Check_ = Callable[[Any], Any]


def _wrong(expected: str, value: object) -> RemoteProtocolError:
    return RemoteProtocolError(f"A frame's field should be {expected}, not {type(value).__name__}.")


def whole(value: Any) -> int:
    """A number from 0 to 2^63-1."""
    if type(value) is not int or not 0 <= value <= WHOLE_MAX:
        raise _wrong("a whole number", value)
    return value


def text(value: Any) -> str:
    """A short text of at most 200 characters."""
    if type(value) is not str or len(value) > TEXT_CHARACTERS_MAX:
        raise _wrong("a short text", value)
    return value


def exactly(size: int) -> Check_:
    """That many bytes."""

    def check(value: Any) -> bytes:
        if type(value) is not bytes or len(value) != size:
            raise _wrong(f"{size} bytes", value)
        return value

    return check


def blob(value: Any) -> bytes:
    """A signed update of at most 4096 bytes."""
    if type(value) is not bytes or len(value) > UPDATE_BYTES_MAX:
        raise _wrong(f"at most {UPDATE_BYTES_MAX} bytes", value)
    return value


def many(item: Check_, limit: int) -> Check_:
    """At most `limit` of `item`."""

    def check(value: Any) -> tuple[Any, ...]:
        if type(value) is not tuple or len(value) > limit:
            raise _wrong(f"a list of at most {limit}", value)
        return tuple([item(entry) for entry in value])

    return check


def features(value: Any) -> dict[str, int]:
    """Names of what a node can do beyond the version, each with a number."""
    if type(value) is not dict or len(value) > FEATURES_MAX:
        raise _wrong("a features map", value)
    return {text(name): whole(number) for name, number in value.items()}


def digest_entry(value: Any) -> tuple[str, int, int]:
    """Agent id, incarnation, and 0 alive, 1 suspect, 2 gone, 3 left, or more in newer nodes."""
    if type(value) is not tuple or len(value) < 3:
        raise _wrong("a digest entry", value)
    agent, incarnation, state = value[:3]
    return text(agent), whole(incarnation), whole(state)


def mail_item(value: Any) -> bytes | None:
    """A message's body of at most 1 MiB and 4 KiB, or nil for one that was withdrawn."""
    if value is not None and (type(value) is not bytes or len(value) > MESSAGE_BYTES_MAX):
        raise _wrong("a message", value)
    return value


def outcome(value: Any) -> tuple[int, str]:
    """A number, and why that message was refused; no reason when it was withdrawn."""
    if type(value) is not tuple or len(value) < 2:
        raise _wrong("an outcome", value)
    return whole(value[0]), text(value[1])


def grant(value: Any) -> bytes:
    """A signature of at most 64 bytes; none when the granter itself is asked."""
    if type(value) is not bytes or len(value) > SIGNATURE_BYTES:
        raise _wrong(f"at most {SIGNATURE_BYTES} bytes", value)
    return value


class Pieces:
    """A payload that came in several parts, as they came: to join them would be to copy them."""

    __slots__ = ("_length", "parts")

    def __init__(self, parts: Sequence[bytes | memoryview]) -> None:
        self.parts = tuple(parts)
        self._length = sum(map(len, parts))

    def __len__(self) -> int:
        return self._length

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)


Payload = bytes | memoryview | Pieces


def chunk(value: Any) -> Payload:
    """At most 524288 bytes, in parts of 131072 and a rest; only a blob's last chunk is shorter."""
    if not isinstance(value, bytes | memoryview | Pieces) or len(value) > CHUNK_BYTES:
        raise _wrong(f"at most {CHUNK_BYTES} bytes", value)
    if isinstance(value, Pieces):
        *full, last = value.parts
        if any(len(each) != PIECE_BYTES for each in full) or not 0 < len(last) <= PIECE_BYTES:
            raise _wrong(f"in parts of {PIECE_BYTES} bytes", value)
    return value


class Frame:
    """A value that travels on a link. Subclasses name their code and check their fields.

    With `parts` 2 the last field is a payload, in a part of its own or in several. Those that come
    most often are tuples of their fields: a frozen dataclass takes three times as long to make.
    """

    __slots__ = ()
    code: ClassVar[int]
    parts: ClassVar[int] = 1
    checks: ClassVar[tuple[Check_, ...]]


_updates = many(blob, UPDATES_MAX)


@dataclass(frozen=True, slots=True)
class Hello(Frame):
    """The dialler says who it is: the first frame on a link, once."""

    code: ClassVar[int] = 1
    checks: ClassVar[tuple[Check_, ...]] = (
        whole, whole, features, text, exactly(KEY_BYTES), text, exactly(NONCE_BYTES),
        whole, blob, exactly(SIGNATURE_BYTES),
    )  # fmt: skip
    version_low: int
    version_high: int
    features: dict[str, int]
    agent: str
    key: bytes
    to: str
    nonce: bytes
    started_ms: int
    record: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class Welcome(Frame):
    """The one that was dialled answers a Hello that it believes; the link is open."""

    code: ClassVar[int] = 2
    checks: ClassVar[tuple[Check_, ...]] = (
        whole, features, text, exactly(KEY_BYTES), exactly(NONCE_BYTES), exactly(NONCE_BYTES),
        blob, exactly(SIGNATURE_BYTES),
    )  # fmt: skip
    version: int
    features: dict[str, int]
    agent: str
    key: bytes
    nonce: bytes
    their_nonce: bytes
    record: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class Refuse(Frame):
    """The link will not be opened, or not go on: `why` for programs, the reason for people."""

    code: ClassVar[int] = 3
    checks: ClassVar[tuple[Check_, ...]] = (text, text, blob)
    why: str
    reason: str
    proof: bytes = b""


@dataclass(frozen=True, slots=True)
class Bye(Frame):
    """This link is being closed on purpose, because another one serves or the node leaves."""

    code: ClassVar[int] = 4
    checks: ClassVar[tuple[Check_, ...]] = (text,)
    reason: str


@dataclass(frozen=True, slots=True)
class Check(Frame):
    """Is this link's other end still there? Asked when a second node claims the same agent."""

    code: ClassVar[int] = 5
    checks: ClassVar[tuple[Check_, ...]] = (exactly(NONCE_BYTES),)
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Here(Frame):
    """Yes: the answer to Check, signed, so that it can be shown to the other claimant."""

    code: ClassVar[int] = 6
    checks: ClassVar[tuple[Check_, ...]] = (
        exactly(NONCE_BYTES), whole, exactly(SIGNATURE_BYTES),
    )  # fmt: skip
    nonce: bytes
    started_ms: int
    signature: bytes


@dataclass(frozen=True, slots=True)
class Ping(Frame):
    """Are you alive? Carries membership updates along."""

    code: ClassVar[int] = 16
    checks: ClassVar[tuple[Check_, ...]] = (whole, _updates)
    seq: int
    updates: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Ack(Frame):
    """Yes, or on behalf of the one a PingReq asked about: it is."""

    code: ClassVar[int] = 17
    checks: ClassVar[tuple[Check_, ...]] = (whole, _updates)
    seq: int
    updates: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class PingReq(Frame):
    """I hear nothing from `target`: ask it for me."""

    code: ClassVar[int] = 18
    checks: ClassVar[tuple[Check_, ...]] = (whole, text, _updates)
    seq: int
    target: str
    updates: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Nack(Frame):
    """I am well and asked, and hear nothing from it either."""

    code: ClassVar[int] = 19
    checks: ClassVar[tuple[Check_, ...]] = (whole,)
    seq: int


@dataclass(frozen=True, slots=True)
class Gossip(Frame):
    """Membership updates on their own."""

    code: ClassVar[int] = 20
    checks: ClassVar[tuple[Check_, ...]] = (_updates,)
    updates: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Sync(Frame):
    """All I know, as a digest; send me what I lack, and with `reply` 1 your digest too."""

    code: ClassVar[int] = 21
    checks: ClassVar[tuple[Check_, ...]] = (whole, many(digest_entry, MEMBERS_MAX))
    reply: int
    digest: tuple[tuple[str, int, int], ...]


class _MailFields(NamedTuple):
    epoch: bytes
    floor: int
    first: int
    items: tuple[bytes | None, ...]


class Mail(_MailFields, Frame):
    """Messages `first`, `first` + 1, … of a stream; all below `floor` are settled for good."""

    __slots__ = ()
    code: ClassVar[int] = 32
    checks: ClassVar[tuple[Check_, ...]] = (
        exactly(EPOCH_BYTES), whole, whole, many(mail_item, MAIL_ITEMS_MAX),
    )  # fmt: skip


class _MailAckFields(NamedTuple):
    epoch: bytes
    upto: int
    last: bytes
    mode: int = 0
    exceptions: tuple[tuple[int, str], ...] = ()


class MailAck(_MailAckFields, Frame):
    """All up to `upto` are durable here, the last with this hash, but for the exceptions.

    `mode` 0 is well; 1 says that the inbox is full: wait; 2 that something is missing: go back.
    """

    __slots__ = ()
    code: ClassVar[int] = 33
    checks: ClassVar[tuple[Check_, ...]] = (
        exactly(EPOCH_BYTES), whole, exactly(HASH_BYTES), whole, many(outcome, MAIL_ITEMS_MAX),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class BlobAsk(Frame):
    """Send me this blob's chunks from `first` on, as far as below `upto` until I say BlobMore.

    At least one may be sent, and at most 64 beyond what has been; the same holds for BlobMore.
    The number `pull` is the asker's own and names the whole exchange. `granter` is the agent whose
    message names the blob, `grant` its signature that lets the asker have it.
    """

    code: ClassVar[int] = 48
    checks: ClassVar[tuple[Check_, ...]] = (
        whole, exactly(SHA256_BYTES), whole, text, grant, whole, whole,
    )  # fmt: skip
    pull: int
    sha256: bytes
    size: int
    granter: str
    grant: bytes
    first: int
    upto: int


@dataclass(frozen=True, slots=True)
class BlobMore(Frame):
    """Chunks below `upto` may be sent now: those before have been written."""

    code: ClassVar[int] = 49
    checks: ClassVar[tuple[Check_, ...]] = (whole, whole)
    pull: int
    upto: int


@dataclass(frozen=True, slots=True)
class BlobChunk(Frame):
    """One chunk of what was asked for, in order, within what may be sent."""

    code: ClassVar[int] = 50
    parts: ClassVar[int] = 2
    checks: ClassVar[tuple[Check_, ...]] = (whole, whole, chunk)
    pull: int
    index: int
    data: Payload


@dataclass(frozen=True, slots=True)
class BlobEnd(Frame):
    """No more of it comes from here. `why`: `absent`, `not allowed`, `busy` or `failed`."""

    code: ClassVar[int] = 51
    checks: ClassVar[tuple[Check_, ...]] = (whole, text, text)
    pull: int
    why: str
    reason: str


@dataclass(frozen=True, slots=True)
class BlobStop(Frame):
    """I have it, or no longer want it: send no more of it."""

    code: ClassVar[int] = 52
    checks: ClassVar[tuple[Check_, ...]] = (whole,)
    pull: int


_KINDS: tuple[type[Frame], ...] = (
    Hello, Welcome, Refuse, Bye, Check, Here, Ping, Ack, PingReq, Nack, Gossip, Sync, Mail, MailAck,
    BlobAsk, BlobMore, BlobChunk, BlobEnd, BlobStop,
)  # fmt: skip


def _is_mail(header: tuple[Any, ...]) -> bool:
    if len(header) != 5:
        return False
    _, epoch, floor, first, items = header
    if not (
        type(epoch) is bytes
        and len(epoch) == EPOCH_BYTES
        and type(floor) is type(first) is int
        and 0 <= floor <= WHOLE_MAX
        and 0 <= first <= WHOLE_MAX
        and type(items) is tuple
        and len(items) <= MAIL_ITEMS_MAX
    ):
        return False
    if not items:
        return True
    return set(map(type, items)) == {bytes} and max(map(len, items)) <= MESSAGE_BYTES_MAX


def _is_mail_ack(header: tuple[Any, ...]) -> bool:
    if len(header) != 6:
        return False
    _, epoch, upto, last, mode, exceptions = header
    return (
        type(epoch) is type(last) is bytes
        and len(epoch) == EPOCH_BYTES
        and len(last) == HASH_BYTES
        and type(upto) is type(mode) is int
        and 0 <= upto <= WHOLE_MAX
        and 0 <= mode <= WHOLE_MAX
        and exceptions == ()
    )


GLANCES: dict[int, tuple[Callable[[Sequence[Any]], Frame], Callable[[tuple[Any, ...]], bool]]] = {
    Mail.code: (partial(tuple.__new__, Mail), _is_mail),
    MailAck.code: (partial(tuple.__new__, MailAck), _is_mail_ack),
}
"""Of the frames that come most often, by their codes: how one is made of its fields, and whether
all of a header pass their checks, seen at once. What a glance does not know is left to these."""


FRAMES: dict[int, type[Frame]] = {kind.code: kind for kind in _KINDS}


def field_names(kind: type[Frame]) -> tuple[str, ...]:
    """In the order in which they travel."""
    if issubclass(kind, tuple):
        names: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
        return names
    return tuple(field.name for field in fields(kind))  # type: ignore[arg-type]


for _kind in FRAMES.values():
    assert len(field_names(_kind)) == len(_kind.checks), _kind
