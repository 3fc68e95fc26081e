"""Which messages wait for which attachments, and how each of them ends. Never moves a byte.

A message that names attachments is durable here as soon as it is answered, and is handed out when
every eager one is here and verified. Then its sender hears `delivered`; or `refused` and why, when
one of them can never be had; or `expired`, when its time was up first. Invariants: every message
that is held ends in exactly one of these; nobody makes us hold more than a sender's share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from meshagent.core.model.attachments import Attachment, AttachmentLimits
from meshagent.core.model.message_states import MessageState
from meshagent.core.model.messages import Message
from meshagent.core.model.peers import AgentId

__all__ = ["Ended", "IncompleteMessages"]

Key = tuple[AgentId, str]

SENDER_FILES_MAX = 1024  # of one sender's held messages: a want costs a few KiB while it waits
SENDER_BYTES_MAX = 16 * 1024 * 1024  # their bodies, which a list of the inbox reads at once
HELD_FILES_MAX = 32 * SENDER_FILES_MAX  # of all; a member can have many names
STALE_MIN = 64  # a heap this short is not worth cleaning


class Ended(NamedTuple):
    """A message is held no more: handed out when it was delivered, dropped otherwise."""

    sender: AgentId
    message: Message
    state: MessageState
    reason: str = ""


@dataclass(slots=True)
class _Held:
    message: Message
    missing: set[bytes]
    size: int


@dataclass(slots=True)
class _Share:
    """What one sender makes us hold."""

    files: int = 0
    size: int = 0


class IncompleteMessages:
    """The messages of one agent that are not complete."""

    def __init__(self, limits: AttachmentLimits | None = None) -> None:
        self.limits = limits or AttachmentLimits()
        self._held: dict[Key, _Held] = {}
        self._wanted_by: dict[bytes, set[Key]] = {}
        self._expiries: list[tuple[int, AgentId, str]] = []
        self._clean_at = STALE_MIN
        self._shares: dict[AgentId, _Share] = {}
        self._files = 0

    def __contains__(self, sha256: bytes) -> bool:
        """Whether a held message waits for this blob."""
        return sha256 in self._wanted_by

    def __len__(self) -> int:
        return len(self._held)

    def held(self) -> list[tuple[AgentId, Message]]:
        """All of them, in the order they came."""
        return [(sender, held.message) for (sender, _), held in self._held.items()]

    def is_crowded(self, sender: AgentId) -> bool:
        """Whether this sender's next message with attachments has to wait."""
        share = self._shares.get(sender)
        if share is None:
            return self._files >= HELD_FILES_MAX
        crowded = share.files >= SENDER_FILES_MAX or share.size >= SENDER_BYTES_MAX
        return crowded or self._files >= HELD_FILES_MAX

    def hold(self, sender: AgentId, message: Message, size: int = 0) -> list[Attachment]:
        """Keep a message until its attachments are here; those that it waits for.

        `size` are the bytes of its body, which stay on disk: here it is kept without its text.
        A second one with its id is none: the disk keeps the first.
        """
        key = (sender, message.id)
        if key in self._held:
            return []
        eager = [each for each in message.attachments if self.limits.is_eager(each)]
        brief = message._replace(text="", data=None, headers={})
        self._held[key] = _Held(brief, {each.sha256 for each in eager}, size)
        share = self._shares.setdefault(sender, _Share())
        share.files += len(message.attachments)
        share.size += size
        self._files += len(message.attachments)
        for each in eager:
            self._wanted_by.setdefault(each.sha256, set()).add(key)
        if message.expires_ms:
            self._note_expiry(message.expires_ms, key)
        return eager

    def complete(self, sender: AgentId, ident: str) -> list[Ended]:
        """This message, if it waits for nothing."""
        held = self._held.get((sender, ident))
        if held is None or held.missing:
            return []
        return [self._end((sender, ident), MessageState.DELIVERED)]

    def ready(self, sha256: bytes) -> list[Ended]:
        """A blob is here: the messages that waited for nothing else, in the order they came."""
        done = []
        for key in self._in_order(self._wanted_by.pop(sha256, set())):
            held = self._held[key]
            held.missing.discard(sha256)
            if not held.missing:
                done.append(self._end(key, MessageState.DELIVERED))
        return done

    def failed(self, sha256: bytes, why: str) -> list[Ended]:
        """A blob can't be had: the messages that can't be completed without it."""
        keys = self._in_order(self._wanted_by.pop(sha256, set()))
        return [self._end(key, MessageState.REFUSED, why) for key in keys]

    def expired(self, now_ms: int) -> list[Ended]:
        """Those whose time is up."""
        ended = []
        while self._expiries and self._expiries[0][0] <= now_ms:
            _, sender, ident = heappop(self._expiries)
            if (sender, ident) in self._held:
                why = "its time was up before its attachments had come"
                ended.append(self._end((sender, ident), MessageState.EXPIRED, why))
        return ended

    def next_expiry(self) -> int | None:
        """When `expired` has something next, at the earliest."""
        return self._expiries[0][0] if self._expiries else None

    def _note_expiry(self, expires_ms: int, key: Key) -> None:
        heappush(self._expiries, (expires_ms, *key))
        if len(self._expiries) > self._clean_at:
            # Those that ended otherwise: their time may be in a thousand years.
            self._expiries = [each for each in self._expiries if each[1:] in self._held]
            heapify(self._expiries)
            self._clean_at = 2 * len(self._expiries) + STALE_MIN

    def _end(self, key: Key, state: MessageState, reason: str = "") -> Ended:
        held = self._held.pop(key)
        share = self._shares[key[0]]
        share.files -= len(held.message.attachments)
        share.size -= held.size
        self._files -= len(held.message.attachments)
        if not share.files:
            del self._shares[key[0]]
        for sha256 in held.missing:
            waiting = self._wanted_by.get(sha256)
            if waiting is not None:
                waiting.discard(key)
                if not waiting:
                    del self._wanted_by[sha256]
        return Ended(key[0], held.message, state, reason)

    def _in_order(self, keys: set[Key]) -> Sequence[Key]:
        return [key for key in self._held if key in keys] if len(keys) > 1 else list(keys)
