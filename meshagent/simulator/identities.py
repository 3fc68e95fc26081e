"""Signers that cost little: what is studied here is the protocol, and not the cryptography.

Anyone could forge their signatures, and nobody here tries. Never used outside of simulations.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from meshagent.core.model.identity import Identity, agent_id_for

__all__ = ["HashSigner", "SimIdentity", "hash_verify", "identity_of"]


def _hash(key: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, key=key).digest()


def hash_verify(key: bytes, data: bytes, signature: bytes) -> bool:
    """Whether one of these signers made it."""
    return _hash(key, data) == signature


class HashSigner:
    """A signer with a key that is none: for membership alone, which makes no links."""

    def __init__(self, name: str, seed: int) -> None:
        self.key = hashlib.sha256(f"{name} {seed}".encode()).digest()
        self.curve_public = hashlib.sha256(self.key).digest()
        self.agent = agent_id_for(name, self.key)

    def sign(self, data: bytes) -> bytes:
        """64 bytes."""
        return _hash(self.key, data)


class SimIdentity(Identity):
    """An agent's real keys, as the handshake looks at them, with signatures that are a hash."""

    def sign(self, data: bytes) -> bytes:
        """64 bytes."""
        return _hash(self.key, data)


@lru_cache(maxsize=64)
def identity_of(name: str) -> SimIdentity:
    """The same for each name, whatever the seed of the world: real keys take long to make."""
    return SimIdentity(name, hashlib.sha256(name.encode()).digest())
