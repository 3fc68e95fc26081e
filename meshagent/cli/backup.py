"""`meshagent backup`: an agent's messages, as a file."""

from __future__ import annotations

from pathlib import Path

import click

from meshagent.cli.node_session import node_session, print_answer
from meshagent.cli.options import Common, common_options

__all__ = ["command"]


@click.command("backup")
@click.argument("file", type=click.Path())
@common_options
def command(common: Common, file: str) -> None:
    """Copy everything this agent keeps into FILE, while its node runs.

    Example:  meshagent backup ~/tester.backup
    """
    with node_session(common) as session:
        done = session.ask("backup", path=str(Path(file).expanduser().absolute()))
    print_answer(common, done, f"{done['agent']} backed up to {done['file']}")
