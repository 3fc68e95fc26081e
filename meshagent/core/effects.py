"""What the core asks the driver to do, as frozen values.

Some are for other engines only: mesh.py passes them on, and no driver ever sees them. Which of
them wait for the disk is said by the turn they stand in (turns.py). What many messages
bring at once stands in one effect. They are named tuples: a frozen dataclass takes five times as
long to make.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from meshagent.core.model.message_states import MessageState
from meshagent.core.model.messages import Message
from meshagent.core.model.peers import AgentId, LinkId, Peer
from meshagent.core.wire.frames import Frame, Payload

__all__ = [
    "Accepted",
    "BlobFailed",
    "BlobProgress",
    "BlobReady",
    "CheckAsk",
    "CloneFound",
    "CloseLink",
    "ClosePartial",
    "CloseReader",
    "Collect",
    "CountUnread",
    "Deliver",
    "Dial",
    "Durable",
    "Effect",
    "FinishBlob",
    "LinkDown",
    "LinkReplaced",
    "LinkUp",
    "Load",
    "Noted",
    "OpenPartial",
    "PeerChanged",
    "ReadChunk",
    "ReceiptChanged",
    "Send",
    "TakenBack",
    "Transmit",
    "Unreachable",
    "WriteChunk",
]


class Send(NamedTuple):
    """Give the frame to this peer over whatever link it has; engines above the links say this."""

    to: AgentId
    frame: Frame


class Dial(NamedTuple):
    """Begin to connect to `address`, and tell the core the link's id for this attempt."""

    attempt: int
    address: str


class Transmit(NamedTuple):
    """Put the frame on this very link."""

    link: LinkId
    frame: Frame


class CloseLink(NamedTuple):
    """Forget this link."""

    link: LinkId


class LinkUp(NamedTuple):
    """For other engines: this agent can be sent to, and said this about itself."""

    agent: AgentId
    record: bytes
    dialled: bool


class LinkDown(NamedTuple):
    """For other engines: the last link to this agent is gone."""

    agent: AgentId


class LinkReplaced(NamedTuple):
    """For other engines: the link in use is gone, with all that was on it; another serves."""

    agent: AgentId


class Unreachable(NamedTuple):
    """For other engines: nobody listens where this agent used to."""

    agent: AgentId


class PeerChanged(NamedTuple):
    """A peer appeared, or what we know of it changed."""

    peer: Peer


class CloneFound(NamedTuple):
    """A copy of this agent runs elsewhere; with `stop` it was first, and this node must end."""

    stop: bool
    where: str


class Durable(NamedTuple):
    """Call `durable` for this peer: what was accepted up to here, in this epoch, is on the disk."""

    peer: AgentId
    epoch: bytes
    upto: int


class Noted(NamedTuple):
    """Call `noted` for this peer: the disk knows how all up to here, in this epoch, have ended."""

    peer: AgentId
    epoch: bytes
    upto: int


class TakenBack(NamedTuple):
    """Call `taken_back` for this peer: the disk knows that this number carries nothing now."""

    peer: AgentId
    epoch: bytes
    seq: int


class Load(NamedTuple):
    """Read up to `limit` pending messages for `peer` from number `first` on, and hand them in."""

    peer: AgentId
    first: int
    limit: int


class CountUnread(NamedTuple):
    """Count on disk what is unread, and hand it in: a count that may be wrong holds senders up."""


class Accepted(NamedTuple):
    """All of this turn is durable: tell whoever handed it in. No engine says this; whoever
    performs the effects adds it to `after`, and knows what `who` is."""

    who: Any


class ReceiptChanged(NamedTuple):
    """Messages of ours have come further, or have ended."""

    peer: AgentId
    ids: Sequence[str]
    state: MessageState
    reason: str


class Collect(NamedTuple):
    """A message that is held is durable: call `collect`, so that its attachments are fetched."""

    sender: AgentId
    message: Message


class Deliver(NamedTuple):
    """Messages are in the inbox, durably: tell who is waiting."""

    sender: AgentId
    messages: Sequence[Message]


# -- blobs: each names the method of core/transfer.py that takes the answer -----------------------


class CheckAsk(NamedTuple):
    """May `peer` have this blob, and is it here whole? → `admitted` or `turned_away`."""

    peer: AgentId
    pull: int
    sha256: bytes
    size: int
    granter: AgentId
    grant: bytes


class ReadChunk(NamedTuple):
    """Read one chunk of a blob that is served → `chunk_read`."""

    peer: AgentId
    pull: int
    sha256: bytes
    chunk: int


class CloseReader(NamedTuple):
    """Nothing more is read for this pull of this peer."""

    peer: AgentId
    pull: int


class OpenPartial(NamedTuple):
    """Make room for a blob, or go on with what is there of it.

    → `opened`, `present`, `held_up` or `impossible`.
    """

    sha256: bytes
    size: int


class WriteChunk(NamedTuple):
    """Write the next chunk of an open partial → `wrote` or `held_up`."""

    sha256: bytes
    chunk: int
    data: Payload


class FinishBlob(NamedTuple):
    """Every chunk is written: verify the whole and put it in place → `finished` or `wrong`."""

    sha256: bytes


class ClosePartial(NamedTuple):
    """Let go of an open partial; with `discard` its contents are of no use to anyone."""

    sha256: bytes
    discard: bool


class BlobReady(NamedTuple):
    """A wanted blob is here, whole and verified; `givers` sent it, or a part, in this run."""

    sha256: bytes
    givers: frozenset[AgentId] = frozenset()


class BlobFailed(NamedTuple):
    """A wanted blob can never be had: nobody has it, or this machine can't keep it."""

    sha256: bytes
    why: str


class BlobProgress(NamedTuple):
    """So many bytes of a wanted blob are written."""

    sha256: bytes
    received: int
    size: int


Effect = (
    Send
    | Dial
    | Transmit
    | CloseLink
    | LinkUp
    | LinkDown
    | LinkReplaced
    | Unreachable
    | PeerChanged
    | CloneFound
    | Durable
    | Noted
    | TakenBack
    | Load
    | CountUnread
    | Accepted
    | ReceiptChanged
    | Deliver
    | Collect
    | CheckAsk
    | ReadChunk
    | CloseReader
    | OpenPartial
    | WriteChunk
    | FinishBlob
    | ClosePartial
    | BlobReady
    | BlobFailed
    | BlobProgress
)
