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
from meshagent.core.model.peers import AgentId
from meshagent.core.transfer.credit_window import CreditWindow
from meshagent.core.transfer.download import Download
from meshagent.core.transfer.downloads import DownloadConfig, Downloads
from meshagent.core.transfer.uploads import UploadConfig, Uploads
from meshagent.core.wire.frames import BlobAsk, BlobChunk, BlobMore, BlobStop, Frame
from meshagent.simulator.bulk import Bulk, small_chunks

A, B, C, D = (AgentId(f"n{at}") for at in range(4))
HEALED_S = 900.0  # several of the longest pauses
CAUGHT_WITHIN = 40  # seeds
WINDOW = DownloadConfig().window_max
READS_PER_PULL = UploadConfig().reads_per_upload_max


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
        self.bulk = Bulk(seed, [0, 0 if alike else 1, 2, 3], pulling=DownloadConfig(stall_s=3.0))
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
            node.slow = node.store.full = False
            node.mute = node.mute and name == D and C not in self.gone
            if node.engine is None and name not in self.gone:
                node.start()
        for a in self.bulk.nodes:
            for b in self.bulk.nodes:
                if a < b and not {a, b} & self.gone and frozenset((a, b)) not in self.bulk.links:
                    self.bulk.link(a, b)

    def check(self) -> None:
        assert self.bulk.most_in_flight <= WINDOW, "more in flight than the window"
        for node in self.bulk.nodes.values():
            assert not node.failed
            if node.engine is None:
                continue
            downloads = node.engine.downloads
            held = sum(each.held for each in downloads.slots.active.values())
            assert held == downloads.window.used <= WINDOW
            assert len(downloads.slots.active) <= DownloadConfig().active_max
            assert node.engine.uploads._reading <= UploadConfig().reads_max

    def check_moved(self) -> None:
        """All that moved twice has an excuse."""
        bulk = self.bulk
        stalls = sum(n.engine.refused["stalled"] for n in bulk.nodes.values() if n.engine)
        excused = (bulk.cuts + stalls) * WINDOW
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


def ten_cuts(seed: int) -> None:
    """The link breaks ten times, with the puller's or the source's process or alone."""
    with small_chunks():
        bulk, rng = Bulk(seed, [0, 1]), random.Random(seed)
        with transcript(bulk):
            bulk.link(A, B)
            pull_one(bulk, 1200, [B])
            for at in range(10):
                bulk.world.run(rng.uniform(0.05, 0.12))
                if at % 3:
                    node = bulk.nodes[A if at % 3 == 1 else B]
                    node.crash()
                    node.start()
                bulk.link(A, B)
            bulk.world.run_until(bulk.settled, 60.0)
            assert bulk.cuts == 10
            assert 1200 <= bulk.moved < 1.1 * 1200 + 10 * WINDOW, "too much was moved twice"
            assert bulk.moved - bulk.nodes[A].lost_chunks <= 1200 + 10 * WINDOW


def test_ten_cuts_and_crashes_of_either_side_move_little_twice() -> None:
    for seed in range(5):
        ten_cuts(seed)


def full_links(seed: int) -> None:
    """Links that are full most of the time, and nothing else: nobody has to find a stall."""
    with small_chunks():
        bulk, rng = Bulk(seed, [0, 1, 2]), random.Random(seed)
        with transcript(bulk):
            bulk.link(A, B)
            bulk.link(A, C)
            bulk.full = rng.choice((0.05, 0.3, 0.7))
            for _ in range(12):
                pull_one(bulk, rng.choice((1, 2, 20, 40)), [rng.choice((B, C))])
            bulk.world.run_until(bulk.settled, DownloadConfig().stall_s - 1.0)
            engine = bulk.nodes[A].engine
            assert engine is not None
            assert not engine.refused["stalled"]


def test_a_full_link_loses_neither_credit_nor_chunk() -> None:
    for seed in range(20):
        full_links(seed)


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
        for _ in range(50):
            pull_one(bulk, 2, [B])
        large = pull_one(bulk, 50, [B])
        for _ in range(40):
            for _ in range(15):
                pull_one(bulk, 2, [B])
            bulk.world.run(0.02)
        assert large in bulk.nodes[A].ready
        assert len(bulk.nodes[A].wanted) > len(bulk.nodes[A].ready) + 100, "the row never ended"


def test_one_blob_alone_fills_the_link() -> None:
    bulk = Bulk(5, [0, 1])
    with transcript(bulk):
        bulk.link(A, B)
        pull_one(bulk, 2000, [B])
        took = bulk.world.run_until(bulk.settled, 60.0, step_s=0.01)
        assert took <= 1.25 * 2000 * bulk.chunk_s
        assert bulk.moved == 2000


def test_blobs_that_are_pulled_at_once_get_equal_parts() -> None:
    bulk = Bulk(8, [0, 1])
    with transcript(bulk):
        bulk.link(A, B)
        names = [pull_one(bulk, 500, [B]) for _ in range(4)]
        bulk.world.run(0.8)
        parts = [bulk.nodes[A].store.received(each) for each in names]
        assert min(parts) > 0.8 * max(parts) > 0


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


def liar(seed: int) -> None:
    """The granter is away; one that is here says it has the blob, and lies, and comes and goes."""
    with small_chunks():
        bulk, rng = Bulk(seed, [0, 1, 2]), random.Random(seed)
        with transcript(bulk):
            bulk.nodes[B].lies = True
            if early := rng.random() < 0.5:
                bulk.link(A, C)
            pull_one(bulk, 30, [C, B])
            bulk.world.run(0.015)
            bulk.unlink(A, C)
            for _ in range(5):
                bulk.link(A, B)
                bulk.world.run(rng.choice((0.01, 0.5, 2.0)))
            rounds = 30 * (1 + early) + bulk.cuts * WINDOW
            assert bulk.moved <= rounds, "who lied is asked again"
            bulk.link(A, C)
            bulk.world.run_until(bulk.settled, 600.0)
            assert bulk.moved <= rounds + 30 + WINDOW


def test_a_liar_is_found_out_and_not_asked_again() -> None:
    for seed in range(30):
        liar(seed)


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


def silent_source(seed: int) -> None:
    """One that has the blob falls silent in the middle; its link stays up."""
    with small_chunks():
        bulk = Bulk(seed, [0, 1, 2])
        with transcript(bulk):
            bulk.link(A, B)
            bulk.link(A, C)
            pull_one(bulk, 300, [B, C])
            bulk.world.run(0.1)
            bulk.nodes[B].mute = True
            bulk.world.run_until(bulk.settled, DownloadConfig().stall_s + 2.0)
            assert bulk.moved <= 300 + 2 * WINDOW


def test_who_stalls_is_left_for_another() -> None:
    silent_source(2)


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
        bulk.world.run_until(bulk.settled, DownloadConfig().longest_pause_s + 2.0)
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
        assert not len(node.engine.downloads.table)
        assert not bulk.nodes[B].engine.uploads._peers  # type: ignore[union-attr]


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
        serving = bulk.nodes[B].engine.uploads  # type: ignore[union-attr]
        assert serving._count <= UploadConfig().per_peer_max + 8
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
    pull = rng.choice([*engine.downloads.requests.numbers(), 0, 1, 2**63 - 1])
    number = rng.choice((0, 1, 5, 63, 64, 2**40, 2**63 - 1))
    return rng.choice((
        BlobChunk(pull, number, rng.randbytes(rng.choice((0, 3, 4, 5)))),
        BlobMore(pull, number),
        BlobStop(pull),
        BlobAsk(pull, sha256, number, C, b"", rng.choice((0, number)), number),
    ))  # fmt: skip


# -- tests of these tests: each mutant breaks a promise, and must be found ------------------------


opened, chunk = Downloads.opened, Downloads._chunk


def resumes_from_zero(self: Downloads, sha256: bytes, received: int, now: float) -> list[Effect]:
    return opened(self, sha256, 0, now)


def credits_on_arrival(
    self: Downloads, frame: BlobChunk, peer: AgentId, now: float
) -> list[Effect]:
    effects = chunk(self, frame, peer, now)
    download = self.requests.find(frame.pull)
    if download is not None and effects:
        more = min(1, download.chunks - download.upto)
        effects.append(self.requests.more(download, more, now))
    return effects


def blames_nobody(self: Downloads, sha256: bytes, now: float) -> list[Effect]:
    return self._close(self.table[sha256], discard=True) + self._continue(now)


def is_never_owed(self: Download) -> bool:
    return False


def does_nothing(*args: object) -> None:
    pass


def slow_disk(seed: int) -> None:
    """A slow disk: what comes faster than it is written must not pile up."""
    with small_chunks():
        bulk = Bulk(seed, [0, 1])
        bulk.nodes[A].slow = True
        bulk.link(A, B)
        pull_one(bulk, 100, [B])
        bulk.world.run_until(bulk.settled, 600.0)
        assert bulk.most_in_flight <= WINDOW, "more in flight than the window"


MUTANTS: dict[str, tuple[Callable[[int], None], type, str, object]] = {
    "gives credit on arrival": (slow_disk, Downloads, "_chunk", credits_on_arrival),
    "resumes from zero": (ten_cuts, Downloads, "opened", resumes_from_zero),
    "forgets what the link did not take": (full_links, Downloads, "not_sent", does_nothing),
    "loses a chunk that the link did not take": (full_links, Uploads, "not_sent", does_nothing),
    "never leaves who stalls": (silent_source, Download, "is_owed", is_never_owed),
    "asks a liar again": (liar, Downloads, "wrong", blames_nobody),
    "keeps a dead request's credit": (whole_trouble, CreditWindow, "take_back", does_nothing),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_promise_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, owner, attribute, mutant = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, mutant)
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
