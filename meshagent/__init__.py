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
    from meshagent.core.types import Peer, PeerState, Presence
    from meshagent.sdk import Event, Letter, Node, Receipt, join
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
    "Letter",
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
    "StorageError",
    "SyncNode",
    "UsageError",
    "__version__",
    "join",
    "join_sync",
]

_LAZY = {
    "Event": "meshagent.sdk",
    "Letter": "meshagent.sdk",
    "Node": "meshagent.sdk",
    "Peer": "meshagent.core.types",
    "PeerState": "meshagent.core.types",
    "Presence": "meshagent.core.types",
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
