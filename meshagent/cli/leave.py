"""`meshagent leave`: end a node cleanly."""

from __future__ import annotations

import os
import time

import click

from meshagent.cli.options import Common, common_options
from meshagent.cli.output import print_json
from meshagent.errors import MeshError

__all__ = ["command"]

END_TIMEOUT_S = 10.0  # a clean end takes well under a second


@click.command("leave")
@common_options
def command(common: Common) -> None:
    """End this agent's node; its peers see it leave at once.

    Example:  meshagent leave
    """
    from meshagent.session import attach, open_mesh

    mesh = open_mesh(common.dir)
    with attach(mesh.registry, common.agent, os.environ) as session:
        answer = session.ask("leave")
    _wait_for_end(int(answer["pid"]), mesh.agents / answer["agent"] / "lock")
    if common.json:
        print_json({"agent": answer["agent"], "left": True})
    else:
        click.echo(f"{answer['agent']} has left.")


def _wait_for_end(pid: int, lock: os.PathLike[str]) -> None:
    """The lock is the truth: an embedded node ends while its process goes on."""
    from pathlib import Path

    from meshagent.storage.folders.agent_lock import AgentLock

    deadline = time.monotonic() + END_TIMEOUT_S
    while AgentLock(Path(lock)).holder() is not None:
        if time.monotonic() > deadline:
            raise MeshError(
                f"The node (pid {pid}) was asked to leave and still runs.",
                hint=f"End it with: kill {pid}",
            )
        time.sleep(0.02)
