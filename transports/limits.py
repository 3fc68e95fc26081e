"""The limits of a link, the same for every transport.

Invariant: reaching one of these is visible to the owner (False, a closed link, a count in
`refused`), never a crash and never a silent drop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshagent.errors import LocalProtocolError

__all__ = ["LinkLimits", "descriptors_for_links"]

KIB = 1024
MIB = 1024 * KIB

DIALLED_DESCRIPTORS = 4
"""A dialled link: its TCP socket, its DEALER's mailbox, and one for each end of its monitor."""

INBOUND_DESCRIPTORS = 1
"""An inbound link: its TCP socket only."""


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """What one transport may hold, and for how long."""

    frame_bytes_max: int = MIB + 64 * KIB
    """All parts of a frame: one full message or chunk (1 MiB, DESIGN 9 and 10) and its header."""

    frame_bytes_margin: int = 64 * KIB
    """A part this much over the limit still reaches us and is counted; a larger one is cut off
    by libzmq at its length prefix, before memory is taken for it."""

    frame_parts_max: int = 64
    """Parts in a frame: a header and a batch of payloads; parsing cost stays under 0.1 ms."""

    queue_frames_max: int = 256
    """Frames waiting on each side of a link before `send` says False. Deep enough to keep the
    encrypting thread busy; a stalled link holds 256 full frames at the very worst, and bulk is
    pulled with a smaller window."""

    links_max: int = 512
    """Ten times the largest mesh we promise for (50), with both sides dialling at once."""

    strangers_max: int = 256
    """Connections accepted that have not yet sent a frame. A member needs milliseconds for that,
    a stranger gets nowhere in HANDSHAKE_IVL: the oldest is cut off when more arrive."""

    forgotten_max: int = 4096
    """Routing ids of closed inbound links whose late frames are dropped: eight times links_max."""

    denied_max: int = 1024
    """CURVE keys turned away at the door for a while; the one that expires first makes room."""

    sources_max: int = 1024
    """Source addresses whose admissions are counted; the table starts anew when it is full."""

    source_admissions_max: int = 2000
    """Admissions of one source address in each `source_window_s`: fifty agents on one machine
    that all restart at once and dial every address of ours need a tenth of it."""

    source_window_s: float = 10.0

    turn_frames_max: int = 256
    """Frames read from one socket before the loop's other work gets its turn: about 1 ms."""

    turn_bytes_max: int = 4 * MIB
    """Bytes read from one socket before the loop's other work gets its turn: about 1 ms."""

    monitor_events_max: int = 10_000
    """Events that wait for us before libzmq's thread waits too: a flood of 5,000 connections
    during one stall of the loop."""

    backlog: int = 256
    """Connections the kernel holds for us while libzmq's thread is busy."""

    connect_s: float = 3.0
    """A host that drops packets is given up after this; a LAN answers in milliseconds."""

    handshake_s: float = 5.0
    """Half-open connections are closed after this (DESIGN 8)."""

    parting_s: float = 0.1
    """What was sent just before a close may still leave for this long (a refusal, a LEAVE)."""

    addresses_max: int = 16
    """Addresses of ours that we tell others; a container host has dozens, few of use to them."""

    attempts_max: int = 4
    """Resolved addresses of one host name that are tried in turn (IPv6 and IPv4 of two cards)."""

    def check_frame(self, parts: Sequence[bytes | memoryview]) -> None:
        """Raise LocalProtocolError for a frame that may not be sent."""
        size = sum(map(len, parts))
        if not 0 < len(parts) <= self.frame_parts_max:
            raise LocalProtocolError(f"A frame of {len(parts)} parts can't be sent.")
        if size > self.frame_bytes_max:
            raise LocalProtocolError(f"A frame of {size} bytes is too large to be sent.")


def descriptors_for_links(limit: int) -> int:
    """How many of the process's file descriptors links may take: three quarters, less 64.

    The rest is for the database, blobs, sessions and strangers at the door.
    """
    return max(limit * 3 // 4 - 64, DIALLED_DESCRIPTORS)
