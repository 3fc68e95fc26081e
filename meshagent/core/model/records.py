"""What members say about themselves and each other, signed. Never decides whether it is news.

A Record is an agent's own word about itself (where it listens, its role, that it leaves), an
Accusation is one member's word that another does not answer. Both are signed over the mesh id, so
neither can be forged by another member nor carried over from another mesh. They are relayed as
the bytes that were signed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from meshagent.core.model.identity import Signer, Verify, id_matches_key
from meshagent.core.model.peers import AgentId, PeerState, check_name, is_agent_id
from meshagent.core.model.presence import Presence
from meshagent.core.wire.codec import pack, unpack
from meshagent.core.wire.frames import KEY_BYTES, SIGNATURE_BYTES, UPDATE_BYTES_MAX, WHOLE_MAX
from meshagent.errors import LocalProtocolError, RemoteProtocolError, UsageError

__all__ = [
    "Accusation",
    "Record",
    "UnknownUpdate",
    "parse_update",
    "sign_accusation",
    "sign_record",
]

ADDRESSES_MAX = 16
CAPABILITIES_MAX = 16
ADDRESS_CHARACTERS_MAX = 128
STATUS_CHARACTERS_MAX = 200
HOST_CHARACTERS_MAX = 64
PRESENCE_CHARACTERS_MAX = 32
VERSION_CHARACTERS_MAX = 32
PARSED_MAX = 2048  # gossip brings each update several times; 2048 x 4 KiB bounds the memory

_RECORD, _ACCUSATION = 1, 2
_LABEL = {_RECORD: b"meshagent record 1", _ACCUSATION: b"meshagent accusation 1"}
_ACCUSED_STATES = {1: PeerState.SUSPECT, 2: PeerState.GONE}


class UnknownUpdate(RemoteProtocolError):
    """A well-formed update of a kind that only newer nodes know: to be passed over, not blamed."""


@dataclass(frozen=True, slots=True)
class Record:
    """An agent's own word about itself. A larger incarnation replaces a smaller one, whole."""

    agent: AgentId
    key: bytes
    incarnation: int
    started_ms: int
    left: bool
    role: str
    capabilities: tuple[str, ...]
    addresses: tuple[str, ...]
    host: str
    presence: Presence | str
    status: str
    version: str

    @property
    def name(self) -> str:
        """The part of the id before the fingerprint."""
        return self.agent[:-9]


@dataclass(frozen=True, slots=True)
class Accusation:
    """`accuser` says that `subject`, at that incarnation, does not answer, or is gone."""

    subject: AgentId
    incarnation: int
    state: PeerState
    accuser: AgentId


@dataclass(frozen=True, slots=True)
class Signed:
    """A statement with the bytes that prove it."""

    statement: Record | Accusation
    data: bytes
    body: bytes
    signature: bytes

    def is_genuine(self, key: bytes, mesh_id: bytes, verify: Verify) -> bool:
        """Whether the holder of `key` said this in this mesh."""
        kind = _RECORD if isinstance(self.statement, Record) else _ACCUSATION
        return verify(key, _LABEL[kind] + mesh_id + self.body, self.signature)


def sign_record(record: Record, signer: Signer, mesh_id: bytes) -> Signed:
    """`record` as its agent says it; a LocalProtocolError when nobody could read it."""
    body = pack(
        (
            record.agent,
            record.key,
            record.incarnation,
            record.started_ms,
            record.left,
            record.role,
            record.capabilities,
            record.addresses,
            record.host,
            str(record.presence),
            record.status,
            record.version,
        )
    )
    word = _sign(_RECORD, record, body, signer, mesh_id)
    try:
        parse_update(word.data)
    except RemoteProtocolError as error:
        # Every peer would refuse it too, and the agent would vanish from their views in silence.
        raise LocalProtocolError(f"This record can't be told to others: {error}") from None
    return word


def sign_accusation(accusation: Accusation, signer: Signer, mesh_id: bytes) -> Signed:
    """`accusation` as its accuser says it."""
    state = 1 if accusation.state is PeerState.SUSPECT else 2
    body = pack((accusation.subject, accusation.incarnation, state, accusation.accuser))
    return _sign(_ACCUSATION, accusation, body, signer, mesh_id)


def _sign(
    kind: int, statement: Record | Accusation, body: bytes, signer: Signer, mesh_id: bytes
) -> Signed:
    signature = signer.sign(_LABEL[kind] + mesh_id + body)
    return Signed(statement, pack((kind, body, signature)), body, signature)


@lru_cache(maxsize=PARSED_MAX)
def parse_update(data: bytes) -> Signed:
    """What `data` says, well-formed but not yet believed: ask `is_genuine`."""
    update = unpack(data, UPDATE_BYTES_MAX)
    match update:
        case (int() as kind, bytes() as body, bytes() as signature) if (
            len(signature) == SIGNATURE_BYTES
        ):
            fields = unpack(body, UPDATE_BYTES_MAX)
        case _:
            raise RemoteProtocolError("An update is a kind, a body and a signature.")
    if kind == _RECORD:
        return Signed(_read_record(fields), data, body, signature)
    if kind == _ACCUSATION:
        return Signed(_read_accusation(fields), data, body, signature)
    raise UnknownUpdate(f"An update of kind {kind} is not known here.")


def _read_record(fields: Any) -> Record:
    if type(fields) is not tuple or len(fields) < 12:
        raise RemoteProtocolError("A record lacks fields.")
    agent, key, incarnation, started, left, role, caps, addresses, host, presence, status, ver = (
        fields[:12]
    )
    _require(type(agent) is str and is_agent_id(agent), "agent")
    _require(type(key) is bytes and len(key) == KEY_BYTES and id_matches_key(agent, key), "key")
    _require(_is_whole(incarnation), "incarnation")
    _require(_is_whole(started), "started")
    _require(type(left) is bool, "left")
    _require(_is_name(role), "role")
    _require(_is_tuple_of(caps, CAPABILITIES_MAX) and all(map(_is_name, caps)), "capabilities")
    _require(
        _is_tuple_of(addresses, ADDRESSES_MAX)
        and all(_is_line(each, ADDRESS_CHARACTERS_MAX) for each in addresses),
        "addresses",
    )
    _require(_is_line(host, HOST_CHARACTERS_MAX), "host")
    _require(_is_line(status, STATUS_CHARACTERS_MAX), "status")
    _require(_is_line(ver, VERSION_CHARACTERS_MAX), "version")
    _require(presence != "" and _is_line(presence, PRESENCE_CHARACTERS_MAX), "presence")
    return Record(
        AgentId(agent), key, incarnation, started, left, role, caps, addresses, host,
        Presence(presence) if presence in _PRESENCES else presence, status, ver,
    )  # fmt: skip


def _read_accusation(fields: Any) -> Accusation:
    if type(fields) is not tuple or len(fields) < 4:
        raise RemoteProtocolError("An accusation lacks fields.")
    subject, incarnation, state, accuser = fields[:4]
    _require(type(subject) is str and is_agent_id(subject), "subject")
    _require(_is_whole(incarnation), "incarnation")
    _require(_is_whole(state), "state")
    _require(type(accuser) is str and is_agent_id(accuser), "accuser")
    if state not in _ACCUSED_STATES:
        raise UnknownUpdate(f"An accusation of state {state} is not known here.")
    return Accusation(AgentId(subject), incarnation, _ACCUSED_STATES[state], AgentId(accuser))


_PRESENCES = frozenset(each.value for each in Presence)


def _require(holds: bool, field: str) -> None:
    if not holds:
        raise RemoteProtocolError(f"A membership update has a bad {field}.")


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value <= WHOLE_MAX


def _is_name(value: Any) -> bool:
    try:
        return type(value) is str and bool(check_name(value, "name"))
    except UsageError:
        return False


def _is_line(value: Any, limit: int) -> bool:
    # isprintable keeps terminal escapes and line breaks out of every view, at the door.
    return type(value) is str and len(value) <= limit and value.isprintable()


def _is_tuple_of(value: Any, limit: int) -> bool:
    return type(value) is tuple and len(value) <= limit
