"""Which links there are, who is at their other ends, and which one is used for each peer.

Never opens a socket: the driver dials and reports what happened. Invariant: a frame counts for a
peer only on a link whose other end has proved to be that peer. When both peers have settled, at
most one link per peer and run is left: the one that the smaller agent id dialled.

    dialled:  DIALLING ─opened─▶ HELLO_SENT ─Welcome─▶ OPEN
    inbound:         opened─▶ AWAITING_HELLO ─Hello─▶ OPEN
    either:   ─another run of that agent has a link─▶ CHECKING ─▶ OPEN, or refused as a clone

`HANDLERS`, at the end, says what a frame does in each state.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping

from meshagent.core.effects import (
    CloneFound,
    CloseLink,
    Dial,
    Effect,
    LinkDown,
    LinkReplaced,
    LinkUp,
    Transmit,
    Unreachable,
)
from meshagent.core.links.clones import CloneCheck
from meshagent.core.links.dialing import Dialing
from meshagent.core.links.handshake import (
    Refusal,
    check_hello,
    check_welcome,
    common_features,
    make_hello,
    make_welcome,
    refuse_clone,
)
from meshagent.core.links.link_table import Link, LinkState, LinkTable
from meshagent.core.links.links_config import LinksConfig
from meshagent.core.model.identity import Signer, Verify
from meshagent.core.model.peers import AgentId, Candidate, LinkId
from meshagent.core.model.records import Record
from meshagent.core.wire.frames import (
    FRAMES,
    MEMBERS_MAX,
    NONCE_BYTES,
    TEXT_CHARACTERS_MAX,
    Bye,
    Check,
    Frame,
    Hello,
    Here,
    Refuse,
    Welcome,
)
from meshagent.errors import RemoteProtocolError

__all__ = ["HANDLERS", "Links"]


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
        self.table = LinkTable(signer.agent)
        self._signer, self._mesh_id, self._verify = signer, mesh_id, verify
        self._rng, self._started_ms, self._my_record = rng, started_ms, my_record
        self._config = config or LinksConfig()
        self._clones = CloneCheck(signer, mesh_id, verify, started_ms)
        self._dialing = Dialing(rng, self._config.dialing)
        self._attempts: dict[int, Link] = {}
        self._pinned: dict[str, bytes] = {}
        self._attempt = 0

    # -- queries ------------------------------------------------------------------------------

    def link_to(self, agent: AgentId) -> LinkId | None:
        """The link that is used for this agent."""
        best = self.table.best(agent)
        return best.link if best else None

    def linked(self) -> list[AgentId]:
        """Everyone who has an open link."""
        return self.table.agents()

    def address_of(self, agent: AgentId) -> str:
        """The address at which we dialled it; empty when it dialled us."""
        return next((each.address for each in self.table.open_links(agent) if each.address), "")

    def features(self, agent: AgentId) -> Mapping[str, int]:
        """What this agent and we can both do beyond the version; nothing while it has no link."""
        best = self.table.best(agent)
        return best.features if best else {}

    def agent_on(self, link: LinkId) -> AgentId | None:
        """Who is at the other end of an open link."""
        known = self.table.get(link)
        return known.agent if known and known.state is LinkState.OPEN else None

    def pin(self, agent: str, key: bytes) -> bytes:
        """The key this id was first seen with. Whoever uses another key for it is an impostor."""
        pinned = self._pinned.setdefault(agent, key)
        if len(self._pinned) > MEMBERS_MAX:  # forget the oldest: its id is bound to its key anyway
            del self._pinned[next(iter(self._pinned))]
        return pinned

    def key_of(self, agent: str) -> bytes | None:
        """The key this id was first seen with, if it was seen."""
        return self._pinned.get(agent)

    # -- whom to dial -------------------------------------------------------------------------

    def found(self, candidate: Candidate, lasting: bool, patient: bool, now: float) -> None:
        """Somebody may be there; `patient` gives a smaller id time to dial us first."""
        agent = candidate.agent
        if not candidate.addresses:
            return
        waits = patient and agent < self._signer.agent
        wait_s = self._config.smaller_id_dials_s if waits else 0.0
        self._dialing.want(agent, candidate.addresses, lasting, now, wait_s)
        if self.table.best(AgentId(agent)) is not None:
            self._dialing.linked(agent)

    def hurry(self, agent: AgentId, now: float) -> None:
        """We have something for this agent: dial it now if it has no link."""
        self._dialing.hurry(agent, now)

    def hurry_all(self, now: float) -> None:
        """Our own network changed: dial everyone who has no link now."""
        for key in list(self._dialing.targets):
            self._dialing.hurry(key, now)

    def lose_interest(self, agent: AgentId) -> None:
        """The agent left: stop dialling it. It dials us when it returns."""
        self._dialing.drop(agent)

    def dialled(self, attempt: int, link: LinkId) -> None:
        """The driver reports which link an attempt became."""
        known = self._attempts.pop(attempt, None)
        if known is not None:
            known.link = link
            self.table.add(known)

    # -- what the transport reports -----------------------------------------------------------

    def opened(self, link: LinkId, curve_key: bytes | None, now: float) -> list[Effect]:
        """A connection passed the transport's own handshake."""
        known = self.table.get(link)
        if known is None:
            self.table.add(Link(link, False, LinkState.AWAITING_HELLO, now, curve_key=curve_key))
            return []
        known.state, known.since = LinkState.HELLO_SENT, now
        known.nonce = self._rng.randbytes(NONCE_BYTES)
        hello = make_hello(
            self._signer, self._mesh_id, known.expected, known.nonce, self._started_ms,
            self._my_record(), self._config.features,
        )  # fmt: skip
        return [Transmit(link, hello)]

    def received(self, link: LinkId, frame: Frame, now: float) -> list[Effect]:
        """A frame of the handshake, or any frame on a link that is not open."""
        known = self.table.get(link)
        if known is None:
            return []
        handler = HANDLERS.get((known.state, type(frame)))
        if handler is None:
            name = type(frame).__name__
            raise RemoteProtocolError(f"A {name} can't come on a link that is {known.state.value}.")
        try:
            return handler(self, known, frame, now)
        except Refusal as refusal:
            self.refused[refusal.why] += 1
            return self._refuse(known, Refuse(refusal.why, refusal.reason), now)

    def closed(self, link: LinkId, reason: str, now: float) -> list[Effect]:
        """The transport lost the link, or could not make it."""
        known = self.table.get(link)
        if known is None:
            return []
        if known.state is LinkState.OPEN:
            return self._lose(known, now)
        self.table.remove(known)
        if known.dialled and self._dialing.failed(known.target, now) and known.expected:
            return [Unreachable(AgentId(known.expected))]
        return []

    def heard(self, link: LinkId, now: float) -> list[Effect]:
        """A frame came from an agent with several links. If it speaks on another one than we do,
        ours is dead.

        Its other end may be gone without a word: a network that changed, a goodbye that was lost.
        The agent has dialled again, and does not know that we still use the old link.
        """
        known = self.table.get(link)
        if known is None or known.state is not LinkState.OPEN:
            return []
        known.heard_at = now
        in_use = self.table.best(known.agent)
        assert in_use is not None, "an open link is in the table"
        if in_use is known or now - in_use.heard_at < self._config.check_s:
            return []
        bye = Transmit(in_use.link, Bye("nothing is heard on this link"))
        return [bye, *self._discard(in_use, now)]

    def broke_protocol(self, link: LinkId, now: float, reason: str) -> list[Effect]:
        """The other end sent bytes that no member's software sends, or a frame too new for us."""
        self.refused["protocol"] += 1
        known = self.table.get(link)
        if known is None:
            return [CloseLink(link)]
        return self._refuse(known, Refuse("protocol", reason[:TEXT_CHARACTERS_MAX]), now)

    def cut(self, agent: AgentId, now: float) -> list[Effect]:
        """Nothing is heard on the links to this agent: close them and dial again.

        A connection whose far end lost its address or its power looks healthy here for minutes.
        """
        effects: list[Effect] = []
        for silent in self.table.open_links(agent):
            effects.append(Transmit(silent.link, Bye("nothing is heard on this link")))
            effects += self._discard(silent, now)
        return effects

    def close_all(self, last_word: Frame, reason: str) -> list[Effect]:
        """The node stops. A peer that has our Hello may already list us, so it is told too."""
        told = (LinkState.OPEN, LinkState.HELLO_SENT)
        return [
            Transmit(known.link, frame)
            for known in self.table
            if known.state in told
            for frame in (last_word, Bye(reason))
        ]

    # -- timers -------------------------------------------------------------------------------

    def on_timer(self, now: float) -> list[Effect]:
        """Dial who is due, and close links whose handshake takes too long."""
        effects: list[Effect] = []
        for known in self.table.unproven():
            if now < self._expires(known):
                continue
            if known.state is LinkState.CHECKING:
                effects += self._replace_older_run(known, now)
            else:
                effects += self._discard(known, now)
        for target, address in self._dialing.due(now):
            self._attempt += 1
            self._attempts[self._attempt] = Link(
                LinkId(-1), True, LinkState.DIALLING, now,
                address=address, target=target.key, expected=target.agent,
            )  # fmt: skip
            effects.append(Dial(self._attempt, address))
        return effects

    def deadline(self) -> float | None:
        """When on_timer is wanted next."""
        times = [self._expires(each) for each in self.table.unproven()]
        dialing = self._dialing.deadline()
        if dialing is not None:
            times.append(dialing)
        return min(times, default=None)

    def _expires(self, known: Link) -> float:
        checking = known.state is LinkState.CHECKING
        return known.since + (self._config.check_s if checking else self._config.handshake_s)

    # -- handlers: one for each entry of HANDLERS -----------------------------------------------

    def _hello(self, known: Link, hello: Frame, now: float) -> list[Effect]:
        assert isinstance(hello, Hello)
        me = self._signer.agent
        record = check_hello(hello, known.curve_key, me, self._mesh_id, self._verify)
        if record.agent == me:
            return self._own_key(known, hello, now)
        known.hello = hello
        known.features = common_features(self._config.features, hello.features)
        return self._identified(known, record, hello.record, hello.started_ms, now)

    def _welcome(self, known: Link, welcome: Frame, now: float) -> list[Effect]:
        assert isinstance(welcome, Welcome)
        record = check_welcome(
            welcome, known.expected, known.nonce, self._signer, self._mesh_id, self._verify
        )
        self._dialing.answered(known.target, known.address, record.agent)
        if record.agent == self._signer.agent:
            return self._discard(known, now)
        known.features = common_features(self._config.features, welcome.features)
        return self._identified(known, record, welcome.record, record.started_ms, now)

    def _check(self, known: Link, check: Frame, now: float) -> list[Effect]:
        assert isinstance(check, Check)
        return [Transmit(known.link, self._clones.proof(check.nonce))]

    def _here(self, older: Link, here: Frame, now: float) -> list[Effect]:
        """An older run answered, so two nodes share a key: the one that started later stops."""
        assert isinstance(here, Here)
        for known in self.table.unproven():
            if known.agent == older.agent and known.check_nonce == here.nonce:
                if known.started_ms < older.started_ms:
                    return self._replace_older_run(known, now)
                self.refused["clone"] += 1
                return self._refuse(known, refuse_clone(here), now)
        return []

    def _refused(self, known: Link, refuse: Frame, now: float) -> list[Effect]:
        assert isinstance(refuse, Refuse)
        if refuse.why == "self" and known.dialled:
            self._dialing.drop(known.target)
        if refuse.why == "not me" and known.dialled:
            self._dialing.moved_out(known.target, known.address, now)
        effects = self._discard(known, now)
        if self._clones.is_proved(refuse, known.nonce):
            effects.append(CloneFound(True, known.address))
        return effects

    def _bye(self, known: Link, bye: Frame, now: float) -> list[Effect]:
        return self._discard(known, now)

    def _ignore(self, known: Link, frame: Frame, now: float) -> list[Effect]:
        return []

    # -- from a proved identity to an open link -------------------------------------------------

    def _identified(
        self, known: Link, record: Record, data: bytes, started_ms: int, now: float
    ) -> list[Effect]:
        """The other end proved who it is. Another run of that agent is asked whether it runs."""
        if self.pin(record.agent, record.key) != record.key:
            raise Refusal("impostor", "This agent id belongs to another key.")
        known.agent, known.started_ms, known.record = record.agent, started_ms, data
        others = [
            each for each in self.table.open_links(record.agent) if each.started_ms != started_ms
        ]
        if not others:
            return self._open(known, now)
        known.state, known.since = LinkState.CHECKING, now
        known.check_nonce = known.hello.nonce if known.hello else known.nonce
        return [Transmit(each.link, Check(known.check_nonce)) for each in others]

    def _own_key(self, known: Link, hello: Hello, now: float) -> list[Effect]:
        answer, clone = self._clones.dialled_by_own_key(hello)
        if clone is not None:
            self.refused["clone"] += 1
        effects: list[Effect] = [] if answer is None else [Transmit(known.link, answer)]
        effects += self._discard(known, now)
        return effects if clone is None else [*effects, clone]

    def _open(self, known: Link, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for older in self.table.open_links(known.agent):
            if now - older.since > self._config.settled_s:
                effects += self._drop(older, "a newer link serves")
        self.table.set_open(known, now)
        if known.hello is not None:
            effects.append(Transmit(known.link, self._welcome_to(known, known.hello)))
            known.hello = None
        self._dialing.linked(known.agent)
        effects.append(LinkUp(known.agent, known.record, known.dialled))
        for spare in self.table.open_links(known.agent)[1:]:
            if spare.dialled:
                effects.append(Transmit(spare.link, Bye("another link serves")))
                effects += self._discard(spare, now)
        return effects

    def _welcome_to(self, known: Link, hello: Hello) -> Welcome:
        assert known.curve_key is not None
        nonce = self._rng.randbytes(NONCE_BYTES)
        record = self._my_record()
        return make_welcome(
            self._signer, self._mesh_id, hello, known.curve_key, nonce, record,
            self._config.features,
        )  # fmt: skip

    def _replace_older_run(self, known: Link, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for older in self.table.open_links(known.agent):
            if older.started_ms != known.started_ms:
                effects += self._drop(older, "a newer node of this agent is here")
        return effects + self._open(known, now)

    # -- how a link ends ------------------------------------------------------------------------

    def _refuse(self, known: Link, refuse: Refuse, now: float) -> list[Effect]:
        return [Transmit(known.link, refuse), *self._discard(known, now)]

    def _drop(self, older: Link, reason: str) -> list[Effect]:
        """Another link takes its place, so the other engines hear of nothing."""
        self.table.remove(older)
        return [Transmit(older.link, Bye(reason)), CloseLink(older.link)]

    def _discard(self, known: Link, now: float) -> list[Effect]:
        if known.state is LinkState.OPEN:
            return [CloseLink(known.link), *self._lose(known, now)]
        self.table.remove(known)
        if known.dialled:
            self._dialing.failed(known.target, now)
        return [CloseLink(known.link)]

    def _lose(self, known: Link, now: float) -> list[Effect]:
        """An open link is gone."""
        in_use = self.table.best(known.agent) is known
        self.table.remove(known)
        if self.table.best(known.agent) is not None:
            return [LinkReplaced(known.agent)] if in_use else []
        self._dialing.unlinked(known.agent, now)
        return [LinkDown(known.agent)]


Handler = Callable[[Links, Link, Frame, float], list[Effect]]
_AFTER_HANDSHAKE = [kind for kind in FRAMES.values() if kind not in (Hello, Welcome)]

HANDLERS: dict[tuple[LinkState, type[Frame]], Handler] = {
    # The other end of a link that is being checked may count it as open already. What it sends is
    # ignored: it will be sent again.
    **{(LinkState.CHECKING, kind): Links._ignore for kind in _AFTER_HANDSHAKE},
    # A clone check may cross with the end of a handshake; who has not proved itself gets no answer.
    **{(state, kind): Links._ignore for state in LinkState for kind in (Check, Here)},
    **{(state, Refuse): Links._refused for state in LinkState},
    **{(state, Bye): Links._bye for state in LinkState},
    (LinkState.AWAITING_HELLO, Hello): Links._hello,
    (LinkState.HELLO_SENT, Welcome): Links._welcome,
    (LinkState.OPEN, Check): Links._check,
    (LinkState.OPEN, Here): Links._here,
}
"""What a frame does on a link in this state. A pair that is not here is a protocol error."""
