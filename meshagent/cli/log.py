"""`meshagent log`: the audit trail."""

from __future__ import annotations

import click

from meshagent.cli.mail import print_messages
from meshagent.cli.node_session import node_session
from meshagent.cli.options import Common, common_options
from meshagent.cli.output import notice, print_json

__all__ = ["command"]


@click.command("log")
@click.option("--search", default="", metavar="Q", help="Only messages with these words.")
@click.option("--peer", default="", help="Only to and from this one.")
@click.option("--kind", default="", help="Only messages of this kind.")
@click.option("--limit", type=click.IntRange(1), default=50, help="The newest so many.")
@common_options
def command(common: Common, search: str, peer: str, kind: str, limit: int) -> None:
    """List messages both ways, oldest first, with how far each has come.

    Example:  meshagent log --search "login 500"
    """
    with node_session(common) as session:
        messages = session.ask("log", search=search, peer=peer, kind=kind, limit=limit)
    if common.json:
        print_json(messages)
    elif messages:
        print_messages(messages, session.agent)
    else:
        notice("Nothing matches.", common.quiet)
