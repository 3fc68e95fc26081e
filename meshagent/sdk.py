"""Embedding: `async with meshagent.join(role="tester") as node`. Same verbs as the command line.

No global state, no thread left behind; several nodes may live in one process, under a loop that
somebody else started.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from meshagent.core.model.peers import AgentId, Peer
from meshagent.errors import UsageError
from meshagent.node.blobs import Attachable
from meshagent.node.changes import Event
from meshagent.node.received import Receipt, ReceivedAttachment, ReceivedMessage
from meshagent.node.views import damage_view

if TYPE_CHECKING:
    from meshagent.node.mailbox import Mailbox

__all__ = [
    "Attachable",
    "Event",
    "Node",
    "Receipt",
    "ReceivedAttachment",
    "ReceivedMessage",
    "join",
]

RETRY_S = 0.1  # before a handler gets a message again that it failed on; doubles each time


class Node:
    """A running node, as `join` gives it."""

    def __init__(self, running: Any) -> None:
        self._driver = running.driver
        self._mailbox: Mailbox = running.mailbox
        self.agent: AgentId = running.driver.agent
        """This agent's id."""
        self.role: str = running.driver.profile.role
        self.mesh: str = running.driver.profile.mesh_name

    def __repr__(self) -> str:
        return f"<Node {self.agent}>"

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others may dial this node."""
        addresses: tuple[str, ...] = self._driver.addresses
        return addresses

    @property
    def peers(self) -> list[Peer]:
        """Every other agent known, by id; `last_heard` is seconds since the epoch."""
        offset = self._driver.views.clock_offset
        return [
            peer if peer.last_heard is None else replace(peer, last_heard=peer.last_heard + offset)
            for peer in self._driver.mesh.peers()
        ]

    async def events(self) -> AsyncIterator[Event]:
        """First one event for each peer known now, and for each damage found since the start; then
        every change, until the node ends."""
        with self._driver.changes.subscribe(self._driver.views.events) as events:
            for peer in self._driver.views.peers():
                yield Event("peer", peer)
            for damage in tuple(self._driver.damage.found):
                yield Event("damage", damage_view(damage))
            async for event in events:
                yield event

    def status(self, text: str | None = None, *, presence: str | None = None) -> dict[str, Any]:
        """This agent at a glance; with `text` or `presence`, sets what others see first."""
        if text is not None or presence is not None:
            self._driver.describe(presence, text)
        status: dict[str, Any] = self._driver.views.status()
        return status

    async def send(
        self,
        to: str,
        text: str = "",
        *,
        data: Any = None,
        kind: str = "text",
        thread: str = "",
        reply_to: str = "",
        ttl: float | None = None,
        attach: Iterable[Attachable] = (),
        progress: Callable[[int, int | None], None] | None = None,
    ) -> Receipt:
        """Send to one agent: an id, the beginning of one, a name, or `any:role`.

        When this returns the message is durable here, with all that is attached as it is now;
        `await receipt.delivered()` waits for more. `attach` takes paths, or a name with bytes or
        an open file; `progress` hears how much of each was copied, and its size if that is known.
        """
        recipients = self._mailbox.recipients(to)
        if len(recipients) != 1:
            raise UsageError(f"{to!r} means {len(recipients)} agents.", hint="Use send_all.")
        if attach:
            (receipt,) = await self._mailbox.send(
                recipients, (text,), data=data, kind=kind, thread=thread, reply_to=reply_to,
                ttl_s=ttl, attach=await self._enclose(attach, progress),
            )  # fmt: skip
        else:  # most often: nothing to wait for but the disk
            (receipt,) = await self._mailbox.submissions.hand_in(
                recipients, (text,), data, kind, thread, reply_to, ttl
            )
        return receipt

    async def send_all(
        self,
        to: str,
        text: str = "",
        *,
        data: Any = None,
        kind: str = "text",
        thread: str = "",
        reply_to: str = "",
        ttl: float | None = None,
        attach: Iterable[Attachable] = (),
        progress: Callable[[int, int | None], None] | None = None,
    ) -> list[Receipt]:
        """Send to everyone that `to` means: `@role`, `@all`, or any form that `send` takes."""
        recipients = self._mailbox.recipients(to)
        return await self._mailbox.send(
            recipients, (text,), data=data, kind=kind, thread=thread, reply_to=reply_to,
            ttl_s=ttl, attach=await self._enclose(attach, progress),
        )  # fmt: skip

    async def _enclose(
        self, attach: Iterable[Attachable], progress: Callable[[int, int | None], None] | None
    ) -> list[tuple[str, str]]:
        return [await self._mailbox.blob_transfers.enclose(each, progress) for each in attach]

    async def send_many(
        self, to: str, texts: Iterable[str], *, kind: str = "text", ttl: float | None = None
    ) -> list[Receipt]:
        """Send many texts at once, in order: one commit, and all of them are durable or none."""
        recipients = self._mailbox.recipients(to)
        return await self._mailbox.send(recipients, list(texts), kind=kind, ttl_s=ttl)

    def inbox(self) -> AsyncIterator[ReceivedMessage]:
        """Every message that is not done yet, in order, then each as it comes, until the node ends.

        A message is durable: one that is not `done` is handed out again by the next iterator.
        """
        return self._mailbox.unread()

    async def on_message(
        self, handler: Callable[[ReceivedMessage], Awaitable[None]], *, failures_max: int = 5
    ) -> None:
        """Call `handler` for each message; done when it returns, handed out again when it raises.

        After `failures_max` failures a message is parked: it stays in the inbox, visibly, and
        those behind it go on. Runs until the node ends or the task is cancelled.
        """
        async for letter in self.inbox():
            while True:
                try:
                    await handler(letter)
                except Exception:
                    self._driver.log.exception("the handler failed on %s", letter.id)
                    if await letter.failed(failures_max):
                        break
                    await asyncio.sleep(RETRY_S * 2 ** min(letter.failures, 5))
                else:
                    await letter.done()
                    break

    async def outbox(self, limit: int = 1000, *, ended: bool = False) -> list[dict[str, Any]]:
        """Messages that wait (with `ended`, all), oldest first, as `meshagent outbox --json`."""
        return await self._mailbox.outbox(limit, ended)

    async def cancel(self, ident: str) -> dict[str, Any]:
        """Take back a message that has not left yet, by its id or a unique beginning of it."""
        return await self._mailbox.cancel(ident)

    async def log(
        self, limit: int = 1000, *, search: str = "", peer: str = "", kind: str = ""
    ) -> list[dict[str, Any]]:
        """The newest messages both ways that match, oldest of them first, as `meshagent log`."""
        return await self._mailbox.log(limit, search, peer, kind)

    async def wait(self) -> None:
        """Until the node is told to leave (by `meshagent leave`), or has to: then it raises why."""
        await self._driver.wait()

    def leave(self) -> None:
        """End `wait`; the node itself ends with its `async with` block."""
        self._driver.end()


class _Join:
    """What `join` returns: nothing happens until it is entered."""

    def __init__(self, dir: str | os.PathLike[str] | None, options: dict[str, Any]) -> None:
        self._dir, self._options = dir, options
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Node:
        from meshagent.node.wiring import JoinOptions, check_options, open_node
        from meshagent.session import open_mesh

        options = JoinOptions(**self._options)
        check_options(options)
        mesh = open_mesh(self._dir, make_personal=True)
        return Node(await self._stack.enter_async_context(open_node(mesh, options)))

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)


def join(
    role: str,
    name: str | None = None,
    dir: str | os.PathLike[str] | None = None,
    listen: str | None = None,
    discovery: str = "auto",
    peers: Iterable[str] = (),
    capabilities: Iterable[str] = (),
) -> _Join:
    """Join the mesh of this folder (or `dir`) as an agent, for as long as the block runs."""
    return _Join(
        dir,
        {
            "role": role,
            "name": name,
            "listen": os.environ.get("MESHAGENT_LISTEN") if listen is None else listen,
            "discovery": None if discovery == "auto" else discovery,
            "peers": tuple(peers),
            "capabilities": tuple(capabilities),
        },
    )
