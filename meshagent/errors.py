"""Every error a user can meet, in one tree.

MeshError                     carries a sentence, a hint for the next step, an exit code
├── UsageError            2   what was asked can't be done as asked
│   ├── ConfigError       2   mesh.toml, agent.toml or an option holds a bad value
│   ├── LocalProtocolError 2  our own caller broke a rule of the protocol
│   ├── MalformedRequest  2   a session sent its node something that is no request
│   └── PortBusy          2   the listen address is taken or not ours
├── DeliveryTimeout       3   not delivered in time; the message stays queued
├── NoSuchPeer            4   nobody answers to that name
│   └── AmbiguousPeer     4   several do
├── NotAdmitted           5   the mesh, or this machine's lock, said no
│   ├── InviteError       5   the invite code is damaged or not one of ours
│   ├── AlreadyRunning    5   this agent has a node already
│   ├── CloneRunning      5   a copy of this agent runs elsewhere
│   └── NotRunning        5   the command needs a running node and there is none
├── LimitReached          6   a named bound, or the disk, is full
├── StorageError          1   a file could not be read or written
│   └── CorruptFile       1   it was read, and it is not what it should be
├── TransportError        1   a socket failed in a way we did not foresee
└── RemoteProtocolError   1   a peer's bytes broke the protocol (hostile input raises only this)
"""

from __future__ import annotations

__all__ = [
    "AlreadyRunning",
    "AmbiguousPeer",
    "CloneRunning",
    "ConfigError",
    "CorruptFile",
    "DeliveryTimeout",
    "InviteError",
    "LimitReached",
    "LocalProtocolError",
    "MalformedRequest",
    "MeshError",
    "NoSuchPeer",
    "NotAdmitted",
    "NotRunning",
    "PortBusy",
    "RemoteProtocolError",
    "StorageError",
    "TransportError",
    "UsageError",
]


class MeshError(Exception):
    """What happened, in a sentence; `hint` says what to try next; `data` is for programs."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "", **data: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.data = data

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class UsageError(MeshError):
    """What was asked can't be done as asked."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting holds a value it can't hold; the message names the field and the fix."""


class LocalProtocolError(UsageError):
    """Our own caller broke a rule of the protocol."""


class MalformedRequest(UsageError):
    """A session sent its node something that is no request; the message names the field."""


class PortBusy(UsageError):
    """The address to listen on is taken, or does not belong to this machine."""


class DeliveryTimeout(MeshError):
    """Not delivered in time; the message stays queued."""

    exit_code = 3


class NoSuchPeer(MeshError):
    """Nobody answers to that name."""

    exit_code = 4


class AmbiguousPeer(NoSuchPeer):
    """Several agents answer to that name."""


class NotAdmitted(MeshError):
    """The mesh, or this machine's lock on the agent, said no."""

    exit_code = 5


class InviteError(NotAdmitted):
    """The invite code is damaged or not one of ours."""


class AlreadyRunning(NotAdmitted):
    """This agent has a running node already."""


class CloneRunning(NotAdmitted):
    """A copy of this agent, with the same key, runs elsewhere."""


class NotRunning(NotAdmitted):
    """The command needs a running node, and there is none."""


class LimitReached(MeshError):
    """A named bound, or the disk, is full."""

    exit_code = 6


class StorageError(MeshError):
    """A file or folder could not be read or written."""


class CorruptFile(StorageError):
    """The file was read, and it is not what it should be."""


class TransportError(MeshError):
    """A socket failed in a way we did not foresee."""


class RemoteProtocolError(MeshError):
    """A peer's bytes broke the protocol. Hostile input can raise nothing else."""
