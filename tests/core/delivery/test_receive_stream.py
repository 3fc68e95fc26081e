"""What a recipient remembers of one sender's numbers, and what it says when it no longer does."""

from __future__ import annotations

import pytest

from meshagent.core.delivery.receive_stream import FORGOTTEN, NO_HASH, ReceiveStream
from meshagent.core.model.messages import body_hash
from meshagent.core.wire.frames import EPOCH_BYTES, HASH_BYTES, Mail

HASH = b"h" * HASH_BYTES


@pytest.mark.parametrize(
    ("noted", "floor", "left"),
    [
        ({}, 9, {}),
        ({3: ""}, 3, {3: ""}),
        ({3: ""}, 4, {3: FORGOTTEN}),
        ({2: "", 3: "no", 5: ""}, 4, {3: FORGOTTEN, 5: ""}),
        ({2: FORGOTTEN, 5: ""}, 5, {2: FORGOTTEN, 5: ""}),
        ({2: FORGOTTEN, 5: ""}, 6, {5: FORGOTTEN}),
    ],
)
def test_one_word_stands_for_all_that_was_forgotten(
    noted: dict[int, str], floor: int, left: dict[int, str]
) -> None:
    stream = ReceiveStream(8, HASH, noted)
    stream.forget_below(floor)
    assert stream.exceptions == left
    assert (stream.seq, stream.last) == (8, HASH)
    stream.forget_below(floor - 1)
    assert stream.exceptions == left, "a late frame brings nothing back"


def test_the_last_hash_goes_when_nobody_can_tell_its_number() -> None:
    stream = ReceiveStream(8, HASH, {7: "", 8: ""})
    assert stream.named == 6
    stream.forget_below(7)
    assert (stream.named, stream.last) == (6, HASH)
    stream.forget_below(8)
    assert (stream.named, stream.last) == (7, NO_HASH)


def test_the_number_of_a_refused_message_keeps_its_hash_when_that_is_forgotten() -> None:
    body = b"refused"
    stream = ReceiveStream(8, body_hash(body), {8: "too large"})
    stream.forget_below(9)
    assert (stream.named, stream.last) == (8, body_hash(body))
    assert not stream.contradicts(Mail(bytes(EPOCH_BYTES), 8, 8, (body,)))
    assert stream.contradicts(Mail(bytes(EPOCH_BYTES), 8, 8, (b"another",)))


def test_what_an_earlier_database_had_is_not_vouched_for() -> None:
    stream = ReceiveStream(3, HASH, {2: "no"})
    stream.skip_to(7)
    assert (stream.seq, stream.last, stream.exceptions) == (6, NO_HASH, {6: FORGOTTEN})
