"""A mesh of real processes in a folder of its own. Nothing leaves loopback, nobody survives.

Every child gets its own HOME, data and runtime folder, and listens on 127.0.0.1 alone. `close`
ends every process that carries this mesh's folder in its environment, however it was started.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshagent.core.model.identity import SEED_BYTES, Identity
from meshagent.storage.folders.agent_lock import AgentLock
from meshagent.storage.folders.agents import AgentFolder, create_agent
from meshagent.storage.folders.mesh_folder import MeshFolder

__all__ = ["COMMAND", "Mesh", "Node", "Ran", "Screen", "Seen", "wait_until"]

COMMAND = (sys.executable, "-P", "-m", "meshagent")
PATIENCE_S = 20.0  # how long a test waits before it gives up; promises have bounds of their own

# A session leader's terminal must be given to it; then Ctrl-C and hang-ups reach it.
_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


@dataclass(frozen=True, slots=True)
class Ran:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass(frozen=True, slots=True)
class Seen:
    """An event line, and when it was read."""

    at: float
    event: dict[str, Any]


class Node:
    """A `join --json` in the foreground, and what it has said."""

    def __init__(self, process: subprocess.Popen[bytes], errors: Path) -> None:
        self.process = process
        self._errors = errors
        self._seen: list[Seen] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def agent(self) -> str:
        return str(self.joined.event["agent"])

    @property
    def joined(self) -> Seen:
        return self.wait_for(lambda event: event["event"] == "joined", "it to join")

    @property
    def err(self) -> str:
        return self._errors.read_text()

    def wait_for_peer(
        self, agent: str, state: str, within: float = PATIENCE_S, since: float = 0.0
    ) -> Seen:
        """The first event after `since` that shows `agent` in `state`."""
        return self.wait_for(
            lambda event: (
                (event["event"], event.get("agent"), event.get("state")) == ("peer", agent, state)
            ),
            f"{agent} to be {state}",
            within,
            since,
        )

    def wait_for(
        self,
        wanted: Callable[[dict[str, Any]], bool],
        what: str,
        within: float = PATIENCE_S,
        since: float = 0.0,
    ) -> Seen:
        deadline = time.monotonic() + within
        with self._news:
            while True:
                for seen in self._seen:
                    if seen.at >= since and wanted(seen.event):
                        return seen
                left = deadline - time.monotonic()
                if left <= 0 or not self._reader.is_alive():
                    raise AssertionError(f"waited {within} s for {what}: {self.told()}")
                self._news.wait(min(left, 0.5))

    def told(self) -> str:
        events = [f"{seen.at:.2f} {json.dumps(seen.event)}" for seen in self._seen]
        return "\n".join([f"pid {self.pid}, code {self.process.poll()}", *events, self.err])

    def peer_events(self, agent: str) -> list[dict[str, Any]]:
        with self._news:
            return [seen.event for seen in self._seen if seen.event.get("agent") == agent][:]

    def events(self, kind: str) -> list[dict[str, Any]]:
        with self._news:
            return [seen.event for seen in self._seen if seen.event["event"] == kind]

    def everybody(self) -> set[str]:
        """Every agent that this node has ever shown."""
        with self._news:
            return {seen.event["agent"] for seen in self._seen if seen.event["event"] == "peer"}

    def signal(self, number: int) -> float:
        """Send it; the time just before."""
        now = time.monotonic()
        os.kill(self.pid, number)
        return now

    def wait(self, within: float = PATIENCE_S) -> int:
        code = self.process.wait(within)
        self._reader.join(within)
        return code

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                seen = Seen(time.monotonic(), json.loads(line))
                with self._news:
                    self._seen.append(seen)
                    self._news.notify_all()


class Screen:
    """A command in a terminal of its own, and everything that it drew."""

    def __init__(self, command: list[str], columns: int, rows: int, **options: Any) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _TAKE_TERMINAL, *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            **options,
        )
        os.close(slave)
        self._drawn = bytearray()
        self._open = True
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def drawn(self) -> str:
        return self._drawn.decode(errors="replace")

    def wait_for(self, text: str, within: float = PATIENCE_S) -> None:
        wait_until(lambda: text in self.drawn, f"{text!r} on {self.drawn!r}", within)

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def wait(self, within: float = PATIENCE_S) -> int:
        code = self.process.wait(within)
        self._reader.join(within)
        return code

    def hang_up(self) -> None:
        """Close the window."""
        if self._open:
            self._open = False
            self._reader.join(PATIENCE_S)  # a read under way would keep the terminal open
            os.close(self._master)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        self.hang_up()

    def _read(self) -> None:
        # EIO: the last process that had the terminal open has ended.
        with contextlib.suppress(OSError):
            while self._open:
                if select.select([self._master], [], [], 0.02)[0]:
                    self._drawn += os.read(self._master, 65536)


class Mesh:
    """A fresh folder with a project's mesh in it, and the processes that were started there."""

    def __init__(self, *, made: bool = True) -> None:
        # Not pytest's folder: the path of a socket must stay short.
        self.root = Path(tempfile.mkdtemp(prefix="ma-", dir="/tmp"))
        self.project = self.root / "project"
        self.folder = MeshFolder(self.project / ".meshagent")
        self.runtime = self.root / "run"
        for folder in (self.project, self.runtime, self.root / "home"):
            folder.mkdir(mode=0o700)
        if made:
            self.folder.create("project")
        self._started: list[Node | Screen] = []

    def environment(self, **changes: str) -> dict[str, str]:
        kept = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
        own = {
            "HOME": str(self.root / "home"),
            "XDG_DATA_HOME": str(self.root / "data"),
            "XDG_RUNTIME_DIR": str(self.runtime),
            "MESHAGENT_LISTEN": "127.0.0.1",
            "PYTHONWARNINGS": "error",
        }
        return kept | own | changes

    def command(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command, and leave the waiting to the caller."""
        return subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=options.pop("cwd", self.project),
            env=self.environment(**options.pop("env", {})),
            stdin=options.pop("stdin", subprocess.DEVNULL),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def run(self, *arguments: str, text: str | None = None, **options: Any) -> Ran:
        if text is not None:
            options["stdin"] = subprocess.PIPE
        process = self.command(*arguments, **options)
        return finish(process, text)

    def join(
        self,
        role: str = "tester",
        *arguments: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        discovery: str = "file",
    ) -> Node:
        """Start a node; `joined` waits for it."""
        errors = self.root / f"stderr-{len(self._started)}"
        more = ["--discovery", discovery] if discovery else []
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                [*COMMAND, "join", "--json", "--role", role, *more, *arguments],
                cwd=cwd or self.project,
                env=self.environment(**(env or {})),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        node = Node(process, errors)
        self._started.append(node)
        return node

    def screen(self, *arguments: str, columns: int = 40, rows: int = 12, **env: str) -> Screen:
        screen = Screen(
            [*COMMAND, *arguments],
            columns,
            rows,
            cwd=self.project,
            env=self.environment(**{"TERM": "xterm-256color", **env}),
        )
        self._started.append(screen)
        return screen

    def make_agent(self, name: str = "tester", folder: MeshFolder | None = None) -> AgentFolder:
        """An agent that has never run."""
        seed = os.urandom(SEED_BYTES)
        agent = Identity(name, seed).agent
        return create_agent(folder or self.folder, agent, seed, name, name)

    def registry_file(self, agent: str) -> Path:
        return self.folder.registry / f"{agent}.json"

    def holder(self, agent: str) -> int | None:
        """The pid that runs this agent, by its lock."""
        return AgentLock(self.folder.agents / agent / "lock").holder()

    def listing(self) -> dict[str, tuple[object, ...]]:
        """Everything on this disk: modes, times and contents."""
        return {
            str(path.relative_to(self.root)): _facts(path)
            for path in [self.root, *sorted(self.root.rglob("*"))]
        }

    def close(self) -> None:
        for each in self._started:
            each.end()
        for pid in self._strays():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not list(self._strays()), "every process of this mesh to end")
        shutil.rmtree(self.root)

    def _strays(self) -> Iterator[int]:
        """Processes that carry our folder in their environment: detached nodes, mostly."""
        mark = f"XDG_RUNTIME_DIR={self.runtime}\0".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes() and not _is_zombie(path.parent):
                    yield int(path.parent.name)


def finish(process: subprocess.Popen[str], text: str | None = None) -> Ran:
    try:
        out, err = process.communicate(text, PATIENCE_S)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    return Ran(process.returncode, out, err)


def wait_until(true: Callable[[], object], what: str, within: float = PATIENCE_S) -> float:
    """How long it took until `true` was."""
    start = time.monotonic()
    while not true():
        if time.monotonic() - start > within:
            raise AssertionError(f"waited {within} s for {what}")
        time.sleep(0.02 if time.monotonic() - start < 1.0 else 0.1)  # each look costs a node work
    return time.monotonic() - start


def _facts(path: Path) -> tuple[object, ...]:
    status = path.lstat()
    content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    return status.st_mode, status.st_mtime_ns, status.st_size, content


def _is_zombie(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
