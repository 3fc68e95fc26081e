"""The two ways to run a simulated mesh, each from a seed: safety and liveness.

Safety: everything goes wrong that can, everywhere, and nothing that was promised is broken at any
step; then all is well again, and all that was accepted settles. Liveness: one pair of nodes is well
for good while everything else stays broken, and all of that pair settles in a bounded time. A run
that fails prints its seed and what happened.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from meshagent.core.delivery.config import DeliveryConfig
from meshagent.core.model.message_states import MessageState
from meshagent.core.model.messages import RECEIPT_KIND
from meshagent.core.model.peers import AgentId
from meshagent.core.wire.codec import encode
from meshagent.core.wire.frames import EPOCH_BYTES, HASH_BYTES, Mail, MailAck
from meshagent.simulator.blobs import random_blob
from meshagent.simulator.disk import Disk, DiskFaults
from meshagent.simulator.mesh import SimMesh
from meshagent.simulator.network import Faults
from meshagent.simulator.node import SimNode
from meshagent.simulator.promises import Promises
from meshagent.simulator.small_limits import small_chunks, small_windows

__all__ = ["Trouble", "forged_answers", "liveness", "safety", "settle", "transcript"]

SETTLED_S = 90.0  # a frame that is lost on the way back is made good by the longest pause
PAIR_SETTLED_S = 90.0
HOUR_S = 3600.0
DAY_MS = 24 * 3600 * 1000
STEPS_S = (0.0, 0.0, 0.001, 0.05, 0.3, 3.0)


def safety(seed: int, check: Callable[[SimMesh], None] = lambda mesh: None) -> SimMesh:
    """Faults everywhere, then none: nothing is lost, early, twice or out of order.

    `check` looks at the mesh at every step, too.
    """
    with small_chunks(), small_windows(seed % 4 != 0):
        trouble = Trouble(seed, check)
        with transcript(trouble.mesh):
            for _ in range(trouble.rng.randint(2, 8)):
                trouble.phase(trouble.mesh.nodes)
            trouble.mesh.heal()
            settle(trouble.mesh, trouble.promises)
        return trouble.mesh


def liveness(seed: int, check: Callable[[SimMesh], None] = lambda mesh: None) -> float:
    """One pair is well, and nothing else is: how long it took until all of theirs had settled."""
    with small_chunks(), small_windows(seed % 4 != 0):
        trouble = Trouble(seed, check, at_least=3, config=DeliveryConfig())
        mesh, rng = trouble.mesh, trouble.rng
        with transcript(mesh):
            for _ in range(rng.randint(1, 4)):
                trouble.phase(mesh.nodes)
            pair = rng.sample(mesh.nodes, 2)
            others = [node for node in mesh.nodes if node not in pair]
            trouble.mend_for_good(pair)
            began = mesh.world.now
            while not _pair_settled(pair, trouble.promises):
                assert mesh.world.now - began < PAIR_SETTLED_S, "the healthy pair does not settle"
                trouble.break_everything(others)
                trouble.something(others)
                for node in pair:
                    node.deal_with(1000)
                    node.keep_house()
                mesh.world.run(0.5)
                trouble.check()
            return mesh.world.now - began


class Trouble:
    """A few nodes, and phases in which everything goes wrong that can."""

    def __init__(
        self, seed: int, check: Callable[[SimMesh], None], at_least: int = 2,
        config: DeliveryConfig | None = None,
    ) -> None:  # fmt: skip
        self.rng = rng = random.Random(seed)
        config = config or DeliveryConfig(
            unread_max=rng.choice([250_000, 250_000, 5, 40]),
            pending_max=rng.choice([1_000_000, 1_000_000, 30]),
        )
        self.mesh = SimMesh(seed, config)
        self.promises = Promises(self.mesh)
        self.also = check
        self.drops: list[tuple[SimNode, SimNode, Mail]] = []
        self.backups: dict[str, list[Disk]] = {}
        self.has_liars = seed % 3 == 0
        self.has_backups = seed % 4 == 1
        self.clocks_jump = True
        self.mesh.add(rng.randint(at_least, 4 if at_least > 2 else 3))

    def check(self) -> None:
        """What holds at every moment."""
        self.promises.check()
        self.also(self.mesh)

    def phase(self, nodes: Sequence[SimNode]) -> None:
        """Some time with one set of faults."""
        self.break_everything(nodes)
        for _ in range(self.rng.randint(0, 25)):
            self.something(nodes)
            self.mesh.world.run(self.rng.choice(STEPS_S))
            self.check()
        if self.rng.random() < 0.3:
            self.mesh.network.heal()

    def break_everything(self, nodes: Sequence[SimNode]) -> None:
        """Choose what goes wrong with the network, and with the disks of these."""
        rng, network = self.rng, self.mesh.network
        network.faults = Faults(
            loss=rng.choice([0, 0, 0.1, 0.3]),
            duplicate=rng.choice([0, 0.2]),
            reorder=rng.choice([0, 0.3]),
            full=rng.choice([0, 0, 0.2]),
            delay_s=(0.0005, rng.choice([0.003, 0.01, 0.5])),
        )
        if rng.random() < 0.4:
            for one in nodes:
                other = rng.choice(self.mesh.nodes)
                if other is not one:
                    network.cut(*rng.choice([(one.name, other.name), (other.name, one.name)]))
        for node in nodes:
            node.faults = DiskFaults(
                commit_s=rng.choice([(0.0005, 0.02), (0.0005, 0.02), (0.5, 10.0)]),
                at_once=rng.choice([0, 0.3, 1.0]),
                crash=rng.choice([0, 0, 0.002, 0.05]),
                failing=rng.choice([0, 0, 0, 0.1]),
                is_full=rng.random() < 0.05,
            )
            machine = node.blobs.machine
            machine.is_full, machine.is_slow = rng.random() < 0.2, rng.random() < 0.2

    def mend_for_good(self, pair: Sequence[SimNode]) -> None:
        """Nothing goes wrong with these two and between them any more."""
        one, other = pair
        self.mesh.world.say(f"{one.name} and {other.name} are well for good")
        self.mesh.network.mend_for_good(one.name, other.name)
        for node in pair:
            self.mesh.heal_machine(node)
        self.mesh.discover(pair)

    # -- what happens -------------------------------------------------------------------------

    def something(self, nodes: Sequence[SimNode]) -> None:
        """One thing that people, programs or machines do to one of these."""
        rng = self.rng
        node = rng.choice(nodes)
        peer = rng.choice([each for each in self.mesh.nodes if each is not node])
        match rng.choices(range(11), [60, 5, 3, 5, 5, 8, 3, 6, 4, 2, 4])[0]:
            case 0:
                self._send(node, peer)
            case 1:
                for _ in range(rng.choice([1, 2])):  # the second may not know of the first
                    node.withdraw(peer.agent, MessageState.CANCELLED)
            case 2:
                node.keep_house()
            case 3:
                self.mesh.network.break_links(node.name, peer.name)
            case 4:
                self.mesh.network.mend(node.name, peer.name)
                self.mesh.discover([node, peer])
            case 5:
                self._stop_or_start(node)
            case 6 if self.clocks_jump:
                node.clock_skew_ms = rng.choice([0, DAY_MS, -DAY_MS])
            case 7:
                node.deal_with(rng.randint(1, 20))
            case 8:
                self._use_spool(node, peer)
            case 9 if self.has_liars and node.engine is not None:
                lie(node, peer)
            case 10 if self.has_backups:
                self._use_backup(node)

    def _send(self, node: SimNode, peer: SimNode) -> None:
        rng = self.rng
        kind = RECEIPT_KIND if rng.random() < 0.03 else "text"  # one without data: refused there
        ttl_s, files = rng.choice([0, 0, 0, 0, 0.5, HOUR_S]), []
        if rng.random() < 0.15:
            data = random_blob(rng, rng.choice([0, 1, 1, 2, 5, 17, 40]))
            files = [node.blobs.machine.put(data)]
        texts = ["x" * rng.choice([1, 10, 1000])] * rng.choice([1, 1, 1, 12])
        node.send(peer.agent, *texts, ttl_s=ttl_s, kind=kind, files=files)

    def _stop_or_start(self, node: SimNode) -> None:
        hints = [each.hint() for each in self.mesh.running() if each is not node]
        if node.engine is None:
            node.start(hints if self.rng.random() < 0.5 else ())
        elif self.rng.random() < 0.2:
            node.leave()
        else:
            node.crash(silently=self.rng.random() < 0.5)

    def _use_spool(self, node: SimNode, peer: SimNode) -> None:
        """Leave mail, or find what was left any time ago."""
        if self.drops and self.rng.random() < 0.6:
            sender, to, found = self.rng.choice(self.drops)
            to.take_drop(sender.agent, found)
        elif (mail := node.drop_for(peer.agent)) is not None:
            self.promises.left.update(filter(None, mail.items))
            self.drops.append((node, peer, mail))

    def _use_backup(self, node: SimNode) -> None:
        """Make one; or go on from one, or from an empty disk, with or without a word to anyone."""
        rng, backups = self.rng, self.backups.setdefault(node.name, [])
        if not backups or rng.random() < 0.4:
            backups.append(node.disk.copy())
            return
        disk = rng.choice(backups) if rng.random() < 0.8 else node.empty_disk()
        self.mesh.world.say(f"{node.name} gets another disk")
        if node.engine is not None:
            node.crash()
        self.promises.replace_disk(node, disk.copy())
        node.start([each.hint() for each in self.mesh.running() if each is not node])


def forged_answers(node: SimNode, peer: AgentId) -> list[MailAck]:
    """Answers that `peer` never gave: wrong in one thing each, or long out of date."""
    assert node.engine is not None
    if node.engine.delivery is None:
        return []
    epoch, floor = node.engine.delivery.numbers(peer)
    sent = floor + 2
    wrong = b"\xff" * HASH_BYTES
    return [
        MailAck(b"\xff" * EPOCH_BYTES, floor + 1, wrong),
        MailAck(epoch, max(0, floor - 2), wrong),
        MailAck(epoch, 0, bytes(HASH_BYTES), 2),
        MailAck(epoch, 0, bytes(HASH_BYTES), 1),
        MailAck(epoch, max(0, floor - 1), wrong, 9, ((floor, ""), (floor + 1, "no"))),
        MailAck(epoch, floor, wrong),
        MailAck(epoch, sent, wrong),
        MailAck(epoch, sent + 10**9, wrong),
    ]


def lie(node: SimNode, peer: SimNode) -> None:
    """The peer answers what is not so."""
    assert node.engine is not None
    link = node.engine.links.link_to(peer.agent)
    for ack in forged_answers(node, peer.agent):
        if link is not None:
            node.link_received(link, encode(ack))


# -- the end --------------------------------------------------------------------------------------


def settle(mesh: SimMesh, promises: Promises, limit_s: float = SETTLED_S) -> float:
    """Until nothing waits anywhere, while somebody reads; how long that took."""

    def settled() -> bool:
        for node in mesh.nodes:
            node.deal_with(1000)
            node.keep_house()
        return all(_waits_for_nothing(node, promises) for node in mesh.nodes)

    took = mesh.world.run_until(settled, limit_s, 0.25)
    mesh.world.run(1.0)
    promises.check_at_rest()
    return took


def _waits_for_nothing(
    node: SimNode, promises: Promises, peers: Sequence[str] | None = None
) -> bool:
    """Whether all of its messages (to one of these) have ended, and no file is missing.

    How one with files ended, its recipient says once: a disk that was put back may not know it.
    """
    mail = node.disk.mail
    out = [e for e in mail.out.values() if peers is None or e.peer in peers]
    held = [e for e in mail.receiving() if peers is None or e.sender in peers]
    taken = [e for e in out if e.settled and e.state == MessageState.SENT]
    unsaid = [e for e in taken if not promises.may_forget(node, e.peer)]
    works = node.engine is not None and node.engine.delivery is not None
    is_idle = works and (node.turns.is_idle or peers is not None)
    return is_idle and not held and not unsaid and all(e.settled for e in out)


def _pair_settled(pair: Sequence[SimNode], promises: Promises) -> bool:
    one, other = pair
    return all(
        _waits_for_nothing(node, promises, [peer.agent])
        for node, peer in ((one, other), (other, one))
    )


@contextmanager
def transcript(mesh: SimMesh) -> Iterator[None]:
    """A failure inside shows the seed and what happened."""
    try:
        yield
    except BaseException:
        print(mesh.world.transcript())
        for node in mesh.running():
            print(node.name, node.agent, {a: s.value for a, s in node.view().items()})
            mail = node.disk.mail
            for out in mail.out.values():
                if not out.settled or out.state == MessageState.SENT:
                    print(f"  {out.id} to {out.peer} waits: {out.seq}, {out.state}, {out.settled}")
            for held in mail.receiving():
                print(f"  {held.id} from {held.sender} is held")
        raise
