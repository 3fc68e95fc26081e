"""`meshagent restore`: an agent's mailbox becomes what a backup holds."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click

from meshagent.cli.options import Common, common_options
from meshagent.cli.output import print_json

__all__ = ["command"]


@click.command("restore")
@click.argument("file", type=click.Path())
@common_options
def command(common: Common, file: str) -> None:
    """Replace this agent's mailbox with a backup. Everything since then is lost.

    The node must be running. The replaced mailbox is kept in a folder, which is named.

    Example:  meshagent restore ~/tester.backup
    """
    from meshagent.session import attach, open_mesh

    mesh = open_mesh(common.dir)
    with attach(mesh.registry, common.agent, os.environ) as session:
        done = session.ask("restore", path=str(Path(file).expanduser().absolute()))
    if common.json:
        print_json(done)
    else:
        click.echo(f"The mailbox of {done['agent']} is now the backup {done['file']}.")
        if kept := done["replaced"]:
            click.echo(f"The mailbox that it replaced is kept in {kept}")
            click.echo(f"To go back to it: meshagent restore {shlex.quote(f'{kept}/mesh.db')}")
            click.echo(f"To delete it: rm -r {shlex.quote(kept)}")
