"""What is kept of each peer across restarts: its key, and where it last answered. Hints only.

Invariant: many changes within a second share one write, and what is known to be on the disk
already is not written again.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshagent.core.model.peers import AgentId
from meshagent.core.model.records import ADDRESSES_MAX
from meshagent.core.model.rows import PeerRow
from meshagent.core.wire.frames import MEMBERS_MAX

__all__ = ["RememberedPeers"]

SAVE_PEERS_S = 1.0  # what is remembered of peers is a hint, so many can share one sync


class RememberedPeers:
    """Which peers are on the disk, and which are to be put there."""

    def __init__(self) -> None:
        self._saved: dict[AgentId, PeerRow] = {}
        self._unsaved: dict[AgentId, PeerRow] = {}
        self.save_at: float | None = None

    def known(self, row: PeerRow) -> None:
        """This is on the disk."""
        self._saved[AgentId(row.agent)] = row

    def note(self, agent: AgentId, key: bytes, addresses: Sequence[str], now: float) -> None:
        """Remember this, if it is news, with the next batch."""
        row = PeerRow(agent, key, tuple(dict.fromkeys(addresses))[:ADDRESSES_MAX])
        if self._saved.get(agent) == row:
            return
        self._saved[agent] = self._unsaved[agent] = row
        if len(self._saved) > MEMBERS_MAX:
            del self._saved[next(iter(self._saved))]  # at worst one row is written once more
        if self.save_at is None:
            self.save_at = now + SAVE_PEERS_S

    def due(self, now: float) -> list[PeerRow]:
        """What is to be written now."""
        if self.save_at is None or now < self.save_at:
            return []
        rows, self._unsaved, self.save_at = self._unsaved, {}, None
        return list(rows.values())
