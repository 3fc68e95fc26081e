"""How messages and receipts look to a person."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import click

from meshagent.cli.output import ago, size_text, terminal_width
from meshagent.errors import UsageError

__all__ = ["attachment_text", "parse_duration", "print_message", "print_messages", "receipt_line"]

STATE_COLOURS = {
    "queued": "yellow",
    "sent": "yellow",
    "delivered": "green",
    "seen": "green",
    "done": "green",
    "unread": "cyan",
    "receiving": "yellow",
    "expired": "red",
    "refused": "red",
    "parked": "red",
    "cancelled": "bright_black",
}
LISTED_CHARACTERS_MAX = 500  # of a text: an agent that lists has not asked for all of it
UNKNOWN_TYPE = "application/octet-stream"  # whoever says so says nothing
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "": 1}


def parse_duration(text: str) -> float:
    """`30`, `30s`, `15m`, `2h`, `7d` in seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if found is None or float(found[1]) == 0:
        raise UsageError(f"{text!r} is not a span of time.", hint="Write 30s, 15m, 2h or 7d.")
    return float(found[1]) * _UNITS[found[2]]


def coloured(state: str) -> str:
    """A state in its colour."""
    return click.style(state, fg=STATE_COLOURS.get(state))


def plain(text: str) -> str:
    """Text from elsewhere, without anything that could drive the terminal."""
    return "".join(each if each.isprintable() or each == "\n" else "\ufffd" for each in text)


def receipt_line(receipt: Mapping[str, Any]) -> str:
    """`7k2m9qdx4hza to backend-…: delivered`."""
    reason = f" ({plain(receipt['reason'])})" if receipt.get("reason") else ""
    return f"{receipt['id']} to {receipt['to']}: {coloured(receipt['state'])}{reason}"


def print_messages(messages: Sequence[Mapping[str, Any]], me: str) -> None:
    """One line each, cut to the terminal; a text's beginning, wherever it goes."""
    width = terminal_width()
    for each in messages:
        other = f"from {each['from']}" if each["to"] == me else f"to {each['to']}"
        head = f"{each['id']}  {each['state']:<9}  {other}  {ago(each['sent_at'])}  "
        first = plain(each["text"]).split("\n")[0] or ("(data)" if each["data"] is not None else "")
        first = _cut(first, LISTED_CHARACTERS_MAX)
        first = "  ".join([first, *map(attachment_text, each["attachments"])]).lstrip()
        if each.get("reason"):
            first = f"({plain(each['reason'])}) {first}"
        line = head + _cut(first, max(0, width - len(head)))
        click.echo(line.replace(each["state"], coloured(each["state"]), 1))


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: max(0, room - 1)] + "…"


def attachment_text(attachment: Mapping[str, Any]) -> str:
    """`[shot.png 20 KiB image/png]`, and how far it has come when it is not here.

    Before that its type is only what its sender says.
    """
    name, size, mime = plain(attachment["name"]), attachment["size"], plain(attachment["mime"])
    if attachment["state"] == "ready":
        return f"[{name} {size_text(size)} {mime}]"
    words = [f"{name} {size_text(size)}"]
    if mime != UNKNOWN_TYPE:
        words.append(f"said to be {mime}")
    if attachment["state"] == "receiving":
        share = 100 * attachment["received"] // size if size else 0
        why = f" ({plain(attachment['reason']).rstrip('.')})" if attachment["reason"] else ""
        words.append(f"receiving {share}%{why}")
    else:
        words.append("not fetched")
    return f"[{', '.join(words)}]"


def print_message(message: Mapping[str, Any], agent: str | None) -> None:
    """The whole message, as this agent was asked to read it."""
    click.secho(f"{message['id']}  from {message['from']}  {ago(message['sent_at'])}", dim=True)
    if message["reply_to"]:
        click.secho(f"in reply to {message['reply_to']}", dim=True)
    click.echo()
    if message["text"]:
        click.echo(plain(message["text"]))
    if message["data"] is not None:
        import json

        click.echo(plain(json.dumps(message["data"], indent=2, ensure_ascii=False)))
    for each in message["attachments"]:
        click.echo(attachment_text(each))
    if message["attachments"]:
        speaker = f" --as {agent}" if agent else ""
        click.secho(f"Save with: meshagent save {message['id']}{speaker}", dim=True)
