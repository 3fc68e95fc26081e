"""An agent in a process of its own that sends as it is told: the contestant called meshagent.

    python -P -m meshagent.bench.agent PROJECT ROLE [PEER…]

Uses the public SDK and nothing else, as an embedding program would. Speaks `children`'s lines.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import meshagent
from meshagent.bench.children import Verbs, obey
from meshagent.node.garbage_collection import ease_garbage_collection

__all__ = ["features"]

DRAIN_TIMEOUT_S = 600.0
POLL_S = 0.005
TEXTS_A_CALL = 1000  # of `send_many`: a commit's worth; a program has not all of its texts at once
TEXTS_MAX = 20_000  # while a transfer runs: more would say nothing more


class Agent:
    """The verbs."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self._handler: asyncio.Task[None] | None = None

    async def meet(self, agent: str) -> None:
        """Until that peer is alive."""
        async for event in self.node.events():
            if event.data.get("agent") == agent and event.data.get("state") == "alive":
                return

    async def latencies(self, to: str, count: int, size: int) -> list[float]:
        """Milliseconds from `send` to delivered, one message at a time."""
        text = "x" * size
        return [await self._latency(to, text) for _ in range(count)]

    async def burst(self, to: str, count: int, size: int, coroutines: int) -> float:
        """Seconds until all are delivered; each coroutine waits for its own message."""
        text, left = "x" * size, iter(range(count))

        async def one_after_the_other() -> None:
            for _ in left:
                receipt = await self.node.send(to, text)
                await receipt.delivered()

        return await _seconds(*(one_after_the_other() for _ in range(coroutines)))

    async def many(self, to: str, count: int, size: int) -> float:
        """As `burst`, the bulk way: so many texts a call, and then all receipts."""
        texts = ["x" * size] * count

        async def call_after_call() -> None:
            receipts: list[Any] = []
            for first in range(0, count, TEXTS_A_CALL):
                receipts += await self.node.send_many(to, texts[first : first + TEXTS_A_CALL])
            for receipt in receipts:
                await receipt.delivered()

        return await _seconds(call_after_call())

    async def queue(self, to: str, count: int, size: int, coroutines: int) -> float:
        """Seconds until all are durable here, whether or not anybody receives them."""
        text, left = "x" * size, iter(range(count))

        async def one_after_the_other() -> None:
            for _ in left:
                await self.node.send(to, text)

        return await _seconds(*(one_after_the_other() for _ in range(coroutines)))

    async def drained(self) -> float:
        """The moment at which nothing waits any more, on the machine's clock."""
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            while sum(self.node.status()["outbox"].values()):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(POLL_S)
        return time.monotonic()

    async def attach(self, to: str, path: str, arrives: str) -> list[float]:
        """Seconds from `send` until delivered and, if named, the file is in the other's store; and
        how many of them after `send` returned."""
        returned = 0.0

        async def send() -> None:
            nonlocal returned
            receipt = await self.node.send(to, "see attached", attach=[path])
            returned = time.perf_counter()
            await receipt.delivered()
            while arrives and not os.path.exists(arrives):  # noqa: ASYNC110, ASYNC240
                await asyncio.sleep(POLL_S)

        return [await _seconds(send()), time.perf_counter() - returned]

    async def texts_beside(self, to: str, path: str, arrives: str, size: int) -> list[float]:
        """Latencies of texts for as long as an attachment is on its way to the same peer."""
        moving = asyncio.create_task(self.attach(to, path, arrives))
        taken: list[float] = []
        while not moving.done() and len(taken) < TEXTS_MAX:
            taken.append(await self._latency(to, "x" * size))
        await moving
        return taken

    async def settle(self) -> None:
        """Until nothing of what it did is left to be done: that is not to be another's burden."""
        await self.node.outbox(limit=1)

    async def handle(self) -> None:
        """From now on, say `done` to each message that comes."""

        async def nothing(message: Any) -> None:
            pass

        self._handler = asyncio.create_task(self.node.on_message(nothing))

    async def handled(self) -> None:
        """Until all that has come is done, if that is said here, and was told."""
        if self._handler is not None:
            while self.node.status()["inbox"]["unread"]:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(POLL_S)
            await self.drained()

    async def memory(self) -> float:
        """Resident MiB."""
        return _resident_mib()

    async def _latency(self, to: str, text: str) -> float:
        began = time.perf_counter()
        receipt = await self.node.send(to, text)
        await receipt.delivered()
        return 1000 * (time.perf_counter() - began)

    def verbs(self) -> Verbs:
        """By name."""
        return {
            name: verb
            for name, verb in inspect.getmembers(self, inspect.iscoroutinefunction)
            if not name.startswith("_")
        }


def features() -> frozenset[str]:
    """What this version of the SDK can do, of what the questions ask for."""
    from meshagent.sdk import Node

    found = set()
    if hasattr(Node, "send_many"):
        found.add("send_many")
    if "attach" in inspect.signature(Node.send).parameters:
        found.add("attach")
    return frozenset(found)


def _resident_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


async def _seconds(*work: Any) -> float:
    began = time.perf_counter()
    async with asyncio.timeout(DRAIN_TIMEOUT_S):
        await asyncio.gather(*work)
    return time.perf_counter() - began


@asynccontextmanager
async def _opened(
    project: str, role: str, peers: list[str]
) -> AsyncIterator[tuple[dict[str, Any], Verbs]]:
    async with meshagent.join(
        role=role, dir=project, listen="127.0.0.1", discovery="none", peers=peers
    ) as node:
        ease_garbage_collection()  # as `meshagent join` does, and as an embedding program may
        yield {"agent": node.agent, "address": node.addresses[0]}, Agent(node).verbs()


if __name__ == "__main__":
    obey(_opened(sys.argv[1], sys.argv[2], sys.argv[3:]))
