"""Blobs arrive whole, once, and within the window, whatever happens to links, disks and sources.

Each run injects faults from a seed and checks safety at every step; then it heals and demands
that everything wanted is there, byte for byte, for a bounded number of chunks moved.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from meshagent.core.effects import Effect
from meshagent.core.frames import BlobAsk, BlobChunk, BlobMore, BlobStop, Frame
from meshagent.core.pulling import Pulling, PullingConfig
from meshagent.core.serving import Serving, ServingConfig
from meshagent.core.types import AgentId
from meshagent.simulator.bulk import Bulk, small_chunks

A, B, C, D = (AgentId(f"n{at}") for at in range(4))
HEALED_S = 900.0  # several of the longest pauses
CAUGHT_WITHIN = 40  # seeds
WINDOW = PullingConfig().window_max
READS_PER_PULL = ServingConfig().reads_per_pull_max


@pytest.fixture(autouse=True)
def _small_chunks() -> Iterator[None]:
    with small_chunks():
        yield


@contextmanager
def transcript(bulk: Bulk) -> Iterator[None]:
    try:
        yield
    except BaseException:
        print(bulk.world.transcript())
        raise


class Trouble:
    """Two who pull from two or three who have it, one of which may lie or leave for good."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        alike = self.rng.random() < 0.3
        self.bulk = Bulk(seed, [0, 0 if alike else 1, 2, 3], pulling=PullingConfig(stall_s=3.0))
        self.excused = 0
        self.chunks = 0
        self.gone: set[AgentId] = set()
        nodes = self.bulk.nodes
        nodes[D].lies = self.rng.random() < 0.3
        for _ in range(self.rng.randint(1, 6)):
            number = self.rng.choice((0, 1, 1, 2, 5, 17, 40))
            sha256, size = self.bulk.blob(number, C, D)
            for puller in (A, B):
                if self.rng.random() < 0.6:
                    nodes[puller].want(sha256, size, [C, D, A, B], C)
                    self.chunks += number

    def run(self) -> None:
        with transcript(self.bulk):
            for _ in range(25):
                self.rng.choice(self.steps())()
                self.bulk.world.run(self.rng.choice((0.0, 0.005, 0.02, 0.02, 0.5, 4.0)))
                self.check()
            self.heal()
            self.bulk.world.run_until(self.bulk.settled, HEALED_S, step_s=0.5)
            self.check()
            self.check_moved()

    def steps(self) -> list[Callable[[], None]]:
        return [self.link, self.link, self.link, self.cut, self.crash, self.disks, self.links,
                self.mute, self.leave]  # fmt: skip

    def pair(self) -> tuple[AgentId, AgentId]:
        one, other = self.rng.sample(sorted(set(self.bulk.nodes) - self.gone), 2)
        return one, other

    def link(self) -> None:
        one, other = self.pair()
        self.bulk.link(one, other)

    def cut(self) -> None:
        self.bulk.unlink(*self.pair())

    def crash(self) -> None:
        node = self.bulk.nodes[self.pair()[0]]
        if node.engine is not None:
            node.crash()
        node.start()

    def disks(self) -> None:
        node = self.bulk.nodes[self.pair()[0]]
        node.store.full = self.rng.random() < 0.4
        node.slow = self.rng.random() < 0.4

    def links(self) -> None:
        self.bulk.full = self.rng.choice((0.0, 0.0, 0.1, 0.5))
        self.bulk.delay_s = self.rng.choice((0.001, 0.01, 0.1))

    def mute(self) -> None:
        self.bulk.nodes[self.rng.choice((C, D))].mute = self.rng.random() < 0.5

    def leave(self) -> None:
        """One who has everything is gone for good, when the other does not lie."""
        if self.rng.random() < 0.2 and not self.gone and not self.bulk.nodes[D].lies:
            leaver = self.rng.choice((C, D))
            self.gone.add(leaver)
            if self.bulk.nodes[leaver].engine is not None:
                self.bulk.nodes[leaver].crash()

    def heal(self) -> None:
        self.bulk.world.say("heals")
        self.bulk.full, self.bulk.delay_s = 0.0, 0.002
        for name, node in self.bulk.nodes.items():
            node.slow = node.mute = node.store.full = False
            if node.engine is None and name not in self.gone:
                node.start()
        for a in self.bulk.nodes:
            for b in self.bulk.nodes:
                if a < b and not {a, b} & self.gone:
                    self.bulk.link(a, b)

    def check(self) -> None:
        assert self.bulk.most_in_flight <= WINDOW, "more in flight than the window"
        for node in self.bulk.nodes.values():
            assert not node.failed
            if node.engine is None:
                continue
            pulling = node.engine._pulling
            held = sum(each.held for each in pulling._active.values())
            assert held == pulling._held <= WINDOW
            assert len(pulling._active) <= PullingConfig().active_max
            assert node.engine._serving._reading <= ServingConfig().reads_max

    def check_moved(self) -> None:
        """All that moved twice has an excuse."""
        bulk = self.bulk
        stalls = sum(n.engine.refused["stalled"] for n in bulk.nodes.values() if n.engine)
        excused = (bulk.cuts + stalls + self.excused) * WINDOW
        excused += bulk.refusals * READS_PER_PULL
        excused += sum(each.lost_chunks for each in bulk.nodes.values())
        assert bulk.moved <= 1.1 * self.chunks + excused, "more was moved than needed"


def whole_trouble(seed: int) -> None:
    with small_chunks():
        Trouble(seed).run()


def test_whatever_happens_every_blob_arrives_whole(seeds: range) -> None:
    for seed in seeds:
        whole_trouble(seed)


def pull_one(
    bulk: Bulk, number: int, holders: list[AgentId], sources: list[AgentId] | None = None
) -> bytes:
    """A wants a blob of that many chunks; its name."""
    sha256, size = bulk.blob(number, *holders)
    bulk.nodes[A].want(sha256, size, sources or holders, holders[0])
    return sha256


# -- speed and fairness ---------------------------------------------------------------------------


def test_ten_cuts_and_crashes_of_either_side_move_little_twice() -> None:
    bulk = Bulk(1, [0, 1])
    with transcript(bulk):
        bulk.link(A, B)
        pull_one(bulk, 1200, [B])
        for at in range(10):
            bulk.world.run(0.1)
            if at % 3:
                bulk.nodes[A if at % 3 == 1 else B].crash()
                bulk.nodes[A if at % 3 == 1 else B].start()
            bulk.link(A, B)
        bulk.world.run_until(bulk.settled, 60.0)
        assert bulk.cuts == 10
        assert 1200 <= bulk.moved < 1.1 * 1200 + 10 * WINDOW
        assert bulk.moved - bulk.nodes[A].lost_chunks <= 1200 + 10 * WINDOW


def test_a_small_blob_overtakes_a_large_one() -> None:
    bulk = Bulk(2, [0, 1])
    with transcript(bulk):
        bulk.link(A, B)
        large = pull_one(bulk, 4000, [B])
        bulk.world.run(1.0)
        assert large not in bulk.nodes[A].ready
        small, began = pull_one(bulk, 1, [B]), bulk.world.now
        bulk.world.run_until(lambda: small in bulk.nodes[A].ready, 60.0, step_s=0.01)
        chunk_times = (bulk.nodes[A].ready[small] - began) / bulk.chunk_s
        assert chunk_times <= 3 * WINDOW
        bulk.world.run_until(bulk.settled, 60.0)


def test_a_small_blob_finds_a_place_among_many_large_ones() -> None:
    bulk = Bulk(3, [0, 1])
    with transcript(bulk):
        bulk.link(A, B)
        large = [pull_one(bulk, 1000, [B]) for _ in range(12)]
        bulk.world.run(1.0)
        small, began = pull_one(bulk, 1, [B]), bulk.world.now
        bulk.world.run_until(lambda: small in bulk.nodes[A].ready, 60.0, step_s=0.01)
        assert (bulk.nodes[A].ready[small] - began) / bulk.chunk_s <= 3 * WINDOW
        assert not set(large) & set(bulk.nodes[A].ready)


def test_an_endless_row_of_small_blobs_does_not_starve_a_large_one() -> None:
    bulk = Bulk(4, [0, 1])
    with transcript(bulk):
        bulk.link(A, B)
        large = pull_one(bulk, 400, [B])
        for _ in range(300):
            for _ in range(6):
                pull_one(bulk, 2, [B])
            bulk.world.run(0.02)
        assert large in bulk.nodes[A].ready


def test_one_blob_alone_fills_the_link() -> None:
    bulk = Bulk(5, [0, 1])
    with transcript(bulk):
        bulk.link(A, B)
        pull_one(bulk, 2000, [B])
        took = bulk.world.run_until(bulk.settled, 60.0, step_s=0.01)
        assert took <= 1.25 * 2000 * bulk.chunk_s
        assert bulk.moved == 2000


def test_two_pullers_get_equal_parts_of_one_source() -> None:
    bulk = Bulk(6, [0, 1, 2])
    with transcript(bulk):
        bulk.link(A, C)
        bulk.link(B, C)
        sha256, size = bulk.blob(1000, C)
        bulk.nodes[A].want(sha256, size, [C], C)
        bulk.nodes[B].want(sha256, size, [C], C)
        bulk.world.run(0.5)
        parts = [bulk.nodes[each].store.received(sha256) for each in (A, B)]
        assert min(parts) > 0.8 * max(parts) > 0


def test_a_slow_disk_slows_its_source() -> None:
    bulk = Bulk(7, [0, 1])
    with transcript(bulk):
        bulk.nodes[A].slow = True
        bulk.link(A, B)
        pull_one(bulk, 200, [B])
        bulk.world.run(2.0)
        assert bulk.moved <= bulk.nodes[A].store.received(next(iter(bulk.nodes[A].wanted))) + WINDOW
        bulk.world.run_until(bulk.settled, 600.0)
        assert bulk.moved == 200


# -- sources --------------------------------------------------------------------------------------


def test_a_liar_is_found_out_and_another_asked() -> None:
    for seed in range(20):
        bulk = Bulk(seed, [0, 1, 2])
        with transcript(bulk):
            bulk.nodes[B].lies = True
            bulk.link(A, B)
            sha256 = pull_one(bulk, 30, [B, C])
            bulk.world.run(random.Random(seed).choice((0.005, 0.02, 1.0)))
            bulk.link(A, C)
            if seed % 2:
                bulk.unlink(A, B)
                bulk.world.run(0.02)
                bulk.link(A, B)
            bulk.world.run_until(lambda: sha256 in bulk.nodes[A].ready or bool(bulk.nodes[A].failed),
                                 600.0)  # fmt: skip
            if bulk.nodes[A].failed:
                # The other one had never been heard of when the granter turned out to lie.
                continue
            assert bulk.moved <= 30 * 4 + 3 * WINDOW


def test_a_lying_granter_alone_ends_in_a_failure_that_says_so() -> None:
    bulk = Bulk(1, [0, 1])
    with transcript(bulk):
        bulk.nodes[B].lies = True
        bulk.link(A, B)
        sha256 = pull_one(bulk, 30, [B])
        bulk.world.run(5.0)
        assert "wrong contents" in bulk.nodes[A].failed[sha256]
        assert bulk.moved == 30
        assert not bulk.nodes[A].store.partials
        assert not bulk.nodes[A].store.open


def test_who_stalls_is_left_for_another() -> None:
    bulk = Bulk(2, [0, 1, 2])
    with transcript(bulk):
        bulk.link(A, B)
        bulk.link(A, C)
        pull_one(bulk, 300, [B, C])
        bulk.world.run(0.1)
        bulk.nodes[B].mute = True
        took = bulk.world.run_until(bulk.settled, 60.0)
        assert took <= PullingConfig().stall_s + 2.0
        assert bulk.moved <= 300 + 2 * WINDOW


def test_what_a_neighbour_has_is_not_moved() -> None:
    bulk = Bulk(3, [0, 0, 0, 1])
    with transcript(bulk):
        for puller in (A, B, C):
            bulk.link(puller, D)
        sha256, size = bulk.blob(200, D)
        for puller in (A, B, C):
            bulk.nodes[puller].want(sha256, size, [D], D)
        bulk.world.run_until(bulk.settled, 120.0)
        assert bulk.moved == 200


def test_a_full_disk_is_waited_for_in_sight() -> None:
    bulk = Bulk(4, [0, 1])
    with transcript(bulk):
        node = bulk.nodes[A]
        bulk.link(A, B)
        sha256 = pull_one(bulk, 300, [B])
        bulk.world.run(0.1)
        node.store.full = True
        bulk.world.run(100.0)
        assert node.engine is not None
        received, size, reason = node.engine.progress(sha256) or (0, 0, "")
        assert 0 < received < size
        assert reason.startswith("disk full")
        assert bulk.moved < 150
        node.store.full = False
        bulk.world.run_until(bulk.settled, PullingConfig().longest_pause_s + 2.0)
        assert bulk.moved <= 300 + WINDOW


def test_a_quota_ends_it_and_an_unwanted_one_leaves_nothing() -> None:
    bulk = Bulk(5, [0, 1])
    with transcript(bulk):
        node = bulk.nodes[A]
        node.quota = 100
        bulk.link(A, B)
        too_large, fits = pull_one(bulk, 300, [B]), pull_one(bulk, 20, [B])
        bulk.world.run(0.01)
        node.unwant(fits)
        bulk.world.run(5.0)
        assert node.failed == {too_large: "quota"}
        assert not node.ready
        assert not node.store.partials
        assert not node.store.open
        assert node.engine is not None
        assert node.engine.progress(fits) is None
        assert not node.engine._pulling._wants
        assert not bulk.nodes[B].engine._serving._clients  # type: ignore[union-attr]


def test_mail_that_waits_for_an_absent_source_costs_nothing() -> None:
    bulk = Bulk(6, [0, 1])
    with transcript(bulk):
        for _ in range(50):
            pull_one(bulk, 3, [B])
        bulk.world.run(1000.0)
        before = bulk.world.events
        bulk.world.run(3600.0)
        assert bulk.world.events - before < 50 * 60
        bulk.link(A, B)
        bulk.world.run_until(bulk.settled, 5.0)
        assert bulk.moved == 150


# -- hostile peers --------------------------------------------------------------------------------


def test_ten_thousand_asks_cost_bounded_memory_and_others_are_served() -> None:
    bulk = Bulk(7, [0, 1, 2])
    with transcript(bulk):
        bulk.link(A, B)
        bulk.link(C, B)
        sha256, size = bulk.blob(100, B)
        hostile = bulk.nodes[C]
        bulk.nodes[C].engine = None
        for pull in range(10_000):
            bulk.carry(C, B, BlobAsk(pull, sha256, size, B, b"", 0, 16))
        pull_one(bulk, 300, [B])
        bulk.world.run_until(bulk.settled, 10.0)
        serving = bulk.nodes[B].engine._serving  # type: ignore[union-attr]
        assert serving._count <= ServingConfig().per_peer_max + 8
        assert hostile.engine is None
        assert len(serving._unsent_ends) <= 256


def test_hostile_frames_of_every_kind_change_nothing() -> None:
    for seed in range(20):
        bulk, rng = Bulk(seed, [0, 1, 2]), random.Random(seed)
        with transcript(bulk):
            for a, b in ((A, B), (A, C), (B, C)):
                bulk.link(a, b)
            sha256 = pull_one(bulk, 200, [B])
            for _ in range(150):
                victim = bulk.nodes[rng.choice((A, B))]
                victim.receive(hostile_frame(rng, bulk, sha256), C)
                bulk.world.run(0.001)
            bulk.world.run_until(bulk.settled, 60.0)
            assert bulk.moved <= 200 + 2
            assert bulk.most_in_flight <= WINDOW


def hostile_frame(rng: random.Random, bulk: Bulk, sha256: bytes) -> Frame:
    """Anything, with numbers that may be right."""
    engine = bulk.nodes[A].engine
    assert engine is not None
    pull = rng.choice([*engine._pulling._pulls, 0, 1, 2**63 - 1])
    number = rng.choice((0, 1, 5, 63, 64, 2**40, 2**63 - 1))
    return rng.choice((
        BlobChunk(pull, number, rng.randbytes(rng.choice((0, 3, 4, 5)))),
        BlobMore(pull, number),
        BlobStop(pull),
        BlobAsk(pull, sha256, number, C, b"", rng.choice((0, number)), number),
    ))  # fmt: skip


# -- tests of these tests: each mutant breaks a promise, and must be found ------------------------


opened, chunk, wrote, not_sent = Pulling.opened, Pulling._chunk, Pulling.wrote, Pulling.not_sent
share_out, rewind = Pulling._share_out, Serving.not_sent


def resumes_from_zero(self: Pulling, sha256: bytes, received: int, now: float) -> list[Effect]:
    return opened(self, sha256, 0, now)


def credits_on_arrival(self: Pulling, frame: BlobChunk, peer: AgentId, now: float) -> list[Effect]:
    effects = chunk(self, frame, peer, now)
    want = self._pulls.get(frame.pull)
    if want is not None and effects:
        more = min(1, want.chunks - want.upto)
        self._credit(want, more)
        effects += self._more(want, 0, now)
    return effects


def small_disaster(seed: int) -> None:
    """A slow disk: what comes faster than it is written must not pile up."""
    with small_chunks():
        bulk = Bulk(seed, [0, 1])
        bulk.nodes[A].slow = True
        bulk.link(A, B)
        pull_one(bulk, 100, [B])
        bulk.world.run_until(bulk.settled, 600.0)
        assert bulk.most_in_flight <= WINDOW, "more in flight than the window"


MUTANTS: dict[str, tuple[Callable[[int], None], type, str, object]] = {
    "gives credit on arrival": (small_disaster, Pulling, "_chunk", credits_on_arrival),
    "resumes from zero": (whole_trouble, Pulling, "opened", resumes_from_zero),
    "forgets what the link did not take": (
        whole_trouble, Pulling, "not_sent", lambda *args: None,
    ),
    "loses a chunk that the link did not take": (
        whole_trouble, Serving, "not_sent", lambda *args: None,
    ),
    "never leaves who stalls": (whole_trouble, Pulling, "_owes", lambda self, want: False),
    "asks a liar again": (whole_trouble, Pulling, "wrong", lambda self, sha256, now: (
        self._close(self._wants[sha256], discard=True) + self._go_on(now)
    )),
    "keeps a dead pull's credit": (
        whole_trouble, Pulling, "_take_back",
        lambda self, want: (self._pulls.pop(want.pull), setattr(want, "pull", 0)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_promise_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, owner, attribute, mutant = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, mutant)
    monkeypatch.setattr("simulated.test_transfer.HEALED_S", 200.0, raising=False)
    for seed in range(CAUGHT_WITHIN):
        try:
            scenario(seed)
        except AssertionError:
            return
    raise AssertionError(f"a node that {name} passes")


def test_the_same_seed_makes_the_same_run() -> None:
    runs = []
    for _ in range(2):
        trouble = Trouble(11)
        trouble.run()
        runs.append(
            (trouble.bulk.world.transcript(), trouble.bulk.moved, trouble.bulk.world.events)
        )
    assert runs[0] == runs[1]
