"""A member that offers, serves and asks for attachments, and keeps no rule in doing so."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from end_to_end.intruders.attacker import ANSWER_MS, STARTED_MS, Attacker, Wire

from meshagent.core.model.attachments import Attachment, grant_words
from meshagent.core.model.messages import body_hash, parse_body
from meshagent.core.model.peers import AgentId
from meshagent.core.wire.codec import pack
from meshagent.core.wire.frames import (
    CHUNK_BYTES,
    EPOCH_BYTES,
    MAIL_ITEMS_MAX,
    Ack,
    BlobAsk,
    BlobChunk,
    BlobEnd,
    Frame,
    Mail,
    MailAck,
    Ping,
)

RECEIPT = "receipt"


def named(content: bytes, name: Any = "a.bin", **changes: Any) -> tuple[Any, ...]:
    """An attachment as the wire has it: true to `content` but for the changes."""
    sha256 = hashlib.sha256(content).digest()
    honest = Attachment(name, len(content), "application/octet-stream", sha256)
    return tuple((honest._asdict() | changes).values())


def body(
    *attachments: tuple[Any, ...], ident: str = "", text: str = "look", expires_ms: int = 0
) -> bytes:
    """A message's bytes, with whatever is to be said in it."""
    ident = ident or os.urandom(6).hex()
    return pack(
        (ident, "text", text, STARTED_MS, None, "", "", {}, tuple(attachments), expires_ms, 0)
    )


def receipt(ident: str, state: str, reason: str = "") -> bytes:
    """A word on how far a message has come, whoever's it is."""
    data = {"id": ident, "state": state, "reason": reason}
    return pack((os.urandom(6).hex(), RECEIPT, "", STARTED_MS, data, "", "", {}, (), 0, 0))


class Foe:
    """One link of a member, with its mail and its pulls."""

    def __init__(self, attacker: Attacker, wire: Wire) -> None:
        self.identity, self.mesh_id = attacker.identity, attacker.secret.mesh_id
        self.wire = wire
        self.epoch = os.urandom(EPOCH_BYTES)
        self.next_seq = 1
        self.ends: dict[str, tuple[str, str]] = {}
        """What the node said of our messages: state and reason."""
        self._pull = 0

    def frames(self, seconds: float = ANSWER_MS / 1000) -> Iterator[Frame]:
        """What comes, while the node is kept believing that all is well."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            frame = self.wire.receive(max(1, int(left * 1000)))
            if isinstance(frame, Ping):
                self.wire.send(Ack(frame.seq))
            elif isinstance(frame, Mail):
                self._take(frame)
            if frame is not None:
                yield frame

    def until(self, fits: Callable[[Frame], bool], seconds: float = 8.0) -> Frame:
        for frame in self.frames(seconds):
            if fits(frame):
                return frame
        raise AssertionError("the frame that was expected did not come")

    def _take(self, mail: Mail) -> None:
        last, withdrawn = bytes(16), []
        for seq, item in enumerate(mail.items, mail.first):
            if item is None:
                withdrawn.append((seq, ""))
                continue
            message, last = parse_body(item), body_hash(item)
            if message.kind == RECEIPT:
                self.ends[message.data["id"]] = (message.data["state"], message.data["reason"])
        upto = mail.first + len(mail.items) - 1
        self.wire.send(MailAck(mail.epoch, upto, last, 0, tuple(withdrawn)))

    # -- mail ---------------------------------------------------------------------------------

    def post(self, *bodies: bytes) -> MailAck:
        """Send them; the node's answer to the last."""
        for at in range(0, len(bodies), MAIL_ITEMS_MAX):
            part = bodies[at : at + MAIL_ITEMS_MAX]
            self.wire.send(Mail(self.epoch, 1, self.next_seq, part))
            self.next_seq += len(part)
        upto = self.next_seq - 1

        def answers(frame: Frame) -> bool:
            ours = isinstance(frame, MailAck) and frame.epoch == self.epoch
            return ours and (frame.upto >= upto or frame.mode == 1)

        answer = self.until(answers)
        assert isinstance(answer, MailAck)
        return answer

    def why_refused(self, one: bytes) -> str:
        """What the node answers to this message; empty when it took it."""
        seq = self.next_seq
        return dict(self.post(one).exceptions).get(seq, "")

    def end_of(self, ident: str, seconds: float = 8.0) -> tuple[str, str]:
        """How the node says that this message of ours ended."""
        for _ in self.frames(seconds):
            if ident in self.ends:
                break
        return self.ends[ident]

    # -- blobs --------------------------------------------------------------------------------

    def asked(self, sha256: bytes = b"") -> BlobAsk:
        """The node's next ask, for this blob if one is given."""
        frame = self.until(
            lambda frame: isinstance(frame, BlobAsk) and sha256 in (b"", frame.sha256)
        )
        assert isinstance(frame, BlobAsk)
        return frame

    def serve(self, *contents: bytes) -> None:
        """As an honest one, until each was asked for to its end; all are of one chunk."""
        left = {hashlib.sha256(each).digest(): each for each in contents}
        while left:
            ask = self.asked()
            if ask.sha256 in left:
                self.wire.send(BlobChunk(ask.pull, 0, left.pop(ask.sha256)))

    def grant(self, to: AgentId, sha256: bytes) -> bytes:
        return self.identity.sign(grant_words(self.mesh_id, self.identity.agent, to, sha256))

    def ask(self, sha256: bytes, size: int, granter: str, grant: bytes = b"") -> Frame:
        """Pull it; the first chunk, or why not."""
        self._pull += 1
        pull = self._pull
        upto = min(4, -(-size // CHUNK_BYTES))
        self.wire.send(BlobAsk(pull, sha256, size, granter, grant, 0, upto))
        return self.until(
            lambda frame: isinstance(frame, BlobChunk | BlobEnd) and frame.pull == pull
        )


@contextlib.contextmanager
def foe(attacker: Attacker, address: str) -> Iterator[Foe]:
    """A member's link to the node at this address."""
    with attacker.member(address) as wire:
        yield Foe(attacker, wire)
