"""What sessions hand in before the loop comes round becomes messages, all together.

Decides ids and times. A crowd is taken in field by field, with no line of Python for each of many.
Invariants: what one call hands in is accepted whole or not at all, and never fails because of a
neighbour.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice, repeat
from operator import itemgetter
from typing import Any, NamedTuple

from meshagent.core.effects import Accepted, Effect
from meshagent.core.model.attachments import Attachment
from meshagent.core.model.messages import (
    RECEIPT_KIND,
    SHORT_TEXT_CHARACTERS,
    MessageIds,
    Texts,
    made_of,
)
from meshagent.core.model.peers import AgentId
from meshagent.core.model.rows import Row
from meshagent.errors import UsageError
from meshagent.node.driver import Driver, Waiter
from meshagent.node.received import Receipt

__all__ = ["DEFAULT_KIND", "Submissions"]

DEFAULT_KIND = "text"
CROWD_MAX = 256  # taken in at once: these are at the disk or the peer while others come
NO_HEADERS: dict[str, str] = {}  # never changed, as nothing of a message is
_new = tuple.__new__  # a named tuple's own way takes twice as long


class Submission(NamedTuple):
    """What one call hands in: each text for each recipient, and rows to keep with them."""

    kept: asyncio.Future[Sequence[Receipt]]
    recipients: Sequence[AgentId]
    texts: Sequence[str]
    kind: str
    data: Any
    thread: str
    reply_to: str
    ttl_s: float | None
    attached: Sequence[Attachment]
    rows: Sequence[Row]

    def is_simple(self) -> bool:
        """Whether it is one message with nothing attached."""
        return len(self.recipients) == len(self.texts) == 1 and not self.attached


_kept, _rows = itemgetter(0), itemgetter(9)


class Submissions:
    """What waits to become messages."""

    def __init__(self, driver: Driver, grant: Callable[[Attachment, AgentId], Attachment]) -> None:
        self._driver, self._grant = driver, grant
        self._ids = MessageIds(random.Random(random.SystemRandom().getrandbits(128)))
        self._waiting: list[Submission] = []
        self._alone = True
        """The last time, it was one."""
        self._moment = -1
        """When that was taken in: what comes in the same moment goes with others."""

    def hand_in(
        self,
        recipients: Sequence[AgentId],
        texts: Sequence[str],
        data: Any = None,
        kind: str = DEFAULT_KIND,
        thread: str = "",
        reply_to: str = "",
        ttl_s: float | None = None,
        attached: Sequence[Attachment] = (),
    ) -> asyncio.Future[Sequence[Receipt]]:
        """Accept each text for each recipient; the future tells when all are durable."""
        if kind == RECEIPT_KIND or self._driver.agent in recipients:
            self.check(recipients, kind)
        kept: asyncio.Future[Sequence[Receipt]] = asyncio.Future(loop=self._driver.loop)
        self._add(
            _new(Submission, (
                kept, recipients, texts, kind, data, thread, reply_to, ttl_s, attached, ()
            ))
        )  # fmt: skip
        return kept

    def check(self, recipients: Sequence[AgentId], kind: str) -> None:
        """Raise when a session must not say this."""
        if kind == RECEIPT_KIND:
            raise UsageError(f"The kind {kind!r} is the mesh's own.", hint="Choose another kind.")
        if self._driver.agent in recipients:
            raise UsageError(
                f"{self._driver.agent} is this agent itself.",
                hint="Send as another one: --as AGENT",
            )

    async def tell(self, sender: AgentId, news: dict[str, str], row: Row) -> None:
        """Keep what became of a message of this sender, and let it know, in one commit."""
        kept: asyncio.Future[Sequence[Receipt]] = asyncio.Future(loop=self._driver.loop)
        self._add(Submission(kept, (sender,), ("",), RECEIPT_KIND, news, "", "", None, (), (row,)))
        await kept

    def _add(self, submission: Submission) -> None:
        if self._alone and self._moment != self._driver.moment:
            self._moment = self._driver.moment
            self._accept([submission])
            return
        if not self._waiting:
            self._driver.loop.call_soon(self._come_round)
        self._waiting.append(submission)

    def _come_round(self) -> None:
        submissions, self._waiting = self._waiting[:CROWD_MAX], self._waiting[CROWD_MAX:]
        self._alone = len(submissions) == 1 and not self._alone
        if self._waiting:
            self._driver.loop.call_soon(self._come_round)
        if any(map(asyncio.Future.done, map(_kept, submissions))):  # somebody gave up
            submissions = [each for each in submissions if not each.kept.done()]
        if submissions:
            self._accept(submissions)

    def _accept(self, submissions: Sequence[Submission]) -> None:
        try:
            taken = self._compose(submissions)
        except (KeyboardInterrupt, SystemExit):
            self._driver.interrupted([Accepted([(each.kept, None) for each in submissions])])
            raise
        except Exception as error:  # whatever it is, who handed it in has to hear of it
            if len(submissions) == 1:
                submissions[0].kept.set_exception(error)
            else:
                for each in submissions:
                    self._accept([each])
        else:
            self._driver.perform(taken)

    def _compose(self, submissions: Sequence[Submission]) -> list[Effect]:
        now_ms = time.time_ns() // 1_000_000
        if len(submissions) == 1 and submissions[0].is_simple():
            return self._compose_one(submissions[0], now_ms)
        if (plain := self._compose_texts(submissions, now_ms)) is not None:
            return plain
        all_fields = [self._fields_of(each, now_ms) for each in submissions]
        fields = [list(chain.from_iterable(each)) for each in zip(*all_fields, strict=True)]
        peers, texts, kinds, data, threads, reply_to, attached, expires = fields
        ids = self._ids.take(now_ms, len(peers))
        receipts = list(map(Receipt, ids, peers, repeat(self._driver.loop)))
        self._driver.receipts.add(ids, receipts)
        messages = map(made_of, zip(
            ids, kinds, texts, repeat(now_ms), data, threads, reply_to, repeat(NO_HEADERS),
            attached, expires, repeat(0), strict=False,
        ))  # fmt: skip
        outgoing = list(zip(peers, messages, strict=True))
        waiters = _waiters(submissions, receipts, [len(each[0]) for each in all_fields])
        rows = list(chain.from_iterable(map(_rows, submissions)))
        return self._driver.accept(outgoing, rows, waiters)

    def _compose_texts(self, submissions: Sequence[Submission], now_ms: int) -> list[Effect] | None:
        """All of them if each is nothing but texts to the same peer, as most are; else none."""
        _, peers, texts, kinds, data, threads, reply_to, ttls, attached, rows = zip(
            *submissions, strict=True
        )
        many, all_texts = len(submissions), list(chain.from_iterable(texts))
        if not (
            len(peers[0]) == 1
            and peers.count(peers[0]) == kinds.count(DEFAULT_KIND) == many
            and threads.count("") == reply_to.count("") == ttls.count(None) == many
            and not any(attached)
            and not any(rows)
            and set(map(type, data)) == {type(None)}
            and set(map(type, all_texts)) == {str}
            and max(map(len, all_texts)) <= SHORT_TEXT_CHARACTERS
        ):
            return None
        (peer,), ids = peers[0], self._ids.take(now_ms, len(all_texts))
        receipts = list(map(Receipt, ids, repeat(peer), repeat(self._driver.loop)))
        self._driver.receipts.add(ids, receipts)
        waiters = _waiters(submissions, receipts, list(map(len, texts)))
        return self._driver.accept(Texts(peer, ids, all_texts, now_ms), (), waiters)

    def _compose_one(self, submission: Submission, now_ms: int) -> list[Effect]:
        """One message, with the least of code: what comes alone is waited for."""
        kept, (peer,), (text,), kind, data, thread, reply_to, ttl_s, _, rows = submission
        ident = self._ids.next(now_ms)
        receipt = Receipt(ident, peer, self._driver.loop)
        self._driver.receipts.add((ident,), (receipt,))
        expires_ms = 0 if ttl_s is None else now_ms + int(ttl_s * 1000)
        message = made_of((
            ident, kind, text, now_ms, data, thread, reply_to, NO_HEADERS, (), expires_ms, 0
        ))  # fmt: skip
        return self._driver.accept([(peer, message)], rows, [(kept, [receipt])])

    def _fields_of(self, submission: Submission, now_ms: int) -> Sequence[Any]:
        _, recipients, texts, kind, data, thread, reply_to, ttl_s, attached, _ = submission
        peers = recipients if len(texts) == 1 else [peer for peer in recipients for _ in texts]
        many = len(peers)
        granted: Iterable[tuple[Attachment, ...]] = repeat((), many)
        if attached:
            granted = [tuple([self._grant(each, peer) for each in attached]) for peer in peers]
        expires = 0 if ttl_s is None else now_ms + int(ttl_s * 1000)
        return (
            peers, [*texts] * len(recipients), repeat(kind, many), repeat(data, many),
            repeat(thread, many), repeat(reply_to, many), granted, repeat(expires, many),
        )  # fmt: skip


def _waiters(
    submissions: Sequence[Submission], receipts: Sequence[Receipt], sizes: Sequence[int]
) -> list[Waiter]:
    """Who handed in each submission, with as many of the receipts as it gives."""
    of_each: Iterable[Sequence[Receipt]]
    if sizes.count(1) == len(sizes):  # most often
        of_each = zip(receipts, strict=False)
    else:
        of_each = map(tuple, map(islice, repeat(iter(receipts)), sizes))
    return list(zip(map(_kept, submissions), of_each, strict=True))
