"""`meshagent done`: one message that came."""

from __future__ import annotations

import os

import click

from meshagent.cli.options import Common, common_options
from meshagent.cli.output import print_json

__all__ = ["command"]


@click.command("done")
@click.argument("ident", metavar="ID")
@common_options
def command(common: Common, ident: str) -> None:
    """Say that a message was acted upon; its sender learns that.

    Example:  meshagent done 7k2m
    """
    from meshagent.session import attach, open_mesh

    mesh = open_mesh(common.dir)
    with attach(mesh.registry, common.agent, os.environ) as session:
        message = session.ask("done", ident=ident)
    if common.json:
        print_json(message)
    else:
        click.echo(f"{message['id']} from {message['from']}: done")
