"""`meshagent status`: this agent at a glance, and what it says of itself."""

from __future__ import annotations

from typing import Any

import click

from meshagent.cli.node_session import node_session
from meshagent.cli.options import Common, common_options
from meshagent.cli.output import duration, print_json

__all__ = ["command"]


@click.command("status")
@click.argument("text", metavar="[TEXT]", required=False)
@click.option(
    "--presence",
    metavar="idle|working|blocked|away",
    help="What this agent is doing, in a word.",
)
@common_options
def command(common: Common, text: str | None, presence: str | None) -> None:
    """Show this agent at a glance; with TEXT, set the line that others see.

    Example:  meshagent status "running the login tests" --presence working
    """
    with node_session(common) as session:
        status = session.ask("status", text=text, presence=presence)
    if common.json:
        print_json(status)
    else:
        for label, value in _lines(status):
            click.echo(f"{label:<10}{value}")


def _lines(status: dict[str, Any]) -> list[tuple[str, str]]:
    peers = ", ".join(f"{count} {state}" for state, count in status["peers"].items())
    refused = ", ".join(f"{count} {why}" for why, count in status["refused"].items())
    trouble = [f"{part}: {word}" for part, word in status["health"].items() if word != "ok"]
    doing = status["presence"] + (f": {status['status']}" if status["status"] else "")
    lines = [
        ("agent", status["agent"]),
        ("role", status["role"]),
        ("mesh", status["mesh"]),
        ("doing", doing),
        ("peers", peers),
        ("inbox", f"{status['inbox']['unread']} unread"),
        ("outbox", ", ".join(f"{count} {state}" for state, count in status["outbox"].items())),
        ("address", "  ".join(status["addresses"])),
        ("running", f"{duration(status['uptime_s'])} (pid {status['pid']})"),
        ("refused", refused or "nobody"),
    ]
    lines += [("trouble", each) for each in trouble]
    if count := len(status["damage"]):
        things = "thing was" if count == 1 else "things were"
        lines.append(("damage", f"{count} {things} damaged on disk. Run: meshagent doctor"))
    return lines
