"""Goal: files arrive whole, once, and within the window, fast and fairly, from whoever has them.

What happens when links, disks and processes fail at once is in test_safety.py. Chunks are a few
bytes long and take a millisecond each on a link.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from simulator.bounds import WINDOW, check_bounds
from simulator.scenarios import Pair

from meshagent.core.effects import Effect
from meshagent.core.model.message_states import MessageState
from meshagent.core.model.peers import AgentId
from meshagent.core.transfer.credit_window import CreditWindow
from meshagent.core.transfer.download import Download
from meshagent.core.transfer.downloads import DownloadConfig, Downloads
from meshagent.core.transfer.uploads import UploadConfig, Uploads
from meshagent.core.wire.codec import encode
from meshagent.core.wire.frames import BlobAsk, BlobChunk, BlobMore, BlobStop, Frame
from meshagent.simulator.blobs import Machine, random_blob
from meshagent.simulator.mesh import SimMesh
from meshagent.simulator.modes import transcript
from meshagent.simulator.network import Faults
from meshagent.simulator.node import SimNode
from meshagent.simulator.small_limits import SMALL_CHUNK_BYTES, small_chunks

CHUNK_S = 0.001
STALL_S = DownloadConfig().stall_s
CAUGHT_WITHIN = 20  # seeds


class Silent(SimMesh):
    """The chunks of one node are lost."""

    mute = ""

    def loses(self, node: SimNode, frame: Frame) -> bool:
        return node.name == self.mute and isinstance(frame, BlobChunk)


class Files(Pair):
    """Nodes that send files, all of them to `a`."""

    def __init__(self, mesh: SimMesh, count: int) -> None:
        super().__init__(mesh, count)
        self.network.payload_byte_s = CHUNK_S / SMALL_CHUNK_BYTES
        self.files: list[bytes] = []

    def send(self, source: SimNode, chunk_number: int, to: SimNode | None = None) -> bytes:
        """A message with a file of so many chunks; its name."""
        data = self.world.rng.randbytes(chunk_number * SMALL_CHUNK_BYTES)
        sha256 = source.blobs.machine.put(data)
        self.files.append(sha256)
        assert source.send((to or self.a).agent, "a file", files=[sha256])
        return sha256

    @property
    def moved(self) -> int:
        """How many chunks were put on links."""
        return self.sent(BlobChunk)

    def has(self, *files: bytes) -> bool:
        return set(files) <= self.a.blobs.ready.keys()

    def wait(self, limit_s: float, *files: bytes) -> float:
        """Until `a` has these, or all; how long that took."""
        took = self.world.run_until(lambda: self.has(*(files or self.files)), limit_s, 0.01)
        check_bounds(self.mesh)
        return took


@contextmanager
def files(
    seed: int, count: int = 2, mesh: SimMesh | None = None, machine: Machine | None = None
) -> Iterator[Files]:
    """A failure inside shows the seed and what happened; with `machine`, others share that one."""
    mesh = mesh or SimMesh(seed)
    with small_chunks(), transcript(mesh):
        some = Files(mesh, count)
        if machine is not None:
            some.others += mesh.add(2, machine)
            some.world.run_until(mesh.agree, 10.0)
        yield some


# -- speed and fairness ---------------------------------------------------------------------------


def ten_cuts(seed: int) -> None:
    """The link breaks ten times, with the puller's or the source's process or alone."""
    rng = random.Random(seed)
    with files(seed) as two:
        two.send(two.b, 1200)
        two.world.run(0.1)
        for at in range(10):
            if at % 3:
                node = two.a if at % 3 == 1 else two.b
                node.crash()
                node.start()
            else:
                two.network.break_links("n0", "n1")
            two.mesh.discover()
            two.world.run(rng.uniform(0.05, 0.12))
        two.wait(60.0)
        assert 1200 <= two.moved < 1.1 * 1200 + 10 * WINDOW, "too much was moved twice"


def test_ten_cuts_and_crashes_of_either_side_move_little_twice() -> None:
    for seed in range(5):
        ten_cuts(seed)


def full_links(seed: int) -> None:
    """Links that are full again and again, and nothing else: nobody has to find a stall."""
    rng = random.Random(seed)
    with files(seed, 3) as some:
        some.network.faults = Faults(full=rng.choice((0.05, 0.2, 0.4)))
        for _ in range(12):
            some.send(rng.choice((some.b, *some.others)), rng.choice((1, 2, 20, 40)))
        some.wait(STALL_S - 1.0)
        assert some.a.engine is not None
        assert not some.a.engine.refused()["stalled"]


def test_a_full_link_loses_neither_credit_nor_chunk() -> None:
    for seed in range(10):
        full_links(seed)


def test_a_small_file_overtakes_a_large_one() -> None:
    with files(2) as two:
        large = two.send(two.b, 4000)
        two.world.run(1.0)
        took = two.wait(5.0, two.send(two.b, 1))
        assert took <= 3 * WINDOW * CHUNK_S + 0.05
        assert not two.has(large)
        two.wait(60.0)


def test_a_small_file_finds_a_place_among_many_large_ones() -> None:
    with files(3) as two:
        large = [two.send(two.b, 1000) for _ in range(12)]
        two.world.run(1.0)
        took = two.wait(5.0, two.send(two.b, 1))
        assert took <= 3 * WINDOW * CHUNK_S + 0.05
        assert not any(two.has(each) for each in large)


def test_texts_overtake_a_large_file() -> None:
    with files(3) as two:
        two.send(two.b, 4000)
        two.world.run(1.0)
        (ident,) = two.b.send(two.a.agent, "in between")
        two.world.run_until(lambda: ident in two.came(two.a, two.b), 0.2, 0.01)
        assert not two.has(*two.files)


def test_an_endless_row_of_small_files_does_not_starve_a_large_one() -> None:
    with files(4) as two:
        for _ in range(50):
            two.send(two.b, 2)
        large = two.send(two.b, 50)
        for _ in range(60):
            for _ in range(15):
                two.send(two.b, 2)
            two.world.run(0.02)
        assert two.has(large)
        assert len(two.files) > len(two.a.blobs.ready) + 100, "the row never ended"


def test_one_file_alone_fills_the_link() -> None:
    with files(5) as two:
        two.send(two.b, 2000)
        assert two.wait(60.0) <= 1.25 * 2000 * CHUNK_S
        assert two.moved == 2000


def test_files_that_are_pulled_at_once_get_equal_parts() -> None:
    with files(8) as two:
        names = [two.send(two.b, 500) for _ in range(4)]
        two.world.run(0.8)
        parts = [two.a.blobs.machine.received(each) for each in names]
        assert min(parts) > 0.8 * max(parts) > 0


def test_two_pullers_get_equal_parts_of_one_source() -> None:
    with files(6, 3) as some:
        (c,) = some.others
        names = {puller.name: some.send(c, 1000, puller) for puller in (some.a, some.b)}
        some.world.run(0.5)
        parts = [each.blobs.machine.received(names[each.name]) for each in (some.a, some.b)]
        assert min(parts) > 0.8 * max(parts) > 0


def slow_disk(seed: int) -> None:
    """A slow disk: what comes faster than it is written must not pile up."""
    with files(seed) as two:
        two.a.blobs.machine.is_slow = True
        sha256 = two.send(two.b, 100)
        two.world.run(2.0)
        check_bounds(two.mesh)
        assert two.moved <= two.a.blobs.machine.received(sha256) + WINDOW
        two.wait(600.0)
        assert two.moved == 100


def test_a_slow_disk_slows_its_source() -> None:
    slow_disk(7)


# -- sources --------------------------------------------------------------------------------------


def liar(seed: int) -> None:
    """Of two on the sender's machine that have the file, one lies, and comes and goes."""
    rng, machine = random.Random(seed), Machine()
    with files(seed, 2, machine=machine) as some:
        honest, lying = some.others
        lying.blobs.lies = True
        some.send(honest, 30)
        some.world.run(rng.choice((0.012, 0.02, 0.03)))
        some.mesh.part(some.a, honest)
        for _ in range(5):
            some.network.break_links(some.a.name, lying.name)
            some.world.run(rng.choice((0.1, 0.5, 2.0)))
        assert some.moved <= 30 * 2 + 6 * WINDOW, "who lied is asked again"
        some.mesh.meet(some.a, honest)
        some.wait(600.0)
        assert some.moved <= 30 * 3 + 7 * WINDOW


def test_a_liar_is_found_out_and_not_asked_again() -> None:
    for seed in range(10):
        liar(seed)


def test_a_sender_that_lies_ends_in_a_refusal_that_says_so() -> None:
    with files(1) as two:
        two.b.blobs.lies = True
        sha256 = two.send(two.b, 30)
        two.world.run(5.0)
        assert "wrong contents" in two.a.blobs.failed[sha256]
        (entry,) = two.b.disk.mail.out.values()
        assert entry.state == MessageState.REFUSED
        assert "wrong contents" in entry.reason
        assert two.moved == 30
        assert not two.a.blobs.machine.partials
        assert not two.a.blobs.machine.open


def silent_source(seed: int) -> None:
    """One that has the file falls silent in the middle; its link stays up."""
    mesh, machine = Silent(seed), Machine()
    with files(seed, 2, mesh, machine) as some:
        sender, _ = some.others
        some.send(sender, 300)
        some.world.run(0.1)
        mesh.mute = sender.name
        some.wait(STALL_S + 5.0)
        assert some.moved <= 300 + 2 * WINDOW


def test_who_stalls_is_left_for_another() -> None:
    silent_source(2)


def test_what_a_neighbour_has_is_not_moved() -> None:
    machine = Machine()
    with files(3, 2, machine=machine) as some:
        data = random_blob(some.world.rng, 200)
        sha256 = some.a.blobs.machine.put(data)
        for puller in some.others:
            some.a.send(puller.agent, "the same file", files=[sha256])
        some.world.run_until(lambda: all(sha256 in n.blobs.ready for n in some.others), 120.0)
        assert some.moved == 200


def test_a_full_disk_is_waited_for_in_sight() -> None:
    with files(4) as two:
        sha256 = two.send(two.b, 300)
        two.world.run(0.1)
        two.a.blobs.machine.is_full = True
        two.world.run(100.0)
        assert two.a.engine is not None
        received, size, reason = two.a.engine.transfer.progress(sha256) or (0, 0, "")
        assert 0 < received < size
        assert reason.startswith("disk full")
        assert two.moved < 150
        two.a.blobs.machine.is_full = False
        two.wait(DownloadConfig().longest_pause_s + 2.0)
        assert two.moved <= 300 + WINDOW


def test_a_quota_ends_it_and_what_has_expired_leaves_nothing() -> None:
    with files(5) as two:
        node = two.a
        node.blobs.quota = 1000
        too_large = two.send(two.b, 300)
        data = random_blob(two.world.rng, 200)
        two.b.send(node.agent, "brief", ttl_s=0.05, files=[two.b.blobs.machine.put(data)])
        two.world.run(0.07)
        node.keep_house()
        two.world.run(5.0)
        assert node.blobs.failed == {too_large: "quota"}
        assert not node.blobs.ready
        assert not node.blobs.machine.partials
        assert not node.blobs.machine.open
        assert not two.came(node, two.b)
        states = {each.state for each in two.b.disk.mail.out.values()}
        assert states == {MessageState.REFUSED, MessageState.EXPIRED}
        for each in two.mesh.nodes:
            assert each.engine is not None
            assert not len(each.engine.transfer.downloads.table)
            assert not each.engine.transfer.uploads._peers


def test_mail_that_waits_for_an_absent_source_costs_nothing() -> None:
    with files(6) as two:
        two.network.payload_byte_s = 1.0
        for _ in range(50):
            two.send(two.b, 3)
        two.world.run(0.5)
        two.b.crash()
        moved = two.moved
        two.world.run(200.0)
        before = len(two.frames)
        two.world.run(1000.0)
        asks = [frame for _, frame in two.frames[before:] if isinstance(frame, BlobAsk)]
        assert not asks
        two.network.payload_byte_s = 0.0
        two.b.start([two.a.hint()])
        two.mesh.discover()
        two.wait(5.0)
        assert two.moved <= 150 + moved


# -- hostile peers --------------------------------------------------------------------------------


def to_victim(source: SimNode, victim: SimNode, frame: Frame) -> None:
    assert source.engine is not None
    link = source.engine.links.link_to(victim.agent)
    if link is not None:
        source.network.send(source, link, encode(frame))


def test_ten_thousand_asks_cost_bounded_memory_and_others_are_served() -> None:
    with files(7, 3) as some:
        (hostile,) = some.others
        sha256 = some.b.blobs.machine.put(random_blob(some.world.rng, 100))
        for pull in range(10_000):
            ask = BlobAsk(pull, sha256, 400, some.b.agent, b"", 0, 16)
            to_victim(hostile, some.b, ask)
        some.send(some.b, 300)
        some.wait(10.0)
        assert some.b.engine is not None
        serving = some.b.engine.transfer.uploads
        assert serving._count <= UploadConfig().per_peer_max + 8
        assert len(serving._unsent_ends) <= 256


def test_hostile_frames_of_every_kind_change_nothing() -> None:
    for seed in range(10):
        rng = random.Random(seed)
        with files(seed, 3) as some:
            (hostile,) = some.others
            sha256 = some.send(some.b, 200)
            for _ in range(150):
                victim = rng.choice((some.a, some.b))
                to_victim(hostile, victim, hostile_frame(rng, some, sha256))
                some.world.run(0.001)
                check_bounds(some.mesh)
            some.wait(60.0)
            assert some.moved <= 200 + 2


def hostile_frame(rng: random.Random, some: Files, sha256: bytes) -> Frame:
    """Anything, with numbers that may be right."""
    assert some.a.engine is not None
    pull = rng.choice([*some.a.engine.transfer.downloads.requests.numbers(), 0, 1, 2**63 - 1])
    number = rng.choice((0, 1, 5, 63, 64, 2**40, 2**63 - 1))
    granter = some.others[0].agent
    return rng.choice((
        BlobChunk(pull, number, rng.randbytes(rng.choice((0, 3, 4, 5)))),
        BlobMore(pull, number),
        BlobStop(pull),
        BlobAsk(pull, sha256, number, granter, b"", rng.choice((0, number)), number),
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


MUTANTS: dict[str, tuple[Callable[[int], None], type, str, object]] = {
    "gives credit on arrival": (slow_disk, Downloads, "_chunk", credits_on_arrival),
    "resumes from zero": (ten_cuts, Downloads, "opened", resumes_from_zero),
    "forgets what the link did not take": (full_links, Downloads, "not_sent", does_nothing),
    "loses a chunk that the link did not take": (full_links, Uploads, "not_sent", does_nothing),
    "never leaves who stalls": (silent_source, Download, "is_owed", is_never_owed),
    "asks a liar again": (liar, Downloads, "wrong", blames_nobody),
    "keeps a dead request's credit": (ten_cuts, CreditWindow, "take_back", does_nothing),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_promise_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, owner, attribute, mutant = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, mutant)
    for seed in range(CAUGHT_WITHIN):
        try:
            scenario(seed)
        except AssertionError as error:
            print(f"seed {seed}: {error}".splitlines()[0])
            return
    raise AssertionError(f"a node that {name} passes")
