"""Who is at the other end of a link: what HELLO, WELCOME and HERE sign, and what makes them good.

Pure functions over frames. The door (CURVE with a key made from the mesh secret) has let the
other side in; this proves which agent it is. The dialler's CURVE key is part of every signature,
and an inbound link's CURVE key is authenticated by the transport: a HELLO replayed or relayed by
another member arrives under that member's CURVE key and fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshagent.core.model.identity import Signer, Verify, curve_key_of, id_matches_key
from meshagent.core.model.peers import AgentId, is_agent_id
from meshagent.core.model.records import Record, Signed, parse_update
from meshagent.core.wire.codec import pack, unpack
from meshagent.core.wire.frames import Hello, Here, Refuse, Welcome
from meshagent.errors import RemoteProtocolError

__all__ = [
    "FEATURES",
    "VERSION_HIGH",
    "VERSION_LOW",
    "Refusal",
    "check_hello",
    "check_welcome",
    "clone_proof_started",
    "common_features",
    "make_hello",
    "make_here",
    "make_welcome",
]

VERSION_LOW = 1
VERSION_HIGH = 1
FEATURES: Mapping[str, int] = {}
"""What a node of this release can do beyond the version, each with a number: nothing yet. An
engine asks `Links.features` whether a peer can do it, too, and uses only that."""


class Refusal(Exception):
    """The other side is not let in; `why` is counted and sent, the text is for people."""

    def __init__(self, why: str, reason: str) -> None:
        super().__init__(reason)
        self.why = why
        self.reason = reason


def common_features(ours: Mapping[str, int], theirs: Mapping[str, int]) -> dict[str, int]:
    """What both can do, each at the smaller number; names that only one knows mean nothing."""
    return {name: min(ours[name], theirs[name]) for name in ours.keys() & theirs.keys()}


def make_hello(
    signer: Signer,
    mesh_id: bytes,
    to: str,
    nonce: bytes,
    started_ms: int,
    record: bytes,
    features: Mapping[str, int] = FEATURES,
) -> Hello:
    """The first frame on a link that we dialled."""
    hello = Hello(
        VERSION_LOW, VERSION_HIGH, dict(features), signer.agent, signer.key, to, nonce,
        started_ms, record, b"",
    )  # fmt: skip
    return replace(hello, signature=signer.sign(_hello_words(mesh_id, hello, signer.curve_public)))


def check_hello(
    hello: Hello, curve_key: bytes | None, me: AgentId, mesh_id: bytes, verify: Verify
) -> Record:
    """The dialler's record, when everything it claims holds; otherwise a Refusal."""
    if hello.version_low > VERSION_HIGH or hello.version_high < VERSION_LOW:
        raise Refusal(
            "version",
            f"This node speaks versions {VERSION_LOW} to {VERSION_HIGH} of the protocol.",
        )
    if curve_key is None or curve_key_of(hello.key) != curve_key:
        raise Refusal("impostor", "The link was made with another key than the agent's.")
    if hello.to not in ("", me):
        raise Refusal("not me", "Another agent answers at this address now.")
    return _checked_record(hello, _hello_words(mesh_id, hello, curve_key), mesh_id, verify)


def make_welcome(
    signer: Signer,
    mesh_id: bytes,
    hello: Hello,
    curve_key: bytes,
    nonce: bytes,
    record: bytes,
    features: Mapping[str, int] = FEATURES,
) -> Welcome:
    """The answer to a HELLO that we believe."""
    welcome = Welcome(
        min(VERSION_HIGH, hello.version_high), dict(features), signer.agent, signer.key, nonce,
        hello.nonce, record, b"",
    )  # fmt: skip
    words = _welcome_words(mesh_id, welcome, hello.agent, curve_key)
    return replace(welcome, signature=signer.sign(words))


def check_welcome(
    welcome: Welcome,
    expected: str,
    nonce: bytes,
    signer: Signer,
    mesh_id: bytes,
    verify: Verify,
) -> Record:
    """The record of the one we dialled, when it is who we meant; otherwise a Refusal."""
    if not VERSION_LOW <= welcome.version <= VERSION_HIGH:
        raise Refusal("version", "The answer chose a version that we do not speak.")
    if expected and welcome.agent != expected:
        raise Refusal("not them", "Another agent answers at that address now.")
    if welcome.their_nonce != nonce:
        raise Refusal("replay", "The answer belongs to another HELLO.")
    words = _welcome_words(mesh_id, welcome, signer.agent, signer.curve_public)
    return _checked_record(welcome, words, mesh_id, verify)


def make_here(signer: Signer, mesh_id: bytes, nonce: bytes, started_ms: int) -> Here:
    """Signed proof that this node runs now: the nonce was just made by somebody else."""
    return Here(nonce, started_ms, signer.sign(_here_words(mesh_id, nonce, started_ms)))


def refuse_clone(here: Here) -> Refuse:
    """What a second node of the same agent gets, with the proof that the first one runs."""
    proof = pack((here.started_ms, here.signature))
    return Refuse("clone", "Another node runs with this agent's key.", proof)


def clone_proof_started(
    refuse: Refuse, nonce: bytes, key: bytes, mesh_id: bytes, verify: Verify
) -> int | None:
    """When the other node with our key started; None when the proof is no proof."""
    try:
        match unpack(refuse.proof):
            case (int() as started_ms, bytes() as signature):
                words = _here_words(mesh_id, nonce, started_ms)
                return started_ms if verify(key, words, signature) else None
    except RemoteProtocolError:
        pass
    return None


def _checked_record(said: Hello | Welcome, words: bytes, mesh_id: bytes, verify: Verify) -> Record:
    agent, key = said.agent, said.key
    if not is_agent_id(agent) or not id_matches_key(agent, key):
        raise Refusal("impostor", "The agent id belongs to another key.")
    if not verify(key, words, said.signature):
        raise Refusal("forged", "The signature does not hold.")
    try:
        word: Signed = parse_update(said.record)
    except RemoteProtocolError as error:
        raise Refusal("malformed", str(error)) from None
    record = word.statement
    if not isinstance(record, Record) or record.agent != agent or record.key != key:
        raise Refusal("forged", "The record speaks of another agent.")
    if not word.is_genuine(key, mesh_id, verify):
        raise Refusal("forged", "The record's signature does not hold.")
    return record


def _hello_words(mesh_id: bytes, hello: Hello, curve_key: bytes) -> bytes:
    return pack((
        "meshagent hello 1", mesh_id, hello.agent, hello.to, hello.nonce, curve_key,
        hello.started_ms, hello.version_low, hello.version_high, sorted(hello.features.items()),
    ))  # fmt: skip


def _welcome_words(mesh_id: bytes, welcome: Welcome, to: str, curve_key: bytes) -> bytes:
    return pack((
        "meshagent welcome 1", mesh_id, welcome.agent, to, welcome.their_nonce, welcome.nonce,
        curve_key, welcome.version, sorted(welcome.features.items()),
    ))  # fmt: skip


def _here_words(mesh_id: bytes, nonce: bytes, started_ms: int) -> bytes:
    return pack(("meshagent here 1", mesh_id, nonce, started_ms))
