"""What delivery might commit next, made up; and every question that a store is asked about mail."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from storage.mail.mail_rows import (
    EPOCH,
    OTHER,
    PEER,
    became,
    came,
    came_together,
    out,
    out_together,
)

from meshagent.core.delivery.mailbox import MailboxModel
from meshagent.core.model.message_states import WAITING, WITHDRAWN
from meshagent.core.model.rows import (
    Arrived,
    Delivered,
    InEntry,
    InRow,
    NewEpoch,
    OutEntry,
    OutRow,
    OutState,
    ReceiptRow,
    Row,
    TurnedAway,
    Watermark,
)
from meshagent.core.ports import Store

BLOBS = tuple(bytes(31) + bytes([number]) for number in range(3))
MANY = 10_000


class RandomRows:
    """Commits as delivery makes them: numbers in order, answers from a stream's floor on."""

    def __init__(self, rng: random.Random, model: MailboxModel) -> None:
        self.rng, self.model, self.step = rng, model, 0
        self.kinds: list[Callable[[str], list[Row]]] = [
            self.accept, self.accept, self.accept_and_deliver, self.deliver, self.answer,
            self.withdraw, self.receipt, self.receive, self.receive_held,
            self.release, self.read, self.start_over,
        ]  # fmt: skip

    def next(self) -> list[Row]:
        """What is committed next; the model has it already. A store may get several of these as
        one commit."""
        self.step += 1
        rows = self.rng.choice(self.kinds)(self.rng.choice((PEER, OTHER)))
        self.model.write(rows)
        return rows

    def several(self) -> list[Row]:
        """As a store gets what several wait for."""
        return [row for _ in range(self.rng.choice((1, 1, 2, 5))) for row in self.next()]

    def accept(self, peer: str) -> list[Row]:
        new = self._new(peer)
        plain = not any(row.blobs or row.expires_ms for row in new)
        return [out_together(new)] if plain and self.rng.random() < 0.7 else [*new]

    def _new(self, peer: str) -> list[OutRow]:
        rng, first = self.rng, self.model.next_seq.get(peer, 1)
        rows = []
        for number in range(first, first + rng.randint(1, 4)):
            rows.append(out(
                number, f"s{self.step}-{number}", peer,
                expires_ms=rng.choice((0, 0, 0, self.step * 10 + 50)),
                text=rng.choice(("", "needle", "in a haystack")),
                kind=rng.choice(("text", "text", "task")), at_ms=self.step * 10,
                blobs=(rng.choice(BLOBS),) if rng.random() < 0.2 else (),
            ))  # fmt: skip
        return rows

    def accept_and_deliver(self, peer: str) -> list[Row]:
        """What was accepted and answered before one commit took both."""
        waiting, new = self._waiting(peer), self._new(peer)
        first = waiting[0].seq if waiting else new[0].seq
        return [*new, Delivered(peer, first, self.rng.choice(new).seq, self.step * 10)]

    def deliver(self, peer: str) -> list[Row]:
        waiting = self._waiting(peer)[: self.rng.randint(1, 4)]
        return [Delivered(peer, waiting[0].seq, waiting[-1].seq, self.step * 10)] if waiting else []

    def answer(self, peer: str) -> list[Row]:
        rows: list[Row] = []
        for entry in self._waiting(peer)[: self.rng.randint(1, 4)]:
            if entry.state in WITHDRAWN and self.rng.random() < 0.7:
                rows.append(self._word(entry, entry.state))
            elif entry.attached:  # how it ends, its recipient says later
                rows.append(self._word(entry, "sent", taken=True))
            else:
                rows.append(self._word(entry, self.rng.choice(("delivered", "refused"))))
        return rows

    def withdraw(self, peer: str) -> list[Row]:
        fresh = [each for each in self._waiting(peer) if each.state in WAITING]
        end = self.rng.choice(("expired", "cancelled"))
        return [self._word(each, end) for each in fresh[-1:]]

    def receipt(self, peer: str) -> list[Row]:
        ours = [each for each in self.model.out.values() if each.peer == peer]
        if not ours:
            return []
        entry = self.rng.choice(ours)
        state = self.rng.choice(("delivered", "seen", "done", "refused", "expired"))
        reason = "no room" if state == "refused" else ""
        return [ReceiptRow(peer, entry.id, state, self.step * 10, reason)]

    def receive(self, peer: str) -> list[Row]:
        epoch = self.rng.choice((EPOCH, b"epoch--2"))
        mark = Watermark(peer, epoch, self.step, bytes(16), ((self.step, "why"),))
        some = [self._came(peer) for _ in range(2)]
        return [came_together(some) if self.rng.random() < 0.5 else some[0], mark]

    def receive_held(self, peer: str) -> list[Row]:
        ident, blobs = f"h{self.rng.randrange(60)}", (self.rng.choice(BLOBS),)
        held = came(ident, peer, at_ms=self.step * 10, text="needle", blobs=blobs)
        return [self._came(peer), held, self._came(peer)]

    def _came(self, peer: str) -> InRow:
        rng, ident = self.rng, f"c{self.rng.randrange(60)}"
        return came(ident, peer, at_ms=self.step * 10, text=rng.choice(("", "a needle")))

    def release(self, peer: str) -> list[Row]:
        held = [each for each in self.model.receiving() if each.sender == peer]
        kind = self.rng.choice((Arrived, Arrived, TurnedAway))
        return [self._came(peer), *(kind(peer, each.id) for each in held[:2])]

    def read(self, peer: str) -> list[Row]:
        theirs = [each for each in self.model.came.values() if each.sender == peer]
        some = self.rng.sample(theirs, min(2, len(theirs)))
        states = ("unread", "seen", "parked", "done")
        return [
            became(each.id, self.rng.choice(states), self.step * 10, peer, self.rng.randrange(3))
            for each in some
        ]

    def start_over(self, peer: str) -> list[Row]:
        if self.rng.random() < 0.7:
            return []
        return [*self.accept(peer), NewEpoch(self.rng.randbytes(8))]

    def _waiting(self, peer: str) -> list[OutEntry]:
        return self.model.pending(peer, 1, MANY)

    def _word(self, entry: OutEntry, state: str, taken: bool = False) -> OutState:
        why = "too large" if state == "refused" else ""
        return OutState(entry.peer, entry.seq, entry.id, state, why, self.step * 10, taken)


def ranked(entries: Sequence[InEntry], of: Sequence[InEntry]) -> list[InEntry]:
    """With the place among all in place of the position: a store may leave some out."""
    place = {each.position: at for at, each in enumerate(of, 1)}
    return [each._replace(position=place[each.position]) for each in entries]


async def assert_same(store: Store, model: MailboxModel) -> None:
    """Ask both everything."""
    await _same_outbox(store, model)
    await _same_inbox(store, model)
    for limit, search, peer, kind, without in product(
        (1, 5, MANY), ("", "needle", "hay"), ("", PEER), ("", "task"), ("", "task")
    ):
        narrow = {"search": search, "peer": peer, "kind": kind, "without": without}
        assert await store.log(limit, **narrow) == model.log(limit, **narrow), (limit, narrow)
    assert set(await store.blobs()) == model.blobs()
    for sha256, peer, direction in product(BLOBS, (PEER, OTHER), ("in", "out")):
        named = await store.names_blob(sha256, peer, direction)
        assert named == model.names_blob(sha256, peer, direction), (sha256, peer, direction)


async def _same_outbox(store: Store, model: MailboxModel) -> None:
    found, wanted = await store.mail_start(), model.start()
    assert found.epoch == wanted.epoch
    assert set(found.streams) == set(wanted.streams)
    assert (found.unread, sorted(found.taken)) == (wanted.unread, sorted(wanted.taken))
    for peer in (PEER, OTHER):  # the youngest of each sender comes last
        assert [each for each in found.watermarks if each.sender == peer] == [
            each for each in wanted.watermarks if each.sender == peer
        ]
        for first, limit in product((1, 3), (1, MANY)):
            assert await store.pending(peer, first, limit) == model.pending(peer, first, limit)
    assert await store.next_expiry() == model.next_expiry()
    for now_ms, limit in product((0, 500, MANY * MANY), (2, MANY)):
        assert await store.due(now_ms, limit) == model.due(now_ms, limit)
    for limit, ended in product((2, MANY), (True, False)):
        assert await store.outbox(limit, ended=ended) == model.outbox(limit, ended)
    assert await store.withdrawn() == model.withdrawn()
    for prefix in ("s", "s1", "nothing"):
        assert await store.outgoing(prefix) == model.outgoing(prefix)


async def _same_inbox(store: Store, model: MailboxModel) -> None:
    theirs = sorted([*await store.inbox(0, MANY), *await store.receiving()])
    ours = list(model.came.values())
    assert ranked(theirs, theirs) == ranked(ours, ours)
    assert (await store.newest() > 0) == (model.newest() > 0)

    def same(found: Sequence[InEntry], wanted: Sequence[InEntry], asked: Any) -> None:
        assert ranked(found, theirs) == ranked(wanted, ours), asked

    same(await store.receiving(), model.receiving(), "receiving")
    for prefix in ("c", "c1", "nothing"):
        same(await store.incoming(prefix), model.incoming(prefix), prefix)
    middle = len(ours) // 2
    places = [(theirs[middle].position, ours[middle].position)] if ours else [(0, 0)]
    for (at, mine), limit, only in product([*places, (0, 0)], (2, MANY), (True, False)):
        asked = (at, limit, only)
        same(await store.inbox(at, limit, unread=only), model.inbox(mine, limit, only), asked)
        found = await store.recent(limit, upto=at, unseen=only)
        same(found, model.recent(limit, mine, only), asked)
        found = await store.recent(limit, unseen=only)
        same(found, model.recent(limit, None, only), asked)
