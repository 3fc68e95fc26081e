"""The local socket through which sessions reach a node. Never touches the database.

One JSON object per line, both ways. A request is `{"id": 1, "do": "peers", …}`; its answer has the
same id and a `result` or an `error`. `subscribe` answers with a snapshot and its sequence number;
actions follow, each with the next number. Invariant: a session that dies, stalls or sends
nonsense costs its own connection and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from meshagent.core.model.message_states import MessageState
from meshagent.core.model.peers import AgentId
from meshagent.errors import (
    AmbiguousPeer,
    LimitReached,
    MeshError,
    NoSuchPeer,
    RemoteProtocolError,
    UsageError,
)
from meshagent.node.driver import Driver
from meshagent.node.mailbox import Mailbox
from meshagent.session import REQUEST_BYTES_MAX
from meshagent.storage.folders.files import mapped_errors

__all__ = ["ControlServer"]

PROTOCOL = 1
SESSIONS_MAX = 256
# Connections that wait to be accepted while the node is busy: all sessions at once, and as many
# that are then told that there are too many. Beyond it a connect waits (session.py).
LISTEN_BACKLOG = 2 * SESSIONS_MAX
SESSION_BACKLOG_BYTES_MAX = 4 * 1024 * 1024  # beyond it the session is cut off and resumes
SESSION_CLOSE_TIMEOUT_S = 0.25  # for its last lines; one that does not read must not hold us up
WAIT_MAX_S = 600.0  # for delivery, while a session waits
GONE_LOOK_S = 1.0  # between looks whether a session that waits without a limit is still there
ABSENT_WAIT_S = 0.5  # a node that has just started meets its peers within that; others are away
MEETING_S = 2.0  # from a node's start until it has met whoever can be met, on a busy machine
STEADY_S = 0.5  # without a newcomer: those who were going to be met at once have been
LOOK_S = 0.05
PEERS_CHANNEL = "mesh-peers:/"


class ControlServer:
    """Serves the sessions of one node at `path`."""

    def __init__(self, driver: Driver, mailbox: Mailbox, path: Path, log: logging.Logger) -> None:
        self.path = path
        self._driver, self._mailbox, self._log = driver, mailbox, log
        self._server: asyncio.Server | None = None
        self._sessions: set[asyncio.Task[None]] = set()
        self._began = self._idle_since = time.monotonic()
        self._verbs: dict[str, Callable[[dict[str, Any]], Any]] = {
            "peers": lambda _: {"me": driver.views.me(), "peers": driver.views.peers()},
            "status": self._status,
            "leave": self._leave,
        }
        self._mail_verbs: dict[str, Callable[..., Awaitable[Any]]] = {
            "send": self._send,
            "recipients": self._recipients,
            "inbox": mailbox.inbox,
            "read": mailbox.read,
            "done": mailbox.done,
            "message": mailbox.message,
            "fetch": mailbox.fetch,
            "outbox": mailbox.outbox,
            "cancel": mailbox.cancel,
            "log": mailbox.log,
            "backup": mailbox.backup,
            "restore": mailbox.restore,
        }

    async def start(self) -> None:
        """Listen; only this user can connect. A socket left by a crash is replaced."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with mapped_errors(self.path, "create"):
                self.path.unlink(missing_ok=True)
                listener.bind(str(self.path))
                # Its folder is private already. Not by umask, which is the whole process's: files
                # that another node makes at this moment would get odd modes.
                self.path.chmod(0o600)
            self._server = await asyncio.start_unix_server(
                self._accept, sock=listener, limit=REQUEST_BYTES_MAX, backlog=LISTEN_BACKLOG
            )
        except BaseException:
            listener.close()
            raise

    async def close(self) -> None:
        """End every session and remove the socket."""
        if self._server is None:
            return
        self._server.close()
        for session in list(self._sessions):
            session.cancel()
        await asyncio.gather(*self._sessions, return_exceptions=True)
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    def idle_s(self) -> float:
        """For how long no session has been attached."""
        return 0.0 if self._sessions else time.monotonic() - self._idle_since

    # -- one session --------------------------------------------------------------------------

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._sessions.add(session)
        session.add_done_callback(self._ended)

    def _ended(self, session: asyncio.Task[None]) -> None:
        self._sessions.discard(session)
        self._idle_since = time.monotonic()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        watch: asyncio.Task[None] | None = None
        try:
            if len(self._sessions) > SESSIONS_MAX:
                full = LimitReached(
                    f"{SESSIONS_MAX} sessions are attached to {self._driver.agent} already.",
                    hint="End some of them and try again.",
                )
                _answer(writer, None, error=full)
                return
            while line := await reader.readline():
                request = _parse(line)
                if request.get("do") == "subscribe" and watch is None:
                    watch = asyncio.create_task(self._watch(request, writer))
                elif request.pop("follow", False) and watch is None:
                    watch = asyncio.create_task(self._follow(request, writer))
                elif request.get("do") == "fetch":
                    await _while_attached(reader, self._handle(request, writer))
                else:
                    await self._handle(request, writer)
                await writer.drain()
        except (RemoteProtocolError, ValueError, ConnectionError) as error:
            self._log.info("a session ended: %s", error)
        finally:
            if watch is not None:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
            await _end(writer)

    async def _handle(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        name, number = str(request.get("do")), request.get("id")
        verb = self._verbs.get(name)
        if verb is None and name in self._mail_verbs:
            await self._handle_mail(name, request, writer)
            return
        if verb is None:
            unknown = UsageError(
                f"This node does not know {request.get('do')!r}.",
                hint="Node and command differ in version; restart the node.",
            )
            _answer(writer, number, error=unknown)
            return
        try:
            _answer(writer, number, verb(request))
        except MeshError as error:
            _answer(writer, number, error=error)

    async def _handle_mail(
        self, name: str, request: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        arguments = {key: value for key, value in request.items() if key not in ("id", "do")}
        try:
            try:
                result = await self._mail_verbs[name](**arguments)
            except TypeError as error:
                raise UsageError(f"The node can't {name} like this: {error}.") from None
            _answer(writer, request.get("id"), result)
        except MeshError as error:
            _answer(writer, request.get("id"), error=error)

    async def _follow(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """The inbox as it is, then each message as it comes, as fast as the session reads."""
        shown = await self._mailbox.newest()
        await self._handle_mail("inbox", {**request, "upto": shown}, writer)
        async for view in self._mailbox.follow(shown):
            _write(writer, {"action": view})
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        writer.close()  # the node has ended

    async def _send(
        self, to: str, text: str = "", wait_s: float = 0.0, strict: bool = False, **arguments: Any
    ) -> list[dict[str, Any]]:
        """Send, and wait a while for delivery; durable in any case."""
        recipients = await self._recipients(to)
        receipts = await self._mailbox.send(recipients, [text], **arguments)
        if wait_s > 0:
            await self._wait(receipts, min(wait_s, WAIT_MAX_S), strict)
        return [
            {
                "id": each.id,
                "to": each.to,
                "state": each.state.value,
                "reason": each.reason,
                "known": each.state is not MessageState.QUEUED or self._mailbox.knows(each.to),
            }
            for each in receipts
        ]

    async def _recipients(self, to: str) -> list[AgentId]:
        """Whom `to` means; a node that has just started is given a moment to meet them.

        For all of a group that is until nobody has joined them for a while.
        """
        several, met, steady_since = to.startswith("@"), 0, self._began
        while True:
            now = time.monotonic()
            is_new = now - self._began <= MEETING_S
            found: list[AgentId] = []
            try:
                found = self._mailbox.recipients(to)
            except AmbiguousPeer:
                raise
            except NoSuchPeer:
                if not is_new:
                    raise
            if len(found) != met:
                met, steady_since = len(found), now
            if found and not (several and is_new and now - steady_since < STEADY_S):
                return found
            await asyncio.sleep(LOOK_S)

    async def _wait(self, receipts: Sequence[Any], wait_s: float, strict: bool) -> None:
        """For those who are here, or might be in a moment; for all of them when `strict`."""
        waits = {asyncio.create_task(each.settled()): each.to for each in receipts}
        try:
            if not strict:
                moment_s = min(wait_s, ABSENT_WAIT_S)
                _, late = await asyncio.wait(waits, timeout=moment_s)
                here = [each for each in late if self._driver.is_linked(waits[each])]
                wait_s -= moment_s
            else:
                here = list(waits)
            if here:
                await asyncio.wait(here, timeout=wait_s)
        finally:
            for wait in waits:
                wait.cancel()

    async def _watch(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Snapshot first, then actions, numbered without a gap."""
        number = 0
        with self._driver.changes.subscribe(self._driver.views.events, ("peer", "clone")) as events:
            snapshot = {"me": self._driver.views.me(), "peers": self._driver.views.peers()}
            _answer(writer, request.get("id"), {"seq": number, "snapshot": snapshot})
            async for event in events:
                if event.kind == "lagged" or (
                    writer.transport.get_write_buffer_size() > SESSION_BACKLOG_BYTES_MAX
                ):
                    writer.transport.abort()
                    return
                number += 1
                action = {"event": event.kind, **event.data}
                _write(writer, {"channel": PEERS_CHANNEL, "seq": number, "action": action})
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
        writer.close()  # the node ended: let the session know

    # -- verbs --------------------------------------------------------------------------------

    def _status(self, request: dict[str, Any]) -> dict[str, Any]:
        text, presence = request.get("text"), request.get("presence")
        if not (isinstance(text, str | None) and isinstance(presence, str | None)):
            raise RemoteProtocolError("A session sent a status that is not text.")
        if text is not None or presence is not None:
            self._driver.describe(presence, text)
        return self._driver.views.status()

    def _leave(self, _: dict[str, Any]) -> dict[str, Any]:
        self._driver.end()
        return {"agent": self._driver.agent, "pid": os.getpid()}


def _parse(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        raise RemoteProtocolError("A session sent a line that is not JSON.") from None
    if not isinstance(request, dict):
        raise RemoteProtocolError("A session sent something other than a request.")
    return request


def _answer(
    writer: asyncio.StreamWriter,
    number: object,
    result: object = None,
    error: MeshError | None = None,
) -> None:
    if error is None:
        _write(writer, {"id": number, "result": result})
        return
    words = {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}
    _write(writer, {"id": number, "error": words})


async def _while_attached(reader: asyncio.StreamReader, work: Coroutine[Any, Any, None]) -> None:
    """Do this for as long as the session is there: one that was given up must free its place."""
    task = asyncio.create_task(work)
    try:
        while not task.done() and not reader.at_eof():
            await asyncio.wait({task}, timeout=GONE_LOOK_S)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _end(writer: asyncio.StreamWriter) -> None:
    writer.close()
    try:
        async with asyncio.timeout(SESSION_CLOSE_TIMEOUT_S):
            await writer.wait_closed()
    except (ConnectionError, TimeoutError):
        pass
    finally:
        writer.transport.abort()


def _write(writer: asyncio.StreamWriter, value: object) -> None:
    writer.write(json.dumps(value, separators=(",", ":")).encode() + b"\n")
