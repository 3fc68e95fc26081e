"""Identities, records and engines for the tests of the core: real keys, no clock, no network."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from typing import Any

from meshagent.core.effects import CloseLink, Transmit
from meshagent.core.links.handshake import make_hello
from meshagent.core.mesh import Mesh
from meshagent.core.model.identity import Identity, MeshSecret, verify
from meshagent.core.model.peers import LinkId, PeerState
from meshagent.core.model.presence import Presence
from meshagent.core.model.records import Accusation, Record, Signed, sign_accusation, sign_record
from meshagent.core.turns import Turn
from meshagent.core.wire.codec import encode
from meshagent.core.wire.frames import (
    Ack,
    BlobAsk,
    BlobChunk,
    BlobEnd,
    BlobMore,
    BlobStop,
    Bye,
    Check,
    Frame,
    Gossip,
    Hello,
    Here,
    Mail,
    MailAck,
    Nack,
    Ping,
    PingReq,
    Refuse,
    Sync,
    Welcome,
)

SECRET = MeshSecret(b"a secret of the tests")
OTHER_SECRET = MeshSecret(b"another mesh's secret")
MESH_ID = SECRET.mesh_id


def identity(name: str) -> Identity:
    """The same keys for the same name, every time."""
    return Identity(name, hashlib.sha256(name.encode()).digest())


def in_order(*names: str) -> list[Identity]:
    """Identities for these names, smallest agent id first."""
    return sorted((identity(name) for name in names), key=lambda each: each.agent)


def record_of(who: Identity, **changes: Any) -> Record:
    """What `who` says about itself."""
    plain = Record(
        who.agent, who.key, 1 << 32, 1000, False, "tester", ("python",), ("10.0.0.1:7000",),
        "host", Presence.IDLE, "", "0.1",
    )  # fmt: skip
    return replace(plain, **changes)


def word_of(who: Identity, **changes: Any) -> Signed:
    """The same, signed."""
    return sign_record(record_of(who, **changes), who, MESH_ID)


def accusation(
    subject: Identity,
    accuser: Identity,
    state: PeerState = PeerState.SUSPECT,
    incarnation: int = 1 << 32,
    signer: Identity | None = None,
) -> bytes:
    """`accuser` (or somebody else in its name) says that `subject` does not answer."""
    said = Accusation(subject.agent, incarnation, state, accuser.agent)
    return sign_accusation(said, signer or accuser, MESH_ID).data


def mesh_of(who: Identity, seed: int = 1, **changes: Any) -> Mesh:
    """A whole engine at time 0."""
    return Mesh(record_of(who, **changes), who, MESH_ID, verify, random.Random(seed), 0.0)


def hello_of(
    who: Identity, to: str = "", nonce: bytes = bytes(16), started_ms: int = 1000
) -> Hello:
    """An honest first frame."""
    word = word_of(who, started_ms=started_ms)
    return make_hello(who, MESH_ID, to, nonce, started_ms, word.data)


def open_link(mesh: Mesh, who: Identity, link: int, now: float, **changes: Any) -> Turn:
    """`who` dials `mesh` and is let in."""
    mesh.opened(LinkId(link), who.curve_public, now)
    return mesh.received_parts(LinkId(link), encode(hello_of(who, **changes)), now)


def sent(turn: Turn, link: int | None = None) -> list[Frame]:
    """The frames that go out at once, on `link` or anywhere."""
    return [
        each.frame for each in turn.free if isinstance(each, Transmit) and link in (None, each.link)
    ]


def refusals(turn: Turn) -> list[str]:
    """Why the other side is told that it is refused."""
    return [each.why for each in sent(turn) if isinstance(each, Refuse)]


def closes(turn: Turn, link: int) -> bool:
    """Whether the link is closed."""
    return CloseLink(LinkId(link)) in turn.free


_someone = identity("someone")
_word = word_of(_someone).data

EXAMPLES: dict[type[Frame], Frame] = {
    type(frame): frame
    for frame in (
        hello_of(_someone),
        Welcome(1, {"x": 1}, _someone.agent, _someone.key, bytes(16), bytes(16), _word, bytes(64)),
        Refuse("clone", "Another node runs with this agent's key.", b"proof"),
        Bye("leaving"),
        Check(bytes(16)),
        Here(bytes(16), 5, bytes(64)),
        Ping(1, (_word,)),
        Ack(2, (_word,)),
        PingReq(3, _someone.agent, (_word,)),
        Nack(4),
        Gossip((_word, accusation(_someone, identity("accuser")))),
        Sync(1, ((_someone.agent, 1 << 32, 0),)),
        Mail(bytes(8), 1, 3, (b"a message", None, b"another")),
        MailAck(bytes(8), 5, bytes(16), 0, ((4, ""), (5, "too large"))),
        BlobAsk(7, bytes(32), 300_000, _someone.agent, bytes(64), 0, 2),
        BlobMore(7, 2),
        BlobChunk(7, 1, b"part of a picture"),
        BlobEnd(7, "absent", "It was deleted."),
        BlobStop(7),
    )
}
"""One plausible frame of each kind."""
