"""How peers, this node and events look to sessions and in JSON (DESIGN 13). Keys are stable."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from meshagent.core.model.peers import Peer

__all__ = ["iso", "peer_view"]


def iso(epoch_s: float | None) -> str | None:
    """ISO-8601 in UTC, to the millisecond."""
    if epoch_s is None:
        return None
    text = datetime.fromtimestamp(epoch_s, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def peer_view(peer: Peer, clock_offset: float) -> dict[str, Any]:
    """`clock_offset` turns the engine's clock into wall time."""
    heard = None if peer.last_heard is None else peer.last_heard + clock_offset
    return {
        "agent": peer.agent,
        "name": peer.name,
        "role": peer.role,
        "state": peer.state.value,
        "presence": str(peer.presence),
        "status": peer.status,
        "capabilities": list(peer.capabilities),
        "addresses": list(peer.addresses),
        "host": peer.host,
        "last_heard": iso(heard),
        "version": peer.version,
    }
