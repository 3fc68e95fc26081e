"""Messages as a program holds them: a receipt for one that it sent, and one that it received."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import nullcontext
from itertools import repeat
from operator import call
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

from meshagent.core.effects import ReceiptChanged
from meshagent.core.model.attachments import Attachment
from meshagent.core.model.message_states import PROGRESS, MessageState
from meshagent.core.model.messages import parse_body
from meshagent.core.model.peers import AgentId
from meshagent.core.model.rows import InEntry
from meshagent.errors import DeliveryTimeout, MeshError
from meshagent.node.changes import ChangeFeed

if TYPE_CHECKING:
    from meshagent.node.blobs import Attachable
    from meshagent.node.mailbox import Mailbox

__all__ = ["Receipt", "ReceiptBook", "ReceivedAttachment", "ReceivedMessage"]

DELIVERED_RANK = PROGRESS[MessageState.DELIVERED]
_END_RANK = max(PROGRESS.values())
_BEGINNING: tuple[MessageState, ...] = (MessageState.QUEUED,)
_ON_ITS_WAY = frozenset({MessageState.QUEUED, MessageState.SENT})
TIDY_RECEIPTS = 4096  # entries between looks for those whose receipt nobody holds any more
_NOBODY = type(None)  # in place of a reference: called, it gives none
_FAILED = frozenset({MessageState.EXPIRED, MessageState.REFUSED, MessageState.CANCELLED})


class Receipt:
    """How far a message of ours has come. It is durable: the message stays queued until it ends."""

    __slots__ = ("__weakref__", "_history", "_loop", "_waiting", "id", "reason", "state", "to")

    def __init__(self, ident: str, to: str, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.id = ident
        self.to = to
        self.state = MessageState.QUEUED
        self.reason = ""
        self._history = _BEGINNING
        self._loop = loop  # to ask which one runs takes a system call
        self._waiting: tuple[tuple[int, asyncio.Future[None]], ...] = ()
        """Who waits, and for which rank."""

    def __repr__(self) -> str:
        return f"<Receipt {self.id} to {self.to}: {self.state.value}>"

    async def delivered(self, timeout: float | None = None) -> Receipt:
        """Until it is durable at the recipient; DeliveryTimeout when that takes longer.

        MeshError when it ended otherwise: expired, refused (with the reason) or cancelled.
        """
        if timeout is None:  # most often: nothing to set up
            while self.state in _ON_ITS_WAY:
                await self._change(DELIVERED_RANK)
            if self.state not in _FAILED:
                return self
        return await self.reached(MessageState.DELIVERED, timeout)

    async def reached(self, state: MessageState | str, timeout: float | None = None) -> Receipt:
        """Until it has come at least as far as `state`."""
        rank = PROGRESS[MessageState(state)]
        if PROGRESS[self.state] >= rank and self.state not in _FAILED:
            return self
        try:
            # Without a time limit nothing is set up for one: many wait for many.
            async with asyncio.timeout(timeout) if timeout is not None else nullcontext():
                while self.state in _FAILED or PROGRESS[self.state] < rank:
                    if self.state in _FAILED:
                        reason = f" ({self.reason})" if self.reason else ""
                        raise MeshError(f"The message {self.id} was {self.state}{reason}.")
                    await self._change(rank)
        except TimeoutError:
            raise DeliveryTimeout(
                f"The message {self.id} is {self.state} after {timeout:g} s; it stays queued.",
                id=self.id,
            ) from None
        return self

    async def settled(self) -> None:
        """Until it was delivered, or ended otherwise."""
        while PROGRESS[self.state] < DELIVERED_RANK and self.state not in _FAILED:
            await self._change(DELIVERED_RANK)

    async def watch(self) -> AsyncIterator[MessageState]:
        """Every state it has been in and comes to, in order, until it has ended."""
        shown = 0
        while True:
            while shown < len(self._history):
                yield self._history[shown]
                shown += 1
            if self.state in _FAILED or self.state is MessageState.DONE:
                return
            await self._change()

    def _change(self, rank: int = 0) -> asyncio.Future[None]:
        """Done when it has come so far, or has ended: nobody is woken for less."""
        change: asyncio.Future[None] = asyncio.Future(loop=self._loop)
        before = self._waiting
        self._waiting = ((rank, change),)
        if before:  # who asks often leaves one behind, not many
            self._waiting += tuple([each for each in before if not each[1].done()])
        return change


class ReceiptBook:
    """The receipts that somebody still holds, by message."""

    def __init__(self, changes: ChangeFeed) -> None:
        self._held: dict[str, ref[Receipt]] = {}
        self._tidy_at = TIDY_RECEIPTS
        changes.listen(ReceiptChanged, self._advance)

    def add(self, ids: Iterable[str], receipts: Iterable[Receipt]) -> None:
        """From now on they hear how far the messages with these ids have come."""
        self._held.update(zip(ids, map(ref, receipts), strict=True))
        if len(self._held) >= self._tidy_at:
            # Not by a callback for each: that takes longer than all else that is done with it.
            self._held = {ident: held for ident, held in self._held.items() if held() is not None}
            self._tidy_at = max(TIDY_RECEIPTS, 2 * len(self._held))

    def _advance(self, change: ReceiptChanged) -> None:
        """These messages have come so far; nobody answers for another."""
        peer, idents, state, reason = change
        rank, news = PROGRESS[state], (state,)
        reached = _END_RANK if state in _FAILED else rank
        for receipt in map(call, map(self._held.get, idents, repeat(_NOBODY))):
            if receipt is not None and receipt.to == peer and PROGRESS[receipt.state] < rank:
                receipt.state, receipt.reason = state, reason
                receipt._history += news
                for wanted, change in receipt._waiting:
                    if wanted <= reached and not change.done():
                        change.set_result(None)


class ReceivedAttachment:
    """A file that came with a message. Its bytes must not be changed: other messages share them.

    What it is (`mime`, `width`, `height`) is its sender's claim until it is here, and then what its
    contents say.
    """

    def __init__(self, attachment: Attachment, sender: AgentId, mailbox: Mailbox) -> None:
        self._attachment, self._sender, self._mailbox = attachment, sender, mailbox
        self.name, self.size, self.mime = attachment.name, attachment.size, attachment.mime
        self.sha256 = attachment.sha256.hex()
        self.width, self.height = attachment.width or None, attachment.height or None

    def __repr__(self) -> str:
        return f"<Attachment {self.name!r}, {self.size} bytes, {self.mime}>"

    @property
    def path(self) -> Path | None:
        """Where it is; None as long as it is not here: `await fetch()`."""
        blobs = self._mailbox.blob_transfers.blobs
        held = blobs.holds(self._attachment.sha256, self.size)
        return blobs.path(self._attachment.sha256) if held else None

    async def fetch(self, progress: Callable[[int, int], None] | None = None) -> Path:
        """Get it if it is not here; `progress` hears bytes received and the size."""
        await self._mailbox.blob_transfers.fetch(self._sender, self._attachment, progress)
        await self.look()
        return self._mailbox.blob_transfers.blobs.path(self._attachment.sha256)

    async def look(self) -> None:
        """Learn what it is by its contents, if it is here."""
        sha256 = self._attachment.sha256
        if self._mailbox.blob_transfers.blobs.holds(sha256, self.size):
            self.mime, width, height = await self._mailbox.file_types.look(sha256)
            self.width, self.height = width or None, height or None

    async def read(self) -> bytes:
        """Its bytes, all at once."""
        await self.fetch()
        return await self._mailbox.blob_transfers.contents(self._attachment.sha256)


class ReceivedMessage:
    """A message that came. It stays in the inbox, and is handed out again, until `done`."""

    def __init__(self, entry: InEntry, mailbox: Mailbox) -> None:
        message = parse_body(entry.body)
        self._entry, self._mailbox = entry, mailbox
        self.id = message.id
        self.sender = entry.sender
        self.kind = message.kind
        self.text = message.text
        self.data: Any = message.data
        self.thread = message.thread or message.id
        self.reply_to = message.reply_to
        self.attachments = tuple(
            ReceivedAttachment(each, AgentId(entry.sender), mailbox) for each in message.attachments
        )
        self.failures = entry.failures

    def __repr__(self) -> str:
        return f"<ReceivedMessage {self.id} from {self.sender}>"

    async def seen(self) -> None:
        """It was shown to a person, or put into a model's context; its sender learns that."""
        if self._entry.state == "unread":
            await self._mark("seen")

    async def done(self) -> None:
        """It was acted upon: it will not be handed out again, and its sender learns that."""
        if self._entry.state != "done":
            await self._mark("done")

    async def _mark(self, state: str) -> None:
        """As it was when it was read: one that changed meanwhile has only news too many."""
        await self._mailbox.mark(self._entry, state)
        self._entry = self._entry._replace(state=state)

    async def reply(
        self, text: str = "", *, data: Any = None, attach: Iterable[Attachable] = ()
    ) -> Receipt:
        """Answer its sender, in the same thread."""
        (receipt,) = await self._mailbox.send(
            [AgentId(self.sender)], [text], data=data, thread=self.thread, reply_to=self.id,
            attach=[await self._mailbox.blob_transfers.enclose(each) for each in attach],
        )  # fmt: skip
        return receipt

    async def failed(self, times_max: int) -> bool:
        """A handler failed on it; after so many times it is parked, visibly. True when it is."""
        self.failures += 1
        parked = self.failures >= times_max
        await self._mailbox.mark(self._entry, "parked" if parked else "unread", self.failures)
        return parked
