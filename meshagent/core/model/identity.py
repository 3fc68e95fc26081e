"""Who an agent is, and what the mesh secret opens. Never touches a disk: keys come as bytes.

One Ed25519 seed per agent serves for signatures and, converted, for CURVE. The mesh secret yields
the door's CURVE key (the key every ROUTER serves with), the mesh id that signatures are bound to,
and the tag that discovery shows. Invariant: nothing derived here leads back to the secret or seed.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Protocol

from meshagent.core.model.peers import AgentId, check_name
from meshagent.errors import LocalProtocolError

__all__ = ["Identity", "MeshSecret", "Signer", "Verify", "agent_id_for", "curve_key_of", "verify"]

SECRET_BYTES_MIN = 16
SEED_BYTES = 32
FINGERPRINT_CHARACTERS = 8
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's: nothing that reads like another


class Signer(Protocol):
    """What the core needs of an identity; the simulator has a cheaper one."""

    agent: AgentId
    key: bytes
    curve_public: bytes

    def sign(self, data: bytes) -> bytes:
        """64 bytes that only the holder of the seed can make."""


class Verify(Protocol):
    """Whether `signature` over `data` was made with the seed behind `key`."""

    def __call__(self, key: bytes, data: bytes, signature: bytes) -> bool: ...


def fingerprint(key: bytes) -> str:
    """Eight characters of a key's hash, as they stand in agent ids."""
    digest = hashlib.sha256(b"meshagent fingerprint 1" + key).digest()
    number = int.from_bytes(digest[:5], "big")  # 8 characters of 5 bits
    return "".join(_ALPHABET[number >> shift & 31] for shift in range(35, -1, -5))


def agent_id_for(name: str, key: bytes) -> AgentId:
    """The id that belongs to this name and key, and to no other key."""
    return AgentId(f"{check_name(name, 'name')}-{fingerprint(key)}")


def id_matches_key(agent: str, key: bytes) -> bool:
    """Whether the id could have been made with this key."""
    return agent[-FINGERPRINT_CHARACTERS:] == fingerprint(key)


class Identity:
    """An agent's key pair and the id made from it."""

    def __init__(self, name: str, seed: bytes) -> None:
        from nacl.signing import SigningKey

        if len(seed) != SEED_BYTES:
            raise LocalProtocolError(f"An agent's seed has {SEED_BYTES} bytes, not {len(seed)}.")
        self._signing = SigningKey(seed)
        self.key = bytes(self._signing.verify_key)
        self.agent = agent_id_for(name, self.key)
        private = self._signing.to_curve25519_private_key()
        self.curve_secret = bytes(private)
        self.curve_public = bytes(private.public_key)

    def sign(self, data: bytes) -> bytes:
        """The signature alone, 64 bytes."""
        return self._signing.sign(data).signature


def curve_key_of(key: bytes) -> bytes | None:
    """The CURVE key that belongs to an Ed25519 key; None when `key` is no valid point."""
    from nacl.exceptions import CryptoError
    from nacl.signing import VerifyKey

    try:
        return bytes(VerifyKey(key).to_curve25519_public_key())
    except (CryptoError, ValueError, RuntimeError, TypeError):
        return None


def verify(key: bytes, data: bytes, signature: bytes) -> bool:
    """Ed25519; False for anything that is not a good signature, whatever its shape."""
    from nacl.exceptions import CryptoError
    from nacl.signing import VerifyKey

    try:
        VerifyKey(key).verify(data, signature)
    except (CryptoError, ValueError, TypeError):
        return False
    return True


class MeshSecret:
    """What the members share. Its text forms never show it."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < SECRET_BYTES_MIN:
            raise LocalProtocolError(f"A mesh secret has at least {SECRET_BYTES_MIN} bytes.")
        self._secret = secret
        self.mesh_id = self._derive("mesh id")
        self.tag = self._derive("discovery tag")[:8].hex()

    def __repr__(self) -> str:
        return f"MeshSecret(tag={self.tag})"

    def reveal(self) -> bytes:
        """The secret itself, for an invite."""
        return self._secret

    def door(self) -> tuple[bytes, bytes]:
        """Public and secret CURVE key of the door: who can't compute them can't come in."""
        from nacl.public import PrivateKey

        private = PrivateKey(self._derive("door"))
        return bytes(private.public_key), bytes(private)

    def _derive(self, label: str) -> bytes:
        return hmac.new(self._secret, b"meshagent 1 " + label.encode(), hashlib.sha256).digest()
