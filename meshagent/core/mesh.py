"""One agent's whole protocol: links below, membership above, frames routed between them.

Never touches a clock, a socket or a disk: the driver, or the simulator, feeds it events with the
time and performs the effects in their order.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

from meshagent.core.delivery.engine import Delivery
from meshagent.core.delivery.incomplete_messages import Ended
from meshagent.core.effects import (
    BlobFailed,
    BlobReady,
    Effect,
    PeerChanged,
    Persist,
    Send,
    Transmit,
)
from meshagent.core.links.engine import (
    LinkDown,
    LinkReplaced,
    Links,
    LinksConfig,
    LinkUp,
    Outcome,
    Unreachable,
)
from meshagent.core.membership.engine import LAN, Membership, MembershipConfig
from meshagent.core.model.attachments import Attachment
from meshagent.core.model.identity import Signer, Verify
from meshagent.core.model.messages import Message, MessageState, Texts
from meshagent.core.model.peers import AgentId, Candidate, LinkId, Peer, PeerState, Presence
from meshagent.core.model.records import ADDRESSES_MAX, Record
from meshagent.core.model.rows import Delivered, OutEntry, OutState, PeerRow
from meshagent.core.transfer.engine import BLOB_FRAMES, Transfer
from meshagent.core.wire.codec import decode
from meshagent.core.wire.frames import (
    MEMBERS_MAX,
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
SAVE_PEERS_S = 1.0  # what is remembered of peers is a hint, so many can share one sync
_ROUTED = frozenset(
    {Send, LinkUp, LinkReplaced, LinkDown, Unreachable, PeerChanged, BlobReady, BlobFailed}
)
"""What one engine says and another has to hear; all else is for the driver."""
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
        self._saved: dict[AgentId, PeerRow] = {}
        self._unsaved: dict[AgentId, PeerRow] = {}
        self._save_at: float | None = None

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
    ) -> list[Effect]:
        """Say something new about ourselves."""
        before = self.me.addresses
        said = self.membership.describe(now, presence=presence, status=status, addresses=addresses)
        if addresses is None:
            return self._route(said, now)
        return self._route([*said, *self._moved(before, now)], now)

    def leave(self, now: float) -> list[Effect]:
        """Say goodbye to all."""
        last_word = self.membership.leave(now)
        effects = self._save(float("inf"))
        return effects + self._route(self.links.close_all(last_word, "leaving"), now)

    # -- what the driver feeds in -------------------------------------------------------------

    def remember(self, rows: Iterable[PeerRow], now: float) -> None:
        """Peers of earlier runs: their keys are pinned, their addresses tried."""
        for row in rows:
            self._saved[AgentId(row.agent)] = row
            self.links.pin(row.agent, row.key)
            self.links.found(Candidate(row.agent, row.addresses, "remembered"), False, False, now)

    def found(self, candidate: Candidate, now: float) -> None:
        """A hint from discovery."""
        self.links.found(candidate, candidate.source == "static", False, now)

    def dialled(self, attempt: int, link: LinkId) -> None:
        """Which link an attempt became."""
        self.links.dialled(attempt, link)

    def opened(self, link: LinkId, curve_key: bytes | None, now: float) -> list[Effect]:
        """A connection passed the door."""
        return self._route(self.links.opened(link, curve_key, now), now)

    def closed(self, link: LinkId, reason: str, now: float) -> list[Effect]:
        """A connection ended or was never made."""
        return self._route(self.links.closed(link, reason, now), now)

    def received_parts(
        self, link: LinkId, parts: Sequence[bytes | memoryview], now: float
    ) -> list[Effect]:
        """Bytes from a link, whatever they are."""
        try:
            frame = decode(parts)
            return [] if frame is None else self.received(link, frame, now)
        except RemoteProtocolError as error:
            return self._route(self.links.broke_protocol(link, now, error.message), now)

    def received(self, link: LinkId, frame: Frame, now: float) -> list[Effect]:
        """A frame from a link."""
        peer = self.links.agent_on(link)
        if peer is None or isinstance(frame, _LINK_FRAMES):
            return self._route(self.links.received(link, frame, now), now)
        if type(frame) is Mail or type(frame) is MailAck:  # of these there are most
            outcomes = self.membership.heard(peer, now)
            if self.delivery is not None:
                outcomes += self.delivery.receive(frame, peer, now, self._wall_ms(now))
        elif isinstance(frame, BLOB_FRAMES):
            outcomes = self.membership.heard(peer, now)
            outcomes += self.transfer.receive(frame, peer, now)
        else:
            outcomes = self.membership.receive(frame, peer, now)
        return self._route(outcomes, now)

    def on_timer(self, now: float) -> list[Effect]:
        """Do what is due in every engine."""
        effects = self._save(now)
        effects += self._route(self.membership.on_timer(now), now)
        if self.delivery is not None:
            effects += self._route(self.delivery.on_timer(now), now)
        effects += self._route(self.transfer.on_timer(now), now)
        return effects + self._route(self.links.on_timer(now), now)

    def deadline(self) -> float | None:
        """When on_timer is wanted next."""
        times = [self.membership.deadline(), self.links.deadline(), self._save_at]
        times.append(self.transfer.deadline())
        if self.delivery is not None:
            times.append(self.delivery.deadline())
        return min((each for each in times if each is not None), default=None)

    # -- messages -----------------------------------------------------------------------------

    def deliver_with(self, delivery: Delivery | None, now: float) -> list[Effect]:
        """Use this engine from now on: at the start, and when its disk could not keep up."""
        self.delivery = delivery
        if delivery is None:
            return []
        linked = [each.agent for each in self.peers() if self.links.link_to(each.agent)]
        return self._route([e for peer in linked for e in delivery.connected(peer, now)], now)

    def accept(
        self, outgoing: Sequence[tuple[AgentId, Message]] | Texts, now: float
    ) -> list[Effect]:
        """Take responsibility for messages, each to its peer: for all of them or none."""
        if self.delivery is None:
            raise StorageError(
                "Messages can't be kept now: the disk does not answer.",
                hint="See 'meshagent status'; it goes on by itself when the disk is well.",
            )
        if isinstance(outgoing, Texts):
            self._hurry(outgoing.peer, now)
            return self._route(self.delivery.accept_texts(outgoing, now), now)
        if len(outgoing) == 1:
            ((peer, message),) = outgoing
            self._hurry(peer, now)
            return self._route(self.delivery.accept(peer, message, now), now)
        for peer in set(map(itemgetter(0), outgoing)):
            self._hurry(peer, now)
        return self._route(self.delivery.accept_all(outgoing, now), now)

    def _hurry(self, peer: AgentId, now: float) -> None:
        """Somebody has something to say to it."""
        if self.links.link_to(peer) is None:
            self.links.hurry(peer, now)

    def take(self, sender: AgentId, mail: Mail, now: float) -> list[Effect]:
        """Mail that was left in the spool."""
        if self.delivery is None:
            return []
        return self._route(self.delivery.take(mail, sender, self._wall_ms(now), True), now)

    def numbers(self, peer: AgentId) -> tuple[bytes, int] | None:
        """Our epoch, and the first number for `peer` that is not settled."""
        return None if self.delivery is None else self.delivery.numbers(peer)

    def correspondents(self) -> list[AgentId]:
        """Everyone to whom we have sent something."""
        return [] if self.delivery is None else self.delivery.correspondents()

    def noted(self, rows: Iterable[OutState | Delivered]) -> None:
        """What was noted is on disk."""
        if self.delivery is not None:
            self.delivery.noted(rows)

    def flush(self, peer: AgentId, epoch: bytes, upto: int, now: float) -> list[Effect]:
        """All messages to `peer` up to this number are durable."""
        if self.delivery is None:
            return []
        return self._route(self.delivery.flush(peer, epoch, upto, now), now)

    def durable(self, peer: AgentId, epoch: bytes, upto: int, now: float) -> list[Effect]:
        """All messages to `peer` up to this number are durable, and have left."""
        if self.delivery is None:
            return []
        then = self.delivery.durable(peer, epoch, upto, now)
        return self._route(then, now) if then else then

    def loaded(self, peer: AgentId, entries: Sequence[OutEntry], now: float) -> list[Effect]:
        """What a Load read."""
        if self.delivery is None:
            return []
        return self._route(self.delivery.loaded(peer, entries, now, self._wall_ms(now)), now)

    def withdraw(self, entry: OutEntry, state: MessageState, now: float) -> list[Effect]:
        """A pending message expired or was cancelled."""
        if self.delivery is None:
            return []
        peer, at = AgentId(entry.peer), self._wall_ms(now)
        return self._route(self.delivery.withdraw(peer, entry.seq, entry.id, state, at), now)

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

    def collect(self, sender: AgentId, message: Message, now: float) -> list[Effect]:
        """A held message is durable: get what it names, or hand it out when nothing is missing."""
        if self.delivery is None:
            return []
        incomplete = self.delivery.incomplete
        effects: list[Effect] = []
        sources = self._sources(sender)
        for each in message.attachments:
            if each.sha256 in incomplete and incomplete.limits.is_eager(each):
                try:
                    effects += self._want(sender, each, sources, now)
                except LimitReached as error:
                    effects += self._end(incomplete.failed(each.sha256, error.message), now)
        return self._route(effects + self._end(incomplete.complete(sender, message.id), now), now)

    def fetch(self, sender: AgentId, attachment: Attachment, now: float) -> list[Effect]:
        """Somebody asks for this one: `BlobReady` or `BlobFailed` follows."""
        effects = self._want(sender, attachment, self._sources(sender), now)
        self._fetched.add(attachment.sha256)
        return self._route(effects, now)

    def relay(self, effects: list[Effect], now: float) -> list[Effect]:
        """What the transfer engine answered to the driver."""
        return self._route(effects, now)

    def expire(self, now: float) -> list[Effect]:
        """Held messages whose time is up."""
        if self.delivery is None:
            return []
        ended = self.delivery.incomplete.expired(self._wall_ms(now))
        return self._route(self._end(ended, now), now)

    def _want(
        self, sender: AgentId, attachment: Attachment, sources: Sequence[AgentId], now: float
    ) -> list[Effect]:
        return self.transfer.want(
            attachment.sha256, attachment.size, sources, sender, attachment.grant, now
        )

    def inbox_shrank(self, by: int, now: float) -> list[Effect]:
        """Messages in the inbox were dealt with."""
        return (
            [] if self.delivery is None else self._route(self.delivery.inbox_shrank(by, now), now)
        )

    def inbox_holds(self, unread: int, now: float) -> list[Effect]:
        """So many messages in the inbox are unread, as the disk has counted them."""
        if self.delivery is None:
            return []
        return self._route(self.delivery.inbox_holds(unread, now), now)

    # -- between the engines ------------------------------------------------------------------

    def _route(self, outcomes: Sequence[Outcome], now: float) -> list[Effect]:
        effects: list[Effect] = []
        queue = list(outcomes)
        for outcome in queue:  # which grows meanwhile
            if type(outcome) not in _ROUTED:
                effects.append(outcome)  # type: ignore[arg-type]
                continue
            if type(outcome) is Send:  # of these there are most
                to, frame = outcome
                if (link := self.links.link_to(to)) is not None:
                    effects.append(Transmit(link, frame))
                continue
            match outcome:
                case LinkUp(agent, record, dialled):
                    queue += self.membership.connected(agent, record, dialled, now)
                    self._note(agent, now)
                    queue += self._connected(agent, now)
                case LinkReplaced(agent):
                    queue += self._connected(agent, now)
                case LinkDown(agent):
                    queue += self.membership.disconnected(agent, now)
                    queue += self.transfer.disconnected(agent, now)
                    if self.delivery is not None:
                        queue += self.delivery.disconnected(agent)
                case Unreachable(agent):
                    if self.links.link_to(agent) is None:
                        queue += self.membership.unreachable(agent, now)
                case PeerChanged(peer):
                    queue += self._follow(peer, now)
                    effects.append(outcome)
                case BlobReady(sha256):
                    effects.append(outcome)
                    self._fetched.discard(sha256)
                    if self.delivery is not None:
                        queue += self._end(self.delivery.incomplete.ready(sha256), now)
                case BlobFailed(sha256, why):
                    effects.append(outcome)
                    self._fetched.discard(sha256)
                    if self.delivery is not None:
                        queue += self._end(self.delivery.incomplete.failed(sha256, why), now)
        return effects

    def _connected(self, agent: AgentId, now: float) -> list[Effect]:
        mail = self.delivery.connected(agent, now) if self.delivery is not None else []
        return mail + self.transfer.connected(agent, now)

    def _end(self, ended: Sequence[Ended], now: float) -> list[Effect]:
        """Held messages have ended, one way or the other."""
        if self.delivery is None or not ended:
            return []
        effects = self.delivery.end(ended, now, self._wall_ms(now))
        for each in ended:
            if each.state is not MessageState.DELIVERED:
                blobs = {a.sha256 for a in each.message.attachments} - self._fetched
                for sha256 in blobs:
                    if sha256 not in self.delivery.incomplete:
                        effects += self.transfer.unwant(sha256, now)
        return effects

    def _sources(self, sender: AgentId) -> list[AgentId]:
        """Whom to ask: the sender, then its neighbours, who share its store, then the others."""
        peers = [each for each in self.peers() if each.agent != sender]
        hosts = {each.host for each in self.peers() if each.agent == sender}
        peers.sort(key=lambda each: (each.host not in hosts, each.state is not PeerState.ALIVE))
        return [sender, *(each.agent for each in peers[:SOURCES_MAX])]

    def _follow(self, peer: Peer, now: float) -> list[Outcome]:
        """Keep links and the dial list in step with who is in the mesh."""
        if peer.state is PeerState.LEFT:
            self.links.lose_interest(peer.agent)
            return []
        self.links.found(Candidate(peer.agent, peer.addresses, "gossip"), True, True, now)
        return self.links.cut(peer.agent, now) if peer.state is PeerState.GONE else []

    def _moved(self, before: tuple[str, ...], now: float) -> list[Outcome]:
        """Our addresses changed. Links made from one that we lost are dead, and nobody says so."""
        self.links.hurry_all(now)
        if set(before) <= set(self.me.addresses):
            return []
        outcomes: list[Outcome] = []
        for agent in self.links.linked():
            if not self.membership.is_fresh(agent, now):
                outcomes += self.links.cut(agent, now)
        return outcomes

    def _is_linked(self, agent: AgentId) -> bool:
        return self.links.link_to(agent) is not None

    def _note(self, agent: AgentId, now: float) -> None:
        """Remember the peer's key and addresses, if they are news, with the next batch."""
        peer, key = self.membership.peer(agent), self.membership.key_of(agent)
        if peer is None or key is None:
            return
        good = self.links.address_of(agent)
        addresses = tuple(dict.fromkeys([*([good] if good else []), *peer.addresses]))
        row = PeerRow(agent, key, addresses[:ADDRESSES_MAX])
        if self._saved.get(agent) == row:
            return
        self._saved[agent] = self._unsaved[agent] = row
        if len(self._saved) > MEMBERS_MAX:
            del self._saved[next(iter(self._saved))]  # at worst one row is written once more
        if self._save_at is None:
            self._save_at = now + SAVE_PEERS_S

    def _save(self, now: float) -> list[Effect]:
        if self._save_at is None or now < self._save_at:
            return []
        rows, self._unsaved, self._save_at = self._unsaved, {}, None
        return [Persist(list(rows.values()))]
