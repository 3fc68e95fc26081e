"""Which links there are, who is at their other ends, and which one serves each peer.

Never opens a socket: the driver dials, and tells what happened. Invariant: a frame counts for a
peer only on a link whose other end has proved to be that peer; per peer and run at most one link
is kept once things settle, the one dialled by the smaller agent id.

    dialled:  DIALLING ─opened─▶ GREETING ─WELCOME─▶ OPEN
    inbound:             WAITING ─HELLO─▶ OPEN
    either:   ─another run of that agent is linked─▶ CHECKING ─▶ OPEN, or refused as a clone
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from meshagent.core.effects import CloneFound, CloseLink, Dial, Effect, Transmit
from meshagent.core.links.dialing import Dialing, DialingConfig
from meshagent.core.links.handshake import (
    Refusal,
    check_hello,
    check_welcome,
    clone_proof_started,
    make_hello,
    make_here,
    make_welcome,
    refuse_clone,
)
from meshagent.core.model.identity import Signer, Verify
from meshagent.core.model.peers import AgentId, Candidate, LinkId
from meshagent.core.model.records import Record
from meshagent.core.wire.frames import (
    MEMBERS_MAX,
    NONCE_BYTES,
    Bye,
    Check,
    Frame,
    Hello,
    Here,
    Refuse,
    Welcome,
)
from meshagent.errors import RemoteProtocolError

__all__ = ["LinkDown", "LinkReplaced", "LinkUp", "Links", "LinksConfig", "Unreachable"]


@dataclass(frozen=True, slots=True)
class LinksConfig:
    """The knobs of links."""

    handshake_s: float = 5.0
    """A link that has not proved who it is by then is closed."""
    check_s: float = 1.0
    """How long an older link may take to show that its end still runs."""
    courtesy_s: float = 0.6
    """Of two that learn of each other at once, the larger id waits this long for the smaller."""
    settled_s: float = 10.0
    """Two that dial each other at once are done by then: a later second link means that the
    first is dead at the other end, whatever our own kernel believes."""
    dialing: DialingConfig = field(default_factory=DialingConfig)


NOBODY = AgentId("")


class LinkState(Enum):
    """How far a link has come."""

    DIALLING = "dialling"
    GREETING = "greeting"
    WAITING = "waiting"
    CHECKING = "checking"
    OPEN = "open"


TRANSITIONS: dict[tuple[LinkState, type[Frame]], LinkState] = {
    (LinkState.WAITING, Hello): LinkState.OPEN,
    (LinkState.GREETING, Welcome): LinkState.OPEN,
}
"""What a handshake frame leads to; a pair that is not here is a protocol error."""


@dataclass(slots=True)
class Link:
    """One connection and what we know about its other end."""

    link: LinkId
    dialled: bool
    state: LinkState
    since: float
    address: str = ""
    target: str = ""
    expected: str = ""
    curve_key: bytes | None = None
    nonce: bytes = b""
    agent: AgentId = NOBODY
    started_ms: int = 0
    record: bytes = b""
    hello: Hello | None = None
    check_nonce: bytes = b""
    heard_at: float = 0.0
    """When a frame came on it last; only as long as there is another link to its agent."""


@dataclass(frozen=True, slots=True)
class LinkUp:
    """For the engines above: this agent can be sent to, and said this about itself."""

    agent: AgentId
    record: bytes
    dialled: bool


@dataclass(frozen=True, slots=True)
class LinkDown:
    """For the engines above: the last link to this agent is gone."""

    agent: AgentId


@dataclass(frozen=True, slots=True)
class LinkReplaced:
    """For the engines above: the link in use is gone, with all that was on it; another serves."""

    agent: AgentId


@dataclass(frozen=True, slots=True)
class Unreachable:
    """For the engines above: nobody listens where this agent used to."""

    agent: AgentId


Outcome = Effect | LinkUp | LinkDown | LinkReplaced | Unreachable


class Links:
    """The links of one agent."""

    def __init__(
        self,
        signer: Signer,
        mesh_id: bytes,
        verify: Verify,
        rng: random.Random,
        started_ms: int,
        my_record: Callable[[], bytes],
        config: LinksConfig | None = None,
    ) -> None:
        self.refused: Counter[str] = Counter()
        self._signer, self._mesh_id, self._verify = signer, mesh_id, verify
        self._rng, self._started_ms, self._my_record = rng, started_ms, my_record
        self._config = config or LinksConfig()
        self._dialing = Dialing(rng, self._config.dialing)
        self._links: dict[LinkId, Link] = {}
        self._attempts: dict[int, Link] = {}
        self._by_agent: dict[AgentId, list[Link]] = {}
        self._pinned: dict[str, bytes] = {}
        self._attempt = 0
        self._unsettled: set[LinkId] = set()
        self.doubled: set[AgentId] = set()
        """Those with more than one link: call `heard` for every frame of theirs."""

    # -- what others may ask ------------------------------------------------------------------

    def link_to(self, agent: AgentId) -> LinkId | None:
        """The link that serves this agent best."""
        links = self._by_agent.get(agent)
        return links[0].link if links else None

    def linked(self) -> list[AgentId]:
        """Everyone who has a link."""
        return list(self._by_agent)

    def address_of(self, agent: AgentId) -> str:
        """Where we reached it, when it was we who dialled."""
        return next((each.address for each in self._by_agent.get(agent, ()) if each.address), "")

    def agent_on(self, link: LinkId) -> AgentId | None:
        """Who is at the other end of an open link."""
        known = self._links.get(link)
        return known.agent if known and known.state is LinkState.OPEN else None

    def pin(self, agent: str, key: bytes) -> bytes:
        """The key this id was first seen with; any other one for it is an impostor's."""
        pinned = self._pinned.setdefault(agent, key)
        if len(self._pinned) > MEMBERS_MAX:  # the oldest gives way; its id still binds its key
            del self._pinned[next(iter(self._pinned))]
        return pinned

    def key_of(self, agent: str) -> bytes | None:
        """The key this id was first seen with, if it was seen."""
        return self._pinned.get(agent)

    # -- what to connect to -------------------------------------------------------------------

    def found(self, candidate: Candidate, lasting: bool, patient: bool, now: float) -> None:
        """Discovery or gossip hints at somebody; `patient` gives them time to dial us first."""
        agent = candidate.agent
        if not candidate.addresses:
            return
        wait_s = 0.0
        if patient and agent < self._signer.agent:
            wait_s = self._config.courtesy_s
        self._dialing.want(agent, candidate.addresses, lasting, now, wait_s)
        if agent in self._by_agent:
            self._dialing.linked(agent)

    def hurry(self, agent: AgentId, now: float) -> None:
        """We have something for this agent: dial it now if it has no link."""
        self._dialing.hurry(agent, now)

    def hurry_all(self, now: float) -> None:
        """Our own network changed: dial at once whoever has no link."""
        for key in list(self._dialing.targets):
            self._dialing.hurry(key, now)

    def lose_interest(self, agent: AgentId) -> None:
        """The agent left: it will come back by itself."""
        self._dialing.drop(agent)

    def dialled(self, attempt: int, link: LinkId) -> None:
        """The driver says which link this attempt became."""
        known = self._attempts.pop(attempt, None)
        if known is not None:
            known.link = link
            self._links[link] = known
            self._unsettled.add(link)

    # -- what the transport tells -------------------------------------------------------------

    def opened(self, link: LinkId, curve_key: bytes | None, now: float) -> list[Outcome]:
        """A connection passed the door."""
        self._unsettled.add(link)
        known = self._links.get(link)
        if known is None:
            self._links[link] = Link(link, False, LinkState.WAITING, now, curve_key=curve_key)
            return []
        known.state, known.since = LinkState.GREETING, now
        known.nonce = self._rng.randbytes(NONCE_BYTES)
        hello = make_hello(
            self._signer, self._mesh_id, known.expected, known.nonce, self._started_ms,
            self._my_record(),
        )  # fmt: skip
        return [Transmit(link, hello)]

    def received(self, link: LinkId, frame: Frame, now: float) -> list[Outcome]:
        """A frame of the handshake, or one on a link that is not open."""
        known = self._links.get(link)
        if known is None:
            return []
        try:
            return self._handle(known, frame, now)
        except Refusal as refusal:
            self.refused[refusal.why] += 1
            return [
                Transmit(link, Refuse(refusal.why, refusal.reason)),
                *self._discard(known, now),
            ]

    def closed(self, link: LinkId, reason: str, now: float) -> list[Outcome]:
        """The transport lost the link, or never made it."""
        known = self._links.pop(link, None)
        if known is None:
            return []
        self._unsettled.discard(link)
        if known.state is LinkState.OPEN:
            return self._lost(known, now)
        outcomes: list[Outcome] = []
        if known.dialled and self._dialing.failed(known.target, now) and known.expected:
            outcomes.append(Unreachable(AgentId(known.expected)))
        return outcomes

    def heard(self, link: LinkId, now: float) -> list[Outcome]:
        """A frame came on this link. When its agent speaks on another than we do, ours is dead.

        Its end may be gone without a word: a network that changed, a goodbye that was lost. The
        agent has dialled anew, and does not know that we still have the old one.
        """
        known = self._links.get(link)
        if known is None or known.state is not LinkState.OPEN:
            return []
        known.heard_at = now
        in_use = self._by_agent[known.agent][0]
        if in_use is known or now - in_use.heard_at < self._config.check_s:
            return []
        return [
            Transmit(in_use.link, Bye("nothing is heard on this link")),
            *self._discard(in_use, now),
        ]

    def broke_protocol(self, link: LinkId, now: float) -> list[Outcome]:
        """The other end sent bytes that no member's software sends."""
        self.refused["protocol"] += 1
        known = self._links.get(link)
        if known is None:
            return [CloseLink(link)]
        return [
            Transmit(link, Refuse("protocol", "These bytes break the protocol.")),
            *self._discard(known, now),
        ]

    def cut(self, agent: AgentId, now: float) -> list[Outcome]:
        """Nothing is heard on the links to this agent: end them, and dial anew.

        A connection whose far end lost its address or its power looks healthy here for minutes.
        """
        outcomes: list[Outcome] = []
        for silent in list(self._by_agent.get(agent, ())):
            outcomes.append(Transmit(silent.link, Bye("nothing is heard on this link")))
            outcomes += self._discard(silent, now)
        return outcomes

    def close_all(self, last_word: Frame, reason: str) -> list[Outcome]:
        """The node ends. Who has our Hello may count us in already, so it is told too."""
        told = (LinkState.OPEN, LinkState.GREETING)
        return [
            Transmit(known.link, frame)
            for known in self._links.values()
            if known.state in told
            for frame in (last_word, Bye(reason))
        ]

    # -- timers -------------------------------------------------------------------------------

    def on_timer(self, now: float) -> list[Outcome]:
        """Dial who is due; give up on those who do not prove themselves."""
        outcomes: list[Outcome] = []
        for link in [each for each in self._unsettled if now >= self._expires(each)]:
            known = self._links[link]
            if known.state is LinkState.CHECKING:
                outcomes += self._replace_older(known, now)
            else:
                outcomes += self._discard(known, now)
        for target, address in self._dialing.due(now):
            self._attempt += 1
            self._attempts[self._attempt] = Link(
                LinkId(-1), True, LinkState.DIALLING, now,
                address=address, target=target.key, expected=target.agent,
            )  # fmt: skip
            outcomes.append(Dial(self._attempt, address))
        return outcomes

    def deadline(self) -> float | None:
        """When on_timer is wanted next."""
        times = [self._expires(link) for link in self._unsettled]
        dialing = self._dialing.deadline()
        if dialing is not None:
            times.append(dialing)
        return min(times, default=None)

    def _expires(self, link: LinkId) -> float:
        known = self._links[link]
        checking = known.state is LinkState.CHECKING
        return known.since + (self._config.check_s if checking else self._config.handshake_s)

    # -- the handshake ------------------------------------------------------------------------

    def _handle(self, known: Link, frame: Frame, now: float) -> list[Outcome]:
        match frame:
            case Refuse():
                return self._refused_by_them(known, frame, now)
            case Bye():
                return self._discard(known, now)
            case Check(nonce) if known.state is LinkState.OPEN:
                here = make_here(self._signer, self._mesh_id, nonce, self._started_ms)
                return [Transmit(known.link, here)]
            case Here() if known.state is LinkState.OPEN:
                return self._still_there(known, frame, now)
            case Here() | Check():
                return []
        if known.state is LinkState.CHECKING and not isinstance(frame, Hello | Welcome):
            return []  # one that we dialled counts the link as open already: it will say it again
        if (known.state, type(frame)) not in TRANSITIONS:
            raise RemoteProtocolError(
                f"A {type(frame).__name__} can't come on a link that is {known.state.value}."
            )
        if isinstance(frame, Hello):
            return self._greeted(known, frame, now)
        assert isinstance(frame, Welcome)
        return self._welcomed(known, frame, now)

    def _greeted(self, known: Link, hello: Hello, now: float) -> list[Outcome]:
        me = self._signer.agent
        record = check_hello(hello, known.curve_key, me, self._mesh_id, self._verify)
        if record.agent == me:
            return self._met_myself(known, hello, now)
        known.hello = hello
        return self._believe(known, record, hello.record, hello.started_ms, now)

    def _welcomed(self, known: Link, welcome: Welcome, now: float) -> list[Outcome]:
        record = check_welcome(
            welcome, known.expected, known.nonce, self._signer, self._mesh_id, self._verify
        )
        self._dialing.answered(known.target, known.address, record.agent)
        if record.agent == self._signer.agent:
            return self._discard(known, now)
        return self._believe(known, record, welcome.record, record.started_ms, now)

    def _believe(
        self, known: Link, record: Record, data: bytes, started_ms: int, now: float
    ) -> list[Outcome]:
        if self.pin(record.agent, record.key) != record.key:
            raise Refusal("impostor", "This agent id belongs to another key.")
        known.agent, known.started_ms, known.record = record.agent, started_ms, data
        others = self._by_agent.get(record.agent, [])
        older = [each for each in others if each.started_ms != started_ms]
        if older:
            known.state, known.since = LinkState.CHECKING, now
            known.check_nonce = known.hello.nonce if known.hello else known.nonce
            return [Transmit(each.link, Check(known.check_nonce)) for each in older]
        return self._open(known, now)

    def _open(self, known: Link, now: float) -> list[Outcome]:
        known.state, known.since = LinkState.OPEN, now
        self._unsettled.discard(known.link)
        outcomes = self._drop_settled(known.agent, now)
        if known.hello is not None:
            assert known.curve_key is not None
            nonce = self._rng.randbytes(NONCE_BYTES)
            welcome = make_welcome(
                self._signer, self._mesh_id, known.hello, known.curve_key, nonce, self._my_record()
            )
            outcomes.append(Transmit(known.link, welcome))
            known.hello = None
        links = self._by_agent.setdefault(known.agent, [])
        links.append(known)
        links.sort(key=self._rank)
        if len(links) > 1:
            self.doubled.add(known.agent)
            for each in links:
                each.heard_at = now
        self._dialing.linked(known.agent)
        outcomes.append(LinkUp(known.agent, known.record, known.dialled))
        for spare in [each for each in links[1:] if each.dialled]:
            outcomes.append(Transmit(spare.link, Bye("another link serves")))
            outcomes += self._discard(spare, now)
        return outcomes

    def _drop_settled(self, agent: AgentId, now: float) -> list[Outcome]:
        """Links to this agent so old that a new one shows them to be dead."""
        outcomes: list[Outcome] = []
        for older in list(self._by_agent.get(agent, ())):
            if now - older.since > self._config.settled_s:
                self._forget(older)
                outcomes += [Transmit(older.link, Bye("a newer link serves"))]
                outcomes += [CloseLink(older.link)]
        return outcomes

    def _rank(self, link: Link) -> tuple[bool, int]:
        """Smaller is better: both ends agree that the smaller id's dialled link stays."""
        i_am_smaller = self._signer.agent < link.agent
        return (link.dialled is not i_am_smaller, link.link)

    # -- two nodes of one agent ---------------------------------------------------------------

    def _met_myself(self, known: Link, hello: Hello, now: float) -> list[Outcome]:
        """Somebody with our own key dialled us: ourselves by another address, or a copy."""
        if hello.started_ms == self._started_ms:
            return [Transmit(known.link, Refuse("self", "")), *self._discard(known, now)]
        self.refused["clone"] += 1
        if hello.started_ms < self._started_ms:
            return [*self._discard(known, now), CloneFound(True, "a node that dialled this one")]
        here = make_here(self._signer, self._mesh_id, hello.nonce, self._started_ms)
        return [
            Transmit(known.link, refuse_clone(here)),
            *self._discard(known, now),
            CloneFound(False, "a node that dialled this one"),
        ]

    def _still_there(self, older: Link, here: Here, now: float) -> list[Outcome]:
        """The older run answered, so two nodes share a key: the one that started later goes."""
        for known in [self._links[each] for each in self._unsettled]:
            if known.agent == older.agent and known.check_nonce == here.nonce:
                if known.started_ms < older.started_ms:
                    return self._replace_older(known, now)
                self.refused["clone"] += 1
                return [Transmit(known.link, refuse_clone(here)), *self._discard(known, now)]
        return []

    def _replace_older(self, known: Link, now: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for older in list(self._by_agent.get(known.agent, ())):
            if older.started_ms != known.started_ms:
                outcomes.append(Transmit(older.link, Bye("a newer node of this agent is here")))
                self._forget(older)
                outcomes.append(CloseLink(older.link))
        return outcomes + self._open(known, now)

    def _refused_by_them(self, known: Link, refuse: Refuse, now: float) -> list[Outcome]:
        if refuse.why == "self" and known.dialled:
            self._dialing.drop(known.target)
        if refuse.why == "not me" and known.dialled:
            self._dialing.moved_out(known.target, known.address, now)
        outcomes = self._discard(known, now)
        if refuse.why == "clone" and known.nonce:
            signer = self._signer
            started = clone_proof_started(
                refuse, known.nonce, signer.key, self._mesh_id, self._verify
            )
            if started is not None and started < self._started_ms:
                outcomes.append(CloneFound(True, known.address))
        return outcomes

    # -- endings ------------------------------------------------------------------------------

    def _discard(self, known: Link, now: float) -> list[Outcome]:
        self._links.pop(known.link, None)
        self._unsettled.discard(known.link)
        outcomes: list[Outcome] = [CloseLink(known.link)]
        if known.state is LinkState.OPEN:
            return outcomes + self._lost(known, now)
        if known.dialled:
            self._dialing.failed(known.target, now)
        return outcomes

    def _forget(self, known: Link) -> bool:
        """Whether that was the last link to its agent."""
        self._links.pop(known.link, None)
        self._unsettled.discard(known.link)
        links = self._by_agent.get(known.agent, [])
        if known in links:
            links.remove(known)
        if len(links) < 2:
            self.doubled.discard(known.agent)
        if links:
            return False
        self._by_agent.pop(known.agent, None)
        return True

    def _lost(self, known: Link, now: float) -> list[Outcome]:
        in_use = self.link_to(known.agent) == known.link
        if not self._forget(known):
            return [LinkReplaced(known.agent)] if in_use else []
        self._dialing.unlinked(known.agent, now)
        return [LinkDown(known.agent)]
