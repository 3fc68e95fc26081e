"""Runs of a few nodes, each from a seed, that more than one test wants."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from meshagent.core.delivery.config import DeliveryConfig
from meshagent.core.effects import Effect, Transmit
from meshagent.core.model.message_states import WITHDRAWN, MessageState
from meshagent.core.wire.frames import Frame, Mail
from meshagent.simulator.disk import Disk
from meshagent.simulator.mesh import SimMesh
from meshagent.simulator.modes import settle, transcript
from meshagent.simulator.network import Faults
from meshagent.simulator.node import SimNode
from meshagent.simulator.promises import Promises
from meshagent.simulator.small_limits import small_chunks, small_windows

LASTING_S = 120.0  # without a new link, the longest pause between repetitions counts


class Pair:
    """Two nodes that know each other, or a few, and what must hold of them."""

    def __init__(self, mesh: SimMesh, count: int = 2) -> None:
        self.mesh, self.world, self.network = mesh, mesh.world, mesh.network
        self.promises = Promises(mesh)
        self.frames: list[tuple[SimNode, Frame]] = []
        mesh.watchers.append(self._see)
        self.a, self.b, *self.others = mesh.add(count)
        mesh.world.run_until(mesh.agree, 10.0)

    def _see(self, node: SimNode, effect: Effect) -> None:
        if isinstance(effect, Transmit):
            self.frames.append((node, effect.frame))

    def sent(self, kind: type[Frame]) -> int:
        """How many frames of this kind were put on links."""
        return sum(isinstance(frame, kind) for _, frame in self.frames)

    def run(self, for_s: float) -> None:
        """Let time pass, and look whether all holds."""
        self.world.run(for_s)
        self.promises.check()

    def settle(self, limit_s: float = 60.0) -> float:
        """Until nothing waits; how long that took."""
        return settle(self.mesh, self.promises, limit_s)

    def came(self, owner: SimNode, sender: SimNode) -> list[str]:
        """The ids in `owner`'s inbox from `sender`, in the order they became visible."""
        inbox = owner.disk.mail.inbox(0, 1 << 40, unread=False)
        return [each.id for each in inbox if each.sender == sender.agent]

    def part(self) -> None:
        """Nothing passes between the two any more, and both notice."""
        self.mesh.part(self.a, self.b)

    def meet(self) -> None:
        """They reach each other again."""
        self.mesh.meet(self.a, self.b)

    def link(self) -> None:
        """They meet, and have a link when this returns."""
        self.meet()
        self.world.run_until(lambda: self.b.is_linked(self.a) and self.a.is_linked(self.b), 5.0)

    def put_back(self, node: SimNode, disk: Disk) -> None:
        """The node goes on from another disk, and nobody is told."""
        if node.engine is not None:
            node.crash()
        self.promises.replace_disk(node, disk.copy())
        node.start([each.hint() for each in self.mesh.running()])


@contextmanager
def pair(
    seed: int, small: bool = True, count: int = 2, config: DeliveryConfig | None = None,
    mesh: SimMesh | None = None,
) -> Iterator[Pair]:  # fmt: skip
    """A failure inside shows the seed and what happened."""
    mesh = mesh or SimMesh(seed, config)
    with small_chunks(), small_windows(small), transcript(mesh):
        yield Pair(mesh, count)


def send_some(source: SimNode, to: SimNode, count: int, text: str = "x") -> list[str]:
    return [ident for _ in range(count) for ident in source.send(to.agent, text)]


def lasting_link(seed: int) -> None:
    """Loss, and nobody breaks the link: what repairs it must come from delivery alone."""
    rng = random.Random(seed)
    with pair(seed, seed % 2 == 0) as two:
        two.network.faults = Faults(
            0.3, rng.choice([0, 0.2]), rng.choice([0, 0.3]), rng.choice([0, 0.2])
        )
        for _ in range(30):
            send_some(*rng.sample([two.a, two.b], 2), rng.randint(1, 5))
            two.run(rng.choice([0, 0.01, 0.5]))
        two.network.heal()
        two.settle(LASTING_S)


# -- databases that were put back or deleted ------------------------------------------------------


def restored_databases(seed: int) -> None:
    """Disks are put back to an earlier day, or are empty, on either side."""
    rng = random.Random(seed)
    drops: list[tuple[SimNode, SimNode, Mail]] = []
    with pair(seed, seed % 2 == 0) as two:
        talk(two, rng, drops)
        backups = {node.name: [node.disk.copy()] for node in (two.a, two.b)}
        for _ in range(rng.randint(1, 4)):
            talk(two, rng, drops)
            sides = rng.choice([[two.a], [two.b], [two.a, two.b]])
            for side in sides:
                backup = rng.choice(backups[side.name])
                replace_disk(two, rng, side, backup)
                talk(two, rng, drops)
            if rng.random() < 0.3:
                side = rng.choice(sides)
                backups[side.name].append(side.disk.copy())
        two.mesh.heal()
        two.settle()


def replace_disk(two: Pair, rng: random.Random, side: SimNode, backup: Disk) -> None:
    """By an empty one or a copy of another day; with `meshagent restore`, or behind its back."""
    way = rng.random()
    two.world.say(f"{side.name} gets another disk")
    if way < 0.25:
        two.put_back(side, side.empty_disk())
    elif way < 0.8:
        two.put_back(side, backup)
    elif side.engine is not None:
        side.restore(backup, partial(two.promises.replace_disk, side))


def talk(two: Pair, rng: random.Random, drops: list[tuple[SimNode, SimNode, Mail]]) -> None:
    """Some mail, some of it withdrawn, with or without contact."""
    two.network.faults = Faults(loss=rng.choice([0, 0, 0.3]))
    for _ in range(rng.randint(1, 12)):
        a, b = rng.sample([two.a, two.b], 2)
        match rng.choices(range(5), [60, 8, 8, 8, 8])[0]:
            case 0:
                send_some(a, b, rng.choice([1, 1, 8]))
            case 1:
                a.withdraw(b.agent, MessageState.CANCELLED)
            case 2:
                two.meet()
            case 3:
                two.part()
            case 4 if (mail := a.drop_for(b.agent)) is not None:
                two.promises.left.update(filter(None, mail.items))
                drops.append((a, b, mail))
        two.run(rng.choice([0, 0.01, 0.5, 5]))
    if drops and rng.random() < 0.3:
        sender, to, mail = drops.pop()
        to.take_drop(sender.agent, rewritten(mail, sender, to))


def rewritten(mail: Mail, sender: SimNode, to: SimNode) -> Mail:
    """The file as its sender leaves it: without what was withdrawn since."""
    if mail.epoch != sender.disk.mail.epoch:
        return mail
    out = [each for each in sender.disk.mail.out.values() if each.peer == to.agent]
    gone = {each.seq for each in out if each.state in WITHDRAWN}
    numbered = enumerate(mail.items, mail.first)
    return mail._replace(items=tuple(None if seq in gone else body for seq, body in numbered))


def backup_after(two: Pair, count: int, more: int) -> Disk:
    """The sender's disk between two batches that are both delivered."""
    send_some(two.a, two.b, count)
    two.world.run(1.0)
    backup = two.a.disk.copy()
    send_some(two.a, two.b, more)
    two.world.run(1.0)
    return backup


def backup_twice(seed: int) -> None:
    """The second time the recipient speaks of the epoch in between, which proves nothing."""
    rng = random.Random(seed)
    with pair(seed, seed % 2 == 0) as two:
        backup = backup_after(two, 20, 20)
        for count in (rng.randint(1, 30), rng.randint(30, 60)):
            two.part()
            two.put_back(two.a, backup)
            send_some(two.a, two.b, count)
            two.run(rng.choice([0, 5]))
            two.meet()
            two.settle()


def backup_and_spool(seed: int) -> None:
    """Mail in the spool comes without a greeting: its numbers have to speak for themselves."""
    rng = random.Random(seed)
    with pair(seed, small=False) as two:
        backup = backup_after(two, 20, 20)
        two.part()
        two.put_back(two.a, backup)
        for _ in range(rng.randint(1, 3)):
            send_some(two.a, two.b, rng.randint(1, 40))
            two.world.run(0.1)
            drop = two.a.drop_for(two.b.agent)
            assert drop is not None
            two.b.take_drop(two.a.agent, drop)
            two.run(0.1)
        two.mesh.heal()
        two.settle()


def backup_before_cancel(seed: int) -> None:
    """Cancelled, told and forgotten; then its sender has it open again, and asks if it came."""
    rng = random.Random(seed)
    with pair(seed) as two:
        two.part()
        sent = send_some(two.a, two.b, rng.randint(20, 30))
        two.world.run(1.0)
        backup = two.a.disk.copy()
        at = rng.randint(1, 8)  # told with the first that leave: those behind say that it is known
        entry = two.a.disk.mail.out[sent[at - 1]]
        assert two.a.engine is not None
        cancel = two.a.engine.withdraw(entry, MessageState.CANCELLED, two.world.now)
        two.a.perform(cancel)
        two.link()
        two.world.run(2.0)
        assert two.a.disk.mail.states()[entry.id] is MessageState.CANCELLED
        two.put_back(two.a, backup)
        two.settle()
        assert two.a.disk.mail.states()[sent[-1]] is MessageState.DONE
        assert sorted(two.came(two.b, two.a)) == sorted(sent), (
            "nobody knows any more that it was cancelled"
        )
