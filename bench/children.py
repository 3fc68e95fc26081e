"""Programs that run in a process of their own and obey: one JSON object per line, both ways.

`Child` is the parent's side; `obey` the child's. Decides nothing about what is measured.
Invariant: a child ends when its parent closes it or dies, and says on its standard error why else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from meshagent.bench.nodes import LEASH

__all__ = ["Child", "ChildFailed", "Verbs", "obey", "say"]

START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 600.0  # the longest round, a backlog of 100,000, ends well before
END_TIMEOUT_S = 10.0
READ_BYTES_MAX = 1 << 16
NOTES_SHOWN_MAX = 4000  # of a failed child's standard error: the end of a traceback

Verbs = Mapping[str, Callable[..., Awaitable[Any]]]


class ChildFailed(Exception):
    """A child said no, or died; its own words."""


class Child:
    """One `python -m MODULE WORDS…`, from its start to its end."""

    def __init__(
        self,
        module: str,
        *words: str,
        notes: Path,
        environ: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self._notes, self._rest, self._module = notes, b"", module
        self.started = time.monotonic()
        with notes.open("ab") as errors:
            self.process = subprocess.Popen(
                [*LEASH, *prefix, sys.executable, "-P", "-m", module, *words],
                env=None if environ is None else dict(environ),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                bufsize=0, start_new_session=True,
            )  # fmt: skip
        self.ready: Any = None
        self._is_ready, self._unanswered = False, 0

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self) -> Any:
        """What its first line says, once it has come."""
        if not self._is_ready:
            self.ready = self.answer(START_TIMEOUT_S)
            self._is_ready = True
        return self.ready

    def ask(self, verb: str, **arguments: object) -> Any:
        """Tell it to do something, and wait for the outcome."""
        self.begin(verb, **arguments)
        return self.answer()

    def begin(self, verb: str, **arguments: object) -> None:
        """Tell it to do something; `answer` waits for the outcome."""
        self.wait_ready()
        assert self.process.stdin is not None
        line = json.dumps({"verb": verb, "arguments": arguments}).encode() + b"\n"
        self._unanswered += 1
        with contextlib.suppress(BrokenPipeError):  # `answer` tells why it has died
            self.process.stdin.write(line)

    def answer(self, within_s: float = ANSWER_TIMEOUT_S) -> Any:
        """The next outcome."""
        said = json.loads(self._line(within_s))
        self._unanswered = max(0, self._unanswered - 1)
        if "error" in said:
            raise ChildFailed(f"{self._module}: {said['error']}\n{self._told()}")
        return said["value"]

    def close(self) -> None:
        """End it: by the end of its input; by force when it is busy, or does not listen."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        if self._unanswered:  # somebody pressed Ctrl-C in the middle of a round
            self.kill()
        try:
            self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self.process.stdout.close()

    def kill(self) -> None:
        """As a crash: no goodbye."""
        self.process.kill()
        self.process.wait()

    def _line(self, within_s: float) -> bytes:
        assert self.process.stdout is not None
        deadline = time.monotonic() + within_s
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise ChildFailed(f"{self._module}: no answer in {within_s} s\n{self._told()}")
            data = os.read(self.process.stdout.fileno(), READ_BYTES_MAX)
            if not data:
                raise ChildFailed(f"{self._module} has ended\n{self._told()}")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _told(self) -> str:
        return self._notes.read_text(errors="replace")[-NOTES_SHOWN_MAX:]


def say(value: object) -> None:
    """In the child: the next line for the parent."""
    print(json.dumps({"value": value}), flush=True)


def obey(opened: AbstractAsyncContextManager[tuple[object, Verbs]]) -> None:
    """In the child: open, say that it is ready, and do as told until the input ends."""
    asyncio.run(_obey(opened))


async def _obey(opened: AbstractAsyncContextManager[tuple[object, Verbs]]) -> None:
    async with opened as (ready, verbs):
        say(ready)
        async for order in _orders():
            try:
                say(await verbs[order["verb"]](**order["arguments"]))
            except Exception as error:
                import traceback

                traceback.print_exc()
                print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)


async def _orders() -> AsyncIterator[dict[str, Any]]:
    while line := await asyncio.to_thread(sys.stdin.readline):
        yield json.loads(line)
