"""Of two nodes with one key the later one stops, and only on proof."""

from __future__ import annotations

import pytest
from core.made import MESH_ID, hello_of, in_order

from meshagent.core.effects import CloneFound
from meshagent.core.links.clones import CloneCheck
from meshagent.core.links.handshake import make_here, refuse_clone
from meshagent.core.model.identity import verify
from meshagent.core.wire.frames import Refuse

A, B = in_order("ada", "bob")
NONCE = b"n" * 16
CHECK = CloneCheck(A, MESH_ID, verify, 1000)


@pytest.mark.parametrize(
    ("started", "refused", "must_stop"),
    [(999, "", True), (1000, "self", None), (1001, "clone", False)],
    ids=["older", "this very node", "later"],
)
def test_a_node_with_our_key_is_judged_by_when_it_started(
    started: int, refused: str, must_stop: bool | None
) -> None:
    answer, clone = CHECK.dialled_by_own_key(hello_of(A, started_ms=started))
    assert (answer.why if answer else "") == refused
    assert (clone.stop if clone else None) == must_stop
    assert clone is None or isinstance(clone, CloneFound)


def test_two_nodes_never_both_stop() -> None:
    older, later = (CloneCheck(A, MESH_ID, verify, started) for started in (1, 2))
    answer, clone = older.dialled_by_own_key(hello_of(A, nonce=NONCE, started_ms=2))
    assert clone is not None
    assert answer is not None
    assert not clone.stop
    assert later.is_proved(answer, NONCE)
    assert not older.is_proved(answer, NONCE)


@pytest.mark.parametrize(
    "refuse",
    [
        Refuse("clone", "Stop!", b""),
        Refuse("protocol", "Stop!", refuse_clone(make_here(A, MESH_ID, NONCE, 1)).proof),
        refuse_clone(make_here(B, MESH_ID, NONCE, 1)),
        refuse_clone(make_here(A, MESH_ID, b"x" * 16, 1)),
        refuse_clone(make_here(A, b"x" * 16, NONCE, 1)),
        refuse_clone(make_here(A, MESH_ID, NONCE, 1000)),
    ],
    ids=["no proof", "another reason", "another key", "replayed", "another mesh", "not older"],
)
def test_nothing_less_than_fresh_proof_of_our_own_key_stops_us(refuse: Refuse) -> None:
    assert CHECK.is_proved(refuse_clone(make_here(A, MESH_ID, NONCE, 1)), NONCE)
    assert not CHECK.is_proved(refuse, NONCE)
