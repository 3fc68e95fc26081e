"""`meshagent restore`: an agent's mailbox becomes what a backup holds."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from meshagent.cli.node_session import node_session, print_answer
from meshagent.cli.options import Common, common_options

__all__ = ["command"]


@click.command("restore")
@click.argument("file", type=click.Path())
@common_options
def command(common: Common, file: str) -> None:
    """Replace this agent's mailbox with a backup. Everything since then is lost.

    The node must be running. The replaced mailbox is kept in a folder, which is named.

    Example:  meshagent restore ~/tester.backup
    """
    with node_session(common) as session:
        done = session.ask("restore", path=str(Path(file).expanduser().absolute()))
    if common.json or not done["replaced"]:
        print_answer(
            common, done, f"The mailbox of {done['agent']} is now the backup {done['file']}."
        )
        return
    kept = done["replaced"]
    click.echo(f"The mailbox of {done['agent']} is now the backup {done['file']}.")
    click.echo(f"The mailbox that it replaced is kept in {kept}")
    click.echo(f"To go back to it: meshagent restore {shlex.quote(f'{kept}/mesh.db')}")
    click.echo(f"To delete it: rm -r {shlex.quote(kept)}")
