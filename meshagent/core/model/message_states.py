"""How far a message has come: the states on both sides, and which of them replaces which.

Values only. Invariant: a state of ours is replaced only by one of a larger rank, so late and
repeated news change nothing.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["PROGRESS", "UNREAD_STATES", "WAITING", "WITHDRAWN", "InboxState", "MessageState"]


class MessageState(StrEnum):
    """How far a message of ours has come, in this order; then the ends other than `done`."""

    __hash__ = str.__hash__  # Enum's own runs in Python, for every look into a table

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
    # Decided here without an answer: a later word from the recipient still counts.
    MessageState.EXPIRED: 2,
    MessageState.CANCELLED: 2,
    MessageState.DELIVERED: 3,
    MessageState.SEEN: 4,
    MessageState.DONE: 5,
    MessageState.REFUSED: 5,
}
"""The rank of each state, upwards."""

WAITING = frozenset({MessageState.QUEUED, MessageState.SENT})
"""The recipient has not answered, and may still get it."""
WITHDRAWN = frozenset({MessageState.EXPIRED, MessageState.CANCELLED})
"""Its sender has taken it back; its number still travels, with nothing in it."""


class InboxState(StrEnum):
    """What became of a message that came. `done` is final; the ones before it change freely."""

    __hash__ = str.__hash__

    UNREAD = "unread"
    SEEN = "seen"
    PARKED = "parked"
    DONE = "done"
    RECEIVING = "receiving"
    """Its attachments are not here yet, so nobody sees it."""


UNREAD_STATES = frozenset({InboxState.UNREAD, InboxState.SEEN})
"""Somebody has still to deal with it: what `unread` counts."""
