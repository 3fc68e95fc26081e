"""`meshagent cancel`: take a message back."""

from __future__ import annotations

import os

import click

from meshagent.cli.mail import receipt_line
from meshagent.cli.options import Common, common_options
from meshagent.cli.output import print_json

__all__ = ["command"]


@click.command("cancel")
@click.argument("ident", metavar="ID")
@common_options
def command(common: Common, ident: str) -> None:
    """Take back a message that has not left yet.

    Example:  meshagent cancel 7k2m
    """
    from meshagent.session import attach, open_mesh

    mesh = open_mesh(common.dir)
    with attach(mesh.registry, common.agent, os.environ) as session:
        receipt = session.ask("cancel", ident=ident)
    if common.json:
        print_json(receipt)
    else:
        click.echo(receipt_line(receipt))
