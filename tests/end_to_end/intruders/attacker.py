"""Somebody who attacks: with the mesh secret or without, and bound by no rule of ours.

Uses the real core to make frames, and plain pyzmq to send them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

import zmq

from meshagent.core.links.handshake import make_hello
from meshagent.core.model.identity import Identity, MeshSecret
from meshagent.core.model.peers import AgentId
from meshagent.core.model.presence import Presence
from meshagent.core.model.records import Record, Signed, parse_update, sign_record
from meshagent.core.wire.codec import decode, encode, pack
from meshagent.core.wire.frames import NONCE_BYTES, Ack, Frame, Hello, Ping, Refuse, Sync, Welcome

ANSWER_MS = 3000
STARTED_MS = 1_700_000_000_000


class Wire:
    """One connection to a node's port."""

    def __init__(self, dealer: zmq.Socket[bytes]) -> None:
        self.dealer = dealer

    def send(self, frame: Frame) -> None:
        """What is sent after the node hung up is lost: libzmq would wait for ever."""
        with contextlib.suppress(zmq.Again):
            self.dealer.send_multipart(encode(frame), zmq.NOBLOCK)

    def receive(self, timeout_ms: int = ANSWER_MS) -> Frame | None:
        """The next frame; None when nothing comes."""
        if not self.dealer.poll(timeout_ms):
            return None
        return decode(self.dealer.recv_multipart())

    def receive_until(self, fits: Callable[[Frame], bool]) -> Frame:
        """The next frame that fits; others may come before it, for a while."""
        deadline = time.monotonic() + ANSWER_MS / 1000
        while time.monotonic() < deadline:
            frame = self.receive()
            if frame is not None and fits(frame):
                return frame
        raise AssertionError("the frame that was expected did not come")

    def welcome(self) -> Welcome:
        frame = self.receive_until(lambda frame: isinstance(frame, Welcome))
        assert isinstance(frame, Welcome)
        return frame

    def refusal(self) -> str:
        """Why this link is refused."""
        frame = self.receive_until(lambda frame: isinstance(frame, Refuse))
        assert isinstance(frame, Refuse)
        return frame.why

    def answers(self, seq: int) -> None:
        """A ping is answered, so the link serves and all before it was read."""
        self.send(Ping(seq))
        self.receive_until(lambda frame: isinstance(frame, Ack) and frame.seq == seq)


class Attacker:
    """Has a mesh secret (perhaps the wrong one) and a key of its own."""

    def __init__(self, secret: MeshSecret, name: str = "mallory", seed: bytes = b"") -> None:
        self.secret = secret
        self.identity = Identity(name, seed or os.urandom(32))

    @contextlib.contextmanager
    def dial(self, address: str) -> Iterator[Wire]:
        """Through the door, with this attacker's CURVE key."""
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.SNDTIMEO, ANSWER_MS)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        dealer.setsockopt(zmq.ROUTING_ID, b"\x01" + os.urandom(15))
        dealer.curve_serverkey = self.secret.door()[0]
        dealer.curve_publickey = self.identity.curve_public
        dealer.curve_secretkey = self.identity.curve_secret
        try:
            dealer.connect(f"tcp://{address}")
            yield Wire(dealer)
        finally:
            context.destroy(linger=0)

    @contextlib.contextmanager
    def member(self, address: str) -> Iterator[Wire]:
        """As a real member: the handshake done, the link open."""
        with self.dial(address) as wire:
            wire.send(self.hello())
            wire.welcome()
            yield wire

    @contextlib.contextmanager
    def listen(self) -> Iterator[tuple[zmq.Socket[bytes], str]]:
        """A port with the mesh's door, at which members will dial."""
        context = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.curve_server = True
        router.curve_publickey, router.curve_secretkey = self.secret.door()
        try:
            port = router.bind_to_random_port("tcp://127.0.0.1")
            yield router, f"127.0.0.1:{port}"
        finally:
            context.destroy(linger=0)

    def record(self, **changes: object) -> Signed:
        """This attacker's own word about itself."""
        fields: dict[str, object] = {
            "agent": self.identity.agent, "key": self.identity.key, "incarnation": 1,
            "started_ms": STARTED_MS, "left": False, "role": "mallory", "capabilities": (),
            "addresses": (), "host": "nowhere", "presence": Presence.IDLE, "status": "",
            "version": "0",
        }  # fmt: skip
        record = Record(**(fields | changes))  # type: ignore[arg-type]
        return sign_record(record, self.identity, self.secret.mesh_id)

    def hello(self, nonce: bytes = b"") -> Hello:
        nonce = nonce or os.urandom(NONCE_BYTES)
        return make_hello(
            self.identity, self.secret.mesh_id, "", nonce, STARTED_MS, self.record().data
        )

    def forged(self, word: Signed, body: tuple[object, ...]) -> bytes:
        """Somebody else's statement with another body, signed by this attacker."""
        packed = pack(body)
        kind = 1 if isinstance(word.statement, Record) else 2
        label = b"meshagent record 1" if kind == 1 else b"meshagent accusation 1"
        signature = self.identity.sign(label + self.secret.mesh_id + packed)
        return pack((kind, packed, signature))


def record_of(wire: Wire, agent: str) -> Signed:
    """A real member's signed record, as any member gets it."""
    wire.send(Sync(1, ()))
    found: list[Signed] = []

    def has_it(frame: Frame) -> bool:
        words = map(parse_update, getattr(frame, "updates", ()))
        found.extend(
            word
            for word in words
            if isinstance(word.statement, Record) and word.statement.agent == AgentId(agent)
        )
        return bool(found)

    wire.receive_until(has_it)
    return found[0]
