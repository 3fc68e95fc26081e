"""Which of two nodes with the same key must stop: the one that started later.

A node stops only on signed proof that an older node with its key runs now: a Here over a nonce
that was made for this check. Never touches a link. Invariant: of two nodes of one agent exactly
one is told to stop, and nobody without the agent's key can stop either.
"""

from __future__ import annotations

from meshagent.core.effects import CloneFound
from meshagent.core.links.handshake import clone_proof_started, make_here, refuse_clone
from meshagent.core.model.identity import Signer, Verify
from meshagent.core.wire.frames import Hello, Here, Refuse

__all__ = ["CloneCheck"]


class CloneCheck:
    """What one node knows about other nodes that hold its own key."""

    def __init__(self, signer: Signer, mesh_id: bytes, verify: Verify, started_ms: int) -> None:
        self._signer, self._mesh_id, self._verify = signer, mesh_id, verify
        self._started_ms = started_ms

    def proof(self, nonce: bytes) -> Here:
        """Signed proof that this node runs now."""
        return make_here(self._signer, self._mesh_id, nonce, self._started_ms)

    def dialled_by_own_key(self, hello: Hello) -> tuple[Refuse | None, CloneFound | None]:
        """A node with our key dialled us: what to answer, and whether there is a clone.

        It is this very node at another of its addresses, or a second node with a copied key.
        """
        if hello.started_ms == self._started_ms:
            return Refuse("self", ""), None
        where = "a node that dialled this one"
        if hello.started_ms < self._started_ms:
            return None, CloneFound(True, where)
        return refuse_clone(self.proof(hello.nonce)), CloneFound(False, where)

    def is_proved(self, refuse: Refuse, nonce: bytes) -> bool:
        """Whether this refusal proves that an older node with our key runs."""
        if refuse.why != "clone" or not nonce:
            return False
        key = self._signer.key
        started = clone_proof_started(refuse, nonce, key, self._mesh_id, self._verify)
        return started is not None and started < self._started_ms
