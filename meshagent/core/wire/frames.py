"""The grammar of the wire: every frame, with a sentence and a limit for each field.

A frame is a msgpack array `[code, field, …]`. Only BlobChunk has payload parts after it: its last
field travels as raw bytes, so that bulk data is neither packed nor copied. Codes below
`OPTIONAL_FROM` are required: a peer that does not know such a code refuses the frame. Codes from
there on are optional: a peer that does not know one ignores the frame. Extra fields at the end are
ignored, so a new version can add fields; an existing field never changes its meaning.

docs/protocol.md is generated from this file, and a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

from meshagent.core.wire.field_checks import (
    CHUNK_BYTES,
    MESSAGE_BYTES_MAX,
    SIGNATURE_BYTES,
    TEXT_CHARACTERS_MAX,
    UPDATE_BYTES_MAX,
    WHOLE_MAX,
    FieldCheck,
    chunk,
    digest_entry,
    exactly,
    features,
    grant,
    mail_item,
    many,
    outcome,
    signed_update,
    text,
    whole,
)
from meshagent.core.wire.payload import Payload, Pieces

__all__ = [
    "CHUNK_BYTES",
    "CREDIT_CHUNKS_MAX",
    "EPOCH_BYTES",
    "FRAMES",
    "HASH_BYTES",
    "HEADER_BYTES_MAX",
    "KEY_BYTES",
    "MAIL_ITEMS_MAX",
    "MEMBERS_MAX",
    "MESSAGE_BYTES_MAX",
    "NONCE_BYTES",
    "OPTIONAL_FROM",
    "PARTS_MAX",
    "SIGNATURE_BYTES",
    "TEXT_CHARACTERS_MAX",
    "UPDATES_MAX",
    "UPDATE_BYTES_MAX",
    "WHOLE_MAX",
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
    "Payload",
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
MAIL_ITEMS_MAX = 512  # messages in one frame when there is a backlog
EPOCH_BYTES = 8
HASH_BYTES = 16
PARTS_MAX = 64  # a header and its payload parts
KEY_BYTES = 32
NONCE_BYTES = 16
SHA256_BYTES = 32
CREDIT_CHUNKS_MAX = 32  # how far ahead of what was sent the downloader may let us send: 16 MiB

UPDATES_MAX = 256  # updates in one frame
MEMBERS_MAX = 4096  # members that a node keeps, hence digest entries


class Frame:
    """A value that travels on a link. A subclass names its code and one check per field.

    With `parts` 2 the last field is a payload, in one part or several. The most frequent frames
    are named tuples: creating a frozen dataclass takes three times as long.
    """

    __slots__ = ()
    code: ClassVar[int]
    parts: ClassVar[int] = 1
    checks: ClassVar[tuple[FieldCheck, ...]]


_updates = many(signed_update, UPDATES_MAX)


@dataclass(frozen=True, slots=True)
class Hello(Frame):
    """The first frame on a link, sent once: the dialler says who it is."""

    code: ClassVar[int] = 1
    checks: ClassVar[tuple[FieldCheck, ...]] = (
        whole, whole, features, text, exactly(KEY_BYTES), text, exactly(NONCE_BYTES),
        whole, signed_update, exactly(SIGNATURE_BYTES),
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
    """The dialled side accepts a Hello and says who it is; the link is open."""

    code: ClassVar[int] = 2
    checks: ClassVar[tuple[FieldCheck, ...]] = (
        whole, features, text, exactly(KEY_BYTES), exactly(NONCE_BYTES), exactly(NONCE_BYTES),
        signed_update, exactly(SIGNATURE_BYTES),
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
    """The link is refused or ended: `why` is for programs, `reason` for people."""

    code: ClassVar[int] = 3
    checks: ClassVar[tuple[FieldCheck, ...]] = (text, text, signed_update)
    why: str
    reason: str
    proof: bytes = b""


@dataclass(frozen=True, slots=True)
class Bye(Frame):
    """The sender closes this link on purpose: another link is used, or the node stops."""

    code: ClassVar[int] = 4
    checks: ClassVar[tuple[FieldCheck, ...]] = (text,)
    reason: str


@dataclass(frozen=True, slots=True)
class Check(Frame):
    """Does this link's other end still run? Sent when a second node claims the same agent."""

    code: ClassVar[int] = 5
    checks: ClassVar[tuple[FieldCheck, ...]] = (exactly(NONCE_BYTES),)
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Here(Frame):
    """The answer to Check: yes. It is signed, so that it can be shown to the second node."""

    code: ClassVar[int] = 6
    checks: ClassVar[tuple[FieldCheck, ...]] = (
        exactly(NONCE_BYTES), whole, exactly(SIGNATURE_BYTES),
    )  # fmt: skip
    nonce: bytes
    started_ms: int
    signature: bytes


@dataclass(frozen=True, slots=True)
class Ping(Frame):
    """Are you alive? It also carries membership updates."""

    code: ClassVar[int] = 16
    checks: ClassVar[tuple[FieldCheck, ...]] = (whole, _updates)
    seq: int
    updates: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Ack(Frame):
    """The answer to Ping, or to a PingReq whose target has answered."""

    code: ClassVar[int] = 17
    checks: ClassVar[tuple[FieldCheck, ...]] = (whole, _updates)
    seq: int
    updates: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class PingReq(Frame):
    """I hear nothing from `target`: please probe it for me."""

    code: ClassVar[int] = 18
    checks: ClassVar[tuple[FieldCheck, ...]] = (whole, text, _updates)
    seq: int
    target: str
    updates: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Nack(Frame):
    """The answer to a PingReq whose target has not answered in time."""

    code: ClassVar[int] = 19
    checks: ClassVar[tuple[FieldCheck, ...]] = (whole,)
    seq: int


@dataclass(frozen=True, slots=True)
class Gossip(Frame):
    """Membership updates, with nothing else."""

    code: ClassVar[int] = 20
    checks: ClassVar[tuple[FieldCheck, ...]] = (_updates,)
    updates: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Sync(Frame):
    """A digest of all members I know; send me what I lack, and with `reply` 1 your digest."""

    code: ClassVar[int] = 21
    checks: ClassVar[tuple[FieldCheck, ...]] = (whole, many(digest_entry, MEMBERS_MAX))
    reply: int
    digest: tuple[tuple[str, int, int], ...]


class _MailFields(NamedTuple):
    epoch: bytes
    floor: int
    first: int
    items: tuple[bytes | None, ...]


class Mail(_MailFields, Frame):
    """Messages `first`, `first` + 1, … of a stream; every one below `floor` is settled."""

    __slots__ = ()
    code: ClassVar[int] = 32
    checks: ClassVar[tuple[FieldCheck, ...]] = (
        exactly(EPOCH_BYTES), whole, whole, many(mail_item, MAIL_ITEMS_MAX),
    )  # fmt: skip


class _MailAckFields(NamedTuple):
    epoch: bytes
    upto: int
    last: bytes
    mode: int = 0
    exceptions: tuple[tuple[int, str], ...] = ()


class MailAck(_MailAckFields, Frame):
    """Every message up to `upto` is durable here, except those in `exceptions`.

    `last` is the hash of message `upto`. `mode` 0 means that all is well, 1 that the inbox is full
    (wait), 2 that messages are missing (send again from `upto` + 1).
    """

    __slots__ = ()
    code: ClassVar[int] = 33
    checks: ClassVar[tuple[FieldCheck, ...]] = (
        exactly(EPOCH_BYTES), whole, exactly(HASH_BYTES), whole, many(outcome, MAIL_ITEMS_MAX),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class BlobAsk(Frame):
    """Send me the chunks of this blob from `first` on, up to but not including `upto`.

    `upto` allows at least one chunk, and at most 32 more than have been sent; the same holds for
    BlobMore. The downloader chooses the number `pull`, which names this download in all frames.
    `granter` is the agent whose message names the blob; `grant` is its signature that allows the
    downloader to have the blob.
    """

    code: ClassVar[int] = 48
    checks: ClassVar[tuple[FieldCheck, ...]] = (
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
    """More credit: chunks below `upto` may be sent now."""

    code: ClassVar[int] = 49
    checks: ClassVar[tuple[FieldCheck, ...]] = (whole, whole)
    pull: int
    upto: int


@dataclass(frozen=True, slots=True)
class BlobChunk(Frame):
    """One chunk of the blob. Chunks come in order and only within the credit."""

    code: ClassVar[int] = 50
    parts: ClassVar[int] = 2
    checks: ClassVar[tuple[FieldCheck, ...]] = (whole, whole, chunk)
    pull: int
    index: int
    data: Payload


@dataclass(frozen=True, slots=True)
class BlobEnd(Frame):
    """The upload ends here. `why` is `absent`, `not allowed`, `busy` or `failed`."""

    code: ClassVar[int] = 51
    checks: ClassVar[tuple[FieldCheck, ...]] = (whole, text, text)
    pull: int
    why: str
    reason: str


@dataclass(frozen=True, slots=True)
class BlobStop(Frame):
    """The download ends: send no more chunks."""

    code: ClassVar[int] = 52
    checks: ClassVar[tuple[FieldCheck, ...]] = (whole,)
    pull: int


_KINDS: tuple[type[Frame], ...] = (
    Hello, Welcome, Refuse, Bye, Check, Here, Ping, Ack, PingReq, Nack, Gossip, Sync, Mail, MailAck,
    BlobAsk, BlobMore, BlobChunk, BlobEnd, BlobStop,
)  # fmt: skip


FRAMES: dict[int, type[Frame]] = {kind.code: kind for kind in _KINDS}


def field_names(kind: type[Frame]) -> tuple[str, ...]:
    """The names of its fields, in wire order."""
    if issubclass(kind, tuple):
        names: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
        return names
    return tuple(field.name for field in fields(kind))  # type: ignore[arg-type]


for _kind in FRAMES.values():
    assert len(field_names(_kind)) == len(_kind.checks), _kind
