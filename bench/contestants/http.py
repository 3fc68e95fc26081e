"""HTTP with aiohttp: a minimal server, and a client, each in a process of its own.

    python -P -m meshagent.bench.contestants.http serve FOLDER
    python -P -m meshagent.bench.contestants.http call PORT

Not encrypted, not authenticated, and a message for an absent server is lost: the least that two
programs agree on. `synced` makes the server sync what it got before it answers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from meshagent.bench.children import Child, Verbs, obey

__all__ = ["Http"]

UPLOAD_BYTES_MAX = 4 << 30
CHUNK_BYTES = 256 << 10
MODULE = "meshagent.bench.contestants.http"


class Http:
    """A server and a client."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._server = Child(MODULE, "serve", str(folder), notes=folder / "server.stderr")
        port = str(self._server.wait_ready())
        self._client = Child(MODULE, "call", port, notes=folder / "client.stderr")
        self._client.wait_ready()

    def latencies(self, count: int, size: int, *, synced: bool) -> list[float]:
        """Milliseconds of a POST of JSON, on one connection that is kept."""
        taken: list[float] = self._client.ask("latencies", count=count, size=size, synced=synced)
        return taken

    def upload(self, path: Path) -> float:
        """Seconds of a multipart upload, until the file is synced there."""
        return float(self._client.ask("upload", path=str(path)))

    def close(self) -> None:
        """End both."""
        self._client.close()
        self._server.close()


class _Server:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = os.open(folder / "messages", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def message(self, request: Any) -> Any:
        from aiohttp import web

        message = await request.json()
        os.write(self._log, json.dumps(message).encode() + b"\n")
        if request.query.get("synced"):
            os.fdatasync(self._log)  # blocks the loop: for one client that is the fastest way
        return web.json_response({"ok": True})

    async def upload(self, request: Any) -> Any:
        from aiohttp import web

        part = await (await request.multipart()).next()
        path = self._folder / "upload"
        with path.open("wb") as file:
            while chunk := await part.read_chunk(CHUNK_BYTES):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        path.unlink()
        return web.json_response({"ok": True})


@asynccontextmanager
async def _serving(folder: Path) -> AsyncIterator[tuple[int, Verbs]]:
    from aiohttp import web

    server = _Server(folder)
    application = web.Application(client_max_size=UPLOAD_BYTES_MAX)
    application.add_routes(
        [web.post("/message", server.message), web.post("/upload", server.upload)]
    )
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1], {}
    finally:
        await runner.cleanup()


class _HttpClient:
    def __init__(self, session: Any, url: str) -> None:
        self._session, self._url = session, url

    async def latencies(self, count: int, size: int, synced: bool) -> list[float]:
        url = f"{self._url}/message" + ("?synced=1" if synced else "")
        taken = []
        for _ in range(count):
            began = time.perf_counter()
            async with self._session.post(url, json={"text": "x" * size}) as answer:
                await answer.read()
            taken.append(1000 * (time.perf_counter() - began))
        return taken

    async def upload(self, path: str) -> float:
        import aiohttp

        began = time.perf_counter()
        form = aiohttp.FormData()
        form.add_field("file", Path(path).open("rb"), filename="file")  # noqa: ASYNC230, SIM115
        async with self._session.post(f"{self._url}/upload", data=form) as answer:
            answer.raise_for_status()
        return time.perf_counter() - began


@asynccontextmanager
async def _calling(port: str) -> AsyncIterator[tuple[None, Verbs]]:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as session:
        client = _HttpClient(session, f"http://127.0.0.1:{port}")
        yield None, {"latencies": client.latencies, "upload": client.upload}


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        obey(_serving(Path(sys.argv[2])))
    else:
        obey(_calling(sys.argv[2]))
