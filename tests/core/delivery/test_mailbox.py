"""The reference that stores are compared with; what its rows mean, tests/storage/mail asks."""

from __future__ import annotations

import pytest

from meshagent.core.delivery.mailbox import MailboxModel
from meshagent.core.model.messages import Message, pack_body
from meshagent.core.model.rows import InRow, NewEpoch, OutRow, OutState, Row, Watermark
from meshagent.errors import StorageError

EPOCH, PEER = b"epoch--1", "beta-bbbbbbbb"


def out(seq: int) -> OutRow:
    ident = f"m{seq}"
    return OutRow(PEER, EPOCH, seq, ident, pack_body(Message(ident, "text", "hi", 5)), 0)


def filled() -> MailboxModel:
    model = MailboxModel(EPOCH)
    model.write([out(1), out(2), InRow(PEER, EPOCH, 1, "c", b"", 5, (bytes(32),))])
    model.write([OutState(PEER, 1, "m1", "cancelled", "", 9), Watermark(PEER, EPOCH, 1, b"h")])
    return model


@pytest.mark.parametrize("last", [out(5), out(3)._replace(id="m1")], ids=["number", "id"])
def test_one_row_that_cannot_be_kept_keeps_all_others_out(last: Row) -> None:
    model, before = filled(), filled()
    with pytest.raises(StorageError):
        model.write([
            InRow(PEER, EPOCH, 2, "d", b"", 5), OutState(PEER, 1, "m1", "delivered", "", 9),
            Watermark(PEER, EPOCH, 2, b"h"), NewEpoch(b"epoch--2"), last,
        ])  # fmt: skip
    assert model == before


def test_a_backup_stays_as_it_was_made() -> None:
    model, before = filled(), filled()
    backup = model.copy()
    model.write([out(3), InRow(PEER, EPOCH, 2, "d", b"", 5, (bytes(32),)), NewEpoch(b"epoch--2")])
    assert backup == before
    backup.write([out(3)])
    assert set(model.states()) == set(backup.states())
    assert model != backup
