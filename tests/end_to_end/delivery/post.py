"""Agents that write to each other as real processes, and what tests ask of them.

Beside the project's folder there is `elsewhere`, a second folder of the same mesh: agents there
share no registry and no spool with those here, as on another machine. Nothing leaves loopback.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from end_to_end.processes.harness import COMMAND, PATIENCE_S, Mesh, Node, Ran, wait_until

from meshagent.errors import MeshError
from meshagent.session import Session, running_agents
from meshagent.storage.folders.mesh_folder import MeshFolder

__all__ = ["Post", "texts"]


def texts(messages: list[dict[str, Any]]) -> list[str]:
    return [each["text"] for each in messages]


class Post(Mesh):
    """A mesh in two folders, and the verbs of its mail."""

    def __init__(self) -> None:
        super().__init__()
        # The person's own agent is started without options: keep it off multicast, too.
        settings = self.folder.path / "mesh.toml"
        settings.write_text('name = "project"\ndiscovery = "file"\n')
        self.elsewhere = MeshFolder(self.root / "elsewhere" / ".meshagent")
        self.elsewhere.path.parent.mkdir()
        self.elsewhere.create("project", self.folder.read_secret())

    # -- nodes ----------------------------------------------------------------------------------

    def start(self, role: str, *arguments: str) -> Node:
        """A node that has joined."""
        node = self.join(role, *arguments)
        node.joined  # noqa: B018 - waits
        return node

    def join_elsewhere(self, role: str, *peers: Node, arguments: tuple[str, ...] = ()) -> Node:
        """A node that finds others only where it is told, or where it met them before."""
        address = [peer.joined.event["addresses"][0] for peer in peers]
        dial = [word for each in address for word in ("--peer", each)]
        folder = self.elsewhere.path.parent
        return self.join(role, *dial, *arguments, cwd=folder, discovery="none")

    def join_changed(self, role: str, change: str) -> Node:
        """A node whose code is changed first: another version, or one that is broken."""
        code = f"{change}\nfrom meshagent.cli import main\nmain()"
        return self.run_program(code, "join", "--json", "--role", role)

    def run_program(self, code: str, *arguments: str) -> Node:
        """A Python program that is a node, and prints its events as `join --json` does."""
        errors = self.root / f"stderr-{len(self._started)}"
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", code, *arguments],
                cwd=self.project,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        node = Node(process, errors)
        self._started.append(node)
        return node

    def leave(self, node: Node) -> None:
        node.process.terminate()
        assert node.wait() == 0, node.told()

    # -- sessions -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def session(self, agent: str) -> Iterator[Session]:
        """A connection to the node of `agent`, in either folder."""
        folders = (self.folder, self.elsewhere)
        running = [entry for each in folders for entry in running_agents(each.registry)]
        found = [entry for entry in running if entry.agent == agent]
        assert found, f"{agent} does not run"
        with Session(found[0]) as session:
            yield session

    def ask(self, agent: str, verb: str, **arguments: Any) -> Any:
        with self.session(agent) as session:
            return session.ask(verb, **arguments)

    def send(self, agent: str, to: str, *words: str) -> list[str]:
        """Queue these texts; their ids."""
        with self.session(agent) as session:
            return [session.ask("send", to=to, text=each)[0]["id"] for each in words]

    def inbox(self, agent: str) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = self.ask(agent, "inbox", limit=1_000_000)
        return messages

    def state(self, agent: str, ident: str) -> str:
        """How far a message that `agent` sent has come."""
        found = self.ask(agent, "outbox", limit=1_000_000, ended=True)
        return str(next(each["state"] for each in found if each["id"] == ident))

    def wait_for_state(self, agent: str, ident: str, state: str) -> None:
        wait_until(lambda: self.state(agent, ident) == state, f"{ident} to be {state}")

    def wait_for_texts(self, agent: str, wanted: list[str], within: float = PATIENCE_S) -> float:
        """When `agent` had exactly these, in this order."""
        came: list[str] = []

        def are_here() -> bool:
            nonlocal came
            with contextlib.suppress(MeshError, AssertionError):
                came = texts(self.inbox(agent))
            return len(came) >= len(wanted)

        try:
            wait_until(are_here, f"{len(wanted)} messages", within)
        except AssertionError:
            raise AssertionError(f"{len(wanted)} were wanted, there are: {came[:40]}") from None
        assert came == wanted, f"wanted {wanted[:40]}, came {came[:40]}"
        return time.monotonic()

    # -- commands -------------------------------------------------------------------------------

    def say(self, agent: str, *arguments: str, **options: Any) -> Ran:
        """A command as one of the agents that run here."""
        return self.run(*arguments, "--as", agent, **options)

    def follow(self, agent: str) -> tuple[subprocess.Popen[str], Callable[[], list[str]]]:
        """An `inbox --follow --json` that stays open, and the lines it has printed so far."""
        printed = self.root / "followed"
        with printed.open("w") as out:
            process = subprocess.Popen(
                [*COMMAND, "inbox", "--follow", "--json", "--as", agent],
                cwd=self.project,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )
        return process, lambda: printed.read_text().splitlines()

    @property
    def spool(self) -> Path:
        return self.folder.spool
