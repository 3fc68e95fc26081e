"""Measures this machine: what the mesh does on it, next to what a user would pick instead."""

from __future__ import annotations

__all__ = ["CONTESTANTS", "QUESTIONS"]

QUESTIONS = {
    "latency": "how long one durable message takes",
    "throughput": "how many durable messages a second",
    "receipts": "what it costs when the recipient says done to each message",
    "bulk": "how fast attachments go",
    "interference": "whether an attachment delays the texts beside it",
    "discovery": "how soon a peer is found, and a crash noticed",
    "replay": "what a backlog costs when the peer returns",
    "scale": "what a mesh costs as it grows",
    "startup": "how long a start takes, and a send from the command line",
}
"""In the order in which they are asked; each is a module of this package with `measure`."""

CONTESTANTS = {
    "nats": ("nats-py",),
    "zenoh": ("eclipse-zenoh",),
    "pyre": ("zeromq-pyre",),
    "http": ("aiohttp",),
    "scp": (),
}
"""Each with the distributions that it needs; the name of a module would not tell pyre from pyre."""
