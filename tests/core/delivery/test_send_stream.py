"""What waits for one peer: which part is in memory, on the wire, settled."""

from __future__ import annotations

import pytest

from meshagent.core.delivery import send_stream as outgoing
from meshagent.core.delivery.send_stream import FRAME_BYTES_MAX, ITEM_BYTES, SendStream
from meshagent.core.model.message_states import MessageState
from meshagent.core.model.rows import OutEntry, OutRow
from meshagent.core.wire.frames import MAIL_ITEMS_MAX

EPOCH = b"ourepoch"


def entry(seq: int, state: MessageState = MessageState.QUEUED) -> OutEntry:
    return OutEntry("bob", seq, f"m{seq}", b"body", state, "", 0, 1, 1, False)


def stream(count: int, size: int = 10, durable: bool = True) -> SendStream:
    made = SendStream(EPOCH)
    made.linked = True
    made.add([OutRow("bob", EPOCH, seq, f"m{seq}", bytes(size), 0) for seq in range(1, count + 1)])
    if durable:
        made.durable = count
    return made


def frames(made: SendStream) -> list[list[int]]:
    found = []
    while made.has_next:
        mail = made.next_frame()
        found.append(list(range(mail.first, mail.first + len(mail.items))))
    return found


def test_a_backlog_goes_out_in_few_frames() -> None:
    assert [len(each) for each in frames(stream(MAIL_ITEMS_MAX + 3))] == [MAIL_ITEMS_MAX, 3]


def test_a_frame_has_a_size_and_one_large_message_travels_alone() -> None:
    assert frames(stream(3, FRAME_BYTES_MAX // 2)) == [[1], [2], [3]]
    assert frames(stream(5, FRAME_BYTES_MAX // 3)) == [[1, 2], [3, 4], [5]]
    assert frames(stream(2, 2 * FRAME_BYTES_MAX)) == [[1], [2]]


def test_only_what_is_durable_leaves() -> None:
    made = stream(3, durable=False)
    assert frames(made) == []
    made.durable = 2
    assert frames(made) == [[1, 2]]


def test_a_message_is_reported_as_sent_the_first_time_only() -> None:
    made = stream(2)
    frames(made)
    assert made.first_sent == ["m1", "m2"]
    made.first_sent = []
    made.rewind(0)
    assert frames(made) == [[1, 2]]
    assert made.first_sent == []


def test_what_came_further_before_is_not_reported_as_sent() -> None:
    made = SendStream(EPOCH, next_seq=4)
    made.linked = made.loading = True
    states = (MessageState.DELIVERED, MessageState.QUEUED, MessageState.CANCELLED)
    made.take_loaded([entry(at, state) for at, state in enumerate(states, 1)], {})
    assert frames(made) == [[1, 2, 3]]
    assert made.first_sent == ["m2"]


def test_going_back_never_reaches_what_is_settled_nor_goes_ahead() -> None:
    made = stream(5)
    frames(made)
    made.settle(2)
    made.rewind(0)
    assert made.sent == 2
    made.rewind(4)
    assert made.sent == 2


def test_what_is_settled_leaves_memory() -> None:
    made = stream(3)
    assert [each.id for each in made.settle(2)] == ["m1", "m2"]
    assert (made.floor, made.waiting, made.loaded) == (3, 1, 3)
    assert made.loaded_bytes == ITEM_BYTES + 10
    assert made.settle(1) == []
    assert made.floor == 3


def test_memory_is_bounded_by_number_and_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "WINDOW_ITEMS_MAX", 4)
    made = stream(10)
    assert (made.loaded, made.next_seq) == (4, 11)
    assert not made.wants_more()
    made.settle(3)
    assert not made.wants_more(), "many are read at once"
    made.settle(4)
    assert made.wants_more()
    monkeypatch.setattr(outgoing, "WINDOW_BYTES_MAX", 100)
    assert stream(10, 60).loaded == 1


def test_only_what_comes_next_is_taken_from_disk() -> None:
    made = SendStream(EPOCH, next_seq=6, floor=2)
    made.linked = made.loading = True
    made.take_loaded([entry(2), entry(3), entry(5)], {})
    assert (made.loaded, made.loading) == (3, False)
    made.take_loaded([entry(4)], {})
    assert made.loaded == 3, "nobody asked"


@pytest.mark.parametrize("reason", ["unlinked", "outdated"])
def test_what_was_asked_for_in_another_life_is_passed_over(reason: str) -> None:
    made = SendStream(EPOCH, next_seq=3)
    made.linked = made.loading = True
    if reason == "unlinked":
        made.unlink()
    else:
        made.outdated = True
    assert made.take_loaded([entry(1)], {}) == ()
    assert (made.loaded, made.outdated, made.loading) == (0, False, False)


def test_a_withdrawn_message_is_found_by_its_id_whatever_number_was_read() -> None:
    made = stream(3)
    assert made.withdraw(1, "m2", MessageState.CANCELLED)
    mail = made.next_frame()
    assert [body is None for body in mail.items] == [False, True, False]
    assert not made.withdraw(2, "m2", MessageState.EXPIRED)
    assert made.withdraw(9, "m9", MessageState.EXPIRED), "not in memory: the disk will tell"


def test_what_was_withdrawn_carries_nothing_whether_the_disk_knows_it_or_not() -> None:
    made = SendStream(EPOCH, next_seq=5)
    made.linked = made.loading = True
    entries = [entry(1), entry(2, MessageState.EXPIRED), entry(3), entry(4, MessageState.EXPIRED)]
    late = dict.fromkeys(("m3", "m4"), MessageState.CANCELLED)
    made.take_loaded(entries, late)
    mail = made.next_frame()
    assert mail.items == (b"body", None, None, None)
    states = [None, MessageState.EXPIRED, MessageState.CANCELLED, MessageState.EXPIRED]
    assert [made.withdrawn(seq) for seq in (1, 2, 3, 4)] == states
    made.settle(3)
    made.forget_settled()
    assert [made.withdrawn(seq) for seq in (2, 3, 4)] == [None, None, MessageState.EXPIRED]


def test_the_next_time_is_the_earliest_of_all() -> None:
    made = stream(1)
    assert made.due is None
    made.answer_due = 3.0
    assert made.due == 3.0
    made.busy_until, made.gap_due = 2.0, 1.0
    assert made.due == 1.0
    made.forget_times()
    assert made.due is None


def test_an_answer_beyond_a_gap_ends_the_wait_for_it() -> None:
    made = stream(5)
    frames(made)
    made.missing_after(0, 0.0)
    made.missing_after(0, 0.01)
    assert made.gap_due is not None
    made.settle(1)
    assert made.gap_due is None


def test_what_an_answer_does_not_say_all_of_is_known_whether_accepted_or_read_from_disk() -> None:
    made = SendStream(EPOCH)
    made.linked = True
    plain = OutRow("bob", EPOCH, 1, "m1", b"body", 0)
    made.add([plain, plain._replace(seq=2, expires_ms=9), plain._replace(seq=3, blobs=(b"s",))])
    assert made.special == {2, 3}
    made.settle(2)
    made.forget_settled()
    assert made.special == {3}, "it is not kept for ever"
    read = SendStream(EPOCH, next_seq=4)
    read.linked = read.loading = True
    read.take_loaded(
        [entry(1), entry(2)._replace(expires_ms=9), entry(3)._replace(attached=True)], {}
    )
    assert read.special == {2, 3}
    read.unlink()
    assert read.special == set()
