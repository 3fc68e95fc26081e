"""What this agent says of itself and of others, signed. Never decides when to say it.

Invariant: our incarnation only grows, and the newest record is the one that is passed on.
"""

from __future__ import annotations

from dataclasses import replace

from meshagent.core.membership.gossip import GossipQueue
from meshagent.core.model.identity import Signer
from meshagent.core.model.peers import AgentId, PeerState
from meshagent.core.model.presence import Presence
from meshagent.core.model.records import Accusation, Record, Signed, sign_accusation, sign_record

__all__ = ["OwnRecord"]


class OwnRecord:
    """Our own record, as last signed."""

    def __init__(self, record: Record, signer: Signer, mesh_id: bytes, gossip: GossipQueue) -> None:
        self._signer, self._mesh_id, self._gossip = signer, mesh_id, gossip
        self.record = record
        self.signed = sign_record(record, signer, mesh_id)

    @property
    def agent(self) -> AgentId:
        """Our own id."""
        return self.record.agent

    def describe(
        self,
        presence: Presence | None,
        status: str | None,
        addresses: tuple[str, ...] | None,
    ) -> None:
        """Change what is given, under a new incarnation."""
        me = self.record
        self._sign(
            replace(
                me,
                incarnation=me.incarnation + 1,
                presence=me.presence if presence is None else presence,
                status=me.status if status is None else status,
                addresses=me.addresses if addresses is None else addresses,
            )
        )

    def leave(self) -> None:
        """Say that we stop on purpose."""
        self._sign(replace(self.record, incarnation=self.record.incarnation + 1, left=True))

    def refute(self, incarnation: int) -> None:
        """Say that we are alive, with a larger incarnation than the one that was named."""
        larger = max(incarnation, self.record.incarnation) + 1
        self._sign(replace(self.record, incarnation=larger))

    def repeat(self) -> None:
        """Pass our record on again."""
        self._gossip.put(f"{self.agent} record", self.signed.data)

    def accuse(self, record: Record, state: PeerState) -> Signed:
        """Our signed statement that another agent is in this state."""
        accusation = Accusation(record.agent, record.incarnation, state, self.agent)
        return sign_accusation(accusation, self._signer, self._mesh_id)

    def _sign(self, record: Record) -> None:
        self.record = record
        self.signed = sign_record(record, self._signer, self._mesh_id)
        self.repeat()
