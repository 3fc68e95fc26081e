"""`meshagent fetch`: get attachments that were too large to come by themselves."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import click

from meshagent.cli.mail import attachment_text, plain
from meshagent.cli.node_session import node_session
from meshagent.cli.options import Common, common_options
from meshagent.cli.output import print_json

if TYPE_CHECKING:
    from meshagent.session import Session

__all__ = ["command", "fetched"]

LOOK_S = 0.3


@click.command("fetch")
@click.argument("ident", metavar="ID")
@common_options
def command(common: Common, ident: str) -> None:
    """Get the attachments of a message that did not come by themselves; they stay here.

    Example:  meshagent fetch 7k2m
    """
    with node_session(common) as session:
        message = fetched(session, ident, common.quiet or common.json)
    if common.json:
        print_json(message)
        return
    for each in message["attachments"]:
        click.echo(f"{attachment_text(each)}  {each['path']}")


def fetched(session: Session, ident: str, quiet: bool) -> dict[str, Any]:
    """The message with all its attachments here; how far they have come is shown meanwhile."""
    from meshagent.cli.progress import ProgressLine

    message: dict[str, Any] = session.ask("message", ident=ident)
    if all(each["state"] == "ready" for each in message["attachments"]):
        return message
    done = threading.Event()
    with ProgressLine("Fetching", quiet) as line:
        watcher = threading.Thread(target=_watch, args=(session, ident, line, done), daemon=True)
        watcher.start()
        try:
            answer: dict[str, Any] = session.ask("fetch", ident=message["id"])
        except KeyboardInterrupt:
            line.say("It goes on in the background. See: meshagent inbox")
            raise
        finally:
            done.set()
            watcher.join()
    return answer


def _watch(session: Session, ident: str, line: Any, done: threading.Event) -> None:
    """Ask again and again, over a connection of its own: the other one waits for the end."""
    from meshagent.errors import MeshError

    try:
        with session.another() as looking:
            while not done.wait(LOOK_S):
                attachments = looking.ask("message", ident=ident)["attachments"]
                received = sum(each["received"] for each in attachments)
                line.update(received, sum(each["size"] for each in attachments))
                for each in attachments:
                    if each["reason"]:
                        why = plain(each["reason"]).rstrip(".")
                        line.say(f"{plain(each['name'])} waits, and goes on by itself: {why}.")
    except MeshError:
        return  # the one that fetches says what is wrong
