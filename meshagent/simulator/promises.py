"""What must hold: at every effect, at every moment, and when all is well again.

Sees every effect of every node just before it is performed, and looks at their disks. Changes
nothing. What a node told a person is compared with what is on its own disk and on the other's: a
disk that was replaced excuses what was on it alone, and nothing else is excused.
"""

from __future__ import annotations

from itertools import pairwise

from meshagent.core.delivery.receive_stream import FORGOTTEN
from meshagent.core.effects import Accepted, Deliver, Effect, ReceiptChanged, Transmit
from meshagent.core.model.body_summary import summarize
from meshagent.core.model.message_states import (
    PROGRESS,
    WAITING,
    WITHDRAWN,
    InboxState,
    MessageState,
)
from meshagent.core.model.messages import RECEIPT_KIND
from meshagent.core.model.peers import AgentId
from meshagent.core.model.rows import InEntry
from meshagent.core.wire.frames import Mail, MailAck
from meshagent.simulator.disk import Disk
from meshagent.simulator.driver import SimDriver
from meshagent.simulator.mesh import SimMesh
from meshagent.simulator.node import SimNode

__all__ = ["Promises"]

_HAD = frozenset({MessageState.DELIVERED, MessageState.SEEN, MessageState.DONE})
_ENDS = _HAD | WITHDRAWN | {MessageState.REFUSED}


class Promises:
    """The promises of one simulated mesh."""

    def __init__(self, mesh: SimMesh) -> None:
        self.mesh = mesh
        self.left: set[bytes] = set()
        """Messages that have left their sender."""
        self.taken_back: set[bytes] = set()
        """What was withdrawn before it left."""
        self.lost_there: set[str] = set()
        """In an inbox on a disk that is no more."""
        self.lost_here: set[str] = set()
        """In an outbox on a disk that is no more."""
        self.brief: set[str] = set()
        """What may expire."""
        self.revived: set[str] = set()
        """Withdrawn on a disk that is no more, and not on the one that took its place."""
        self.at_odds: set[str] = set()
        """In an inbox, and withdrawn for good, on two disks of different days."""
        self.put_back: set[str] = set()
        """Whose disk is not the one that they began with."""
        self._meaning: dict[tuple[str, AgentId, bytes, int], bytes] = {}
        mesh.watchers.append(self.see)

    def replace_disk(self, node: SimNode, disk: Disk) -> None:
        """Whatever was on the old disk only is gone, and nobody can be blamed for that."""
        before, after = node.disk.mail, disk.mail
        self.lost_there |= {each.id for each in _visible(node.disk)} - {
            each.id for each in _visible(disk)
        }
        self.lost_there |= {
            i for (s, i), e in before.came.items() if e.state != _state(after.came.get((s, i)))
        }
        was, is_now = before.states(), after.states()
        self.lost_here |= was.keys() - is_now.keys()
        self.revived |= {i for i, s in was.items() if s in WITHDRAWN and s != is_now.get(i)}
        self.put_back.add(node.name)
        disks = [disk if each is node else each.disk for each in self.mesh.nodes]
        came = {ident for each in disks for _, ident in each.mail.came}
        self.at_odds |= {i for each in disks for i in _withdrawn_for_good(each) if i in came}
        node.states.clear()
        self.taken_back.clear()
        for peer, ids in node.accepted.items():
            node.accepted[peer] = [each for each in ids if each not in self.lost_here]
        node.disk = disk

    def may_forget(self, node: SimNode, peer: str) -> bool:
        """Whether one of the two does not have the disk that it began with."""
        return node.name in self.put_back or self.mesh.node_of(AgentId(peer)).name in self.put_back

    # -- at every effect ----------------------------------------------------------------------

    def see(self, node: SimDriver, effect: Effect) -> None:
        """Nothing is sent, answered, handed out or reported before it is durable, and truly so."""
        match effect:
            case Transmit(link, Mail() as mail):
                self._see_mail(node, node.peer_on(link), mail)
            case Transmit(link, MailAck() as ack):
                self._see_answer(node, node.peer_on(link), ack)
            case Accepted(asked):
                unkept = set(asked.ids) - node.disk.mail.out.keys()
                assert not unkept, f"{node.name} accepts {unkept} before it is durable"
            case Deliver(sender, messages):
                for message in messages:
                    entry = node.disk.mail.came.get((sender, message.id))
                    kept = entry is not None and entry.state != InboxState.RECEIVING
                    assert kept, f"{node.name} hands out {message.id} before it is durable"
                    files = {each.sha256 for each in message.attachments}
                    missing = files - node.blobs.machine.blobs.keys()
                    assert not missing, f"{node.name} hands out {message.id} without its files"
            case ReceiptChanged(peer, idents, state, _):
                for ident in idents:
                    self._see_receipt(node, peer, ident, state)

    def _see_mail(self, node: SimDriver, peer: AgentId | None, mail: Mail) -> None:
        if peer is None:
            return  # the link has ended meanwhile
        for seq, body in enumerate(mail.items, mail.first):
            if body is None:
                self._see_withdrawn(node, peer, mail.epoch, seq)
                continue
            assert body in node.disk.bodies, f"{node.name} sends {seq} before it is durable"
            self.left.add(body)
            if node.name not in self.put_back:
                before = self._meaning.setdefault((node.name, peer, mail.epoch, seq), body)
                assert before == body, f"{node.name} has two messages with number {seq} for {peer}"

    def _see_withdrawn(self, node: SimDriver, peer: AgentId, epoch: bytes, seq: int) -> None:
        mail = node.disk.mail
        pending = mail.pending(peer, seq, 1) if mail.epoch == epoch else []
        kept = all(each.seq != seq or each.state not in WAITING for each in pending)
        assert kept, f"{node.name} takes back {seq} before that is durable"

    def _see_answer(self, node: SimDriver, peer: AgentId | None, ack: MailAck) -> None:
        if peer is None:
            return  # the link has ended meanwhile
        mark = node.disk.mail.marks.get((peer, ack.epoch))
        forgotten = [seq for seq, why in ack.exceptions if why == FORGOTTEN]
        covered = max([0 if mark is None else mark.seq, *forgotten])
        assert ack.upto <= covered, f"{node.name} answers {ack.upto} before it is durable"

    def _see_receipt(
        self, node: SimDriver, peer: AgentId, ident: str, state: MessageState
    ) -> None:  # fmt: skip
        known = node.disk.mail.out.get(ident)
        if known is not None and summarize(known.body).kind == RECEIPT_KIND:
            return
        entry = self.mesh.node_of(peer).disk.mail.came.get((node.agent, ident))
        there = "" if entry is None else entry.state
        excused = ident in self.lost_there
        if state in _HAD:
            true = there not in ("", InboxState.RECEIVING)
            assert true or excused, f"{node.name} calls {ident} {state}, and it is not there"
        if state is MessageState.DONE:
            assert there == InboxState.DONE or excused, f"nobody has done {ident}"

    # -- at every moment ----------------------------------------------------------------------

    def check(self) -> None:
        """What holds at every moment."""
        for node in self.mesh.nodes:
            self._check_receipts(node)
            states = node.disk.mail.states()
            for peer in self.mesh.nodes:
                if peer is not node:
                    self._check_stream(node, peer, states)
        assert not self.taken_back & self.left, "a message left after it was taken back"

    def check_at_rest(self) -> None:
        """What holds when nothing went wrong for a while: nothing that was accepted is lost."""
        self.check()
        for node in self.mesh.nodes:
            states = node.disk.mail.states()
            for peer, ids in node.accepted.items():
                came = self._came(self.mesh.node_of(peer), node.agent)
                for ident in ids:
                    if states[ident] is not MessageState.SENT or not self.may_forget(node, peer):
                        self._check_end(node, ident, states[ident], came.get(ident))
            assert node.engine is not None
            delivery = node.engine.delivery
            assert delivery is not None
            taken = [p for p, _ in delivery.sending.taken if not self.may_forget(node, p)]
            assert not taken, f"{node.name} still waits for how these ended: {taken}"
            assert delivery.sending.pending == delivery.sending.on_wire == 0, node.name

    def _check_stream(
        self, node: SimNode, peer: SimNode, states: dict[str, MessageState]
    ) -> None:  # fmt: skip
        accepted, epochs = node.accepted[peer.agent], self._came(peer, node.agent)
        place = {ident: at for at, ident in enumerate(epochs)}
        nowhere = place.keys() - states.keys() - self.lost_here
        assert not nowhere, f"{peer.name} has what {node.name} never kept: {nowhere}"
        unkept = set(accepted) - states.keys()
        assert not unkept, f"{node.name} accepted, and does not have: {unkept}"
        outbox = [each for each in node.disk.mail.out.values() if each.peer == peer.agent]
        self.brief |= {each.id for each in outbox if each.expires_ms}
        there = [each for each in accepted if each in place]
        self._check_all_orders(node, peer, there, states, place, epochs)
        for out in outbox:
            if out.state in WITHDRAWN and out.body not in self.left:
                self.taken_back.add(out.body)
            # Of one with files that was taken back too late, its recipient has still to speak.
            open_states = WITHDRAWN | {MessageState.SENT} if out.attached else {MessageState.SENT}
            ended = out.settled and out.state not in open_states
            if ended and summarize(out.body).kind != RECEIPT_KIND:
                self._check_end(node, out.id, MessageState(out.state), epochs.get(out.id))

    def _check_all_orders(
        self, node: SimNode, peer: SimNode, there: list[str], states: dict[str, MessageState],
        place: dict[str, int], epochs: dict[str, bytes],
    ) -> None:  # fmt: skip
        """What has attachments is visible when these are there, and stands in nobody's way.

        A new epoch can bring what should have come before the rest: a file in the spool may be
        older than the epoch in which its message was withdrawn; or it was found when the clock was
        ahead, and what was too late by then goes out anew. Whoever lost what came first, or took
        back what is here again, has the rest already.
        """
        attached = node.disk.mail.out_blobs.keys()
        plain = [each for each in there if each not in attached]
        renumbered = node.disk.renumbered
        astray = {i for i in renumbered if states.get(i) in WITHDRAWN} | renumbered & self.brief
        astray |= self.revived | self.lost_there
        _check_order(node, peer, [each for each in plain if each not in astray], place)
        for epoch in set(epochs.values()):  # and within one of them without exemption
            _check_order(node, peer, [i for i in plain if epochs[i] == epoch], place)

    def _came(self, owner: SimNode, sender: AgentId) -> dict[str, bytes]:
        """What is in `owner`'s inbox from `sender`, in order, with the epoch in which it came."""
        under = owner.disk.came_under
        return {
            each.id: under[each.sender, each.id]
            for each in _visible(owner.disk)
            if each.sender == sender
        }

    def _check_end(
        self, node: SimNode, ident: str, state: MessageState, came: bytes | None
    ) -> None:  # fmt: skip
        if state in _HAD:
            assert came is not None or ident in self.lost_there, f"{ident} was never delivered"
            return
        assert state in _ENDS, f"{ident} still waits, and nothing is wrong"
        # A number that carries nothing can't ask for what came in an epoch that is no more,
        # whether its sender gave that up or lost the disk that knew of it.
        given_up = ident in node.disk.renumbered or node.name in self.put_back
        explained = (given_up and came != node.disk.mail.epoch) or ident in self.at_odds
        assert came is None or explained, f"{ident} is {state}, and came"

    def _check_receipts(self, node: SimNode) -> None:
        # How one with files ended, its recipient says itself, and may have said before we did.
        told = {i: s for i, s in node.states.items() if i not in node.disk.mail.out_blobs}
        for ident, states in told.items():
            ranks = [PROGRESS[each] for each in states]
            assert ranks == sorted(ranks), f"the receipt of {ident} went back: {states}"


def _state(entry: InEntry | None) -> str:
    return "" if entry is None else entry.state


def _visible(disk: Disk) -> list[InEntry]:
    return disk.mail.inbox(0, 1 << 40, unread=False)


def _check_order(node: SimNode, peer: SimNode, sent: list[str], place: dict[str, int]) -> None:
    late = [b for a, b in pairwise(sent) if place[b] < place[a]]
    assert not late, f"{peer.name} has {late} of {node.name} before what was sent earlier"


def _withdrawn_for_good(disk: Disk) -> set[str]:
    """What its recipient knows to be withdrawn, as this disk has it."""
    out = disk.mail.out.values()
    return {each.id for each in out if each.settled and each.state in WITHDRAWN}
