"""`meshagent outbox`: what waits."""

from __future__ import annotations

import click

from meshagent.cli.mail import print_messages
from meshagent.cli.node_session import node_session
from meshagent.cli.options import Common, common_options
from meshagent.cli.output import notice, print_json

__all__ = ["command"]


@click.command("outbox")
@click.option("--all", "ended", is_flag=True, help="Also what has been delivered or has ended.")
@click.option("--limit", type=click.IntRange(1), default=50, help="At most so many.")
@common_options
def command(common: Common, ended: bool, limit: int) -> None:
    """List the messages of this agent that wait for their recipients, oldest first.

    Example:  meshagent outbox
    """
    with node_session(common) as session:
        messages = session.ask("outbox", limit=limit, ended=ended)
    if common.json:
        print_json(messages)
    elif messages:
        print_messages(messages, session.agent)
    else:
        notice("Nothing waits.", common.quiet)
