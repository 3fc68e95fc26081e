"""Goal: each way in which links, disks, clocks and peers can fail, alone, loses nothing.

What happens when they all fail at once is in test_safety.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest
from simulator.bounds import check_bounds
from simulator.scenarios import (
    LASTING_S,
    Pair,
    backup_after,
    backup_and_spool,
    backup_before_cancel,
    backup_twice,
    lasting_link,
    pair,
    restored_databases,
    send_some,
)

from meshagent.core.delivery import sending
from meshagent.core.delivery.config import DeliveryConfig
from meshagent.core.model.message_states import MessageState
from meshagent.core.model.messages import RECEIPT_KIND
from meshagent.core.model.peers import PeerState
from meshagent.core.wire.codec import encode
from meshagent.core.wire.frames import HASH_BYTES, Frame, Mail, MailAck
from meshagent.simulator.disk import DiskFaults
from meshagent.simulator.mesh import SimMesh
from meshagent.simulator.modes import forged_answers, lie
from meshagent.simulator.node import SimNode

HOUR_S = 3600.0
DAY_MS = 24 * 3600 * 1000


# -- links ----------------------------------------------------------------------------------------


def test_loss_on_a_link_that_lasts_is_made_good() -> None:
    for seed in range(20):
        lasting_link(seed)


@pytest.mark.parametrize("cut", [("n0", "n1"), ("n1", "n0")])
def test_a_one_way_cut_loses_nothing_and_ends_by_itself(cut: tuple[str, str]) -> None:
    for seed in range(10):
        with pair(seed) as two:
            two.network.cut(*cut)
            send_some(two.a, two.b, 10)
            send_some(two.b, two.a, 10)
            for _ in range(20):
                two.run(3.0)
            assert any(True for _ in two.a.disk.mail.unsettled())
            two.network.heal()
            two.settle(LASTING_S)


def test_after_a_long_time_apart_everything_comes_at_once() -> None:
    for seed in range(10):
        with pair(seed, count=3) as two:
            for other in (two.b, *two.others):
                two.mesh.part(two.a, other)
            for _ in range(6):
                for one in two.mesh.nodes:
                    for other in two.mesh.nodes:
                        if one is not other:
                            send_some(one, other, 2)
                two.run(50.0)
            before = two.sent(Mail)
            two.run(60.0)
            assert two.sent(Mail) == before, "it is not quiet while it waits"
            two.mesh.heal()
            took = two.world.run_until(lambda t=two: len(t.came(t.b, t.a)) == 12, 5.0, 0.01)
            assert took < 1.2  # a kernel that knocked just before waits a second
            two.settle()


def test_who_returns_has_all_that_waited_within_100_ms() -> None:
    for seed in range(10):
        with pair(seed, small=False) as two:
            two.b.crash(silently=seed % 2 == 0)
            send_some(two.a, two.b, 5)
            two.run(20.0)
            two.b.start([two.a.hint()])
            two.a.hear_of(two.b.hint())
            two.world.run_until(lambda t=two: len(t.came(t.b, t.a)) == 5, 0.1, 0.005)


def test_a_link_that_is_dead_at_its_other_end_gives_way_to_one_that_lives() -> None:
    for seed in range(10):
        with pair(seed) as two:
            two.run(3.0)
            two.a.crash()
            two.run(10.0)
            two.a.start()  # it knows of nobody by discovery, so it is the other who dials
            two.b.hear_of(two.a.hint())
            two.run(2.0)
            two.network.break_links("n0", "n1", unseen_by="n0")
            two.run(2.0)
            send_some(two.a, two.b, 3)
            two.settle(5.0)


class Deaf(SimMesh):
    """The answers of one node are lost."""

    deaf_to = ""

    def loses(self, node: SimNode, frame: Frame) -> bool:
        return node.name == self.deaf_to and isinstance(frame, MailAck)


def test_a_lost_greeting_does_not_let_false_dedup_in() -> None:
    for seed in range(10):
        mesh = Deaf(seed)
        with pair(seed, small=False, mesh=mesh) as two:
            two.put_back(two.a, backup_after(two, 20, 20))
            mesh.deaf_to = "n1"
            send_some(two.a, two.b, 40)
            two.link()
            two.run(4.0)
            mesh.deaf_to = ""
            two.settle(LASTING_S)


# -- a crash at every moment ----------------------------------------------------------------------


class CrashAt(SimMesh):
    """One node loses power the k-th time that it comes to such a place, and is back soon."""

    def __init__(self, side: str, where: str, at: int) -> None:
        super().__init__(7, DeliveryConfig(unread_max=12))
        self.side, self.where, self.at, self.reached = side, where, at, 0

    def power_fails(self, node: SimNode, where: str) -> bool:
        if (node.name, where) != (self.side, self.where):
            return False
        self.reached += 1
        if self.reached == self.at:
            self.world.plan(0.05, self.back, node)
        return self.reached == self.at

    def back(self, node: SimNode) -> None:
        if node.engine is None:
            node.start()
            self.discover()


def an_afternoon(two: Pair) -> None:
    """Mail both ways, refused, cancelled and expired, for one who is here, away and back."""
    a, b = two.a, two.b
    send_some(a, b, 5)
    send_some(b, a, 2)
    a.send(b.agent, "with a file", files=[a.blobs.machine.put(b"0123456789")])
    two.run(0.1)
    a.send(b.agent, "", kind=RECEIPT_KIND)
    a.send(b.agent, "gone in a moment", ttl_s=0.2)
    send_some(a, b, 1)
    two.part()
    two.run(0.3)
    a.keep_house()
    send_some(a, b, 4)
    two.run(0.1)
    a.withdraw(b.agent, MessageState.CANCELLED)
    two.run(0.1)
    two.meet()
    two.run(1.1)
    b.deal_with(20)
    send_some(b, a, 1)
    two.run(0.1)


def a_bad_morning(two: Pair) -> None:
    """As an afternoon, and then with the sender's disk of the day before."""
    yesterday = two.a.disk.copy()
    an_afternoon(two)
    two.put_back(two.a, yesterday)
    send_some(two.a, two.b, 9)
    two.run(0.1)
    two.meet()
    two.run(0.3)
    send_some(two.a, two.b, 2)
    two.run(0.3)


def crash_everywhere(
    side: str, where: str, day: Callable[[Pair], None], ends: Iterable[int]
) -> int:
    """Run the day once for each such place, crashing there; how many there were."""
    for at in ends:
        mesh = CrashAt(side, where, at)
        with pair(7, mesh=mesh) as two:
            day(two)
            two.mesh.heal()
            two.settle()
        if mesh.reached < at:
            return at - 1
    raise AssertionError("there is no end of commits")


@pytest.mark.parametrize("day", [an_afternoon, a_bad_morning])
@pytest.mark.parametrize("where", ["before a commit", "after a commit", "between two effects"])
@pytest.mark.parametrize("side", ["n0", "n1"], ids=["sender", "recipient"])
def test_a_crash_at_any_commit_loses_nothing(
    side: str, where: str, day: Callable[[Pair], None], long: bool
) -> None:
    step = 1 if long or where != "between two effects" else 4
    assert crash_everywhere(side, where, day, range(1, 2000, step)) >= 9


# -- disks ----------------------------------------------------------------------------------------


def test_a_commit_that_takes_10_s_makes_nobody_suspect_and_chunks_flow() -> None:
    for seed in range(10):
        with pair(seed, count=3) as two:
            for node in two.mesh.nodes:
                node.faults = DiskFaults(commit_s=(10.0, 10.0), at_once=0.0)
            send_some(two.a, two.b, 3)
            data = random.Random(seed).randbytes(160)
            two.a.send(two.b.agent, "a file", files=[two.a.blobs.machine.put(data)])
            for _ in range(60):
                two.run(1.0)
                views = {state for node in two.mesh.nodes for state in node.view().values()}
                assert views == {PeerState.ALIVE}
            two.settle(LASTING_S)


def test_a_full_disk_refuses_and_a_well_one_goes_on_where_it_was() -> None:
    for seed in range(10):
        with pair(seed) as two:
            send_some(two.a, two.b, 3)
            two.run(1.0)
            two.b.faults.is_full = True
            send_some(two.a, two.b, 5)
            assert not send_some(two.b, two.a, 1) or not two.b.accepted[two.a.agent]
            two.run(30.0)
            assert len(two.came(two.b, two.a)) == 3
            assert two.a.view()[two.b.agent] is PeerState.ALIVE
            two.b.faults.is_full = False
            two.settle()
            assert len(two.came(two.b, two.a)) == 8


def test_a_database_of_another_day_loses_nothing_to_false_dedup(seeds: range) -> None:
    for seed in seeds:
        restored_databases(seed)


@pytest.mark.parametrize("scenario", [backup_twice, backup_and_spool, backup_before_cancel])
def test_a_backup_never_makes_new_mail_pass_for_old(scenario: Callable[[int], None]) -> None:
    for seed in range(30):
        scenario(seed)


# -- limits, clocks, and those who do not come back -----------------------------------------------


def test_a_full_inbox_holds_senders_back_and_lets_them_on() -> None:
    for seed in range(10):
        with pair(seed, seed % 2 == 0, 3, DeliveryConfig(unread_max=10)) as two:
            for sender in (two.b, *two.others):
                send_some(sender, two.a, 30)
            for _ in range(30):
                two.run(1.0)
                assert two.a.disk.mail.unread() == 10
            assert two.sent(Mail) < 100, "who was told to wait waits"
            two.a.deal_with(3)
            two.run(0.2)
            assert two.a.disk.mail.unread() == 10, "who waits is told as soon as there is room"
            two.settle()


def test_a_full_outbox_refuses_and_takes_again() -> None:
    with pair(3, config=DeliveryConfig(pending_max=5)) as two:
        two.part()
        assert len(send_some(two.a, two.b, 8)) == 5
        two.meet()
        two.settle()
        assert len(send_some(two.a, two.b, 5)) == 5
        two.settle()
        assert len(two.came(two.b, two.a)) == 10


def test_two_whose_inboxes_and_outboxes_are_full_can_still_read() -> None:
    with pair(3, config=DeliveryConfig(pending_max=20, unread_max=5)) as two:
        for one, other in ((two.a, two.b), (two.b, two.a)):
            send_some(one, other, 5)
        two.run(1.0)
        for one, other in ((two.a, two.b), (two.b, two.a)):
            assert len(send_some(one, other, 30)) == 20
        two.run(5.0)
        two.settle()
        assert len(two.came(two.a, two.b)) == len(two.came(two.b, two.a)) == 25


def test_a_full_outbox_does_not_keep_a_message_with_files_from_ending() -> None:
    with pair(3, count=3, config=DeliveryConfig(pending_max=5)) as two:
        (c,) = two.others
        c.crash(silently=True)
        assert len(send_some(two.b, c, 8)) == 5
        two.a.send(two.b.agent, "a file", files=[two.a.blobs.machine.put(b"0123456789")])
        two.run(5.0)
        (entry,) = two.a.disk.mail.out.values()
        assert entry.state == MessageState.DELIVERED


def test_mail_for_one_who_never_returns_waits_in_sight_or_expires() -> None:
    with pair(5) as two:
        a, b = two.a, two.b
        b.crash()
        two.run(10.0)
        (forever,) = a.send(b.agent, "when you come back")
        (brief,) = a.send(b.agent, "lunch?", ttl_s=HOUR_S)
        for _ in range(4):
            two.run(HOUR_S)
            a.keep_house()
        a.crash()
        a.start()
        states = {forever: MessageState.QUEUED, brief: MessageState.EXPIRED}
        assert a.disk.mail.states() == states
        assert a.states[brief] == [MessageState.EXPIRED]
        assert a.engine is not None
        assert a.engine.delivery is not None
        assert a.engine.delivery.sending.pending == 2, "its number still has to be told"
        before = two.sent(Mail)
        two.run(HOUR_S)
        assert two.sent(Mail) == before, "nothing is tried for those who have no link"


@pytest.mark.parametrize("jump_ms", [DAY_MS, -DAY_MS])
def test_a_clock_that_jumps_changes_neither_order_nor_delivery(jump_ms: int) -> None:
    for seed in range(10):
        with pair(seed) as two:
            for _ in range(10):
                for node in two.mesh.nodes:
                    node.clock_skew_ms = random.Random(two.world.now).choice([0, jump_ms])
                send_some(two.a, two.b, 3)
                send_some(two.b, two.a, 3)
                two.run(0.05)
                two.a.crash()
                two.a.start([two.b.hint()])
            two.settle()
            assert two.a.accepted[two.b.agent] == two.came(two.b, two.a)


def test_a_clock_that_jumps_ahead_expires_what_it_must_and_nothing_else() -> None:
    with pair(9) as two:
        a = two.a
        two.part()
        (lasting,), (brief,) = (
            a.send(two.b.agent, "no hurry"), a.send(two.b.agent, "now or never", ttl_s=HOUR_S)
        )  # fmt: skip
        two.run(1.0)
        a.clock_skew_ms = -DAY_MS
        a.keep_house()
        two.run(1.0)
        assert set(a.disk.mail.states().values()) == {MessageState.QUEUED}
        a.clock_skew_ms = DAY_MS
        a.keep_house()
        a.keep_house()
        two.run(1.0)
        two.mesh.heal()
        two.settle()
        assert a.disk.mail.states() == {lasting: MessageState.DONE, brief: MessageState.EXPIRED}
        assert two.came(two.b, two.a) == [lasting]


# -- liars ----------------------------------------------------------------------------------------


def test_forged_late_and_repeated_answers_change_nothing() -> None:
    for seed in range(10):
        rng = random.Random(seed)
        with pair(seed, seed % 2 == 0) as two:
            link = two.a.engine and two.a.engine.links.link_to(two.b.agent)
            assert link is not None
            seen: list[MailAck] = []
            for _ in range(30):
                send_some(two.a, two.b, rng.randint(0, 3))
                forged = forged_answers(two.a, two.b.agent)
                for ack in [*forged, *rng.sample(seen, min(3, len(seen)))]:
                    if rng.random() < 0.5:
                        two.a.link_received(link, encode(ack))
                two.run(rng.choice([0, 0.02]))
                mark = list(two.b.disk.mail.marks.values())[-1:]
                seen += [MailAck(each.epoch, each.seq, each.last) for each in mark]
                check_bounds(two.mesh)
            two.settle(LASTING_S)
            assert two.a.accepted[two.b.agent] == two.came(two.b, two.a)


def test_a_liar_makes_us_start_over_once_in_a_time_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sending, "START_OVER_S", 100.0)
    with pair(4) as two:
        a = two.a
        assert a.engine is not None
        assert a.engine.delivery is not None
        epochs = set()
        for _ in range(100):
            epochs.add(a.disk.mail.epoch)
            send_some(a, two.b, 1)
            link = a.engine.links.link_to(two.b.agent)
            assert link is not None
            numbers = a.engine.delivery.numbers(two.b.agent)
            a.link_received(link, encode(MailAck(numbers[0], 10**6, bytes(HASH_BYTES))))
            two.run(5.0)
        two.settle(LASTING_S)
        assert 2 <= len(epochs) <= 7
        assert a.engine.delivery.refused["numbers from another day"] == 100


def test_lies_to_one_who_has_nothing_to_send_change_nothing() -> None:
    with pair(4) as two:
        lie(two.a, two.b)
        two.settle()
        assert not two.a.disk.mail.out
