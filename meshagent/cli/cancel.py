"""`meshagent cancel`: take a message back."""

from __future__ import annotations

import click

from meshagent.cli.mail import receipt_line
from meshagent.cli.node_session import node_session, print_answer
from meshagent.cli.options import Common, common_options

__all__ = ["command"]


@click.command("cancel")
@click.argument("ident", metavar="ID")
@common_options
def command(common: Common, ident: str) -> None:
    """Take back a message that has not left yet.

    Example:  meshagent cancel 7k2m
    """
    with node_session(common) as session:
        receipt = session.ask("cancel", ident=ident)
    print_answer(common, receipt, receipt_line(receipt))
