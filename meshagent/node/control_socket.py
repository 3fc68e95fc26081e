"""The local socket through which sessions reach a node. Never touches the database.

One JSON object per line, both ways. A request is `{"id": 1, "do": "peers", …}` (requests.py has the
fields of each); its answer has the same id and a `result` or an `error`. `subscribe` answers with a
snapshot and its sequence number; actions follow, each with the next number. Invariants: a session
that dies, stalls or sends nonsense costs its own connection and nothing else; a bug of ours is
never told as the session's mistake.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshagent.core.model.message_states import MessageState
from meshagent.core.model.peers import AgentId
from meshagent.errors import (
    AmbiguousPeer,
    LimitReached,
    MalformedRequest,
    MeshError,
    NoSuchPeer,
    UsageError,
)
from meshagent.node.driver import Driver
from meshagent.node.mailbox import Mailbox
from meshagent.session import REQUEST_BYTES_MAX
from meshagent.storage.folders.files import mapped_errors

if TYPE_CHECKING:
    from meshagent.node.requests import Request

__all__ = ["ControlServer"]

SESSIONS_MAX = 256
# Connections that wait to be accepted while the node is busy: all sessions at once, and as many
# that are then told that there are too many. Beyond it a connect waits (session.py).
LISTEN_BACKLOG = 2 * SESSIONS_MAX
SESSION_CLOSE_TIMEOUT_S = 0.25  # for its last lines; one that does not read must not hold us up
WAIT_MAX_S = 600.0  # for delivery, while a session waits
GONE_LOOK_S = 1.0  # between looks whether a session that waits without a limit is still there
ABSENT_WAIT_S = 0.5  # a node that has just started meets its peers within that; others are away
MEETING_S = 2.0  # from a node's start until it has met whoever can be met, on a busy machine
STEADY_S = 0.5  # without a newcomer: those who were going to be met at once have been
LOOK_S = 0.05
PEERS_CHANNEL = "mesh-peers:/"
SHOWN_CHARACTERS_MAX = 40  # of a verb or a channel that is not known

Stream = AsyncGenerator[Any, None]
"""An answer, then a line for each change."""


class _TooSlow(Exception):
    """A session does not read what it follows as fast as it changes."""


@dataclass(slots=True)
class _Attached:
    """One session, and what it follows."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    following: asyncio.Task[None] | None = None


class ControlServer:
    """Serves the sessions of one node at `path`."""

    def __init__(
        self, driver: Driver, mailbox: Mailbox, path: Path, log: logging.Logger, log_file: Path
    ) -> None:
        self.path = path
        self._driver, self._mailbox, self._log, self._log_file = driver, mailbox, log, log_file
        self._server: asyncio.Server | None = None
        self._sessions: set[asyncio.Task[None]] = set()
        self._began = self._idle_since = time.monotonic()

    @cached_property
    def _verbs(self) -> Mapping[str, tuple[type[Request], Callable[..., Awaitable[Any] | Stream]]]:
        """What can be asked: the model of its fields, and what does it."""
        from meshagent.node import requests  # when first asked: see there

        return {
            "peers": (requests.Peers, self._peers),
            "status": (requests.Status, self._status),
            "leave": (requests.Leave, self._leave),
            "subscribe": (requests.Subscribe, self._subscribe),
            "recipients": (requests.Recipients, self._recipients),
            "send": (requests.SendMessage, self._send),
            "inbox": (requests.Inbox, self._inbox),
            "outbox": (requests.Outbox, self._mailbox.outbox),
            "log": (requests.Log, self._mailbox.log),
            "message": (requests.OneMessage, self._mailbox.message),
            "read": (requests.OneMessage, self._mailbox.read),
            "done": (requests.OneMessage, self._mailbox.done),
            "fetch": (requests.OneMessage, self._mailbox.fetch),
            "cancel": (requests.OneMessage, self._mailbox.cancel),
            "backup": (requests.Backup, self._mailbox.backup),
            "restore": (requests.Restore, self._mailbox.restore),
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
        # Decided now: all that waited to be accepted come in before the first of them is served.
        serve = self._serve if len(self._sessions) < SESSIONS_MAX else self._turn_away
        session = asyncio.get_running_loop().create_task(serve(reader, writer))
        self._sessions.add(session)
        session.add_done_callback(self._ended)

    def _ended(self, session: asyncio.Task[None]) -> None:
        self._sessions.discard(session)
        self._idle_since = time.monotonic()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = _Attached(reader, writer)
        try:
            while line := await reader.readline():
                await self._handle(line, session)
                await writer.drain()
        except MalformedRequest as error:  # what comes behind it may be anything
            self._log.warning("a session was ended: %s", error.message)
            _answer(writer, None, error=error)
        except ValueError:  # the reader's word for a line beyond its limit
            too_long = LimitReached(f"A request has more than {REQUEST_BYTES_MAX} bytes.")
            self._log.warning("a session was ended: %s", too_long.message)
            _answer(writer, None, error=too_long)
        except ConnectionError as error:
            self._log.info("a session ended: %s", error)
        finally:
            if session.following is not None:
                session.following.cancel()
                await asyncio.gather(session.following, return_exceptions=True)
            await _end(writer)

    async def _turn_away(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        full = LimitReached(
            f"{SESSIONS_MAX} sessions are attached to {self._driver.agent} already.",
            hint="End some of them and try again.",
        )
        _answer(writer, None, error=full)
        await _end(writer)

    async def _handle(self, line: bytes, session: _Attached) -> None:
        number, verb, fields = _parse(line)
        work = self._reply(session, number, verb, fields)
        await (_while_attached(session.reader, work) if verb == "fetch" else work)

    async def _reply(
        self, session: _Attached, number: object, verb: str, fields: dict[str, Any]
    ) -> None:
        from meshagent.node.requests import validate

        with self._answering(session.writer, number, verb):
            if verb not in self._verbs:
                raise UsageError(
                    f"This node does not know {verb[:SHOWN_CHARACTERS_MAX]!r}.",
                    hint="Node and command differ in version; restart the node.",
                )
            model, method = self._verbs[verb]
            answer = method(**dict(validate(verb, model, fields)))
            if not isinstance(answer, AsyncGenerator):
                _answer(session.writer, number, await answer)
            elif session.following is None:
                stream = self._stream(session.writer, number, verb, answer)
                session.following = asyncio.create_task(stream)
            else:
                raise UsageError("This session follows something already.", hint="Open another.")

    @contextlib.contextmanager
    def _answering(self, writer: asyncio.StreamWriter, number: object, verb: str) -> Iterator[None]:
        """What goes wrong within is the answer: a session's mistake as such, a bug as ours."""
        try:
            yield
        except MalformedRequest as error:
            self._log.warning("refused a request: %s", error.message)
            _answer(writer, number, error=error)
        except MeshError as error:
            _answer(writer, number, error=error)
        except Exception as error:
            self._log.exception("the request %r failed unexpectedly", verb)
            ours = MeshError(
                f"The node failed unexpectedly at {verb!r} ({type(error).__name__}).",
                hint=f"This is a bug in meshagent, not in your request. See {self._log_file}.",
            )
            _answer(writer, number, error=ours)

    async def _stream(
        self, writer: asyncio.StreamWriter, number: object, verb: str, lines: Stream
    ) -> None:
        """The answer, then each line, as fast as the session reads."""
        with self._answering(writer, number, verb):
            try:
                async with contextlib.aclosing(lines):
                    _answer(writer, number, await anext(lines))
                    async for line in lines:
                        _write(writer, line)
                        await writer.drain()
            except ConnectionError:
                pass
            except _TooSlow:
                writer.transport.abort()
        writer.close()  # the node ended, or failed: let the session know

    # -- verbs --------------------------------------------------------------------------------

    def _subscribe(self, channel: str) -> Stream:
        if channel != PEERS_CHANNEL:
            raise UsageError(
                f"This node has no channel {channel[:SHOWN_CHARACTERS_MAX]!r}.",
                hint=f"It has {PEERS_CHANNEL!r}.",
            )
        return self._peers_followed()

    async def _peers_followed(self) -> Stream:
        """Snapshot first, then actions, numbered without a gap."""
        number = 0
        with self._driver.changes.subscribe(self._driver.views.events, ("peer", "clone")) as events:
            yield {"seq": number, "snapshot": await self._peers()}
            async for event in events:
                if event.kind == "lagged":
                    raise _TooSlow
                number += 1
                action = {"event": event.kind, **event.data}
                yield {"channel": PEERS_CHANNEL, "seq": number, "action": action}

    def _inbox(self, limit: int, unread: bool, follow: bool) -> Awaitable[Any] | Stream:
        if follow:
            return self._inbox_followed(limit, unread)
        return self._mailbox.inbox(limit, unread)

    async def _inbox_followed(self, limit: int, unread: bool) -> Stream:
        """The inbox as it is, then each message as it comes."""
        shown = await self._mailbox.newest()
        yield await self._mailbox.inbox(limit, unread, upto=shown)
        async with contextlib.aclosing(self._mailbox.follow(shown)) as messages:
            async for message in messages:
                yield {"action": message}

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

    async def _peers(self) -> dict[str, Any]:
        return {"me": self._driver.views.me(), "peers": self._driver.views.peers()}

    async def _status(self, text: str | None, presence: str | None) -> dict[str, Any]:
        if text is not None or presence is not None:
            self._driver.describe(presence, text)
        return self._driver.views.status()

    async def _leave(self) -> dict[str, Any]:
        self._driver.end()
        return {"agent": self._driver.agent, "pid": os.getpid()}


def _parse(line: bytes) -> tuple[object, str, dict[str, Any]]:
    """A request's number, its verb, and its fields, not yet checked."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        raise MalformedRequest("The request is not a line of JSON.") from None
    if not isinstance(request, dict):
        raise MalformedRequest("The request is not a JSON object.")
    number, verb = request.pop("id", None), request.pop("do", None)
    if not isinstance(verb, str):
        raise MalformedRequest("The request has no verb: 'do' should be a text.")
    return number, verb, request


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
