"""`meshagent send`: a message for one agent or several."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from meshagent.cli.mail import parse_duration, receipt_line
from meshagent.cli.options import Common, common_options
from meshagent.cli.output import notice, print_json
from meshagent.errors import DeliveryTimeout, UsageError

__all__ = ["command"]

WAIT_S = 5.0
ARRIVED = frozenset({"delivered", "seen", "done"})
FAILED = frozenset({"expired", "refused", "cancelled"})


@click.command("send")
@click.argument("peer")
@click.argument("text", required=False, metavar="[TEXT|-]")
@click.option(
    "--wait", type=float, default=WAIT_S, metavar="S", help="Wait this long for delivery."
)
@click.option("--strict", is_flag=True, help="Exit 3 when it is not delivered by then.")
@click.option("--ttl", metavar="D", help="Not worth delivering after: 30s, 15m, 2h, 7d.")
@click.option("--thread", default="", help="The conversation it belongs to.")
@click.option("--reply-to", default="", metavar="ID", help="The message it answers.")
@common_options
def command(common: Common, peer: str, text: str | None, wait: float, **rest: Any) -> None:
    """Send a message; it is safe on disk when this prints its id.

    PEER is an id, the beginning of one, a name, @role, @all, or any:role.

    Example:  meshagent send backend "API returns 500 on login"
    """
    from meshagent.session import open_mesh, session_or_start

    text = _text(text)
    ttl = None if rest["ttl"] is None else parse_duration(rest["ttl"])
    mesh = open_mesh(common.dir, make_personal=True)
    started = time.monotonic()
    with session_or_start(mesh, common.agent) as session:
        receipts = session.ask(
            "send", to=peer, text=text, ttl_s=ttl, thread=rest["thread"],
            reply_to=rest["reply_to"], wait_s=max(0.0, wait),
            strict=rest["strict"],
        )  # fmt: skip
    elapsed_ms = round((time.monotonic() - started) * 1000, 1)
    for receipt in receipts:
        receipt["elapsed_ms"] = elapsed_ms
    _show(receipts, common)
    if failed := [each for each in receipts if each["state"] in FAILED]:
        ends = ", ".join(f"{each['state']} for {each['to']}" for each in failed)
        raise DeliveryTimeout(f"Not delivered: {ends}.", hint="See: meshagent log")
    late = [each for each in receipts if each["state"] not in ARRIVED]
    if late and rest["strict"]:
        raise DeliveryTimeout(
            f"Not delivered within {wait:g} s; it stays queued.", hint="See: meshagent outbox"
        )
    if late:
        names = ", ".join(each["to"] for each in late)
        notice(f"Queued: it goes out by itself when {names} is here.", common.quiet or common.json)


def _show(receipts: list[dict[str, Any]], common: Common) -> None:
    if common.json:
        print_json(receipts[0] if len(receipts) == 1 else receipts)
        return
    for receipt in receipts:
        click.echo(receipt_line(receipt))


def _text(text: str | None) -> str:
    if text is None and sys.stdin.isatty():
        raise UsageError("There is nothing to send.", hint='Try: meshagent send PEER "text"')
    if text is None or text == "-":
        try:
            return sys.stdin.buffer.read().decode()
        except UnicodeDecodeError:
            raise UsageError(
                "What came on standard input is not text.", hint="Send a file as an attachment."
            ) from None
    return text
