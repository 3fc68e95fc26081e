"""`meshagent read`: one message that came."""

from __future__ import annotations

import os

import click

from meshagent.cli.mail import print_message
from meshagent.cli.options import Common, common_options
from meshagent.cli.output import print_json

__all__ = ["command"]


@click.command("read")
@click.argument("ident", metavar="ID")
@common_options
def command(common: Common, ident: str) -> None:
    """One message, whole; its sender learns that it was seen.

    Example:  meshagent read 7k2m
    """
    from meshagent.session import attach, open_mesh

    mesh = open_mesh(common.dir)
    with attach(mesh.registry, common.agent, os.environ) as session:
        message = session.ask("read", ident=ident)
    if common.json:
        print_json(message)
    else:
        print_message(message)
