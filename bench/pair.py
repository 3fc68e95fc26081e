"""Agents in processes of their own, in two folders of one mesh, as on two machines.

No registry, spool or blob is shared between the folders: what arrives came over an encrypted link,
and is synced on both sides. Invariant: after `close` no child is left; the folder is the caller's.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshagent.bench.children import Child
from meshagent.storage.folders.mesh_folder import MeshFolder

__all__ = ["MeshPair", "own_environ"]

# A file of 1 GiB is to move like a smaller one: by default it would wait until it is asked for.
SETTINGS = 'name = "bench"\nattachments_eager = "2 GiB"\nattachments_each = "2 GiB"\n'


def own_environ(home: Path, run: str) -> dict[str, str]:
    """Nothing of this user's, and loopback only."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MESHAGENT_", "XDG_"))}
    return kept | {
        "HOME": str(home),
        "XDG_DATA_HOME": str(home / "data"),
        "XDG_RUNTIME_DIR": run,
        "MESHAGENT_LISTEN": "127.0.0.1",
    }


class MeshPair:
    """Senders in the folder `here`, one recipient in the folder `there`."""

    def __init__(self, folder: Path, senders: int = 1) -> None:
        self._folder, self._children = folder, list[Child]()
        # A short path: sockets live in it, and the kernel allows them about 100 characters.
        self._run = tempfile.mkdtemp(prefix="ma-")
        self.here, self.there = (MeshFolder(folder / side / ".meshagent") for side in ("a", "b"))
        for side in ("a", "b", "home"):
            (folder / side).mkdir(parents=True)
        self.here.create("bench")
        self.there.create("bench", self.here.read_secret())
        for mesh in (self.here, self.there):
            mesh.settings_file.write_text(SETTINGS)
        try:
            self.recipient = self.start(self.there, "recipient")
            first = self.recipient.wait_ready()
            self.to = str(first["agent"])
            self.senders = [
                self.start(self.here, f"sender{number}", [first["address"]])
                for number in range(senders)
            ]
            for each in self.senders:
                each.ask("meet", agent=self.to)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> MeshPair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def sender(self) -> Child:
        """The only one, or the first."""
        return self.senders[0]

    def start(self, mesh: MeshFolder, role: str, peers: Sequence[str] = ()) -> Child:
        """An agent; returns before it has joined."""
        child = Child(
            "meshagent.bench.agent", str(mesh.path.parent), role, *peers,
            notes=self._folder / f"{role}.stderr",
            environ=own_environ(self._folder / "home", self._run),
        )  # fmt: skip
        self._children.append(child)
        return child

    def ask(self, verb: str, **arguments: Any) -> Any:
        """The first sender does it, to the recipient."""
        return self.sender.ask(verb, to=self.to, **arguments)

    def ask_all(self, verb: str, **arguments: Any) -> list[Any]:
        """Every sender does it at once."""
        for each in self.senders:
            each.begin(verb, to=self.to, **arguments)
        return [each.answer() for each in self.senders]

    def settle(self) -> None:
        """All agents do now what they would do in a quiet moment."""
        for each in (*self.senders, self.recipient):
            each.ask("settle")

    def recipient_leaves(self) -> None:
        """It ends cleanly."""
        self.recipient.close()

    def recipient_returns(self) -> None:
        """The same agent again, at another address; it dials the first sender."""
        self.recipient = self.start(self.there, "recipient", [self.sender.ready["address"]])
        assert self.recipient.wait_ready()["agent"] == self.to

    def close(self) -> None:
        """End every child."""
        for child in self._children:
            if child.process.stdin is not None and not child.process.stdin.closed:
                child.close()
        shutil.rmtree(self._run, ignore_errors=True)
