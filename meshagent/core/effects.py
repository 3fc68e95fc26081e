"""What the core asks the driver to do, as frozen values.

The driver's contract, per turn: commit every Persist in one transaction, then Dial, Transmit and
CloseLink in their order, then report the rest. So nothing leaves before what it rests on is
durable. A Note is kept soon, and nothing waits for it.

What many messages bring at once stands in one effect. They are named tuples: a frozen dataclass
takes five times as long to make.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from meshagent.core.model.message_states import MessageState
from meshagent.core.model.messages import Message
from meshagent.core.model.peers import AgentId, LinkId, Peer
from meshagent.core.model.rows import Delivered, OutState, Row
from meshagent.core.wire.frames import Frame, Mail, Payload

__all__ = [
    "BlobFailed",
    "BlobProgress",
    "BlobReady",
    "CheckAsk",
    "CloneFound",
    "CloseLink",
    "ClosePartial",
    "CloseReader",
    "Dial",
    "Durable",
    "Effect",
    "FinishBlob",
    "Note",
    "OpenPartial",
    "PeerChanged",
    "Persist",
    "ReadChunk",
    "Send",
    "Transmit",
    "WriteChunk",
    "may_pass",
    "must_wait",
    "overtakes",
]


class Persist(NamedTuple):
    """Make these rows durable before anything else of this turn happens."""

    rows: Sequence[Row]


class Note(NamedTuple):
    """Keep how messages ended before long: a crash that loses it loses only news.

    It goes along with the next commit, before the rows that come later; then call `noted`. The rest
    of the turn does not wait for it, unless it is `urgent`.
    """

    rows: Sequence[OutState | Delivered]
    urgent: bool = False


def must_wait(effects: Iterable[Effect]) -> bool:
    """Whether something of this turn has to be durable before the rest happens."""
    for effect in effects:
        kind = type(effect)
        if kind is Persist or (kind is Note and effect.urgent):  # type: ignore[union-attr]
            return True
    return False


def may_pass(effects: Iterable[Effect]) -> bool:
    """Whether nothing of this turn rests on rows that an earlier turn may still wait for.

    So it is with messages that leave, since they are durable here, and with the news that others
    have arrived: they need not wait for a commit that happens to be under way. An answer to mail
    does wait: it covers all that has come, and the last of it may not be durable yet.
    """
    for effect in effects:
        kind = type(effect)
        if kind is Transmit or kind is Send:
            if type(effect.frame) is not Mail:  # type: ignore[union-attr]
                return False
        elif kind not in _PASSING or (kind is Note and effect.urgent):  # type: ignore[union-attr]
            return False
    return True


def overtakes(effects: Iterable[Effect], waiting: Iterable[Iterable[Effect]]) -> bool:
    """Whether news would be told before older news, which wait: perhaps of the same message."""
    return _tells(effects) and any(map(_tells, waiting))


def _tells(effects: Iterable[Effect]) -> bool:
    return ReceiptChanged in map(type, effects)


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


class PeerChanged(NamedTuple):
    """A peer appeared, or what we know of it changed."""

    peer: Peer


class CloneFound(NamedTuple):
    """A copy of this agent runs elsewhere; with `stop` it was first, and this node must end."""

    stop: bool
    where: str


class Flush(NamedTuple):
    """Call `flush` for this peer now: what was accepted up to here, in this epoch, is durable."""

    peer: AgentId
    epoch: bytes
    upto: int


class Durable(NamedTuple):
    """Call `durable` for this peer now: what was accepted up to here is so, and has just left."""

    peer: AgentId
    epoch: bytes
    upto: int


class Load(NamedTuple):
    """Read up to `limit` pending messages for `peer` from number `first` on, and hand them in."""

    peer: AgentId
    first: int
    limit: int


class CountUnread(NamedTuple):
    """Count on disk what is unread, and hand it in: a count that may be wrong holds senders up."""


class Accepted(NamedTuple):
    """All of this turn is durable: whoever handed it in may go on. No engine says this; whoever
    performs the effects adds it, and knows what `who` is."""

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
    Persist
    | Note
    | Send
    | Dial
    | Transmit
    | CloseLink
    | PeerChanged
    | CloneFound
    | Flush
    | Durable
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

_PASSING = frozenset({Note, ReceiptChanged, Load})
