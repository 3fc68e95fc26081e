"""One engine at a time: what it asks, what it refuses, and what it costs."""

from __future__ import annotations

import random

import pytest

from meshagent.core.effects import (
    BlobFailed,
    BlobProgress,
    BlobReady,
    CheckAsk,
    ClosePartial,
    CloseReader,
    Effect,
    FinishBlob,
    OpenPartial,
    ReadChunk,
    Send,
    WriteChunk,
)
from meshagent.core.model.peers import AgentId
from meshagent.core.transfer.chunks import BLOB_BYTES_MAX, bytes_in, chunk_count, chunk_length
from meshagent.core.transfer.downloads import DownloadConfig
from meshagent.core.transfer.engine import Transfer
from meshagent.core.transfer.uploads import UploadConfig
from meshagent.core.wire.frames import (
    CHUNK_BYTES,
    CREDIT_CHUNKS_MAX,
    BlobAsk,
    BlobChunk,
    BlobEnd,
    BlobMore,
    BlobStop,
    Frame,
    Ping,
)
from meshagent.errors import LimitReached

ALICE, BOB, CAROL = AgentId("alice"), AgentId("bob"), AgentId("carol")
X, Y = b"x" * 32, b"y" * 32
FULL = bytes(CHUNK_BYTES)


def engine(pulling: DownloadConfig | None = None, serving: UploadConfig | None = None) -> Transfer:
    return Transfer(random.Random(7), pulling, serving)


def frames(effects: list[Effect], kind: type[Frame] = Frame) -> list[Frame]:
    return [
        each.frame for each in effects if isinstance(each, Send) and isinstance(each.frame, kind)
    ]


def the_ask(effects: list[Effect]) -> tuple[AgentId, BlobAsk]:
    ((to, ask),) = [
        (each.to, each.frame)
        for each in effects
        if isinstance(each, Send) and isinstance(each.frame, BlobAsk)
    ]
    return to, ask


def pulling_from(
    *peers: AgentId, size: int = 40 * CHUNK_BYTES, granter: AgentId = BOB
) -> tuple[Transfer, BlobAsk]:
    """An engine that has just asked the first of these for X."""
    it = engine()
    for peer in peers:
        it.connected(peer, 0.0)
    assert it.want(X, size, peers, granter, b"grant", 0.0) == [OpenPartial(X, size)]
    _, ask = the_ask(it.opened(X, 0, 0.0))
    return it, ask


def serving_to(peer: AgentId, pull: int = 1, upto: int = 4) -> Transfer:
    it = engine()
    it.connected(peer, 0.0)
    it.receive(BlobAsk(pull, X, 40 * CHUNK_BYTES, CAROL, b"grant", 0, upto), peer, 0.0)
    return it


@pytest.mark.parametrize(
    ("size", "lengths"),
    [
        (0, []),
        (1, [1]),
        (CHUNK_BYTES - 1, [CHUNK_BYTES - 1]),
        (CHUNK_BYTES, [CHUNK_BYTES]),
        (CHUNK_BYTES + 1, [CHUNK_BYTES, 1]),
        (3 * CHUNK_BYTES, [CHUNK_BYTES] * 3),
    ],
)
def test_a_blob_is_cut_into_full_chunks_and_a_rest(size: int, lengths: list[int]) -> None:
    assert chunk_count(size) == len(lengths)
    assert [chunk_length(size, at) for at in range(len(lengths))] == lengths
    assert [bytes_in(at, size) for at in range(len(lengths) + 1)] == [
        sum(lengths[:at]) for at in range(len(lengths) + 1)
    ]


# -- pulling --------------------------------------------------------------------------------------


def test_one_chunk_from_ask_to_ready() -> None:
    it, ask = pulling_from(BOB, size=5)
    assert ask == BlobAsk(ask.pull, X, 5, BOB, b"grant", 0, 1)
    assert it.receive(BlobChunk(ask.pull, 0, b"hello"), BOB, 0.1) == [
        WriteChunk(X, 0, b"hello"),
        Send(BOB, BlobStop(ask.pull)),
    ]
    assert it.wrote(X, 0, 0.2) == [BlobProgress(X, 5, 5), FinishBlob(X)]
    assert it.progress(X) == (5, 5, "")
    assert it.finished(X, 0.3) == [BlobReady(X, frozenset({BOB}))]
    assert it.progress(X) is None
    assert it.deadline() is None


def test_an_empty_blob_needs_nobody() -> None:
    it = engine()
    it.want(X, 0, [BOB], BOB, b"", 0.0)
    assert FinishBlob(X) in it.opened(X, 0, 0.0)
    assert it.finished(X, 0.0) == [BlobReady(X)]
    it.want(Y, 0, [BOB], BOB, b"", 0.0)
    it.opened(Y, 0, 0.0)
    ended = it.wrong(Y, 0.0)
    assert [type(each) for each in ended] == [ClosePartial, BlobFailed]


def test_credit_follows_the_write_and_not_the_chunk() -> None:
    it, ask = pulling_from(BOB)
    for at in range(ask.upto):
        assert not frames(it.receive(BlobChunk(ask.pull, at, FULL), BOB, 0.0))
    assert frames(it.wrote(X, 0, 0.0)) == [BlobMore(ask.pull, ask.upto + 2)]


def test_a_pull_begins_with_little_credit_and_grows_to_its_window() -> None:
    it, ask = pulling_from(BOB)
    config = DownloadConfig()
    assert ask.upto == config.window_first
    upto, held = ask.upto, [ask.upto]
    for at in range(24):
        it.receive(BlobChunk(ask.pull, at, FULL), BOB, 0.0)
        for more in frames(it.wrote(X, at, 0.0), BlobMore):
            assert isinstance(more, BlobMore)
            upto = more.upto
        held.append(upto - at - 1)
    assert max(held) == config.window_per_download_max
    assert min(held[12:]) > config.window_per_download_max - config.window_per_download_max // 3


def test_what_was_not_asked_for_is_dropped_and_counted() -> None:
    it, ask = pulling_from(BOB, CAROL)
    hostile = {
        "chunk beyond the credit": (BlobChunk(ask.pull, ask.upto, FULL), BOB),
        "chunk out of order": (BlobChunk(ask.pull, 1, FULL), BOB),
        "chunk that was never asked for": (BlobChunk(ask.pull + 1, 0, FULL), BOB),
        "end of no pull": (BlobEnd(ask.pull + 1, "absent", ""), BOB),
    }
    for name, (frame, peer) in hostile.items():
        assert it.receive(frame, peer, 0.0) == []
        assert it.refused[name] == 1
    assert it.receive(BlobChunk(ask.pull, 0, FULL), CAROL, 0.0) == []
    assert it.refused["chunk that was never asked for"] == 2
    assert it.receive(Ping(1), BOB, 0.0) == []
    assert WriteChunk(X, 0, FULL) in it.receive(BlobChunk(ask.pull, 0, FULL), BOB, 0.0)


@pytest.mark.parametrize("data", [b"", b"short", FULL + b"x"])
def test_a_chunk_of_a_wrong_length_ends_it_with_that_source(data: bytes) -> None:
    it, ask = pulling_from(BOB, CAROL)
    effects = it.receive(BlobChunk(ask.pull, 0, data), BOB, 0.0)
    assert Send(BOB, BlobStop(ask.pull)) in effects
    assert the_ask(effects)[0] == CAROL
    assert it.refused["chunk of a wrong length"] == 1


def test_a_chunk_that_comes_too_late_is_answered_with_stop() -> None:
    it, ask = pulling_from(BOB)
    it.unwant(X, 0.0)
    assert it.receive(BlobChunk(ask.pull, 0, FULL), BOB, 0.0) == [Send(BOB, BlobStop(ask.pull))]


def test_another_source_goes_on_at_the_next_chunk() -> None:
    it, ask = pulling_from(BOB, CAROL)
    it.receive(BlobChunk(ask.pull, 0, FULL), BOB, 0.0)
    to, again = the_ask(it.disconnected(BOB, 0.0))
    assert (to, again.first) == (CAROL, 1)
    assert again.pull != ask.pull


@pytest.mark.parametrize("why", ["absent", "busy", "failed", "a word of later days"])
def test_who_ends_a_pull_is_left_for_another(why: str) -> None:
    it, ask = pulling_from(BOB, CAROL)
    assert the_ask(it.receive(BlobEnd(ask.pull, why, ""), BOB, 0.0))[0] == CAROL


def test_busy_is_asked_again_after_a_pause_that_grows() -> None:
    it, ask = pulling_from(BOB)
    now, pauses = 0.0, []
    for _ in range(12):
        assert it.receive(BlobEnd(ask.pull, "busy", "Later."), BOB, now) == [ClosePartial(X, True)]
        assert it.progress(X) == (0, 40 * CHUNK_BYTES, "Later.")
        then = it.deadline()
        assert then is not None
        pauses.append(then - now)
        now = then
        assert it.on_timer(now) == [OpenPartial(X, 40 * CHUNK_BYTES)]
        _, ask = the_ask(it.opened(X, 0, now))
    assert pauses[0] <= 1.0
    assert 15.0 <= max(pauses) <= DownloadConfig().longest_pause_s


def test_it_fails_only_when_the_granter_and_all_who_answered_say_no() -> None:
    it, ask = pulling_from(BOB, CAROL, granter=BOB)
    _, again = the_ask(it.receive(BlobEnd(ask.pull, "absent", ""), BOB, 0.0))
    assert it.receive(BlobEnd(again.pull, "absent", ""), CAROL, 0.0) == [
        ClosePartial(X, True),
        BlobFailed(X, "Nobody gives it: absent."),
    ]
    it, ask = pulling_from(CAROL, granter=BOB)
    assert it.receive(BlobEnd(ask.pull, "absent", ""), CAROL, 0.0) == [ClosePartial(X, True)]
    assert it.progress(X) is not None, "its granter may come back"


def test_each_grant_is_tried_before_a_source_is_given_up() -> None:
    it = engine()
    it.connected(CAROL, 0.0)
    it.want(X, 5, [CAROL], ALICE, b"of alice", 0.0)
    it.want(X, 5, [CAROL], BOB, b"of bob", 0.0)
    _, ask = the_ask(it.opened(X, 0, 0.0))
    assert (ask.granter, ask.grant) == (ALICE, b"of alice")
    _, ask = the_ask(it.receive(BlobEnd(ask.pull, "not allowed", ""), CAROL, 0.0))
    assert (ask.granter, ask.grant) == (BOB, b"of bob")
    assert it.receive(BlobEnd(ask.pull, "not allowed", ""), CAROL, 0.0) == [ClosePartial(X, True)]
    it.want(X, 5, [CAROL], BOB, b"a new one", 1.0)
    _, ask = the_ask(it.opened(X, 0, 1.0))
    assert ask.grant == b"a new one"


def test_a_granter_is_asked_in_its_own_name() -> None:
    it = engine()
    it.connected(BOB, 0.0)
    it.want(X, 5, [], ALICE, b"of alice", 0.0)
    it.want(X, 5, [], BOB, b"", 0.0)
    to, ask = the_ask(it.opened(X, 0, 0.0))
    assert (to, ask.granter, ask.grant) == (BOB, BOB, b"")


def test_a_size_that_lies_gives_way_to_the_true_one() -> None:
    it, ask = pulling_from(BOB, CAROL, size=9, granter=BOB)
    it.want(X, 5, [CAROL], CAROL, b"true", 0.0)
    assert it.refused["another size for the same blob"] == 1
    _, again = the_ask(it.receive(BlobEnd(ask.pull, "absent", ""), BOB, 0.0))
    effects = it.receive(BlobEnd(again.pull, "absent", ""), CAROL, 0.0)
    assert effects == [ClosePartial(X, True), OpenPartial(X, 5)]
    _, right = the_ask(it.opened(X, 0, 0.0))
    assert (right.size, right.granter) == (5, CAROL)


def test_mixed_contents_that_are_wrong_are_pulled_anew_from_one_source() -> None:
    it, ask = pulling_from(BOB, CAROL, size=2 * CHUNK_BYTES)
    it.receive(BlobChunk(ask.pull, 0, FULL), BOB, 0.0)
    it.wrote(X, 0, 0.0)
    _, ask = the_ask(it.disconnected(BOB, 0.0))
    it.receive(BlobChunk(ask.pull, 1, FULL), CAROL, 0.0)
    it.wrote(X, 1, 0.0)
    assert it.wrong(X, 0.0) == [ClosePartial(X, True), OpenPartial(X, 2 * CHUNK_BYTES)]
    assert not it.refused["wrong contents"]
    to, ask = the_ask(it.opened(X, 0, 0.0))
    it.receive(BlobChunk(ask.pull, 0, FULL), to, 0.0)
    it.connected(BOB, 0.0)
    effects = it.receive(BlobEnd(ask.pull, "busy", ""), CAROL, 0.0)
    assert not frames(effects, BlobAsk), "bob must not go on with what carol began"
    assert it.wrote(X, 0, 0.0) == [ClosePartial(X, True), OpenPartial(X, 2 * CHUNK_BYTES)]
    to, ask = the_ask(it.opened(X, 0, 0.0))
    assert (to, ask.first) == (BOB, 0)


def test_who_gave_wrong_contents_is_never_asked_again() -> None:
    it, ask = pulling_from(CAROL, size=5, granter=BOB)
    it.receive(BlobChunk(ask.pull, 0, b"wrong"), CAROL, 0.0)
    it.wrote(X, 0, 0.0)
    it.wrong(X, 0.0)
    assert it.refused["wrong contents"] == 1
    assert it.opened(X, 0, 0.0) == [BlobProgress(X, 0, 5), ClosePartial(X, True)]
    it.connected(CAROL, 1.0)
    assert not frames(it.opened(X, 0, 1.0))
    it.connected(BOB, 2.0)
    assert the_ask(it.opened(X, 0, 2.0))[0] == BOB


def test_what_others_wrote_is_blamed_on_nobody() -> None:
    it = engine()
    it.connected(BOB, 0.0)
    it.want(X, 2 * CHUNK_BYTES, [BOB], BOB, b"", 0.0)
    _, ask = the_ask(it.opened(X, 1, 0.0))
    assert ask.first == 1
    it.receive(BlobChunk(ask.pull, 1, FULL), BOB, 0.0)
    it.wrote(X, 1, 0.0)
    it.wrong(X, 0.0)
    assert the_ask(it.opened(X, 0, 0.0))[0] == BOB


def test_a_partial_is_closed_only_when_every_write_is_answered() -> None:
    it, ask = pulling_from(BOB)
    it.receive(BlobChunk(ask.pull, 0, FULL), BOB, 0.0)
    it.wrote(X, 0, 0.0)
    for at in range(1, 4):
        it.receive(BlobChunk(ask.pull, at, FULL), BOB, 0.0)
    assert it.held_up(X, "The disk is full.", 0.0) == [Send(BOB, BlobStop(ask.pull))]
    assert it.held_up(X, "The disk is full.", 0.0) == []
    assert it.held_up(X, "The disk is full.", 0.0) == [ClosePartial(X, False)]
    assert it.progress(X) == (CHUNK_BYTES, 40 * CHUNK_BYTES, "The disk is full.")
    assert it.connected(BOB, 0.1) == [], "a peer does not mend a disk"
    then = it.deadline()
    assert then is not None
    assert it.on_timer(then) == [OpenPartial(X, 40 * CHUNK_BYTES)]


def test_what_is_no_longer_wanted_leaves_nothing_at_any_stage() -> None:
    it = engine()
    it.want(X, 5, [BOB], BOB, b"", 0.0)
    assert it.unwant(X, 0.0) == []
    assert it.progress(X) is None
    assert it.opened(X, 0, 0.0) == [ClosePartial(X, True)]
    it, ask = pulling_from(BOB)
    it.receive(BlobChunk(ask.pull, 0, FULL), BOB, 0.0)
    assert it.unwant(X, 0.0) == [Send(BOB, BlobStop(ask.pull))]
    assert it.wrote(X, 0, 0.0) == [ClosePartial(X, True)]
    it, ask = pulling_from(BOB, size=5)
    it.receive(BlobChunk(ask.pull, 0, b"hello"), BOB, 0.0)
    it.wrote(X, 0, 0.0)
    assert it.unwant(X, 0.0) == []
    assert it.finished(X, 0.0) == []
    for each in (it, engine()):
        assert each.unwant(X, 0.0) == []
        assert not len(each.downloads.table)
        assert not each.downloads.slots.active
        assert not each.downloads.table.with_source(BOB)


def test_a_whole_blob_that_may_not_be_kept_fails_or_was_cancelled_anyway() -> None:
    for unwanted in (False, True):
        it, ask = pulling_from(BOB, size=5)
        it.receive(BlobChunk(ask.pull, 0, b"hello"), BOB, 0.0)
        assert FinishBlob(X) in it.wrote(X, 0, 0.0)
        if unwanted:
            it.unwant(X, 0.0)
        failed = [BlobFailed(X, "Its type is not allowed.")]
        assert it.impossible(X, "Its type is not allowed.", 0.0) == ([] if unwanted else failed)
        assert it.progress(X) is None


def test_what_is_wanted_again_while_it_is_let_go_is_pulled() -> None:
    it, ask = pulling_from(BOB)
    it.receive(BlobChunk(ask.pull, 0, FULL), BOB, 0.0)
    it.unwant(X, 0.0)
    it.want(X, 40 * CHUNK_BYTES, [BOB], BOB, b"grant", 0.0)
    assert it.wrote(X, 0, 0.0) == [ClosePartial(X, False), OpenPartial(X, 40 * CHUNK_BYTES)]
    assert the_ask(it.opened(X, 1, 0.0))[1].first == 1


def test_wanting_is_bounded_and_a_size_must_be_one() -> None:
    it = engine(DownloadConfig(wanted_max=3))
    for at in range(3):
        it.want(bytes([at]) * 32, 5, [BOB], BOB, b"", 0.0)
    it.want(bytes(32), 5, [CAROL], CAROL, b"", 0.0)
    with pytest.raises(LimitReached):
        it.want(X, 5, [BOB], BOB, b"", 0.0)
    for size in (-1, BLOB_BYTES_MAX + 1):
        with pytest.raises(LimitReached):
            it.want(bytes(32), size, [BOB], BOB, b"", 0.0)


def test_sources_grants_and_rivals_of_one_blob_are_bounded() -> None:
    it = engine()
    for at in range(1000):
        peer = AgentId(f"p{at}")
        it.want(X, 5, [peer], peer, b"", 0.0)
        it.want(X, 6 + at, [peer], peer, b"", 0.0)
    want = it.downloads.table[X]
    assert len(want.sources) <= 64
    assert len(want.grants) <= 32
    assert len(want.rivals) <= 8


def test_thousands_wait_without_a_storm_when_the_disk_is_full() -> None:
    it = engine()
    effects: list[Effect] = []
    for at in range(2000):
        effects += it.want(at.to_bytes(32, "big"), 5, [BOB], BOB, b"", 0.0)
    now, opens = 0.0, 0
    while now < 10.0:
        for effect in effects:
            assert isinstance(effect, OpenPartial)
            opens += 1
            it.held_up(effect.sha256, "full", now)
        then = it.deadline()
        assert then is not None
        assert then >= now
        now = max(then, now)
        effects = it.on_timer(now)
    assert opens <= 8 * (1 + 10.0 / DownloadConfig().open_delay_s)


def test_progress_is_told_once_for_each_hundredth() -> None:
    size = 1000 * CHUNK_BYTES
    it, ask = pulling_from(BOB, size=size)
    told: list[Effect] = []
    for at in range(1000):
        it.receive(BlobChunk(ask.pull, at, FULL), BOB, 0.0)
        told += [each for each in it.wrote(X, at, 0.0) if isinstance(each, BlobProgress)]
    assert len(told) == 100
    assert told[-1] == BlobProgress(X, size, size)


def test_an_unsent_ask_is_made_again_with_all_its_credit() -> None:
    it, ask = pulling_from(BOB)
    it.not_sent(BOB, ask, 0.0)
    it.not_sent(BOB, BlobMore(ask.pull, ask.upto), 0.0)
    then = it.deadline()
    assert then is not None
    assert it.on_timer(then) == [Send(BOB, ask)]


# -- serving --------------------------------------------------------------------------------------


def test_chunks_leave_in_order_within_the_credit_once_the_ask_is_admitted() -> None:
    it = serving_to(BOB, upto=3)
    reads = it.admitted(BOB, 1, 0.0)
    assert reads == [ReadChunk(BOB, 1, X, at) for at in range(3)]
    assert it.chunk_read(BOB, 1, 2, FULL, 0.0) == []
    assert it.chunk_read(BOB, 1, 0, FULL, 0.0) == [Send(BOB, BlobChunk(1, 0, FULL))]
    assert it.chunk_read(BOB, 1, 1, FULL, 0.0) == [
        Send(BOB, BlobChunk(1, 1, FULL)),
        Send(BOB, BlobChunk(1, 2, FULL)),
    ]
    assert it.receive(BlobMore(1, 4), BOB, 0.0) == [ReadChunk(BOB, 1, X, 3)]
    assert it.receive(BlobMore(1, 2), BOB, 0.0) == [], "credit never shrinks"


def test_an_answer_about_one_ask_is_never_taken_for_another() -> None:
    it = serving_to(BOB)
    other = BlobAsk(1, Y, 5, CAROL, b"forged", 0, 1)
    it.receive(BlobStop(1), BOB, 0.0)
    assert it.receive(other, BOB, 0.0) == []
    assert it.refused["pull number used twice"] == 1
    assert it.admitted(BOB, 1, 0.0) == [CloseReader(BOB, 1)], "of X, which bob no longer wants"
    assert it.receive(other, BOB, 0.0) == [CheckAsk(BOB, 1, Y, 5, CAROL, b"forged")]


def test_a_new_link_begins_anew_and_late_answers_are_harmless() -> None:
    it = serving_to(BOB)
    it.admitted(BOB, 1, 0.0)
    assert it.connected(BOB, 1.0) == [CloseReader(BOB, 1)]
    for at in range(4):
        assert it.chunk_read(BOB, 1, at, FULL, 1.0) == []
    assert it.chunk_read(BOB, 1, 0, FULL, 1.0) == []
    assert it.admitted(BOB, 1, 1.0) == []
    assert not it.uploads._peers
    assert it.uploads._count == it.uploads._reading == 0


@pytest.mark.parametrize("why", ["absent", "not allowed"])
def test_who_is_turned_away_is_told_why(why: str) -> None:
    it = serving_to(BOB)
    end = Send(BOB, BlobEnd(1, why, "Because."))
    assert it.turned_away(BOB, 1, why, "Because.", 0.0) == [end]
    assert it.refused["blob not granted"] == (why == "not allowed")
    assert not it.uploads._peers


@pytest.mark.parametrize("data", [None, b"", b"cut short", FULL + b"x"])
def test_what_can_no_longer_be_read_ends_in_failed(data: bytes | None) -> None:
    it = serving_to(BOB, upto=1)
    it.admitted(BOB, 1, 0.0)
    end, close = it.chunk_read(BOB, 1, 0, data, 0.0)
    assert isinstance(end, Send)
    assert isinstance(end.frame, BlobEnd)
    assert end.frame.why == "failed"
    assert close == CloseReader(BOB, 1)


ABSURD = [
    (0, 0, 1),
    (5, 0, 0),
    (5, 0, 2),
    (5, 1, 1),
    (5, 2**63 - 1, 2**63 - 1),
    (BLOB_BYTES_MAX + 1, 0, 1),
    (2**63 - 1, 0, 2**63 - 1),
    (1000 * CHUNK_BYTES, 0, CREDIT_CHUNKS_MAX + 1),
    (1000 * CHUNK_BYTES, 9, 8),
]


@pytest.mark.parametrize(("size", "first", "upto"), ABSURD)
def test_absurd_asks_are_refused(size: int, first: int, upto: int) -> None:
    it = engine()
    (said,) = frames(it.receive(BlobAsk(1, X, size, BOB, b"", first, upto), BOB, 0.0))
    assert isinstance(said, BlobEnd)
    assert it.refused["absurd ask"] == 1
    assert not it.uploads._peers


def test_absurd_credit_is_refused() -> None:
    it = serving_to(BOB)
    it.admitted(BOB, 1, 0.0)
    for upto in (41, 2**63 - 1):
        assert it.receive(BlobMore(1, upto), BOB, 0.0) == []
    assert it.receive(BlobMore(2, 1), BOB, 0.0) == []
    assert it.refused["absurd credit"] == 2
    assert it.refused["credit for no pull"] == 1


def test_ten_thousand_asks_keep_a_few_and_the_rest_is_told_to_come_again() -> None:
    it = engine()
    for at in range(10_000):
        peer = AgentId(f"p{at % 50}")
        it.receive(BlobAsk(at, X, 5, peer, b"", 0, 1), peer, 0.0)
    assert it.uploads._count == UploadConfig().in_all_max
    assert max(len(each.uploads) for each in it.uploads._peers.values()) <= 16
    it = engine()
    busy = 0
    for at in range(10_000):
        busy += len(frames(it.receive(BlobAsk(at, X, 5, BOB, b"", 0, 1), BOB, 0.0), BlobEnd))
    assert it.uploads._count == UploadConfig().per_peer_max == 10_000 - busy


def test_asking_and_stopping_while_the_disk_hangs_keeps_nothing() -> None:
    it = engine()
    for pull in range(1000):
        it.receive(BlobAsk(pull, X, 40 * CHUNK_BYTES, BOB, b"", 0, 4), BOB, 0.0)
        it.admitted(BOB, pull, 0.0)
        it.receive(BlobStop(pull), BOB, 0.0)
    serving = it.uploads
    assert serving._reading <= UploadConfig().reads_max
    assert serving._count <= UploadConfig().per_peer_max
    assert len(serving._turns) <= 1
    assert sum(len(each.ready) for each in serving._peers.values()) <= 16


def test_peers_take_turns_however_many_pulls_one_has() -> None:
    it = engine(serving=UploadConfig(reads_max=2))
    reads: list[Effect] = []
    for pull in range(10):
        it.receive(BlobAsk(pull, X, 40 * CHUNK_BYTES, BOB, b"", 0, 8), BOB, 0.0)
        reads += it.admitted(BOB, pull, 0.0)
    it.receive(BlobAsk(1, X, 40 * CHUNK_BYTES, CAROL, b"", 0, 8), CAROL, 0.0)
    reads += it.admitted(CAROL, 1, 0.0)
    order = []
    while reads:
        read = reads.pop(0)
        if isinstance(read, ReadChunk):
            order.append(read.peer)
            reads += it.chunk_read(read.peer, read.pull, read.chunk, FULL, 0.0)
    assert order[:20].count(CAROL) == 8, "carol's eight chunks are among the first twenty"
    assert len(order) == 88


def test_what_a_full_link_refused_is_read_again_and_not_kept() -> None:
    it = serving_to(BOB)
    it.admitted(BOB, 1, 0.0)
    (sent,) = it.chunk_read(BOB, 1, 0, FULL, 0.0)
    assert isinstance(sent, Send)
    it.not_sent(BOB, sent.frame, 0.0)
    for at in (3, 2, 1):
        assert it.chunk_read(BOB, 1, at, FULL, 0.0) == []
    assert not it.uploads._find(BOB, 1).held  # type: ignore[union-attr]
    then = it.deadline()
    assert then is not None
    assert it.on_timer(then) == [ReadChunk(BOB, 1, X, at) for at in range(4)]


def test_a_pull_that_is_idle_loses_its_place() -> None:
    it = serving_to(BOB, upto=1)
    it.admitted(BOB, 1, 0.0)
    it.chunk_read(BOB, 1, 0, FULL, 0.0)
    now = 0.0
    effects: list[Effect] = []
    while it.deadline() is not None:
        now = it.deadline() or now
        effects += it.on_timer(now)
    assert [type(each) for each in effects] == [Send, CloseReader]
    assert 60.0 <= now <= 120.0
    assert not it.uploads._peers


# -- who lets us wait -------------------------------------------------------------------------


def wanted(it: Transfer, peer: AgentId, count: int, size: int = 1) -> list[bytes]:
    """So many blobs of this peer's messages; those that were opened at once."""
    opened = []
    for number in range(count):
        sha256 = peer[:1].encode() + number.to_bytes(31, "big")
        for effect in it.want(sha256, size, [peer], peer, b"", 0.0):
            if isinstance(effect, OpenPartial):
                opened.append(effect.sha256)
    return opened


def opens(effects: list[Effect]) -> list[bytes]:
    return [each.sha256 for each in effects if isinstance(each, OpenPartial)]


def test_a_crowd_of_one_senders_blobs_leaves_a_place_for_anothers() -> None:
    it = engine()
    it.connected(ALICE, 0.0)
    it.connected(BOB, 0.0)
    assert len(wanted(it, ALICE, 1_000)) == DownloadConfig().per_sender_max
    assert len(wanted(it, BOB, 1)) == 1


def test_who_stalls_has_one_place_at_a_time_until_it_sends() -> None:
    it, now = engine(), 0.0
    it.connected(ALICE, now)
    for sha256 in wanted(it, ALICE, 100):
        it.opened(sha256, 0, now)
    asked_at_once = []
    for _ in range(5):
        now = it.deadline() or 0.0
        effects = it.on_timer(now)
        while new := opens(effects):
            asked_at_once.append(len(new))
            effects = [each for sha256 in new for each in it.opened(sha256, 0, now)]
    assert set(asked_at_once) == {1}
    assert it.refused["stalled"] >= DownloadConfig().per_sender_max
    it.connected(BOB, now)
    assert len(wanted(it, BOB, 20)) == DownloadConfig().per_sender_max


def test_who_stalled_and_then_sends_has_its_places_again() -> None:
    it = engine()
    it.connected(ALICE, 0.0)
    asks = [
        each
        for sha256 in wanted(it, ALICE, 20)
        for each in frames(it.opened(sha256, 0, 0.0), BlobAsk)
    ]
    stall_s, places = DownloadConfig().stall_s, DownloadConfig().per_sender_max
    it.on_timer(stall_s)
    effects: list[Effect] = []
    now = stall_s
    while not (new := opens(effects)):
        now = it.deadline() or 0.0
        effects = it.on_timer(now)
    (ask,) = frames(it.opened(new[0], 0, now), BlobAsk)
    assert isinstance(ask, BlobAsk)
    assert len(asks) == places
    it.receive(BlobChunk(ask.pull, 0, b"x"), ALICE, now)
    assert len(opens(it.wrote(new[0], 0, now) + it.finished(new[0], now))) >= places - 1


def test_space_that_was_reserved_for_nothing_is_given_back() -> None:
    it = engine()
    it.connected(BOB, 0.0)
    it.want(X, 3 * CHUNK_BYTES, [BOB], BOB, b"", 0.0)
    it.opened(X, 0, 0.0)
    assert ClosePartial(X, True) in it.on_timer(DownloadConfig().stall_s)


def test_the_same_credit_again_does_not_keep_a_place() -> None:
    it = engine(serving=UploadConfig(idle_s=60.0))
    it.receive(BlobAsk(1, X, 2 * CHUNK_BYTES, ALICE, b"", 0, 1), BOB, 0.0)
    it.admitted(BOB, 1, 0.0)
    it.chunk_read(BOB, 1, 0, FULL, 0.0)
    it.receive(BlobMore(1, 1), BOB, 59.0)
    assert CloseReader(BOB, 1) in it.on_timer(60.0)


def test_what_a_source_says_drives_no_terminal() -> None:
    it = engine()
    it.connected(BOB, 0.0)
    it.want(X, 5, [BOB], BOB, b"", 0.0)
    _, ask = the_ask(it.opened(X, 0, 0.0))
    it.receive(BlobEnd(ask.pull, "busy", "\x1b[2Jgone\x9b"), BOB, 0.0)
    progress = it.progress(X)
    assert progress is not None
    assert progress[2].isprintable()
    assert "gone" in progress[2]
