"""Agents in two folders of a mesh that send each other files, as real processes."""

from __future__ import annotations

import hashlib
import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from end_to_end.attachments.wire import Wire
from end_to_end.delivery.post import Post
from end_to_end.processes.harness import Node, wait_until

from meshagent.session import open_blobs, running_agents
from meshagent.storage.folders.mesh_folder import MeshFolder

__all__ = ["KIB", "MIB", "Courier", "digest", "free_port", "peak_kib", "resident_kib"]

KIB, MIB = 1024, 1024 * 1024
CHUNK_BYTES = 256 * KIB
CHUNK = random.Random(5).randbytes(CHUNK_BYTES)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Courier(Post):
    """A mesh in two folders, its files, and a wire between the folders when it is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self._wire: Wire | None = None
        self._files = 0
        self.settings(self.elsewhere)

    @property
    def wire(self) -> Wire:
        """All nodes that start from now on dial through it."""
        if self._wire is None:
            self._wire = Wire()
        return self._wire

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._wire is not None:
                self._wire.close()

    # -- nodes ----------------------------------------------------------------------------------

    def settings(self, folder: MeshFolder, **attachments: Any) -> None:
        """Write a mesh.toml: `eager="1 MiB"` and so on."""
        lines = ['name = "project"', 'discovery = "file"']
        for key, value in attachments.items():
            shown = value if isinstance(value, int) else f'"{value}"'
            shown = list(value) if isinstance(value, tuple) else shown
            lines.append(f"attachments_{key} = {shown}")
        (folder.path / "mesh.toml").write_text("\n".join(lines) + "\n")

    def join(self, role: str = "tester", *arguments: str, **options: Any) -> Node:
        """As ever; or through the wire, when there is one."""
        if self._wire is None:
            return super().join(role, *arguments, **options)
        code = f"{self._wire.change}\nfrom meshagent.cli import main\nmain()"
        errors = self.root / f"stderr-{len(self._started)}"
        words = ["join", "--json", "--role", role, "--discovery", options.get("discovery", "file")]
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", code, *words, *arguments],
                cwd=options.get("cwd") or self.project,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        node = Node(process, errors)
        self._started.append(node)
        return node

    def join_invited(self, role: str) -> str:
        """An agent in a folder that an invite made; `elsewhere` is that folder from now on."""
        folder = self.root / "invited"
        folder.mkdir()
        code = self.run("invite").out.splitlines()[-1]
        words = ("join", "--role", role, "--invite", "-", "--discovery", "none", "--detach")
        ran = self.run(*words, text=code, cwd=folder)
        assert ran.code == 0, ran
        self.elsewhere = MeshFolder(folder / ".meshagent")
        (entry,) = running_agents(self.elsewhere.registry)
        return str(entry.agent)

    def pair(self) -> tuple[Node, Node]:
        """An agent here and one elsewhere that see each other."""
        here = self.start("tester")
        there = self.join_elsewhere("backend", here)
        there.wait_for_peer(here.agent, "alive")
        here.wait_for_peer(there.agent, "alive")
        return here, there

    # -- files ----------------------------------------------------------------------------------

    def file(self, size: int, name: str = "") -> Path:
        """A file of that size that is like no other."""
        self._files += 1
        path = self.root / (name or f"file-{self._files}.bin")
        salt = os.urandom(8).hex()
        with path.open("wb") as file:
            for at in range(0, size, CHUNK_BYTES):
                mark = f"{salt} {at}\n".encode()  # two chunks in each other's place would show
                file.write((mark + CHUNK)[: min(CHUNK_BYTES, size - at)])
        return path

    def send_files(self, agent: str, to: str, paths: Iterable[Path], text: str = "") -> str:
        """Queue a message with these; its id."""
        folder = self.elsewhere if (self.elsewhere.agents / agent).is_dir() else self.folder
        blobs = open_blobs(folder)
        attach = [(each.name, blobs.put(each).sha256.hex()) for each in paths]
        (receipt,) = self.ask(agent, "send", to=to, text=text, attach=attach)
        return str(receipt["id"])

    def message(self, agent: str, ident: str) -> dict[str, Any] | None:
        """One message of the inbox, also while it is being received."""
        found = [each for each in self.inbox(agent) if each["id"] == ident]
        return found[0] if found else None

    def wait_for_message(self, agent: str, ident: str, within: float = 40.0) -> dict[str, Any]:
        """Until it is handed out."""

        def is_here() -> bool:
            found = self.message(agent, ident)
            return found is not None and found["state"] != "receiving"

        wait_until(is_here, f"{ident} to be delivered", within)
        message = self.message(agent, ident)
        assert message is not None
        return message

    def assert_same(self, message: dict[str, Any], paths: Iterable[Path]) -> None:
        """Its attachments are these files, byte for byte."""
        wanted = [(path.name, path.stat().st_size, digest(path)) for path in paths]
        told = [(each["name"], each["size"], each["sha256"]) for each in message["attachments"]]
        assert told == wanted
        for attachment, (_, size, sha256) in zip(message["attachments"], wanted, strict=True):
            assert attachment["state"] == "ready"
            path = Path(attachment["path"])
            assert (path.stat().st_size, digest(path)) == (size, sha256)

    def assert_verified(self, attachment: dict[str, Any]) -> None:
        """What stands there is what its name says."""
        assert digest(Path(attachment["path"])) == attachment["sha256"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def peak_kib(node: Node) -> int:
    """The most memory that a node has had."""
    status = Path(f"/proc/{node.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found
    return int(found[1])


def resident_kib(node: Node) -> int:
    status = Path(f"/proc/{node.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found
    return int(found[1])
