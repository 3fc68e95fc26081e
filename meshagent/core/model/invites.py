"""Invite codes: one line that carries the mesh secret, who invites, and where to dial.

Never prints or stores one. Invariant: a code with any character changed is refused by its checksum.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass, field

from meshagent.core.model.identity import SECRET_BYTES_MIN
from meshagent.core.model.peers import is_agent_id
from meshagent.core.model.records import ADDRESSES_MAX
from meshagent.core.wire.codec import pack, unpack
from meshagent.errors import InviteError, RemoteProtocolError

__all__ = ["Invite", "format_invite", "parse_invite"]

PREFIX = "mesh1-"
CODE_CHARACTERS_MAX = 4096
CHECKSUM_BYTES = 4
_HINT = "Copy the whole last line that 'meshagent invite' printed, and try again."


@dataclass(frozen=True, slots=True)
class Invite:
    """What a code holds."""

    secret: bytes = field(repr=False)
    mesh_name: str
    inviter: str
    addresses: tuple[str, ...]


def format_invite(invite: Invite) -> str:
    """The code: letters, digits, `-` and `_` on one line."""
    body = pack((invite.secret, invite.mesh_name, invite.inviter, invite.addresses))
    return PREFIX + _letters(body + _checksum(body))


def parse_invite(text: str) -> Invite:
    """The invite in `text`, which may have spaces around it; otherwise an InviteError."""
    code = "".join(text.split())
    if not code:
        raise InviteError("No invite code was given.", hint=_HINT)
    if not code.startswith(PREFIX):
        raise InviteError(f"This is not an invite code: one begins with {PREFIX!r}.", hint=_HINT)
    code = code.removeprefix(PREFIX)
    try:
        if len(code) > CODE_CHARACTERS_MAX:
            raise ValueError
        data = base64.b64decode(code + "=" * (-len(code) % 4), altchars=b"-_", validate=True)
        body, checksum = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
        # base64 can write the same bytes in several ways; only the one we print is a code.
        if checksum != _checksum(body) or _letters(data) != code:
            raise ValueError
        return _read(unpack(body))
    except (ValueError, binascii.Error, RemoteProtocolError):
        # `from None`: the code holds the secret, and must not appear in a traceback.
        raise InviteError("The invite code is damaged or incomplete.", hint=_HINT) from None


def _read(fields: object) -> Invite:
    match fields:
        case (bytes() as secret, str() as name, str() as inviter, tuple() as addresses, *_):
            texts = all(type(each) is str and each.isprintable() for each in addresses)
            if (
                len(secret) >= SECRET_BYTES_MIN
                and name.isprintable()
                and is_agent_id(inviter)
                and texts
            ):
                return Invite(secret, name, inviter, addresses[:ADDRESSES_MAX])
    raise ValueError


def _letters(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(b"meshagent invite 1" + body).digest()[:CHECKSUM_BYTES]
