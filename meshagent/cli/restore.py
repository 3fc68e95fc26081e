"""`meshagent restore`: an agent's messages, as a file."""

from __future__ import annotations

import os
from pathlib import Path

import click

from meshagent.cli.options import Common, common_options
from meshagent.cli.output import print_json

__all__ = ["command"]


@click.command("restore")
@click.argument("file", type=click.Path())
@common_options
def command(common: Common, file: str) -> None:
    """Go on from a backup, while the node runs; what came or went since then is forgotten.

    Example:  meshagent restore ~/tester.backup
    """
    from meshagent.session import attach, open_mesh

    mesh = open_mesh(common.dir)
    with attach(mesh.registry, common.agent, os.environ) as session:
        done = session.ask("restore", path=str(Path(file).expanduser().absolute()))
    if common.json:
        print_json(done)
    else:
        click.echo(f"{done['agent']} restored from {done['file']}")
