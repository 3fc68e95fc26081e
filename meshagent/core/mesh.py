"""One agent's whole protocol: links, membership, delivery and transfer, put together.

Passes on what one engine says and another has to hear, and gives frames their links. Never touches
a clock, a socket or a disk: the driver, or the simulator, feeds it events with the time and runs
the turns that it answers with. Links, membership and transfer rest on nothing durable: all that
they say is free to go.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from meshagent.core.delivery.engine import Delivery
from meshagent.core.delivery.incomplete_messages import Ended
from meshagent.core.effects import (
    BlobFailed,
    BlobReady,
    Effect,
    LinkDown,
    LinkReplaced,
    LinkUp,
    PeerChanged,
    Send,
    Transmit,
    Unreachable,
)
from meshagent.core.links.engine import Links
from meshagent.core.links.links_config import LinksConfig
from meshagent.core.links.remembered_peers import RememberedPeers
from meshagent.core.membership.engine import LAN, Membership, MembershipConfig
from meshagent.core.model.attachments import Attachment
from meshagent.core.model.identity import Signer, Verify
from meshagent.core.model.message_states import MessageState
from meshagent.core.model.messages import Message, Outgoing
from meshagent.core.model.peers import AgentId, Candidate, LinkId, Peer, PeerState
from meshagent.core.model.presence import Presence
from meshagent.core.model.records import Record
from meshagent.core.model.rows import OutEntry, PeerRow
from meshagent.core.transfer.engine import BLOB_FRAMES, Transfer
from meshagent.core.turns import NOTHING, Turn, join_turns
from meshagent.core.wire.codec import decode
from meshagent.core.wire.frames import (
    Bye,
    Check,
    Frame,
    Hello,
    Here,
    Mail,
    MailAck,
    Refuse,
    Welcome,
)
from meshagent.errors import LimitReached, RemoteProtocolError, StorageError

__all__ = ["Mesh"]

SOURCES_MAX = 8  # beside the sender: whoever has the blob is most likely among its neighbours
_INTERNAL = frozenset({LinkUp, LinkReplaced, LinkDown, Unreachable})
"""What only other engines have to hear."""
_PASSED_ON = _INTERNAL | {PeerChanged, BlobReady, BlobFailed}
"""What one engine says and another has to hear."""
_LINK_FRAMES = (Hello, Welcome, Refuse, Bye, Check, Here)


class Mesh:
    """The engine that a node drives."""

    def __init__(
        self,
        me: Record,
        signer: Signer,
        mesh_id: bytes,
        verify: Verify,
        rng: random.Random,
        now: float,
        membership: MembershipConfig = LAN,
        links: LinksConfig | None = None,
        delivery: Delivery | None = None,
        wall_ms: Callable[[float], int] = lambda now: int(now * 1000),
    ) -> None:
        self.delivery = delivery
        self.transfer = Transfer(rng)
        self._fetched: set[bytes] = set()
        self._wall_ms = wall_ms
        self.membership = Membership(
            me, signer, mesh_id, verify, rng, now, membership, self._is_linked
        )
        self.links = Links(
            signer,
            mesh_id,
            verify,
            rng,
            me.started_ms,
            lambda: self.membership.record_bytes,
            links,
        )
        self._remembered = RememberedPeers()

    # -- what sessions ask --------------------------------------------------------------------

    @property
    def me(self) -> Record:
        """Our own record."""
        return self.membership.record

    def peers(self) -> list[Peer]:
        """Everyone we know of."""
        return self.membership.peers()

    def refused(self) -> Counter[str]:
        """How many were refused, by reason."""
        mail: Counter[str] = self.delivery.refused if self.delivery is not None else Counter()
        return self.links.refused + self.membership.refused + mail + self.transfer.refused

    def describe(
        self,
        now: float,
        presence: Presence | None = None,
        status: str | None = None,
        addresses: tuple[str, ...] | None = None,
    ) -> Turn:
        """Say something new about ourselves."""
        before = self.me.addresses
        said = self.membership.describe(now, presence=presence, status=status, addresses=addresses)
        moved = [] if addresses is None else self._moved(before, now)
        return self._route(Turn([*said, *moved]), now)

    def leave(self, now: float) -> Turn:
        """Say goodbye to all."""
        last_word = self.membership.leave(now)
        rows = self._remembered.due(float("inf"))
        said = self.links.close_all(last_word, "leaving")
        return self._route(Turn(said, rows, may_wait=True), now)

    # -- what the driver feeds in -------------------------------------------------------------

    def remember(self, rows: Iterable[PeerRow], now: float) -> None:
        """Peers of earlier runs: their keys are pinned, their addresses tried."""
        for row in rows:
            self._remembered.known(row)
            self.links.pin(row.agent, row.key)
            self.links.found(Candidate(row.agent, row.addresses, "remembered"), False, False, now)

    def found(self, candidate: Candidate, now: float) -> None:
        """A hint from discovery."""
        self.links.found(candidate, candidate.source == "static", False, now)

    def dialled(self, attempt: int, link: LinkId) -> None:
        """Which link an attempt became."""
        self.links.dialled(attempt, link)

    def opened(self, link: LinkId, curve_key: bytes | None, now: float) -> Turn:
        """A connection passed the door."""
        return self._route(Turn(self.links.opened(link, curve_key, now)), now)

    def closed(self, link: LinkId, reason: str, now: float) -> Turn:
        """A connection ended or was never made."""
        return self._route(Turn(self.links.closed(link, reason, now)), now)

    def received_parts(self, link: LinkId, parts: Sequence[bytes | memoryview], now: float) -> Turn:
        """Bytes from a link, whatever they are."""
        try:
            frame = decode(parts)
            return NOTHING if frame is None else self.received(link, frame, now)
        except RemoteProtocolError as error:
            return self._route(Turn(self.links.broke_protocol(link, now, error.message)), now)

    def received(self, link: LinkId, frame: Frame, now: float) -> Turn:
        """A frame from a link."""
        peer = self.links.agent_on(link)
        if peer in self.links.table.doubled:
            heard = self._route(Turn(self.links.heard(link, now)), now)
            return join_turns([heard, self._take(link, peer, frame, now)])
        return self._take(link, peer, frame, now)

    def _take(self, link: LinkId, peer: AgentId | None, frame: Frame, now: float) -> Turn:
        if peer is None or isinstance(frame, _LINK_FRAMES):
            return self._route(Turn(self.links.received(link, frame, now)), now)
        if type(frame) is Mail or type(frame) is MailAck:  # of these there are most
            turn = NOTHING
            if self.delivery is not None:
                turn = self.delivery.receive(frame, peer, now, self._wall_ms(now))
            if heard := self.membership.heard(peer, now):
                turn = join_turns([Turn(heard), turn])
            return self._route(turn, now)
        if isinstance(frame, BLOB_FRAMES):
            heard = self.membership.heard(peer, now)
            return self._route(Turn([*heard, *self.transfer.receive(frame, peer, now)]), now)
        return self._route(Turn(self.membership.receive(frame, peer, now)), now)

    def on_timer(self, now: float) -> Turn:
        """Do what is due in every engine."""
        turns = [
            Turn(rows=self._remembered.due(now), may_wait=True),
            self._route(Turn(self.membership.on_timer(now)), now),
            self.ask_delivery(lambda delivery: delivery.on_timer(now), now),
            self._route(Turn(self.transfer.on_timer(now)), now),
            self._route(Turn(self.links.on_timer(now)), now),
        ]
        return join_turns(turns)

    def deadline(self) -> float | None:
        """When on_timer is wanted next."""
        times = [self.membership.deadline(), self.links.deadline(), self.transfer.deadline()]
        times.append(self._remembered.save_at)
        if self.delivery is not None:
            times.append(self.delivery.deadline())
        return min((each for each in times if each is not None), default=None)

    # -- messages -----------------------------------------------------------------------------

    def deliver_with(self, delivery: Delivery | None, now: float) -> Turn:
        """Use this engine from now on: at the start, and when its disk could not keep up."""
        self.delivery = delivery
        if delivery is None:
            return NOTHING
        linked = [each.agent for each in self.peers() if self.links.link_to(each.agent)]
        turns = [self._route(delivery.connected(peer, now), now) for peer in linked]
        for sender, message in delivery.incomplete.held():
            turns.append(self.collect(sender, message, now))
        return join_turns(turns)

    def ask_delivery(self, ask: Callable[[Delivery], Turn], now: float) -> Turn:
        """What delivery answers; nothing while there is no disk to keep messages on."""
        return NOTHING if self.delivery is None else self._route(ask(self.delivery), now)

    def accept(self, outgoing: Outgoing, now: float, receipts: bool = False) -> Turn:
        """Take responsibility for messages, or receipts, each to its peer: for all or none."""
        if self.delivery is None:
            raise StorageError(
                "Messages can't be kept now: the disk does not answer.",
                hint="See 'meshagent status'; it goes on by itself when the disk is well.",
            )
        for peer in set(outgoing.peers):
            if self.links.link_to(peer) is None:
                self.links.hurry(peer, now)  # somebody has something to say to it
        return self._route(self.delivery.accept(outgoing, now, receipts), now)

    def loaded(self, peer: AgentId, entries: Sequence[OutEntry], now: float) -> Turn:
        """What a Load read."""
        at_ms = self._wall_ms(now)
        return self.ask_delivery(lambda each: each.loaded(peer, entries, now, at_ms), now)

    def withdraw(self, entry: OutEntry, state: MessageState, now: float) -> Turn:
        """A pending message expired or was cancelled."""
        peer, at_ms = AgentId(entry.peer), self._wall_ms(now)
        return self.ask_delivery(
            lambda each: each.withdraw(peer, entry.seq, entry.id, state, at_ms), now
        )

    def take(self, sender: AgentId, mail: Mail, now: float) -> Turn:
        """Mail that was left in the spool."""
        at_ms = self._wall_ms(now)
        return self.ask_delivery(lambda each: each.take(mail, sender, at_ms), now)

    def not_sent(self, link: LinkId, frame: Frame, now: float) -> None:
        """The transport could not take a frame."""
        peer = self.links.agent_on(link)
        if peer is None:
            return
        if self.delivery is not None and isinstance(frame, Mail):
            self.delivery.not_sent(peer, frame, now)
        elif isinstance(frame, BLOB_FRAMES):
            self.transfer.not_sent(peer, frame, now)

    # -- attachments --------------------------------------------------------------------------

    def collect(self, sender: AgentId, message: Message, now: float) -> Turn:
        """A held message is durable: get what it names, or hand it out when nothing is missing."""
        if self.delivery is None:
            return NOTHING
        incomplete, turns, sources = self.delivery.incomplete, [], self._sources(sender)
        for each in message.attachments:
            if each.sha256 in incomplete and incomplete.limits.is_eager(each):
                try:
                    turns.append(Turn(self._want(sender, each, sources, now)))
                except LimitReached as error:
                    turns.append(self._end(incomplete.failed(each.sha256, error.message), now))
        turns.append(self._end(incomplete.complete(sender, message.id), now))
        return self._route(join_turns(turns), now)

    def fetch(self, sender: AgentId, attachment: Attachment, now: float) -> Turn:
        """Somebody asks for this one: `BlobReady` or `BlobFailed` follows."""
        effects = self._want(sender, attachment, self._sources(sender), now)
        self._fetched.add(attachment.sha256)
        return self._route(Turn(effects), now)

    def relay(self, effects: list[Effect], now: float) -> Turn:
        """What the transfer engine answered to the driver."""
        return self._route(Turn(effects), now)

    def expire(self, now: float) -> Turn:
        """Held messages whose time is up."""
        if self.delivery is None:
            return NOTHING
        return self._route(
            self._end(self.delivery.incomplete.expired(self._wall_ms(now)), now), now
        )

    def _want(
        self, sender: AgentId, attachment: Attachment, sources: Sequence[AgentId], now: float
    ) -> list[Effect]:
        return self.transfer.want(
            attachment.sha256, attachment.size, sources, sender, attachment.grant, now
        )

    def _end(self, ended: Sequence[Ended], now: float) -> Turn:
        """Held messages have ended, one way or the other."""
        if self.delivery is None or not ended:
            return NOTHING
        turn = self.delivery.end(ended, now, self._wall_ms(now))
        unwanted: list[Effect] = []
        for each in ended:
            if each.state is not MessageState.DELIVERED:
                blobs = {a.sha256 for a in each.message.attachments} - self._fetched
                for sha256 in blobs:
                    if sha256 not in self.delivery.incomplete:
                        unwanted += self.transfer.unwant(sha256, now)
        return join_turns([turn, Turn(unwanted)])

    def _sources(self, sender: AgentId) -> list[AgentId]:
        """Whom to ask: the sender, then its neighbours, who share its store, then the others."""
        peers = [each for each in self.peers() if each.agent != sender]
        hosts = {each.host for each in self.peers() if each.agent == sender}
        peers.sort(key=lambda each: (each.host not in hosts, each.state is not PeerState.ALIVE))
        return [sender, *(each.agent for each in peers[:SOURCES_MAX])]

    # -- between the engines ------------------------------------------------------------------

    def _route(self, answer: Turn, now: float) -> Turn:
        """Frames get their links; what another engine has to hear is passed on, until all is said.

        Who has no link by then gets no frame: a new link begins with what it needs.
        """
        free, after = self._on_links(answer.free), self._on_links(answer.after)
        if _PASSED_ON.isdisjoint(map(type, free)):  # most often
            return Turn(free, answer.rows, after, answer.may_wait)
        told: list[Effect] = []
        turns = [Turn((), answer.rows, after, answer.may_wait)]
        for effect in free:  # which grows meanwhile
            if type(effect) not in _INTERNAL:
                told.append(effect)
            if type(effect) in _PASSED_ON:
                turn = self._pass_on(effect, now)
                free += self._on_links(turn.free)
                turns.append(turn._replace(free=(), after=self._on_links(turn.after)))
        return join_turns([Turn(told), *turns])

    def _on_links(self, effects: Sequence[Effect]) -> list[Effect]:
        found: list[Effect] = []
        for effect in effects:
            if type(effect) is Send:
                if (link := self.links.link_to(effect.to)) is not None:
                    found.append(Transmit(link, effect.frame))
            else:
                found.append(effect)
        return found

    def _pass_on(self, effect: Effect, now: float) -> Turn:
        """What the other engines say to it."""
        match effect:
            case LinkUp(agent, record, dialled):
                met = Turn(self.membership.connected(agent, record, dialled, now))
                self._remember(agent, now)
                return join_turns([met, self._connected(agent, now)])
            case LinkReplaced(agent):
                return self._connected(agent, now)
            case LinkDown(agent):
                lost = self.membership.disconnected(agent, now)
                if self.delivery is not None:
                    self.delivery.disconnected(agent)
                return Turn([*lost, *self.transfer.disconnected(agent, now)])
            case Unreachable(agent) if self.links.link_to(agent) is None:
                return Turn(self.membership.unreachable(agent, now))
            case PeerChanged(peer):
                return Turn(self._follow(peer, now))
            case BlobReady(sha256):
                self._fetched.discard(sha256)
                if self.delivery is not None:
                    return self._end(self.delivery.incomplete.ready(sha256), now)
            case BlobFailed(sha256, why):
                self._fetched.discard(sha256)
                if self.delivery is not None:
                    return self._end(self.delivery.incomplete.failed(sha256, why), now)
        return NOTHING

    def _follow(self, peer: Peer, now: float) -> list[Effect]:
        """Keep links and the dial list in step with who is in the mesh."""
        if peer.state is PeerState.LEFT:
            self.links.lose_interest(peer.agent)
            return []
        self.links.found(Candidate(peer.agent, peer.addresses, "gossip"), True, True, now)
        return self.links.cut(peer.agent, now) if peer.state is PeerState.GONE else []

    def _moved(self, before: tuple[str, ...], now: float) -> list[Effect]:
        """Our addresses changed. Links made from one that we lost are dead, and nobody says so."""
        self.links.hurry_all(now)
        if set(before) <= set(self.me.addresses):
            return []
        effects: list[Effect] = []
        for agent in self.links.linked():
            if not self.membership.is_fresh(agent, now):
                effects += self.links.cut(agent, now)
        return effects

    def _is_linked(self, agent: AgentId) -> bool:
        return self.links.link_to(agent) is not None

    def _connected(self, agent: AgentId, now: float) -> Turn:
        blobs = Turn(self.transfer.connected(agent, now))
        if self.delivery is None:
            return blobs
        return join_turns([self.delivery.connected(agent, now), blobs])

    def _remember(self, agent: AgentId, now: float) -> None:
        peer, key = self.membership.peer(agent), self.membership.key_of(agent)
        if peer is not None and key is not None:
            good = self.links.address_of(agent)
            self._remembered.note(agent, key, [*([good] if good else []), *peer.addresses], now)
