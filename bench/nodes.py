"""Real nodes as child processes, for benchmarks and for the tests that need real processes.

Starts `meshagent join --json` and reads the event lines; decides nothing about what they mean.
Invariant: every child and every file is gone after `close`, and nothing is sent beyond loopback
unless the caller puts the child into a network namespace of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["NodeProcess", "NodeProcesses"]

JOIN_TIMEOUT_S = 30.0  # well under a second on an idle machine; fifty at once share two cores
END_TIMEOUT_S = 5.0
COMMAND_TIMEOUT_S = 30.0
READ_BYTES_MAX = 1 << 16
TRANSCRIPT_EVENTS_MAX = 30  # of each node, when a wait fails

MESHAGENT = (sys.executable, "-P", "-m", "meshagent")

# Where it exists, a child ends even if this process is killed and can't end it.
LEASH = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()


class NodeProcess:
    """One running node, and everything it has said."""

    def __init__(self, process: subprocess.Popen[bytes], mesh: Path, notes: Path) -> None:
        self.process, self.mesh, self.notes = process, mesh, notes
        self.started = time.monotonic()
        self.events: list[tuple[float, dict[str, Any]]] = []
        self.view: dict[str, dict[str, Any]] = {}
        """The newest `peer` event of each agent."""
        self.joined: dict[str, Any] = {}
        self.joined_after_s = 0.0
        self.ended = False
        self._rest = b""

    def __repr__(self) -> str:
        return f"<NodeProcess {self.joined.get('agent', self.process.pid)}>"

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def agent(self) -> str:
        return str(self.joined["agent"])

    @property
    def address(self) -> str:
        """The first address at which it listens."""
        return str(self.joined["addresses"][0])

    def sees(self, other: NodeProcess | str, state: str = "alive") -> bool:
        """Whether the newest word on `other` is this state."""
        agent = other if isinstance(other, str) else other.agent
        return bool(self.view.get(agent, {}).get("state") == state)

    def states_of(self, other: NodeProcess | str, since: float = 0.0) -> list[str]:
        """All states that were reported of `other`, in order, from that moment on."""
        agent = other if isinstance(other, str) else other.agent
        return [
            event["state"] for at, event in self.events if at >= since and _is_peer(event, agent)
        ]

    def when(self, other: NodeProcess | str, state: str) -> float:
        """The moment at which the newest word on `other` turned to this state."""
        agent = other if isinstance(other, str) else other.agent
        moments = [at for at, event in self.events if _is_peer(event, agent, state)]
        return moments[-1]

    def kill(self) -> None:
        """As a crash: no goodbye."""
        self.process.kill()
        self.process.wait()

    def signal(self, number: int) -> None:
        """Send a signal to this node alone."""
        self.process.send_signal(number)

    def memory(self) -> dict[str, int]:
        """Resident, proportional and unique bytes, from the kernel."""
        rollup = Path(f"/proc/{self.pid}/smaps_rollup").read_text()
        sizes = {
            name: int(rest.split()[0]) * 1024
            for name, _, rest in (line.partition(":") for line in rollup.splitlines()[1:])
        }
        unique = sizes["Private_Clean"] + sizes["Private_Dirty"]
        return {"rss": sizes["Rss"], "pss": sizes["Pss"], "uss": unique}

    def cpu_s(self) -> float:
        """Processor time so far, of all its threads that live, to the nanosecond.

        Not from `stat`: that counts whole ticks, and an idle node's turns are far shorter.
        """
        threads = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((each / "schedstat").read_text().split()[0]) for each in threads) / 1e9

    def descriptors(self) -> int:
        """Open file descriptors."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def take(self, data: bytes, now: float) -> None:
        """Bytes from its standard output."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            event = json.loads(line)
            self.events.append((now, event))
            if event["event"] == "joined":
                self.joined, self.joined_after_s = event, now - self.started
            elif event["event"] == "peer":
                self.view[event["agent"]] = event

    def transcript(self) -> str:
        """What a reader needs when a wait has failed."""
        lines = [
            f"  {at - self.started:8.3f}  {_brief(event)}"
            for at, event in self.events[-TRANSCRIPT_EVENTS_MAX:]
        ]
        said = self.notes.read_text(errors="replace").strip()
        return "\n".join([repr(self), *lines, *([f"  stderr: {said}"] if said else [])])


class NodeProcesses:
    """Starts nodes, reads all of them in one thread, and ends them."""

    def __init__(self, disk: Path | None = None) -> None:
        # A short path: sockets live in it, and the kernel allows them about 100 characters.
        self._run = Path(tempfile.mkdtemp(prefix="ma-"))
        self.folder = Path(tempfile.mkdtemp(prefix="ma-", dir=disk))
        self.nodes: list[NodeProcess] = []
        for name in ("home", "data"):
            (self.folder / name).mkdir(mode=0o700)
        self._news = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = os.pipe()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._reader = threading.Thread(target=self._read, name="node-events", daemon=True)
        self._reader.start()

    def __enter__(self) -> NodeProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def environ(self, anywhere: bool = False) -> dict[str, str]:
        """Nothing of this user's, and loopback only unless the child is in a namespace."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("MESHAGENT_", "XDG_"))}
        kept |= {
            "HOME": str(self.folder / "home"),
            "XDG_DATA_HOME": str(self.folder / "data"),
            "XDG_RUNTIME_DIR": str(self._run),
        }
        return kept if anywhere else kept | {"MESHAGENT_LISTEN": "127.0.0.1"}

    def init(self, name: str) -> Path:
        """A new mesh folder; returns its project folder."""
        project = self.folder / name
        project.mkdir()
        self.command("init", cwd=project)
        return project

    def command(self, *words: str, cwd: Path, within: Sequence[str] = ()) -> str:
        """What a command prints; it must succeed."""
        done = subprocess.run(
            [*within, *MESHAGENT, *words],
            cwd=cwd, env=self.environ(bool(within)), stdin=subprocess.DEVNULL,
            timeout=COMMAND_TIMEOUT_S, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def start(
        self, project: Path, role: str, *words: str, within: Sequence[str] = (), text: str = ""
    ) -> NodeProcess:
        """A node in that project; returns before it has joined."""
        notes = self.folder / f"stderr-{len(self.nodes)}"
        with notes.open("wb") as errors:
            process = subprocess.Popen(
                [*LEASH, *within, *MESHAGENT, "join", "--json", "--role", role, *words],
                cwd=project, env=self.environ(bool(within)), stderr=errors,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        node = NodeProcess(process, project / ".meshagent", notes)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(text.encode())
        self.nodes.append(node)
        self._selector.register(process.stdout, selectors.EVENT_READ, node)  # type: ignore[arg-type]
        os.write(self._woken, b"!")
        return node

    def join(
        self, project: Path, role: str, *words: str, within: Sequence[str] = (), text: str = ""
    ) -> NodeProcess:
        """As `start`; returns when it has joined."""
        node = self.start(project, role, *words, within=within, text=text)
        self.until(lambda: bool(node.joined or node.ended), JOIN_TIMEOUT_S, f"{role} has joined")
        assert node.joined, node.transcript()
        return node

    def until(self, holds: Callable[[], bool], seconds: float, what: str) -> float:
        """Wait until events have made it hold; returns how long that took."""
        begin = time.monotonic()
        with self._news:
            if not self._news.wait_for(holds, seconds):
                told = "\n".join(node.transcript() for node in self.nodes)
                raise AssertionError(f"Not within {seconds} s: {what}\n{told}")
        return time.monotonic() - begin

    def ask(self, node: NodeProcess, verb: str, **arguments: object) -> Any:
        """As a session would, without the start-up time of a command."""
        from meshagent.session import attach

        with attach(node.mesh / "registry", node.agent, {}) as session:
            return session.ask(verb, **arguments)

    def end(self, *nodes: NodeProcess) -> None:
        """End these nodes cleanly."""
        for node in nodes:
            node.signal(signal.SIGTERM)
        for node in nodes:
            node.process.wait(END_TIMEOUT_S)

    def close(self) -> None:
        """End every child, whatever state it is in, and remove every file."""
        for node in self.nodes:
            node.process.kill()
        for node in self.nodes:
            node.process.wait()
        os.close(self._woken)
        self._reader.join(END_TIMEOUT_S)
        self._selector.close()
        for node in self.nodes:
            assert node.process.stdout is not None
            node.process.stdout.close()
        os.close(self._wake)
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self._run, ignore_errors=True)

    def _read(self) -> None:
        while True:
            for key, _ in self._selector.select():
                node: NodeProcess | None = key.data
                data = os.read(key.fd, READ_BYTES_MAX)
                if node is None:
                    if not data:
                        return
                    continue
                if not data:
                    self._selector.unregister(key.fileobj)
                with self._news:
                    node.take(data, time.monotonic())
                    node.ended = not data
                    self._news.notify_all()


def _is_peer(event: dict[str, Any], agent: str, state: str | None = None) -> bool:
    return (
        event["event"] == "peer"
        and event["agent"] == agent
        and (state is None or event["state"] == state)
    )


def _brief(event: dict[str, Any]) -> str:
    if event["event"] != "peer":
        return json.dumps(event)
    words = (event["agent"], event["state"], event["status"], ",".join(event["addresses"]))
    return " ".join(word for word in words if word)
