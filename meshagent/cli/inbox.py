"""`meshagent inbox`: what came."""

from __future__ import annotations

import click

from meshagent.cli.mail import print_messages
from meshagent.cli.node_session import node_session
from meshagent.cli.options import Common, common_options
from meshagent.cli.output import notice, print_json

__all__ = ["command"]


@click.command("inbox")
@click.option("--unread", is_flag=True, help="Only what nobody has seen yet.")
@click.option("--follow", is_flag=True, help="Go on, with a line for each new message.")
@click.option("--limit", type=click.IntRange(1), default=50, help="The newest so many.")
@common_options
def command(common: Common, unread: bool, follow: bool, limit: int) -> None:
    """List the messages that came to this agent, oldest first.

    A message is unread until somebody reads it; what was read and is not done is shown as seen,
    and a program's inbox hands it out until it is done.

    Example:  meshagent inbox --unread
    """
    with node_session(common) as session:
        asked = {"unread": unread, "limit": limit}
        messages = (
            session.follow("inbox", **asked) if follow else iter([session.ask("inbox", **asked)])
        )
        first = next(messages)
        if common.json:
            print_json(first)
        elif first:
            print_messages(first, session.agent)
        elif not follow:
            notice("Nothing here.", common.quiet)
        if follow:
            for message in messages:
                if common.json:
                    print_json(message)
                else:
                    print_messages([message], session.agent)
