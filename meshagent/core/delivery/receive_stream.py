"""What has come from one sender, and whether its numbers still mean what they did.

Never decides what becomes of a message. Invariant: what was taken is every number up to `seq`,
so a duplicate is everything at or below it, for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshagent.core.model.messages import body_hash
from meshagent.core.wire.frames import HASH_BYTES, Mail, MailAck

__all__ = ["BUSY", "FORGOTTEN", "GAP", "NO_HASH", "WELL", "ReceiveStream", "last_that_came"]

NO_HASH = bytes(HASH_BYTES)
WELL, BUSY, GAP = 0, 1, 2  # MailAck.mode
_new = tuple.__new__  # a named tuple's own way takes twice as long
FORGOTTEN = "forgotten"
"""In place of a reason: how this number, and any before it, ended is no longer known here.

Only a sender whose database was put back can have such a number open; it has to start over, for
a message that was cancelled since would pass for delivered. Refusals are sentences, so none of
them reads like this."""


@dataclass(slots=True)
class ReceiveStream:
    """What has come from one sender in one epoch; `last` is of the last that was not withdrawn."""

    seq: int = 0
    known: bytes = NO_HASH
    exceptions: dict[int, str] = field(default_factory=dict)
    doubted: bool = False
    """Its numbers mean other messages than before: nothing more is taken under them."""
    files_doubted: bool = False
    """The same, of what lies in the spool: a file of another day says nothing about the link."""
    unhashed: bytes | None = None
    """The last that came, as long as nobody asked for its hash."""

    @property
    def last(self) -> bytes:
        """The hash of the last that came."""
        if self.unhashed is not None:
            self.known, self.unhashed = body_hash(self.unhashed), None
        return self.known

    @property
    def all_exceptions(self) -> tuple[tuple[int, str], ...]:
        """By number, as they are told and kept."""
        return tuple(sorted(self.exceptions.items()))

    def answer(self, epoch: bytes, mode: int) -> MailAck:
        """What its sender hears of it."""
        exceptions = self.all_exceptions if self.exceptions else ()
        return _new(MailAck, (epoch, self.seq, self.last, mode, exceptions))

    def forget_last(self) -> None:
        """Nobody can tell any more which message was the last."""
        self.known, self.unhashed = NO_HASH, None

    @property
    def named(self) -> int:
        """The number that `last` is of, unless that is no longer known."""
        return last_that_came(self.seq, self.exceptions)

    def forget_below(self, floor: int) -> None:
        """The sender knows how these ended: one word stands for all of them."""
        past = [each for each in self.exceptions if each < floor]
        if not past:
            return
        if self.named < min(self.seq, floor - 1):
            self.forget_last()  # without the exceptions nobody can tell which number it is of
        for seq in past:
            del self.exceptions[seq]
        self.exceptions[max(past)] = FORGOTTEN

    def skip_to(self, floor: int) -> None:
        """All below was settled with an earlier database of ours: it will never come again."""
        self.seq = floor - 1
        self.forget_last()
        self.exceptions = {self.seq: FORGOTTEN}

    def contradicts(self, mail: Mail) -> bool:
        """Whether `mail` holds another message than we took under the last number."""
        at = self.named - mail.first
        body = mail.items[at] if 0 <= at < len(mail.items) else None
        return body is not None and self.last not in (NO_HASH, body_hash(body))

    def withdrawn_in(self, mail: Mail) -> list[bytes]:
        """Messages that stand in `mail` before news, where the last that we have is nothing."""
        known = self.seq + 1 - mail.first
        if not 0 < known < len(mail.items):
            return []
        tail = mail.items[max(0, self.named + 1 - mail.first) : known]
        return [body for body in tail if body is not None]

    def distrusts(self, mail: Mail, spooled: bool) -> bool:
        """Whether nothing of `mail` may be taken; once that was so, it stays so."""
        if self.contradicts(mail):
            # One who is linked hears what we have, and starts over. A file may be of a time that
            # its sender's database has forgotten: then only the other files are to be doubted.
            if spooled:
                self.files_doubted = True
            else:
                self.doubted = True
        # Without the hash nobody can tell what a file means by numbers that its sender has open;
        # over a link the greeting settles that.
        blind = self.last == NO_HASH and self.named > 0 and mail.floor <= self.named
        return self.doubted or (spooled and (self.files_doubted or blind))


def last_that_came(upto: int, exceptions: Mapping[int, str]) -> int:
    """The highest number that was not withdrawn: an answer carries the hash of that message."""
    while exceptions.get(upto) == "":
        upto -= 1
    return upto
