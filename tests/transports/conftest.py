"""A small world of nodes for the transport tests: the same calls over memory and over ZeroMQ."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Awaitable, Callable, Sequence

import pytest

from meshagent.core.model.peers import LinkId
from meshagent.transports.limits import LinkLimits
from meshagent.transports.memory import MemoryNetwork, MemoryTransport

DEADLINE_S = 8.0


async def until(condition: Callable[[], object], seconds: float = DEADLINE_S) -> None:
    """Wait for something that happens in libzmq's thread or at the other end; fail in time."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (most of these have no event in this process)
            await asyncio.sleep(0.002)


class Owner:
    """Records what its transport tells it, and refuses to be told re-entrantly."""

    def __init__(self) -> None:
        self.keys: dict[LinkId, bytes | None] = {}
        self.frames: list[tuple[LinkId, tuple[bytes, ...]]] = []
        self.closed: dict[LinkId, str] = {}
        self.busy = ""
        self.mistakes: list[str] = []
        self.on_received: Callable[[LinkId, Sequence[bytes]], None] = lambda link, parts: None
        self.on_opened: Callable[[LinkId], None] = lambda link: None

    def _enter(self, what: str) -> None:
        if self.busy:
            self.mistakes.append(f"{what} inside {self.busy}")

    def link_opened(self, link: LinkId, curve_key: bytes | None) -> None:
        self._enter("link_opened")
        if link in self.keys:
            self.mistakes.append(f"link {link} opened twice")
        self.keys[link] = curve_key
        self.on_opened(link)

    def link_received(self, link: LinkId, parts: Sequence[bytes]) -> None:
        self._enter("link_received")
        if link not in self.keys or link in self.closed:
            self.mistakes.append(f"a frame on link {link}, which is not open")
        self.frames.append((link, tuple(parts)))
        self.on_received(link, parts)

    def link_closed(self, link: LinkId, reason: str) -> None:
        self._enter("link_closed")
        if link in self.closed:
            self.mistakes.append(f"link {link} closed twice")
        self.closed[link] = reason

    @property
    def bodies(self) -> list[tuple[bytes, ...]]:
        return [parts for _, parts in self.frames]


class Node:
    """A transport and its owner, with every call watched for events from inside it."""

    def __init__(self, transport, key: bytes) -> None:
        self.transport = transport
        self.key = key
        self.owner = Owner()
        self.address = ""

    @property
    def refused(self):
        return self.transport.refused

    def _watched(self, name: str, *values: object):
        before, self.owner.busy = self.owner.busy, name
        try:
            return getattr(self.transport, name)(*values)
        finally:
            self.owner.busy = before

    def dial(self, to: Node | str) -> LinkId:
        return self._watched("dial", to if isinstance(to, str) else to.address)

    def send(self, link: LinkId, *parts: bytes) -> bool:
        return self._watched("send", link, parts)

    def close_link(self, link: LinkId) -> None:
        self._watched("close_link", link)


class World:
    """Nodes that share a mesh secret, unless told otherwise."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def transport(self, door: str, limits: LinkLimits | None) -> tuple[object, bytes]:
        raise NotImplementedError

    async def node(self, door="ours", limits=None, listen="127.0.0.1", port=0) -> Node:
        node = Node(*self.transport(door, limits))
        (node.address, *_) = await node.transport.start(listen, port, node.owner)
        self.nodes.append(node)
        return node

    async def linked(self, a: Node, b: Node) -> tuple[LinkId, LinkId]:
        """A link that `a` dialled, with its number on both sides."""
        known = len(b.owner.frames)
        ours = a.dial(b)
        await until(lambda: ours in a.owner.keys)
        assert a.send(ours, b"hello")
        await until(lambda: (b"hello",) in b.owner.bodies[known:])
        theirs = [link for link, parts in b.owner.frames[known:] if parts == (b"hello",)]
        return ours, theirs[0]

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        failures: list[object] = []

        async def main() -> None:
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _, context: failures.append(context))
            try:
                await scenario()
            finally:
                for node in self.nodes:
                    await node.transport.close()

        asyncio.run(main())
        assert failures == []
        assert [mistake for node in self.nodes for mistake in node.owner.mistakes] == []


class MemoryWorld(World):
    kind = "memory"

    def __init__(self) -> None:
        super().__init__()
        self.network = MemoryNetwork(seed=1)

    def transport(self, door, limits):
        key = hashlib.sha256(b"%d" % len(self.nodes)).digest()
        return MemoryTransport(self.network, key, door.encode(), limits), key


class ZmqWorld(World):
    kind = "zmq"

    def __init__(self) -> None:
        super().__init__()
        self.doors: dict[str, tuple[bytes, bytes]] = {}

    @staticmethod
    def pair() -> tuple[bytes, bytes]:
        import zmq
        from zmq.utils import z85

        public, secret = zmq.curve_keypair()
        return z85.decode(public), z85.decode(secret)

    def door(self, name: str = "ours") -> tuple[bytes, bytes]:
        return self.doors.setdefault(name, self.pair())

    def transport(self, door, limits):
        from meshagent.transports.zmq.transport import ZmqTransport

        public, secret = self.pair()
        return ZmqTransport(*self.door(door), public, secret, limits), public


@pytest.fixture(params=[MemoryWorld, ZmqWorld], ids=["memory", "zmq"])
def world(request):
    return request.param()


@pytest.fixture
def zmq_world():
    return ZmqWorld()


@pytest.fixture
def memory_world():
    return MemoryWorld()


@pytest.fixture(name="until")
def until_fixture():
    return until


@pytest.fixture
def leftovers():
    """How many descriptors and threads this process has."""
    return lambda: (len(os.listdir("/proc/self/fd")), threading.active_count(), _tasks())


def _tasks() -> int:
    return len(os.listdir("/proc/self/task"))
