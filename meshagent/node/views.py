"""How peers, this node and events look to sessions and in JSON (DESIGN 13). Keys are stable."""

from __future__ import annotations

import os
import time
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from meshagent.core.effects import BlobProgress, CloneFound, Deliver, PeerChanged, ReceiptChanged
from meshagent.core.model.peers import Peer, PeerState
from meshagent.core.ports import Damage

if TYPE_CHECKING:
    from meshagent.node.driver import Driver

__all__ = ["NodeViews", "damage_view", "iso", "peer_view"]

DAMAGE_SHOWN_MAX = 100  # of the newest, in `status`


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


def damage_view(damage: Damage) -> dict[str, str]:
    """Something that was damaged on disk."""
    return {
        "origin": damage.origin,
        "peer": damage.peer,
        "message_id": damage.message_id,
        "reason": damage.reason,
        "found_at": damage.found_at,
    }


class NodeViews:
    """One node, as sessions and programs see it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    @property
    def clock_offset(self) -> float:
        """What to add to an engine time to get wall time."""
        return time.time() - self._driver.loop.time()

    def peer(self, peer: Peer) -> dict[str, Any]:
        """A peer."""
        return peer_view(peer, self.clock_offset)

    def peers(self) -> list[dict[str, Any]]:
        """Everyone known, by id."""
        return [self.peer(each) for each in self._driver.mesh.peers()]

    def me(self) -> dict[str, Any]:
        """This agent as its peers see it."""
        me = self._driver.mesh.me
        seen = Peer(
            me.agent, me.name, me.role, PeerState.ALIVE, me.presence, me.status,
            me.capabilities, self._driver.addresses, me.host, self._driver.loop.time(), me.version,
        )  # fmt: skip
        return self.peer(seen)

    def events(self, change: Any) -> list[dict[str, Any]]:
        """What a subscriber hears of a change."""
        match change:
            case PeerChanged(peer):
                return [self.peer(peer)]
            case CloneFound(stop, where):
                return [{"where": where, "stop": stop}]
            case Deliver(sender, messages):
                return [{"from": sender, "id": each.id} for each in messages]
            case ReceiptChanged(peer, idents, state, reason):
                news = {"to": peer, "state": state.value, "reason": reason}
                return [{"id": ident, **news} for ident in idents]
            case BlobProgress(sha256, received, size):
                return [{"sha256": sha256.hex(), "received": received, "size": size}]
            case Damage():
                return [damage_view(change)]
        return []

    def health(self) -> dict[str, str]:
        """Each discovery source, and the store, in a word."""
        states = {each.name: each.health() for each in self._driver.discoveries}
        return states | {"store": self._driver.recovery.trouble or "ok"}

    def status(self) -> dict[str, Any]:
        """This agent at a glance (DESIGN 16)."""
        driver = self._driver
        counts = dict.fromkeys((state.value for state in PeerState if state != PeerState.LEFT), 0)
        for peer in driver.mesh.peers():
            if peer.state.value in counts:
                counts[peer.state.value] += 1
        me, delivery = driver.mesh.me, driver.mesh.delivery
        outbox = {"queued": 0, "sent": 0} if delivery is None else delivery.outbox_counts()
        refused = driver.transport.refused + driver.mesh.refused()
        ignored = Counter(
            {
                f"{source.name} {why}": count
                for source in driver.discoveries
                for why, count in source.ignored.items()
            }
        )
        return {
            "agent": driver.agent,
            "name": me.name,
            "role": me.role,
            "mesh": driver.profile.mesh_name,
            "presence": str(me.presence),
            "status": me.status,
            "pid": os.getpid(),
            "uptime_s": round(time.time() - driver.started_at, 3),
            "addresses": list(driver.addresses),
            "peers": counts,
            "outbox": outbox,
            "inbox": {"unread": 0 if delivery is None else delivery.unread},
            "refused": dict(sorted(refused.items())),
            "ignored": dict(sorted(ignored.items())),
            "health": self.health(),
            "damage": [damage_view(each) for each in driver.damage.known[-DAMAGE_SHOWN_MAX:]],
            "version": me.version,
        }
