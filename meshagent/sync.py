"""The same node for tools that are not async: `with meshagent.join_sync(role="tester") as node`.

A loop in a thread of its own, which ends with the block.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from meshagent.core.model.peers import Peer
from meshagent.sdk import Attachable, Node, Receipt, ReceivedAttachment, ReceivedMessage, join

__all__ = ["SyncNode", "join_sync"]

T = TypeVar("T")


class SyncReceipt:
    """How far a message has come."""

    def __init__(self, receipt: Receipt, node: SyncNode) -> None:
        self._receipt, self._node = receipt, node
        self.id, self.to = receipt.id, receipt.to

    @property
    def state(self) -> str:
        """queued, sent, delivered, seen, done, expired, refused or cancelled."""
        return self._receipt.state.value

    def delivered(self, timeout: float | None = None) -> SyncReceipt:
        """Wait until it is durable at the recipient."""
        self._node.run(self._receipt.delivered(timeout))
        return self


class SyncAttachment:
    """A file that came with a letter."""

    def __init__(self, attachment: ReceivedAttachment, node: SyncNode) -> None:
        self._attachment, self._node = attachment, node
        self.name, self.size, self.mime = attachment.name, attachment.size, attachment.mime
        self.sha256 = attachment.sha256

    @property
    def path(self) -> Path | None:
        """Where it is; None as long as it is not here: `fetch()`."""
        return self._attachment.path

    def fetch(self) -> Path:
        """Get it if it is not here."""
        return self._node.run(self._attachment.fetch())

    def read(self) -> bytes:
        """Its bytes, all at once."""
        return self._node.run(self._attachment.read())


class SyncMessage:
    """A message that came."""

    def __init__(self, letter: ReceivedMessage, node: SyncNode) -> None:
        self._letter, self._node = letter, node
        self.id, self.sender, self.text = letter.id, letter.sender, letter.text
        self.data, self.thread, self.kind = letter.data, letter.thread, letter.kind
        self.attachments = tuple(SyncAttachment(each, node) for each in letter.attachments)

    def done(self) -> None:
        """It was acted upon."""
        self._node.run(self._letter.done())

    def reply(
        self, text: str = "", *, data: Any = None, attach: Iterable[Attachable] = ()
    ) -> SyncReceipt:
        """Answer its sender."""
        answer = self._letter.reply(text, data=data, attach=attach)
        return SyncReceipt(self._node.run(answer), self._node)


class SyncNode:
    """A running node, called from a program without a loop."""

    def __init__(self, joining: AbstractAsyncContextManager[Node]) -> None:
        self._join = joining
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="meshagent")
        self._node: Node | None = None

    def __enter__(self) -> SyncNode:
        self._thread.start()
        try:
            self._node = self.run(self._join.__aenter__())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.run(self._join.__aexit__(kind, error, trace))
        finally:
            self._end()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do async work in the node's loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @property
    def node(self) -> Node:
        """The async node behind this one."""
        assert self._node is not None, "enter the block first"
        return self._node

    @property
    def agent(self) -> str:
        """This agent's id."""
        return self.node.agent

    @property
    def peers(self) -> list[Peer]:
        """Every other agent known."""
        return self.run(self._call(lambda: self.node.peers))

    def send(self, to: str, text: str = "", **options: Any) -> SyncReceipt:
        """As `Node.send`."""
        return SyncReceipt(self.run(self.node.send(to, text, **options)), self)

    def status(self, text: str | None = None, *, presence: str | None = None) -> dict[str, Any]:
        """As `Node.status`."""
        return self.run(self._call(lambda: self.node.status(text, presence=presence)))

    def inbox(self, timeout: float | None = None) -> Iterator[SyncMessage]:
        """Messages as they come; ends when none has come for `timeout` seconds."""
        letters = self.node.inbox()
        try:
            while True:
                try:
                    letter = self.run(_next(letters, timeout))
                except (StopAsyncIteration, TimeoutError):
                    return
                yield SyncMessage(letter, self)
        finally:
            self.run(_close(letters))

    async def _call(self, function: Any) -> Any:
        return function()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _next(letters: Any, timeout: float | None) -> ReceivedMessage:
    async with asyncio.timeout(timeout):
        letter: ReceivedMessage = await anext(letters)
        return letter


async def _close(letters: Any) -> None:
    await letters.aclose()


def join_sync(
    role: str,
    name: str | None = None,
    dir: str | os.PathLike[str] | None = None,
    listen: str | None = None,
    discovery: str = "auto",
    peers: Iterable[str] = (),
    capabilities: Iterable[str] = (),
) -> SyncNode:
    """As `join`, for a plain `with`."""
    return SyncNode(join(role, name, dir, listen, discovery, peers, capabilities))
