"""Messages that wait for attachments: each ends once, in order, and nobody holds all the room."""

from __future__ import annotations

import random

from meshagent.core.delivery import incomplete_messages as module
from meshagent.core.delivery.incomplete_messages import Ended, IncompleteMessages
from meshagent.core.model.attachments import Attachment, AttachmentLimits
from meshagent.core.model.message_states import MessageState
from meshagent.core.model.messages import Message
from meshagent.core.model.peers import AgentId

ALICE, BOB = AgentId("alice"), AgentId("bob")
X, Y, Z = b"x" * 32, b"y" * 32, b"z" * 32
DELIVERED, REFUSED, EXPIRED = MessageState.DELIVERED, MessageState.REFUSED, MessageState.EXPIRED


def message(ident: str, *blobs: bytes, expires_ms: int = 0, size: int = 5) -> Message:
    attached = tuple(Attachment("a", size, "text/plain", each) for each in blobs)
    return Message(ident, "text", "hi", 1, attachments=attached, expires_ms=expires_ms)


def ends(ended: list[Ended]) -> list[tuple[str, str]]:
    return [(each.message.id, each.state.value) for each in ended]


def test_a_message_is_ready_with_its_last_blob_and_only_then() -> None:
    incomplete = IncompleteMessages()
    waits_for = incomplete.hold(ALICE, message("m1", X, Y))
    assert [each.sha256 for each in waits_for] == [X, Y]
    assert incomplete.complete(ALICE, "m1") == []
    assert incomplete.ready(X) == []
    assert incomplete.ready(X) == []
    assert ends(incomplete.ready(Y)) == [("m1", "delivered")]
    assert len(incomplete) == 0
    assert X not in incomplete
    assert Y not in incomplete


def test_a_blob_completes_all_that_waited_for_it_in_the_order_they_came() -> None:
    incomplete = IncompleteMessages()
    for number in range(20):
        incomplete.hold(ALICE if number % 2 else BOB, message(f"m{number:02}", X))
    incomplete.hold(ALICE, message("later", X, Y))
    assert [ident for ident, _ in ends(incomplete.ready(X))] == [f"m{n:02}" for n in range(20)]
    assert [each.id for _, each in incomplete.held()] == ["later"]


def test_what_is_not_eager_is_not_waited_for() -> None:
    incomplete = IncompleteMessages(AttachmentLimits(eager_bytes=4))
    assert incomplete.hold(ALICE, message("m1", X)) == []
    assert X not in incomplete
    assert ends(incomplete.complete(ALICE, "m1")) == [("m1", "delivered")]
    assert incomplete.complete(ALICE, "m1") == []


def test_one_blob_that_fails_refuses_the_message_and_frees_the_others() -> None:
    incomplete = IncompleteMessages()
    incomplete.hold(ALICE, message("m1", X, Y))
    incomplete.hold(BOB, message("m2", Y))
    (ended,) = incomplete.failed(X, "nobody has it")
    assert (ended.sender, ended.message.id, ended.state) == (ALICE, "m1", REFUSED)
    assert ended.reason == "nobody has it"
    assert ends(incomplete.ready(Y)) == [("m2", "delivered")]
    assert incomplete.failed(X, "again") == []


def test_time_is_up_for_those_that_wait_and_for_no_others() -> None:
    incomplete = IncompleteMessages()
    incomplete.hold(ALICE, message("late", X, expires_ms=200))
    incomplete.hold(ALICE, message("early", Y, expires_ms=100))
    incomplete.hold(ALICE, message("never", Z))
    assert incomplete.next_expiry() == 100
    assert incomplete.expired(99) == []
    assert ends(incomplete.expired(100)) == [("early", "expired")]
    assert ends(incomplete.ready(X)) == [("late", "delivered")]
    assert incomplete.expired(10_000) == []
    assert incomplete.next_expiry() is None
    assert len(incomplete) == 1


def test_the_same_id_of_two_senders_are_two_messages() -> None:
    incomplete = IncompleteMessages()
    incomplete.hold(ALICE, message("m1", X))
    incomplete.hold(BOB, message("m1", Y))
    (ended,) = incomplete.ready(Y)
    assert ended.sender == BOB
    assert [sender for sender, _ in incomplete.held()] == [ALICE]


def test_an_id_that_comes_again_with_other_attachments_changes_nothing() -> None:
    """Only who means harm does that; once it made `ready` fail for all that waited behind it."""
    for first, second in ((X, Y), (Y, X)):
        incomplete = IncompleteMessages()
        incomplete.hold(ALICE, message("m1", X))
        assert incomplete.hold(ALICE, message("m1", Y)) == []
        found = ends(
            incomplete.ready(first) + incomplete.ready(second) + incomplete.failed(second, "?")
        )
        assert found == [("m1", "delivered")]
        assert len(incomplete) == 0


def test_every_message_ends_exactly_once_whatever_happens() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        incomplete, blobs = IncompleteMessages(), [bytes([n]) * 32 for n in range(6)]
        held: dict[tuple[str, str], bool] = {}
        ended: list[tuple[str, str]] = []
        for now in range(80):
            took: list[Ended] = []
            match rng.randrange(5):
                case 0 | 1:
                    sender = rng.choice([ALICE, BOB])
                    wants = rng.sample(blobs, rng.randint(1, 3))
                    expires_ms = rng.choice([0, now + rng.randint(1, 30)])
                    ident = f"m{rng.randrange(12)}-{now // 20}"
                    one = message(ident, *wants, expires_ms=expires_ms)
                    incomplete.hold(sender, one)
                    held[sender, one.id] = True
                    took = incomplete.complete(sender, one.id)
                case 2:
                    took = incomplete.ready(rng.choice(blobs))
                case 3:
                    took = incomplete.failed(rng.choice(blobs), "?")
                case 4:
                    took = incomplete.expired(now)
            for each in took:
                key = (each.sender, each.message.id)
                assert held.pop(key), seed
                ended.append(key)
            assert len(incomplete) == len(held), seed
        for blob in blobs:
            for each in incomplete.ready(blob):
                assert held.pop((each.sender, each.message.id)), seed
        assert held == {}, seed
        assert not incomplete._wanted_by, seed
        assert not incomplete._shares, seed
        assert incomplete._files == 0, seed


def test_a_sender_is_held_back_at_its_share_and_another_is_not() -> None:
    incomplete = IncompleteMessages()
    for number in range(module.SENDER_FILES_MAX):
        assert not incomplete.is_crowded(ALICE)
        incomplete.hold(ALICE, message(f"m{number}", number.to_bytes(32, "big")))
    assert incomplete.is_crowded(ALICE)
    assert not incomplete.is_crowded(BOB)
    incomplete.ready((0).to_bytes(32, "big"))
    assert not incomplete.is_crowded(ALICE)


def test_large_bodies_count_and_are_not_kept_in_memory() -> None:
    incomplete = IncompleteMessages()
    large = message("m1", X)._replace(text="x" * 1000, data={"a": 1}, headers={"b": "c"})
    incomplete.hold(ALICE, large, size=module.SENDER_BYTES_MAX)
    assert incomplete.is_crowded(ALICE)
    ((_, kept),) = incomplete.held()
    assert (kept.text, kept.data, kept.headers) == ("", None, {})
    assert kept.attachments == large.attachments


def test_all_senders_together_are_bounded() -> None:
    incomplete = IncompleteMessages()
    many = [number.to_bytes(32, "big") for number in range(256)]
    for number in range(module.HELD_FILES_MAX // 256):
        incomplete.hold(AgentId(f"m{number}"), message("m", *many))
    assert incomplete.is_crowded(BOB)


def test_times_of_messages_that_ended_are_not_remembered_for_ever() -> None:
    incomplete = IncompleteMessages()
    for number in range(10_000):
        incomplete.hold(ALICE, message(f"m{number}", X, expires_ms=2**62))
        incomplete.ready(X)
    assert len(incomplete._expiries) <= 2 * module.STALE_MIN
