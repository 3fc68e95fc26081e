"""A brokerless peer-to-peer mesh for coding agents.

    async with meshagent.join(role="tester") as node:
        print(node.agent, [peer.agent for peer in node.peers])

Importing this package has no side effects and loads nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshagent._version import __version__
from meshagent.errors import (
    AlreadyRunning,
    AmbiguousPeer,
    CloneRunning,
    ConfigError,
    CorruptFile,
    DeliveryTimeout,
    InviteError,
    LimitReached,
    MeshError,
    NoSuchPeer,
    NotAdmitted,
    NotRunning,
    PortBusy,
    StorageError,
    UsageError,
)

if TYPE_CHECKING:
    from meshagent.core.model.peers import Peer, PeerState
    from meshagent.core.model.presence import Presence
    from meshagent.sdk import Event, Node, Receipt, ReceivedMessage, join
    from meshagent.sync import SyncNode, join_sync

__all__ = [
    "AlreadyRunning",
    "AmbiguousPeer",
    "CloneRunning",
    "ConfigError",
    "CorruptFile",
    "DeliveryTimeout",
    "Event",
    "InviteError",
    "LimitReached",
    "MeshError",
    "NoSuchPeer",
    "Node",
    "NotAdmitted",
    "NotRunning",
    "Peer",
    "PeerState",
    "PortBusy",
    "Presence",
    "Receipt",
    "ReceivedMessage",
    "StorageError",
    "SyncNode",
    "UsageError",
    "__version__",
    "join",
    "join_sync",
]

_LAZY = {
    "Event": "meshagent.sdk",
    "ReceivedMessage": "meshagent.sdk",
    "Node": "meshagent.sdk",
    "Peer": "meshagent.core.model.peers",
    "PeerState": "meshagent.core.model.peers",
    "Presence": "meshagent.core.model.presence",
    "Receipt": "meshagent.sdk",
    "SyncNode": "meshagent.sync",
    "join": "meshagent.sdk",
    "join_sync": "meshagent.sync",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'meshagent' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
