"""What sessions hand in becomes messages: batches that share a commit and a frame.

Decides ids and times. While no commit is under way, what comes is taken at once; what comes while
one is, or in the same round of the loop, goes together. One message is a batch of one. Invariants:
what one call hands in is accepted whole or not at all, and never fails because of a neighbour.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

from meshagent.core.model.attachments import Attachment
from meshagent.core.model.messages import RECEIPT_KIND, MessageIds, Outgoing
from meshagent.core.model.peers import AgentId
from meshagent.core.model.rows import Row
from meshagent.errors import StorageError, UsageError
from meshagent.node.driver import Driver
from meshagent.node.received import Receipt
from meshagent.node.turn_runner import Waiter

__all__ = ["DEFAULT_KIND", "Submissions"]

DEFAULT_KIND = "text"
BATCH_MAX = 256  # calls taken at once: these are at the disk or the peer while others come
NO_HEADERS: dict[str, str] = {}  # never changed, as nothing of a message is

Kept = asyncio.Future[Sequence[Receipt]]


class Submission(NamedTuple):
    """What one call hands in: each text for each recipient, and rows to keep with them."""

    kept: Kept
    recipients: Sequence[AgentId]
    texts: Sequence[str]
    kind: str
    data: Any
    thread: str
    reply_to: str
    ttl_s: float | None
    attached: Sequence[Attachment]
    rows: Sequence[Row]


class Submissions:
    """What waits to become messages."""

    def __init__(self, driver: Driver, grant: Callable[[Attachment, AgentId], Attachment]) -> None:
        self._driver, self._grant = driver, grant
        self._ids = MessageIds(random.Random(random.SystemRandom().getrandbits(128)))
        self._waiting: list[Submission] = []

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
    ) -> Kept:
        """Accept each text for each recipient; the future tells when all are durable."""
        if kind == RECEIPT_KIND or self._driver.agent in recipients:
            self.check(recipients, kind)
        kept: Kept = asyncio.Future(loop=self._driver.loop)
        fields = (kept, recipients, texts, kind, data, thread, reply_to, ttl_s, attached, ())
        self._add(Submission(*fields))
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
        kept: Kept = asyncio.Future(loop=self._driver.loop)
        self._add(Submission(kept, (sender,), ("",), RECEIPT_KIND, news, "", "", None, (), (row,)))
        await kept

    def _add(self, submission: Submission) -> None:
        if not self._waiting and not self._driver.runner.turns.is_committing:
            self._accept([submission])
            return
        if not self._waiting:
            self._driver.loop.call_soon(self._accept_waiting)
        self._waiting.append(submission)

    def _accept_waiting(self) -> None:
        batch, self._waiting = self._waiting[:BATCH_MAX], self._waiting[BATCH_MAX:]
        if self._waiting:
            self._driver.loop.call_soon(self._accept_waiting)
        batch = [each for each in batch if not each.kept.done()]  # somebody may have given up
        if batch:
            self._accept(batch)

    def _accept(self, batch: Sequence[Submission]) -> None:
        try:
            self._compose(batch)
        except (KeyboardInterrupt, SystemExit):
            error = StorageError("This was interrupted: it may have been kept.")
            for each in batch:
                if not each.kept.done():
                    each.kept.set_exception(error)
            self._driver.runner.interrupted()
            raise
        except Exception as error:  # whatever it is, who handed it in has to hear of it
            if len(batch) == 1:
                if not batch[0].kept.done():
                    batch[0].kept.set_exception(error)
            else:
                for each in batch:
                    self._accept([each])

    def _compose(self, batch: Sequence[Submission]) -> None:
        """All of them as columns, and hand them to the engine."""
        kept, peers, texts, kinds, data, threads, reply_to, ttls, attached, rows = zip(
            *batch, strict=True
        )
        sizes = [len(each) * len(some) for each, some in zip(peers, texts, strict=True)]
        if sizes.count(1) < len(sizes):
            columns = (kinds, data, threads, reply_to, ttls, attached)
            kinds, data, threads, reply_to, ttls, attached = [
                tuple(chain.from_iterable(map(repeat, column, sizes))) for column in columns
            ]
            peers, texts = zip(*map(_each_to_each, peers, texts), strict=True)
        to, words = tuple(chain.from_iterable(peers)), tuple(chain.from_iterable(texts))
        many, now_ms = len(to), self._driver.wall_ms()
        ids = tuple(self._ids.take(now_ms, many))
        granted = self._granted(to, attached) if any(attached) else ((),) * many
        expires = (0,) * many
        if ttls.count(None) < many:
            expires = tuple(0 if ttl is None else now_ms + int(ttl * 1000) for ttl in ttls)
        outgoing = Outgoing.of(to, (
            ids, kinds, words, (now_ms,) * many, data, threads, reply_to, (NO_HEADERS,) * many,
            granted, expires, (0,) * many,
        ))  # fmt: skip
        receipts = list(map(Receipt, ids, to, repeat(self._driver.loop)))
        self._driver.receipts.add(ids, receipts)
        waiters = _waiters(kept, receipts, sizes)
        are_receipts = kinds.count(RECEIPT_KIND) == many
        self._driver.accept(outgoing, list(chain.from_iterable(rows)), waiters, are_receipts)

    def _granted(
        self, peers: Sequence[AgentId], attached: Sequence[Sequence[Attachment]]
    ) -> tuple[tuple[Attachment, ...], ...]:
        return tuple(
            tuple(self._grant(each, peer) for each in files)
            for peer, files in zip(peers, attached, strict=True)
        )


def _each_to_each(
    recipients: Sequence[AgentId], texts: Sequence[str]
) -> tuple[Sequence[AgentId], Sequence[str]]:
    """Every text for the first recipient, then for the next."""
    peers = recipients if len(texts) == 1 else [peer for peer in recipients for _ in texts]
    return peers, [*texts] * len(recipients)


def _waiters(
    kept: Sequence[Kept], receipts: Sequence[Receipt], sizes: Sequence[int]
) -> list[Waiter]:
    """Who handed in each submission, with as many of the receipts as it gives."""
    of_each: Iterable[Sequence[Receipt]]
    if sizes.count(1) == len(sizes):  # most often
        of_each = zip(receipts, strict=False)
    else:
        of_each = map(tuple, map(islice, repeat(iter(receipts)), sizes))
    return list(zip(kept, of_each, strict=True))
