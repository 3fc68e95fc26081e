"""How a message's row is written, checked and read: its states as numbers, its two checksums.

Never runs a statement. A row has a checksum over what never changes, and a mark over what became
of the message; a new row has no mark yet, and then all that it would cover is zero. Invariants: a
row is opened only when both fit; it is as long when it has ended well as when it was new, so that
SQLite changes it where it stands and leaves the body alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from meshagent.core.model.body_summary import summarize
from meshagent.core.model.message_states import PROGRESS, InboxState
from meshagent.core.model.rows import InEntry, InRow, OutEntry, OutRow
from meshagent.storage.mail.schema import CHECKSUM_BYTES, Value

__all__ = [
    "IN_CODES",
    "IN_COLUMNS",
    "IN_DONE",
    "IN_OPEN",
    "IN_RECEIVING",
    "IN_UNREAD",
    "OUT_CODES",
    "OUT_COLUMNS",
    "OUT_DELIVERED",
    "OUT_WAITING",
    "REPLACES_BELOW",
    "UNMARKED",
    "advanced",
    "delivered_mark",
    "in_mark",
    "in_values",
    "out_mark",
    "out_values",
    "read_in",
    "read_out",
    "renumbered",
    "settled",
]

# A state is kept as its place here, so `state < n` in SQL means "of a smaller rank". These places
# are on people's disks: a test has them as they are.
OUT_STATES = tuple(state.value for state in sorted(PROGRESS, key=PROGRESS.__getitem__))
OUT_CODES = {state: code for code, state in enumerate(OUT_STATES)}
OUT_WAITING = OUT_CODES["expired"]  # below it: queued or sent
OUT_DELIVERED = OUT_CODES["delivered"]  # from here on the recipient has spoken
REPLACES_BELOW = {
    state.value: min(OUT_CODES[known] for known in PROGRESS if PROGRESS[known] >= rank)
    for state, rank in PROGRESS.items()
}
"""For each state the code below which every other one is of a smaller rank."""

IN_STATES = tuple(state.value for state in InboxState)
IN_CODES = {state: code for code, state in enumerate(IN_STATES)}
IN_UNREAD = IN_CODES["unread"]
IN_OPEN = IN_CODES["parked"]  # below it: somebody has still to deal with it
IN_DONE = IN_CODES["done"]
IN_RECEIVING = IN_CODES["receiving"]  # held: not visible yet

UNMARKED = bytes(15)
"""The mark of a new row: as long as the mark, the state and the time that take its place, which as
zeros take no room."""

# As bytes, since a flipped bit may leave text that is not UTF-8; as integers, since it may turn a
# number into something else.
OUT_COLUMNS = (
    "position, CAST(checksum AS BLOB), CAST(mark AS BLOB), CAST(peer AS BLOB), "
    "CAST(seq AS INTEGER), CAST(id AS BLOB), CAST(body AS BLOB), CAST(expires_ms AS INTEGER), "
    "CAST(state AS INTEGER), CAST(reason AS BLOB), CAST(changed_ms AS INTEGER), "
    "CAST(settled AS INTEGER)"
)
IN_COLUMNS = (
    "position, CAST(checksum AS BLOB), CAST(mark AS BLOB), CAST(sender AS BLOB), 0, "
    "CAST(id AS BLOB), CAST(body AS BLOB), CAST(received_ms AS INTEGER), "
    "CAST(state AS INTEGER), CAST(failures AS INTEGER), CAST(changed_ms AS INTEGER)"
)


# In rows of earlier days the mark of a new one is empty: `mark or UNMARKED`.


def _seal(text: str, body: bytes = b"") -> bytes:
    return blake2b(text.encode() + body, digest_size=CHECKSUM_BYTES).digest()


def _out_seal(peer: str, seq: int, ident: str, expires_ms: int, body: bytes) -> bytes:
    return _seal(f"{len(peer)}:{peer}{seq}:{len(ident)}:{ident}{expires_ms}:", body)


def _in_seal(sender: str, ident: str, received_ms: int, body: bytes) -> bytes:
    return _seal(f"{len(sender)}:{sender}{len(ident)}:{ident}{received_ms}:", body)


def out_mark(ident: str, state: int, settled: int, changed_ms: int, reason: str) -> bytes:
    """The mark of a message of ours in this state."""
    if not (state or settled or changed_ms or reason):
        return UNMARKED
    if state == OUT_DELIVERED and settled and not reason:
        return delivered_mark(changed_ms)
    return _seal(f"{len(ident)}:{ident}{state}:{settled}:{changed_ms}:{reason}")


def delivered_mark(changed_ms: int) -> bytes:
    """The mark of all messages of which one answer said that they have arrived."""
    return _seal(f"delivered {changed_ms}")


def in_mark(ident: str, state: int, failures: int, changed_ms: int) -> bytes:
    """The mark of a message that came."""
    if not (state or failures or changed_ms):
        return UNMARKED
    return _seal(f"{len(ident)}:{ident}{state}:{failures}:{changed_ms}:")


def out_values(row: OutRow) -> tuple[Value, ...]:
    """peer, seq, id, expires_ms, size, checksum, body."""
    peer, _, seq, ident, body, expires_ms, _ = row
    seal = _out_seal(peer, seq, ident, expires_ms, body)
    return peer, seq, ident, expires_ms, len(body), seal, body


def in_values(row: InRow) -> tuple[Value, ...]:
    """sender, id, received_ms, size, checksum, body."""
    sender, _, _, ident, body, received_ms, _ = row
    seal = _in_seal(sender, ident, received_ms, body)
    return sender, ident, received_ms, len(body), seal, body


def settled(mark: bytes, ident: str, state: int, changed_ms: int, reason: str) -> bytes:
    """The mark of a row that becomes settled; one that does not fit now will not fit then."""
    if (mark or UNMARKED) != out_mark(ident, state, 0, changed_ms, reason):
        return mark
    return out_mark(ident, state, 1, changed_ms, reason)


def advanced(
    mark: bytes,
    ident: str,
    state: int,
    settled: int,
    changed_ms: int,
    reason: str,
    new_state: int,
    at_ms: int,
    new_reason: str,
) -> bytes:
    """The mark of a row of which a receipt came; one that does not fit now will not fit then."""
    if (mark or UNMARKED) != out_mark(ident, state, settled, changed_ms, reason):
        return mark
    return out_mark(ident, new_state, settled, at_ms, new_reason)


def renumbered(
    seal: bytes, peer: str, seq: int, new_seq: int, ident: str, expires_ms: int, body: bytes
) -> bytes:
    """The checksum of a row under a new number; one that does not fit now will not fit then."""
    if seal != _out_seal(peer, seq, ident, expires_ms, body):
        return seal
    return _out_seal(peer, new_seq, ident, expires_ms, body)


def read_out(row: Sequence[Any]) -> OutEntry | None:
    """The entry in a row of OUT_COLUMNS; None when it is damaged."""
    _, seal, mark, peer_bytes, seq, id_bytes, body, expires_ms, state, why, changed_ms, settled = (
        row
    )
    try:
        peer, ident, reason = peer_bytes.decode(), id_bytes.decode(), why.decode()
        if seal != _out_seal(peer, seq, ident, expires_ms, body):
            return None
        if (mark or UNMARKED) != out_mark(ident, state, settled, changed_ms, reason):
            return None
        opened = summarize(body)
        return OutEntry(
            peer, seq, ident, body, OUT_STATES[state], reason, expires_ms, opened.created_ms,
            changed_ms or opened.created_ms, settled == 1, opened.attached,
        )  # fmt: skip
    except (AttributeError, IndexError, TypeError, ValueError):
        return None  # a cell is missing, or is not what it was written as


def read_in(row: Sequence[Any]) -> InEntry | None:
    """The entry in a row of IN_COLUMNS; None when it is damaged."""
    at, seal, mark, sender_bytes, _, id_bytes, body, received_ms, state, failures, changed_ms = row
    try:
        sender, ident = sender_bytes.decode(), id_bytes.decode()
        if seal != _in_seal(sender, ident, received_ms, body):
            return None
        if (mark or UNMARKED) != in_mark(ident, state, failures, changed_ms):
            return None
        return InEntry(
            at, sender, ident, body, received_ms, IN_STATES[state], failures,
            changed_ms or received_ms,
        )  # fmt: skip
    except (AttributeError, IndexError, TypeError, ValueError):
        return None
