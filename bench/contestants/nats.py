"""NATS JetStream through nats-py: a server, and clients in processes of their own.

    python -P -m meshagent.bench.contestants.nats URL

Publishes to a stream on disk and waits for the server's word; consumes with an ack for each
message. The server syncs each write with `sync_interval: always`; by default it does not, and says
"stored" for what a power cut would take. Listens on 127.0.0.1, in a folder of its own.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from meshagent.bench.children import Child, Verbs, obey
from meshagent.bench.contestants import nats_server
from meshagent.bench.nodes import LEASH

__all__ = ["JetStream"]

START_TIMEOUT_S = 10.0
FETCH_MAX = 500
FETCH_TIMEOUT_S = 5.0
PUBLISH_TIMEOUT_S = 60.0
STREAM, SUBJECT = "bench", "bench.message"
TELL = "Tell"  # the header that says where the publisher waits


class JetStream:
    """A server with one stream, publishers, and one consumer."""

    def __init__(self, folder: Path, *, sync_always: bool, publishers: int = 1) -> None:
        folder.mkdir()
        self._clients: list[Child] = []
        self._server = _start_server(folder, sync_always)
        try:
            self._url = _url(folder)
            for number in range(publishers + 1):
                notes = folder / f"client{number}.stderr"
                self._clients.append(Child(__name__, self._url, notes=notes))
            for each in self._clients:
                each.wait_ready()
        except BaseException:
            self.close()
            raise

    def latencies(self, count: int, size: int) -> list[float]:
        """Milliseconds until the publisher has the server's word and a consumer the message."""
        taken: list[float] = self._clients[0].ask("latencies", count=count, size=size)
        return taken

    def seconds(self, count: int, size: int, coroutines: int, *, told: bool = False) -> float:
        """From the first publish to the last ack by the consumer; `count` from all publishers.

        With `told`, each coroutine goes on when its message has reached the consumer, as ours do
        with `delivered()`; else when the server has it.
        """
        consumer, *publishers = self._clients
        share = count // len(publishers)
        consumer.ask("subscribe")
        consumer.begin("consume", count=share * len(publishers), tell=told)
        began = time.monotonic()
        for each in publishers:
            each.begin("publish", count=share, size=size, coroutines=coroutines, told=told)
        ended = [float(each.answer()) for each in self._clients]
        return max(ended) - began

    def seconds_in_one_process(self, count: int, size: int, coroutines: int) -> float:
        """The same, with publishers and consumer in one process, as a first try would have it."""
        return float(self._clients[0].ask("alone", count=count, size=size, coroutines=coroutines))

    def close(self) -> None:
        """End the clients, then the server."""
        for each in self._clients:
            each.close()
        self._server.terminate()
        self._server.wait()


def _start_server(folder: Path, sync_always: bool) -> subprocess.Popen[bytes]:
    program = nats_server()
    assert program is not None, "asked before"
    sync = ", sync_interval: always" if sync_always else ""
    config = folder / "nats.conf"
    store = json.dumps(str(folder / "store"))
    config.write_text(
        f'listen: "127.0.0.1:-1"\njetstream {{ store_dir: {store}{sync} }}\n'
        f"ports_file_dir: {json.dumps(str(folder))}\n"
    )
    with (folder / "server.log").open("wb") as log:
        return subprocess.Popen([*LEASH, program, "-c", str(config)], stdout=log, stderr=log)


def _url(folder: Path) -> str:
    """The server chose a port, and writes it into a file when it listens."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        for path in folder.glob("nats-server_*.ports"):
            if text := path.read_text():
                return str(json.loads(text)["nats"][0])
        time.sleep(0.02)
    raise TimeoutError(f"nats-server did not start: {(folder / 'server.log').read_text()}")


class _NatsClient:
    """The verbs of one connection."""

    def __init__(self, connection: Any, stream: Any) -> None:
        self._connection, self._stream = connection, stream
        self._consumer: Any = None

    async def latencies(self, count: int, size: int) -> list[float]:
        payload, taken = b"x" * size, []
        consumer = await self._stream.subscribe(SUBJECT, manual_ack=True, deliver_policy="new")
        for _ in range(count):
            began = time.perf_counter()
            _, message = await asyncio.gather(
                self._stream.publish(SUBJECT, payload, timeout=PUBLISH_TIMEOUT_S),
                consumer.next_msg(timeout=PUBLISH_TIMEOUT_S),
            )
            taken.append(1000 * (time.perf_counter() - began))
            await message.ack()
        await consumer.unsubscribe()
        return taken

    async def publish(self, count: int, size: int, coroutines: int, told: bool = False) -> float:
        """The moment of the last word: the server's, or with `told` the consumer's."""
        payload, left = b"x" * size, iter(range(count))
        publish = partial(self._stream.publish, SUBJECT, payload, timeout=PUBLISH_TIMEOUT_S)

        async def one_after_the_other() -> None:
            for _ in left:
                await publish()

        async def one_after_the_other_told() -> None:
            for number in left:
                arrived = waiting[str(number)] = asyncio.get_running_loop().create_future()
                await publish(headers={TELL: f"{inbox}.{number}"})
                await arrived

        async def hear(word: Any) -> None:
            waiting.pop(word.subject.rpartition(".")[2]).set_result(None)

        waiting: dict[str, asyncio.Future[None]] = {}
        inbox = self._connection.new_inbox()
        words = await self._connection.subscribe(f"{inbox}.*", cb=hear)
        work = one_after_the_other_told if told else one_after_the_other
        await asyncio.gather(*(work() for _ in range(coroutines)))
        await words.unsubscribe()
        return time.monotonic()

    async def alone(self, count: int, size: int, coroutines: int) -> float:
        """Seconds."""
        await self.subscribe()
        began = time.monotonic()
        ended = await asyncio.gather(self.publish(count, size, coroutines), self.consume(count))
        return max(ended) - began

    async def subscribe(self) -> None:
        """From now on."""
        from nats.js.api import ConsumerConfig, DeliverPolicy

        config = ConsumerConfig(deliver_policy=DeliverPolicy.NEW, max_ack_pending=20 * FETCH_MAX)
        self._consumer = await self._stream.pull_subscribe(SUBJECT, config=config)

    async def consume(self, count: int, tell: bool = False) -> float:
        """The moment of the last ack; with `tell`, each publisher hears of its message."""
        while count > 0:
            got = await self._consumer.fetch(min(FETCH_MAX, count), timeout=FETCH_TIMEOUT_S)
            for message in got:
                await message.ack()
                if tell:
                    await self._connection.publish(message.headers[TELL], b"")
            count -= len(got)
        ended = time.monotonic()
        await self._consumer.unsubscribe()
        return ended


@asynccontextmanager
async def _opened(url: str) -> AsyncIterator[tuple[None, Verbs]]:
    import nats

    connection = await nats.connect(url, pending_size=64 << 20)
    stream = connection.jetstream(publish_async_max_pending=100_000)
    await stream.add_stream(name=STREAM, subjects=[SUBJECT])
    client = _NatsClient(connection, stream)
    verbs: Verbs = {
        "latencies": client.latencies,
        "publish": client.publish,
        "subscribe": client.subscribe,
        "consume": client.consume,
        "alone": client.alone,
    }
    try:
        yield None, verbs
    finally:
        await connection.close()


if __name__ == "__main__":
    obey(_opened(sys.argv[1]))
