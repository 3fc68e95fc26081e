"""Mail that travels as a file instead of a frame: what is signed, and what makes it good.

A drop is one Mail frame with its sender's name and signature, for a recipient that is away and
shares a folder with us. It goes through the same door in delivery as a frame from a link, so the
two ways together are as safe as one. Never touches a disk.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshagent.core.model.identity import Signer, Verify, id_matches_key
from meshagent.core.model.peers import AgentId, is_agent_id
from meshagent.core.wire.codec import decode, encode, pack, unpack
from meshagent.core.wire.frames import HEADER_BYTES_MAX, KEY_BYTES, SIGNATURE_BYTES, Mail
from meshagent.errors import RemoteProtocolError

__all__ = ["DROP_BYTES_MAX", "Drop", "pack_drop", "parse_drop"]

DROP_BYTES_MAX = HEADER_BYTES_MAX + 4096


@dataclass(frozen=True, slots=True)
class Drop:
    """Mail from a sender who may be gone."""

    sender: AgentId
    key: bytes
    mail: Mail


def pack_drop(signer: Signer, mesh_id: bytes, to: AgentId, mail: Mail) -> bytes:
    """The bytes of the file."""
    frame = bytes(encode(mail)[0])
    signature = signer.sign(_words(mesh_id, signer.agent, to, frame))
    return pack((1, signer.agent, signer.key, frame, signature))


def parse_drop(data: bytes, me: AgentId, mesh_id: bytes, verify: Verify) -> Drop:
    """What a file holds, if a member meant it for us; otherwise RemoteProtocolError."""
    match unpack(data, DROP_BYTES_MAX):
        case (1, str() as sender, bytes() as key, bytes() as frame, bytes() as signature, *_):
            pass
        case _:
            raise RemoteProtocolError("The file is not a drop.")
    if len(key) != KEY_BYTES or len(signature) != SIGNATURE_BYTES or not is_agent_id(sender):
        raise RemoteProtocolError("The drop has a field of the wrong form.")
    if not id_matches_key(sender, key):
        raise RemoteProtocolError("The drop's sender has another key.")
    if not verify(key, _words(mesh_id, sender, me, frame), signature):
        raise RemoteProtocolError("The drop's signature does not hold.")
    mail = decode([frame])
    if not isinstance(mail, Mail):
        raise RemoteProtocolError("The drop holds no mail.")
    return Drop(AgentId(sender), key, mail)


def _words(mesh_id: bytes, sender: str, to: str, frame: bytes) -> bytes:
    return pack(("meshagent drop 1", mesh_id, sender, to, frame))
