"""An upload's states, and which of its chunks is read next."""

from __future__ import annotations

import pytest

from meshagent.core.model.peers import AgentId
from meshagent.core.transfer.upload import (
    TRANSITIONS,
    Upload,
    UploadEvent,
    UploadPeer,
    UploadState,
)
from meshagent.core.wire.frames import BlobAsk

BOB = AgentId("bob")


def upload() -> Upload:
    ask = BlobAsk(1, bytes(32), 10**9, BOB, b"", 0, 4)
    return Upload(UploadPeer(BOB), ask, 4, 0, 0, 0.0)


@pytest.mark.parametrize("state", UploadState)
@pytest.mark.parametrize("event", UploadEvent)
def test_a_state_follows_only_as_the_table_says(state: UploadState, event: UploadEvent) -> None:
    it = upload()
    it.state = state
    changed = (state, event) in TRANSITIONS
    assert it.apply(event) is (state if changed else None)
    assert it.state is TRANSITIONS.get((state, event), state)


def test_a_number_is_free_only_after_the_last_answer_about_it() -> None:
    it = upload()
    it.apply(UploadEvent.END)
    assert not it.is_answered, "the driver still checks it"
    it.apply(UploadEvent.ADMITTED)
    assert it.is_answered
    it = upload()
    it.apply(UploadEvent.ADMITTED)
    it.reading.add(0)
    it.apply(UploadEvent.END)
    assert not it.is_answered, "a chunk is being read"
    it.reading.clear()
    assert it.is_answered


def test_chunks_are_read_only_when_open_and_within_the_credit() -> None:
    it = upload()
    assert it.next_read(8) is None
    it.apply(UploadEvent.ADMITTED)
    assert it.next_read(8) == 0
    it.read = 4
    assert it.next_read(8) is None
    it.rewind(2)
    assert it.next_read(8) == 0, "nothing was sent: it is all read again"
