"""Addresses that a person gave (`--peer host:port`). Never resolves or dials them.

Invariant: each address is reported once, at start, in the order given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from meshagent.core.model.network_addresses import format_address, parse_address
from meshagent.core.model.peers import Candidate
from meshagent.core.ports import Announcement

__all__ = ["StaticDiscovery"]


class StaticDiscovery:
    """Reports the given peers. Announces nothing: there is nobody to hear it."""

    name = "static"

    def __init__(self, peers: Sequence[str]) -> None:
        """Raises UsageError at once when a peer is not written as an address."""
        self.ignored: Counter[str] = Counter()
        self.peers = tuple(dict.fromkeys(format_address(*parse_address(peer)) for peer in peers))

    async def start(self, me: Announcement, found: Callable[[Candidate], None]) -> None:
        """Report every peer but ourselves."""
        for peer in self.peers:
            if peer not in me.addresses:
                found(Candidate(agent="", addresses=(peer,), source=self.name))

    async def update(self, me: Announcement) -> None:
        """Nobody hears a static peer list change."""

    def health(self) -> str:
        """Always `ok`: whether a peer answers is for the links to say."""
        return "ok"

    async def close(self) -> None:
        """There is nothing to withdraw."""
