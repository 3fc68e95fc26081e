"""Which links exist, and which one is used for each agent. Never sends or closes anything.

Invariant: the links of an agent are open, and the best one is first. Both ends rank links in the
same way: the link that the smaller agent id dialled is better.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from meshagent.core.model.peers import AgentId, LinkId
from meshagent.core.wire.frames import Hello

__all__ = ["Link", "LinkState", "LinkTable"]

NOBODY = AgentId("")


class LinkState(Enum):
    """How far a link has come."""

    DIALLING = "dialling"
    HELLO_SENT = "waiting for a Welcome"
    AWAITING_HELLO = "waiting for a Hello"
    CHECKING = "waiting while an older run of the same agent is checked"
    OPEN = "open"


@dataclass(slots=True, eq=False)
class Link:
    """One connection and what we know about its other end."""

    link: LinkId
    dialled: bool
    state: LinkState
    since: float
    """When it came into this state."""
    address: str = ""
    target: str = ""
    expected: str = ""
    """The agent that we dialled; empty when we dialled a bare address."""
    curve_key: bytes | None = None
    nonce: bytes = b""
    agent: AgentId = NOBODY
    started_ms: int = 0
    record: bytes = b""
    hello: Hello | None = None
    """The Hello that still needs a Welcome."""
    check_nonce: bytes = b""
    heard_at: float = 0.0
    """When a frame came on it last; kept only while its agent has another link, too."""
    features: Mapping[str, int] = field(default_factory=dict)
    """What both ends can do beyond the version."""


class LinkTable:
    """Every link, by its number and by the agent at its other end."""

    def __init__(self, me: AgentId) -> None:
        self._me = me
        self._links: dict[LinkId, Link] = {}
        self._unproven: dict[LinkId, Link] = {}
        self._open: dict[AgentId, list[Link]] = {}
        self.doubled: set[AgentId] = set()
        """Agents with more than one open link."""

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[Link]:
        return iter(self._links.values())

    def get(self, link: LinkId) -> Link | None:
        """The link with this number."""
        return self._links.get(link)

    def unproven(self) -> list[Link]:
        """Links whose handshake is not complete."""
        return list(self._unproven.values())

    def agents(self) -> list[AgentId]:
        """Everyone who has an open link."""
        return list(self._open)

    def open_links(self, agent: AgentId) -> list[Link]:
        """The open links to this agent, the best first."""
        return list(self._open.get(agent, ()))

    def best(self, agent: AgentId) -> Link | None:
        """The link that is used for this agent."""
        links = self._open.get(agent)
        return links[0] if links else None

    def add(self, link: Link) -> None:
        """A connection exists; nobody has proved who is at its other end."""
        self._links[link.link] = self._unproven[link.link] = link

    def set_open(self, link: Link, now: float) -> None:
        """The other end has proved who it is."""
        link.state, link.since = LinkState.OPEN, now
        self._unproven.pop(link.link, None)
        links = self._open.setdefault(link.agent, [])
        links.append(link)
        links.sort(key=self._rank)
        if len(links) > 1:
            self.doubled.add(link.agent)
            for each in links:
                each.heard_at = now

    def remove(self, link: Link) -> None:
        """The link is gone."""
        self._links.pop(link.link, None)
        self._unproven.pop(link.link, None)
        links = self._open.get(link.agent, [])
        if link in links:
            links.remove(link)
            if len(links) < 2:
                self.doubled.discard(link.agent)
            if not links:
                del self._open[link.agent]

    def _rank(self, link: Link) -> tuple[bool, int]:
        i_am_smaller = self._me < link.agent
        return (link.dialled is not i_am_smaller, link.link)
