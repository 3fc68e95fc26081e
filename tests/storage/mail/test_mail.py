"""What every Store promises about messages: the suite that both stores pass."""

from __future__ import annotations

import contextlib
import random
from functools import partial
from pathlib import Path

import pytest
from storage.mail.mail_rows import (
    EPOCH,
    OTHER,
    PEER,
    Syncs,
    became,
    beside,
    came,
    came_together,
    copy_files,
    live,
    out,
    out_together,
    outs,
    receipt,
    word,
)
from storage.mail.reference import RandomRows, assert_same

from meshagent.core.delivery.mailbox import WATERMARKS_PER_SENDER_MAX, MailboxModel
from meshagent.core.model.message_states import PROGRESS, MessageState
from meshagent.core.model.rows import Delivered, NewEpoch, Row, StreamStart, Watermark, singly
from meshagent.core.ports import Store
from meshagent.errors import StorageError
from meshagent.storage.log import commit_log as journal_module
from meshagent.storage.log import log_file as commits_module
from meshagent.storage.mail import database as database_module
from meshagent.storage.mail import sqlite_store as sqlite_module
from meshagent.storage.mail.memory_store import MemoryStore
from meshagent.storage.mail.row_checksums import IN_STATES, OUT_STATES
from meshagent.storage.mail.sqlite_store import SqliteStore


@pytest.fixture(params=["sqlite", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return SqliteStore(tmp_path / "mesh.db") if request.param == "sqlite" else MemoryStore()


async def numbers(store: Store, peer: str = PEER) -> list[tuple[int, str]]:
    return [(entry.seq, entry.id) for entry in await store.pending(peer, 1, 100)]


async def state(store: Store, ident: str) -> tuple[str, bool]:
    (entry,) = await store.outgoing(ident)
    return entry.state, entry.settled


# Outbox


def test_an_accepted_message_waits_queued_across_a_restart(store: Store) -> None:
    async def send(store: Store) -> None:
        await store.commit([out(1, "m1", expires_ms=9, at_ms=77)])

    async def look(store: Store) -> None:
        (entry,) = await store.pending(PEER, 1, 10)
        assert (entry.peer, entry.seq, entry.id, entry.state) == (PEER, 1, "m1", "queued")
        assert entry.body == out(1, "m1", at_ms=77).body
        assert (entry.expires_ms, entry.accepted_ms, entry.changed_ms) == (9, 77, 77)
        assert (entry.reason, entry.settled) == ("", False)

    live(store, send, look)


def test_pending_is_in_order_from_a_number_on(store: Store) -> None:
    async def script(store: Store) -> None:
        await store.commit([*outs(9), *outs(3, OTHER)])
        assert [entry.seq for entry in await store.pending(PEER, 4, 3)] == [4, 5, 6]
        assert [entry.seq for entry in await store.pending(OTHER, 1, 9)] == [1, 2, 3]
        assert list(await store.pending(PEER, 10, 5)) == []
        assert list(await store.pending("nobody", 1, 5)) == []

    live(store, script)


@pytest.mark.parametrize("seq", [1, 2, 4, 9])
def test_a_number_is_never_given_twice_nor_left_out(store: Store, seq: int) -> None:
    async def script(store: Store) -> None:
        await store.commit([*outs(2), word("b1", "delivered"), word("b2", "delivered")])
        with pytest.raises(StorageError, match="3 comes next"):
            await store.commit([out(1, "x", OTHER), out(seq, "new")])
        assert list(await store.outgoing("x")) == [], "a half of the commit was kept"
        await store.commit([out(1, "x", OTHER), out(3, "new")])

    live(store, script)


@pytest.mark.parametrize("seq", [1, 2, 4, 9])
def test_a_crowds_numbers_are_those_that_come_next(store: Store, seq: int) -> None:
    async def script(store: Store) -> None:
        await store.commit([out_together(outs(2))])
        with pytest.raises(StorageError, match="3 comes next"):
            await store.commit([out_together([out(seq, "x"), out(seq + 1, "y")])])
        await store.commit([out_together([out(3, "x"), out(4, "y")]), out(5, "z")])
        assert await numbers(store) == [(1, "b1"), (2, "b2"), (3, "x"), (4, "y"), (5, "z")]

    live(store, script)


def test_columns_say_the_same_as_a_row_for_each() -> None:
    ours = [out(seq, f"m{seq}", OTHER, text=f"text {seq}") for seq in range(3, 6)]
    assert [*singly([out_together(ours), ours[0]])] == [*ours, ours[0]]
    theirs = [came(f"m{seq}", OTHER, seq, text=f"text {seq}") for seq in range(3, 6)]
    assert [*singly([came_together(theirs)])] == theirs


def test_an_id_is_given_once(store: Store) -> None:
    async def script(store: Store) -> None:
        await store.commit([out(1, "same")])
        with contextlib.suppress(StorageError):
            await store.commit([out(1, "same", OTHER)])
        assert [entry.peer for entry in await store.outgoing("same")] == [PEER]
        assert (await store.mail_start()).streams[0] == StreamStart(PEER, 1, 2)

    live(store, script)


def test_the_counter_of_a_stream_outlives_all_its_messages(store: Store) -> None:
    async def send(store: Store) -> None:
        await store.commit([*outs(3), *(word(f"b{n}", "delivered", 5) for n in (1, 2, 3))])
        assert await store.retain(1_000_000, 0, 0) == 3
        assert list(await store.outbox(9, ended=True)) == []

    async def look(store: Store) -> None:
        assert (await store.mail_start()).streams == (StreamStart(PEER, 4, 4),)
        with pytest.raises(StorageError):
            await store.commit([out(3, "again")])
        await store.commit([out(4, "next")])

    live(store, send, look)


@pytest.mark.parametrize("before", OUT_STATES)
@pytest.mark.parametrize("after", OUT_STATES)
def test_a_state_is_replaced_by_one_of_a_larger_rank_only(
    before: str, after: str, tmp_path: Path
) -> None:
    async def script(store: Store) -> None:
        await store.commit([out(1, "m")])
        await store.commit([word("m", before, 10)])
        await store.commit([word("m", after, 20, why="so")])
        (entry,) = await store.outgoing("m")
        news = PROGRESS[MessageState(after)] > PROGRESS[MessageState(before)]
        assert entry.state == (after if news else before)
        assert entry.reason == ("so" if news else "")

    live(SqliteStore(tmp_path / "mesh.db"), script)
    live(MemoryStore(), script)


def test_the_places_of_states_are_those_on_peoples_disks() -> None:
    """SQL compares them, and indexes have them in their conditions."""
    assert OUT_STATES == (
        "queued", "sent", "expired", "cancelled", "delivered", "seen", "done", "refused",
    )  # fmt: skip
    assert IN_STATES == ("unread", "seen", "parked", "done", "receiving")


@pytest.mark.parametrize("end", ["expired", "cancelled"])
def test_what_was_withdrawn_is_settled_by_the_second_word(store: Store, end: str) -> None:
    async def script(store: Store) -> None:
        await store.commit([*outs(2), word("b1", end)])
        assert await state(store, "b1") == (end, False)
        assert await numbers(store) == [(1, "b1"), (2, "b2")], "its number must still be told"
        await store.commit([word("b1", end)])
        assert await state(store, "b1") == (end, True)
        assert await numbers(store) == [(2, "b2")]

    live(store, script)


def test_withdrawn_too_late_is_delivered(store: Store) -> None:
    async def script(store: Store) -> None:
        await store.commit([out(1, "m"), word("m", "cancelled"), word("m", "delivered", 9)])
        assert await state(store, "m") == ("delivered", True)
        await store.commit([word("m", "cancelled")])
        assert await state(store, "m") == ("delivered", True)

    live(store, script)


@pytest.mark.parametrize("last", ["delivered", "refused", "expired"])
def test_a_receipt_that_overtakes_the_answer_does_not_settle(store: Store, last: str) -> None:
    async def script(store: Store) -> None:
        await store.commit([*outs(3), receipt("b2", "seen")])
        assert await state(store, "b2") == ("seen", False)
        assert len(await numbers(store)) == 3, "a hole in a stream stops it"
        await store.commit([word("b1", "delivered"), word("b2", last, 9), word("b3", "delivered")])
        shown, settled = await state(store, "b2")
        assert (shown, settled) == ("refused" if last == "refused" else "seen", True)

    live(store, script)


def test_an_answer_settles_a_stretch_and_nothing_beside_it(store: Store) -> None:
    async def script(store: Store) -> None:
        await store.commit([*outs(5), *outs(5, OTHER)])
        await store.commit([Delivered(PEER, 2, 4, 9)])
        assert await numbers(store) == [(1, "b1"), (5, "b5")]
        assert len(await numbers(store, OTHER)) == 5
        for ident in ("b2", "b3", "b4"):
            (entry,) = await store.outgoing(ident)
            assert (entry.state, entry.settled, entry.changed_ms) == ("delivered", True, 9)

    async def look(store: Store) -> None:
        await store.commit([receipt(ident, "seen") for ident in ("b2", "b3", "b4")])
        assert [entry.state for entry in await store.outbox(9, ended=True)][1:4] == ["seen"] * 3

    live(store, script, look)


def test_an_answer_to_a_stretch_keeps_what_a_receipt_said_before(store: Store) -> None:
    async def script(store: Store) -> None:
        await store.commit([*outs(3), receipt("b2", "seen")])
        await store.commit([Delivered(PEER, 1, 3, 9)])
        assert [await state(store, ident) for ident in ("b1", "b2", "b3")] == [
            ("delivered", True), ("seen", True), ("delivered", True),
        ]  # fmt: skip
        await store.commit([Delivered(PEER, 1, 3, 10)])
        (entry,) = await store.outgoing("b1")
        assert entry.changed_ms == 9, "what is settled does not change any more"

    live(store, script)


def test_receipts_count_for_the_right_peer_and_known_messages_only(store: Store) -> None:
    async def script(store: Store) -> None:
        await store.commit([out(1, "m"), word("m", "delivered")])
        await store.commit([receipt("m", "done", peer=OTHER), receipt("nothing", "done")])
        assert await state(store, "m") == ("delivered", True)
        await store.commit([receipt("m", "done", 30), receipt("m", "seen", 40)])
        (entry,) = await store.outgoing("m")
        assert (entry.state, entry.changed_ms, entry.settled) == ("done", 30, True)
        await store.commit([word("m", "cancelled", peer=OTHER), word("nothing", "delivered")])
        assert (await state(store, "m"))[0] == "done"

    live(store, script)


@pytest.mark.parametrize("last", ["refused", "expired", "delivered"])
def test_a_receipt_may_say_how_a_message_ended_and_why(store: Store, last: str) -> None:
    async def script(store: Store) -> None:
        await store.commit([out(1, "m"), receipt("m", last)._replace(reason="no room")])
        (entry,) = await store.outgoing("m")
        assert (entry.state, entry.reason, entry.settled) == (last, "no room", False)
        await store.commit([receipt("m", "done", 9_000)])
        (entry,) = await store.outgoing("m")
        assert (entry.state, entry.reason) == (
            ("refused", "no room") if last == "refused" else ("done", "")
        )

    live(store, script)


def test_what_was_taken_back_is_counted_until_its_recipient_knows(store: Store) -> None:
    async def script(store: Store) -> None:
        await store.commit([*outs(4), word("b1", "delivered")])
        assert await store.withdrawn() == 0
        await store.commit([word("b2", "cancelled"), word("b4", "expired")])
        assert await store.withdrawn() == 2
        await store.commit([word("b2", "cancelled"), word("b4", "delivered")])
        assert await store.withdrawn() == 0

    live(store, script)


def test_expiry_tells_what_is_due_and_when(store: Store) -> None:
    async def script(store: Store) -> None:
        assert await store.next_expiry() is None
        rows = [out(n, expires_ms=expires) for n, expires in enumerate((300, 0, 100, 200, 100), 1)]
        await store.commit([*rows, word("b3", "sent")])
        assert await store.next_expiry() == 100
        assert {entry.id for entry in await store.due(200, 10)} == {"b3", "b4", "b5"}
        assert len(await store.due(200, 2)) == 2
        assert list(await store.due(99, 10)) == []
        await store.commit([word("b3", "expired"), word("b5", "cancelled")])
        assert [entry.id for entry in await store.due(200, 10)] == ["b4"]
        await store.commit([word("b4", "delivered")])
        assert await store.next_expiry() == 300

    live(store, script)


def test_the_outbox_shows_what_waits_or_everything_oldest_first(store: Store) -> None:
    async def script(store: Store) -> None:
        await store.commit([out(1, "a"), out(1, "b", OTHER), out(2, "c"), out(3, "d")])
        await store.commit([word("c", "cancelled"), word("b", "delivered", peer=OTHER)])
        assert [entry.id for entry in await store.outbox(10)] == ["a", "d"]
        assert [entry.id for entry in await store.outbox(1)] == ["a"]
        assert [entry.id for entry in await store.outbox(10, ended=True)] == ["a", "b", "c", "d"]

    live(store, script)


def test_a_beginning_of_an_id_finds_a_few(store: Store) -> None:
    async def script(store: Store) -> None:
        await store.commit([out(n, f"ab{n:03}") for n in range(1, 51)])
        await store.commit([came("cd1"), came("cd1", OTHER), came("ce%")])
        assert (await store.outgoing("ab01"))[0].id == "ab010"
        assert 2 <= len(await store.outgoing("ab")) <= 10
        assert [entry.sender for entry in await store.incoming("cd")] == [PEER, OTHER]
        for nothing in ("zz", "a%", "AB001", "ab0011", "\udcff", "'\""):
            assert list(await store.outgoing(nothing)) == []
            assert list(await store.incoming(nothing)) == []

    live(store, script)


def test_a_new_epoch_numbers_what_waits_from_one_in_its_order(store: Store) -> None:
    async def start_over(store: Store) -> None:
        await store.commit([*outs(5), *outs(2, OTHER), out(1, "x", "only-settled")])
        await store.commit(
            [word("b1", "delivered"), word("b2", "refused"), word("b4", "cancelled")]
        )
        await store.commit([word("x", "delivered", peer="only-settled")])
        await store.commit([NewEpoch(b"epoch--2"), out(4, "b6")])

    async def look(store: Store) -> None:
        assert await numbers(store) == [(1, "b3"), (2, "b4"), (3, "b5"), (4, "b6")]
        assert await numbers(store, OTHER) == [(1, "g1"), (2, "g2")]
        assert await state(store, "b4") == ("cancelled", False)
        start = await store.mail_start()
        assert start.epoch == b"epoch--2"
        assert (await store.facts())["epoch"] == start.epoch.hex()
        assert set(start.streams) == {
            StreamStart(PEER, 1, 5), StreamStart(OTHER, 1, 3), StreamStart("only-settled", 1, 1)
        }  # fmt: skip
        assert await state(store, "b1") == ("delivered", True), "history was lost"
        await store.commit([out(5, "b7"), word("b3", "delivered")])
        assert (await store.mail_start()).streams[0].floor in (1, 2)

    live(store, start_over, look)


# Inbox


def test_a_message_is_kept_once_whatever_number_it_comes_under(store: Store) -> None:
    async def script(store: Store) -> None:
        await store.commit([came("m", at_ms=5), came("m", seq=7, at_ms=6)])
        await store.commit([came("m", seq=2, at_ms=7, text="another"), came("m", OTHER), came("n")])
        found = await store.inbox(0, 10)
        assert [(entry.sender, entry.id) for entry in found] == [
            (PEER, "m"), (OTHER, "m"), (PEER, "n")
        ]  # fmt: skip
        assert found[0].received_ms == 5
        assert found[0].body == came("m").body
        assert {entry.state for entry in found} == {"unread"}

    live(store, script)


def test_positions_only_grow_even_when_everything_was_dropped(store: Store) -> None:
    seen: list[int] = []

    async def script(store: Store) -> None:
        last = seen[-1] if seen else 0
        await store.commit([came(f"m{last}"), came(f"n{last}")])
        found = await store.inbox(last, 10)
        seen.extend(entry.position for entry in found)
        await store.commit([became(entry.id, "done", 1) for entry in found])
        assert await store.retain(10**9, 1, 10**9) == 2

    live(store, script, script, script)
    assert seen == sorted(set(seen))
    assert len(seen) == 6


def test_done_never_goes_back_and_the_rest_may(store: Store) -> None:
    async def script(store: Store) -> None:
        await store.commit([came("m")])
        for number, each in enumerate(("seen", "unread", "parked", "unread", "done")):
            await store.commit([became("m", each, number, n=number)])
            (entry,) = await store.incoming("m")
            assert (entry.state, entry.failures) == (each, number)
        for each in ("unread", "seen", "parked", "done"):
            await store.commit([became("m", each, 99, n=9), became("nothing", each)])
        (entry,) = await store.incoming("m")
        assert (entry.state, entry.failures, entry.changed_ms) == ("done", 4, 4)

    live(store, script)


def test_the_newest_are_had_without_reading_the_rest(store: Store) -> None:
    async def script(store: Store) -> None:
        assert list(await store.recent(3)) == []
        await store.commit([came(f"m{n}") for n in range(6)])
        await store.commit([became("m1", "seen"), became("m4", "done"), became("m5", "parked")])

        async def ids(limit: int, upto: int | None = None, unseen: bool = False) -> list[str]:
            return [each.id for each in await store.recent(limit, upto=upto, unseen=unseen)]

        assert await ids(2) == ["m4", "m5"]
        assert await ids(9) == [f"m{n}" for n in range(6)]
        assert await ids(9, unseen=True) == ["m0", "m2", "m3"]
        assert await ids(2, unseen=True) == ["m2", "m3"]
        third = (await store.inbox(0, 9))[2].position
        assert await ids(2, upto=third) == ["m1", "m2"]
        assert await ids(2, upto=third, unseen=True) == ["m0", "m2"]
        assert await ids(0) == await ids(9, upto=0) == []

    live(store, script)


def test_unread_is_what_nobody_has_dealt_with(store: Store) -> None:
    async def script(store: Store) -> None:
        await store.commit([came(f"m{n}") for n in range(4)])
        await store.commit([became("m1", "seen"), became("m2", "done"), became("m3", "parked")])
        assert [entry.id for entry in await store.inbox(0, 9, unread=True)] == ["m0", "m1"]
        first, *rest = await store.inbox(0, 9)
        assert len(rest) == 3
        assert [each.id for each in await store.inbox(first.position, 1, unread=True)] == ["m1"]
        assert (await store.mail_start()).unread == 2

    live(store, script)


def test_watermarks_come_back_with_their_exceptions_oldest_first(store: Store) -> None:
    one = Watermark(PEER, b"epoch--1", 3, b"h" * 16, ((1, ""), (2, "it's \\ “tôo” large")))
    two = Watermark(PEER, b"\x00\xff" * 4, 1, bytes(16))
    other = Watermark(OTHER, b"epoch--1", 9, b"x" * 16)
    later = Watermark(PEER, b"epoch--1", 4, b"i" * 16)

    async def write(store: Store) -> None:
        await store.commit([one, two])
        await store.commit([other])

    async def again(store: Store) -> None:
        assert (await store.mail_start()).watermarks == (one, two, other)
        await store.commit([later, later])
        assert (await store.mail_start()).watermarks == (two, other, later)

    live(store, write, again)


def test_a_sender_with_many_databases_costs_a_bounded_number_of_rows(store: Store) -> None:
    async def script(store: Store) -> None:
        marks = [Watermark(PEER, n.to_bytes(8, "big"), n, bytes(16)) for n in range(150)]
        await store.commit([Watermark(OTHER, EPOCH, 1, bytes(16)), *marks[:100]])
        await store.commit(marks[100:])
        found = (await store.mail_start()).watermarks
        assert found[1:] == tuple(marks[-WATERMARKS_PER_SENDER_MAX:])
        assert found[0].sender == OTHER

    live(store, script)


# Log


def test_the_log_shows_the_newest_both_ways_oldest_first(store: Store) -> None:
    async def script(store: Store) -> None:
        await store.commit([out(n, f"o{n}", at_ms=n * 10) for n in range(1, 6)])
        await store.commit([came(f"i{n}", at_ms=n * 10 + 5) for n in range(1, 6)])
        await store.commit([word("o5", "refused", why="no room")])
        found = await store.log(4)
        assert [entry.id for entry in found] == ["o4", "i4", "o5", "i5"]
        assert [entry.direction for entry in found] == ["out", "in", "out", "in"]
        assert (found[2].state, found[2].reason, found[2].peer) == ("refused", "no room", PEER)
        assert [entry.at_ms for entry in found] == [40, 45, 50, 55]
        assert list(await store.log(0)) == []

    live(store, script)


def test_the_log_is_filtered_by_peer_and_kind(store: Store) -> None:
    async def script(store: Store) -> None:
        await store.commit([out(1, "a"), out(1, "b", OTHER, kind="task"), out(2, "c", kind="task")])
        await store.commit([came("d", OTHER), came("e", kind="task")])
        assert {entry.id for entry in await store.log(9, peer=OTHER)} == {"b", "d"}
        assert {entry.id for entry in await store.log(9, kind="task")} == {"b", "c", "e"}
        assert {entry.id for entry in await store.log(9, kind="task", peer=PEER)} == {"c", "e"}
        assert len(await store.log(1, kind="task")) == 1

    live(store, script)


def test_a_kind_that_is_left_out_of_the_log_takes_no_place(store: Store) -> None:
    async def script(store: Store) -> None:
        await store.commit([came("a"), out(1, "b")])
        await store.commit([came(f"r{n}", kind="receipt") for n in range(700)])
        assert {entry.id for entry in await store.log(2, without="receipt")} == {"a", "b"}
        assert list(await store.log(9, kind="receipt", without="receipt")) == []

    live(store, script)


@pytest.mark.parametrize(
    ("search", "found"),
    [
        ("login", {"1", "2"}),
        ("LOGIN fails", {"1"}),
        ("fails login", {"1"}),
        ("log", {"1", "2"}),  # the last word may be unfinished
        ("log fails", set()),  # the others may not
        ("über", {"3"}),
        ("uber", {"3"}),
        ("foo-bar", {"4"}),
        ("foo-ba", {"4"}),
        ("bar-foo", set()),
        ('"', set()),
        ("-- ()", set()),
        ('login" OR "x', set()),
        ("login AND", set()),
        ("NEAR(login fails)", set()),
        ("text:login", set()),
        ("login *", {"1", "2"}),
        ("^login", {"1", "2"}),
        ("log\0in", set()),
        ("   ", {"1", "2", "3", "4"}),
    ],
)
def test_a_search_takes_a_persons_words(search: str, found: set[str], tmp_path: Path) -> None:
    async def script(store: Store) -> None:
        await store.commit([out(1, "1", text="The login fails with 500")])
        await store.commit([came("2", text="login works"), came("3", text="Über alles")])
        await store.commit([out(2, "4", text="call foo-bar(x)")])
        assert {entry.id for entry in await store.log(9, search=search)} == found

    live(SqliteStore(tmp_path / "mesh.db"), script)
    live(MemoryStore(), script)


def test_a_search_sees_what_was_committed_before_it(store: Store) -> None:
    async def script(store: Store) -> None:
        for number in range(1, 6):
            await store.commit([out(number, text=f"needle {number}"), came(f"c{number}")])
            assert len(await store.log(9, search="needle")) == number
        await store.commit([word("b1", "delivered", 1)])
        await store.retain(10**9, 1, 10**9)
        found = await store.log(9, search="needle")
        assert [entry.id for entry in found] == ["b2", "b3", "b4", "b5"]
        assert [entry.id for entry in await store.log(2, search="needle")] == ["b4", "b5"]

    live(store, script)


# Retention


def test_only_what_has_ended_and_is_old_is_dropped(store: Store) -> None:
    async def script(store: Store) -> None:
        await store.commit([*outs(6), *(came(f"m{n}") for n in range(5))])
        await store.commit([word("b1", "delivered", 100), word("b2", "delivered", 900)])
        await store.commit([word("b3", "cancelled", 100), word("b4", "sent", 100)])
        await store.commit([became("m0", "done", 100), became("m1", "parked", 100)])
        await store.commit([became("m2", "done", 900), became("m3", "seen", 100)])
        assert await store.retain(1_000, 500, 10**9) == 3
        kept = {entry.id for entry in await store.outbox(9, ended=True)}
        assert kept == {"b2", "b3", "b4", "b5", "b6"}
        assert {entry.id for entry in await store.inbox(0, 9)} == {"m2", "m3", "m4"}
        assert await store.retain(1_000, 500, 10**9) == 0

    live(store, script)


def test_the_oldest_go_when_there_is_too_much(store: Store) -> None:
    size = 50_000

    async def script(store: Store) -> None:
        rows: list[Row] = [out(n, text="x" * size) for n in range(1, 6)]
        rows += [came(f"m{n}", text="x" * size) for n in range(5)]
        await store.commit(rows)
        assert await store.retain(10_000, 10_000, 0) == 0, "pending was dropped"
        await store.commit([word(f"b{n}", "delivered", n * 10) for n in range(1, 5)])
        await store.commit([became(f"m{n}", "done", n * 10 + 5) for n in range(4)])
        assert await store.retain(10_000, 10_000, 4 * size + size // 2) == 4
        assert [entry.id for entry in await store.outbox(9, ended=True)] == ["b3", "b4", "b5"]
        assert [entry.id for entry in await store.inbox(0, 9)] == ["m2", "m3", "m4"]

    live(store, script)


# All rules together


@pytest.mark.parametrize("seed", range(20))
def test_what_waits_is_told_alike_whether_it_stands_in_the_tables_or_not(
    seed: int, tmp_path: Path
) -> None:
    rng, model, told = random.Random(seed), MailboxModel(EPOCH), 0
    made_up = RandomRows(rng, model)

    async def script(store: Store) -> None:
        nonlocal told
        await store.commit([NewEpoch(EPOCH)])
        for _ in range(120):
            await store.commit(made_up.next())
            if rng.random() < 0.1:
                await store.outbox(1)  # which folds
            peer, limit = rng.choice((PEER, OTHER)), rng.choice((1, 3, 100))
            waiting = model.pending(peer, 1, 100)
            first = rng.choice([1, *(each.seq for each in waiting), len(waiting) + 1])
            found = await store.pending(peer, first, limit)
            assert found == model.pending(peer, first, limit)
            told += bool(found)

    live(SqliteStore(tmp_path / "mesh.db"), script)
    assert told > 20


@pytest.mark.parametrize("seed", range(12))
def test_any_sequence_of_rows_means_the_same_to_the_store_and_to_the_model(
    seed: int, tmp_path: Path
) -> None:
    rng, model = random.Random(seed), MailboxModel(EPOCH)
    made_up = RandomRows(rng, model)

    async def script(store: Store) -> None:
        if not made_up.step:
            await store.commit([NewEpoch(EPOCH)])
        for _ in range(12):
            for _ in range(rng.randint(1, 5)):
                await store.commit(made_up.several())
            if rng.random() < 0.2:
                now_ms, keep = made_up.step * 10, rng.choice(((200, 10**9), (10**9, 2_000)))
                dropped = model.retain(now_ms, *keep)
                assert await store.retain(now_ms, *keep) == dropped
            await assert_same(store, model)

    live(SqliteStore(tmp_path / "mesh.db"), script, script)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_a_crash_finds_in_the_journal_nothing_is_lost_or_changed(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of them are power cuts: nothing is left of what the tables got since the last sync."""
    rng, model = random.Random(seed), MailboxModel(EPOCH)
    made_up = RandomRows(rng, model)
    synced: dict[str, bytes] = {}

    def note(path: Path) -> None:
        main, endings = path.with_name("mesh.db"), ("", "-wal")
        synced.clear()
        synced.update(
            {e: beside(main, e).read_bytes() for e in endings if beside(main, e).exists()}
        )

    syncs = Syncs(note, monkeypatch)
    monkeypatch.setattr(commits_module, "FILE_BYTES_MAX", rng.choice((4_000, 20_000, 10**6)))
    monkeypatch.setattr(database_module, "REST_BYTES", rng.choice((1, 2_000, 10**6)))
    monkeypatch.setattr(sqlite_module, "QUIET_S", 600.0)
    monkeypatch.setattr(journal_module, "LOG_BYTES_MAX", rng.choice((500, 3_000, 10**6)))
    monkeypatch.setattr(journal_module, "FOLD_BYTES", rng.choice((1, 500, 10**6)))
    monkeypatch.setattr(journal_module, "MANY", rng.choice((-1, 64)))
    monkeypatch.setattr(journal_module, "LONG_BYTES", rng.choice((100, 1_024)))

    async def script(store: SqliteStore, life: int) -> None:
        if life == 0:
            await store.commit([NewEpoch(EPOCH)])
        await assert_same(store, model)
        for _ in range(rng.randrange(40)):
            await store.commit(made_up.next())
            if rng.random() < 0.1:
                await assert_same(store, model)
        copy_files(store.path, after := tmp_path / f"{life + 1}" / "mesh.db")
        if rng.random() < 0.5:
            for ending, content in synced.items():
                beside(after, ending).write_bytes(content)

    (tmp_path / "0").mkdir()
    for life in range(8):
        (tmp_path / f"{life + 1}").mkdir()
        store = SqliteStore(tmp_path / f"{life}" / "mesh.db")
        note(store.path)
        live(store, partial(script, life=life))
    syncs.unregister()
