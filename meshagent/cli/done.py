"""`meshagent done`: one message that came."""

from __future__ import annotations

import click

from meshagent.cli.node_session import node_session, print_answer
from meshagent.cli.options import Common, common_options

__all__ = ["command"]


@click.command("done")
@click.argument("ident", metavar="ID")
@common_options
def command(common: Common, ident: str) -> None:
    """Say that a message was acted upon; its sender learns that.

    Example:  meshagent done 7k2m
    """
    with node_session(common) as session:
        message = session.ask("done", ident=ident)
    print_answer(common, message, f"{message['id']} from {message['from']}: done")
