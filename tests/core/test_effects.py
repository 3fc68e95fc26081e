"""Which turns wait for the disk, and which need not."""

from __future__ import annotations

import pytest

from meshagent.core.effects import (
    Accepted,
    CloseLink,
    Effect,
    Load,
    Note,
    Persist,
    ReceiptChanged,
    Send,
    Transmit,
    may_pass,
    must_wait,
    overtakes,
)
from meshagent.core.model.message_states import MessageState
from meshagent.core.model.peers import AgentId, LinkId
from meshagent.core.model.rows import Delivered
from meshagent.core.wire.frames import EPOCH_BYTES, HASH_BYTES, Gossip, Mail, MailAck

PEER = AgentId("bob-aaaaaaaa")
LINK = LinkId(1)
MAIL = Mail(bytes(EPOCH_BYTES), 1, 1, (b"body",))
ANSWER = MailAck(bytes(EPOCH_BYTES), 1, bytes(HASH_BYTES))
ARRIVED = Note([Delivered(PEER, 1, 2, 5)])
NEWS = ReceiptChanged(PEER, ["a", "b"], MessageState.DELIVERED, "")


@pytest.mark.parametrize(
    "effects",
    [[], [ARRIVED, NEWS], [Transmit(LINK, MAIL), NEWS], [Send(PEER, MAIL)], [Load(PEER, 1, 9)]],
)
def test_messages_that_leave_and_news_of_arrivals_wait_for_nothing(effects: list[Effect]) -> None:
    assert may_pass(effects)
    assert not must_wait(effects)


@pytest.mark.parametrize(
    "effect",
    [
        Persist(()),
        ARRIVED._replace(urgent=True),
        Accepted([]),
        Transmit(LINK, ANSWER),
        Send(PEER, ANSWER),
        Transmit(LINK, Gossip(())),
        CloseLink(LINK),
    ],
)
def test_all_else_stays_in_line(effect: Effect) -> None:
    assert not may_pass([NEWS, effect])


def test_news_never_overtake_older_news_and_nothing_else_holds_them_up() -> None:
    assert overtakes([ARRIVED, NEWS], [[Persist(())], [Send(PEER, MAIL), NEWS]])
    assert not overtakes([ARRIVED, NEWS], [[Persist(()), Send(PEER, ANSWER)]])
    assert not overtakes([ARRIVED, NEWS], [])
    assert not overtakes([Send(PEER, MAIL)], [[NEWS]])
