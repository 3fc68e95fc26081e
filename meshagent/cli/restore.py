"""`meshagent restore`: an agent's messages, as a file."""

from __future__ import annotations

from pathlib import Path

import click

from meshagent.cli.node_session import node_session, print_answer
from meshagent.cli.options import Common, common_options

__all__ = ["command"]


@click.command("restore")
@click.argument("file", type=click.Path())
@common_options
def command(common: Common, file: str) -> None:
    """Go on from a backup, while the node runs; what came or went since then is forgotten.

    Example:  meshagent restore ~/tester.backup
    """
    with node_session(common) as session:
        done = session.ask("restore", path=str(Path(file).expanduser().absolute()))
    print_answer(common, done, f"{done['agent']} restored from {done['file']}")
