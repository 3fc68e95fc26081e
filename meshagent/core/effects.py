"""What the core asks the driver to do, as frozen values.

The driver's contract, per turn: commit every Persist in one transaction, then Dial, Transmit and
CloseLink in their order, then report the rest. So nothing leaves before what it rests on is
durable.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshagent.core.frames import Frame
from meshagent.core.messages import Message, MessageState
from meshagent.core.ports import Row
from meshagent.core.types import AgentId, LinkId, Peer

__all__ = [
    "CloneFound",
    "CloseLink",
    "Dial",
    "Effect",
    "PeerChanged",
    "Persist",
    "Send",
    "Transmit",
]


@dataclass(frozen=True, slots=True)
class Persist:
    """Make this row durable before anything else of this turn happens."""

    row: Row


@dataclass(frozen=True, slots=True)
class Send:
    """Give the frame to this peer over whatever link it has; engines above the links say this."""

    to: AgentId
    frame: Frame


@dataclass(frozen=True, slots=True)
class Dial:
    """Begin to connect to `address`, and tell the core the link's id for this attempt."""

    attempt: int
    address: str


@dataclass(frozen=True, slots=True)
class Transmit:
    """Put the frame on this very link."""

    link: LinkId
    frame: Frame


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Forget this link."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class PeerChanged:
    """A peer appeared, or what we know of it changed."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class CloneFound:
    """A copy of this agent runs elsewhere; with `stop` it was first, and this node must end."""

    stop: bool
    where: str


@dataclass(frozen=True, slots=True)
class Flush:
    """Call `flush` for this peer now: what was accepted up to here is durable."""

    peer: AgentId
    upto: int


@dataclass(frozen=True, slots=True)
class Load:
    """Read up to `limit` pending messages for `peer` from number `first` on, and hand them in."""

    peer: AgentId
    first: int
    limit: int


@dataclass(frozen=True, slots=True)
class CountUnread:
    """Count on disk what is unread, and hand it in: a count that may be wrong holds senders up."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """This message of ours is durable: `send` may return."""

    peer: AgentId
    id: str


@dataclass(frozen=True, slots=True)
class ReceiptChanged:
    """A message of ours has come further, or has ended."""

    peer: AgentId
    id: str
    state: MessageState
    reason: str


@dataclass(frozen=True, slots=True)
class Deliver:
    """A message is in the inbox, durably: tell who is waiting."""

    sender: AgentId
    message: Message


Effect = (
    Persist
    | Send
    | Dial
    | Transmit
    | CloseLink
    | PeerChanged
    | CloneFound
    | Flush
    | Load
    | CountUnread
    | Accepted
    | ReceiptChanged
    | Deliver
)
