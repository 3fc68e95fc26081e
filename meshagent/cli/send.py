"""`meshagent send`: a message for one agent or several."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshagent.cli.mail import parse_duration, plain, receipt_line
from meshagent.cli.options import Common, common_options
from meshagent.cli.output import notice, print_json
from meshagent.errors import DeliveryTimeout, LimitReached, UsageError

if TYPE_CHECKING:
    from meshagent.storage.folders.mesh_folder import MeshFolder

__all__ = ["command"]

WAIT_S = 5.0
_STARTS = "Starting your own agent, user, to send as; --as chooses another."
ARRIVED = frozenset({"delivered", "seen", "done"})
FAILED = frozenset({"expired", "refused", "cancelled"})


@click.command("send")
@click.argument("peer")
@click.argument("text", required=False, metavar="[TEXT|-]")
@click.option(
    "--wait",
    type=click.FloatRange(min=0),
    default=WAIT_S,
    metavar="S",
    help=f"Wait this long for delivery: {WAIT_S:g} seconds unless you say so.",
)
@click.option("--strict", is_flag=True, help="Exit 3 when it is not delivered by then.")
@click.option("--ttl", metavar="D", help="Not worth delivering after: 30s, 15m, 2h, 7d.")
@click.option("--thread", default="", help="The conversation it belongs to.")
@click.option(
    "--attach", multiple=True, metavar="F", help="A file to send along; - is standard input."
)
@click.option(
    "--attach-name", default="", metavar="NAME", help="What standard input is called there."
)
@click.option("--reply-to", default="", metavar="ID", help="The message it answers.")
@common_options
def command(common: Common, peer: str, text: str | None, wait: float, **rest: Any) -> None:
    """Send a message; it is safe on disk when this prints its id.

    PEER is an id, the beginning of one, a name, @role, @all, or any:role.

    Example:  meshagent send backend "API returns 500 on login" --attach shot.png
    """
    from meshagent.session import open_mesh, session_or_start

    text = _text(text, rest["attach"])
    ttl = None if rest["ttl"] is None else parse_duration(rest["ttl"])
    _check_files(rest["attach"], rest["attach_name"])
    mesh = open_mesh(common.dir, make_personal=True)
    quiet = common.quiet or common.json
    open_session = partial(session_or_start, mesh, common.agent, partial(notice, _STARTS, quiet))
    if rest["attach"]:  # that nobody is called so is told before gigabytes are read
        with open_session() as session:
            session.ask("recipients", to=peer)
    attach = _stored(mesh, rest["attach"], rest["attach_name"], quiet)
    started = time.monotonic()
    with open_session() as session:
        try:
            receipts = session.ask(
                "send", to=peer, text=text, ttl_s=ttl, thread=rest["thread"],
                reply_to=rest["reply_to"], wait_s=wait,
                strict=rest["strict"], attach=attach,
            )  # fmt: skip
        except KeyboardInterrupt:
            notice("Not waiting for it any longer. What waits: meshagent outbox", quiet)
            raise
    elapsed_ms = round((time.monotonic() - started) * 1000, 1)
    strangers = [each["to"] for each in receipts if not each.pop("known", True)]
    for receipt in receipts:
        receipt["elapsed_ms"] = elapsed_ms
    _show(receipts, common)
    for stranger in strangers:
        notice(f"{stranger} was never met here: is the id right? See: meshagent peers", quiet)
    _judge(receipts, wait, rest["strict"], bool(attach), quiet)


def _judge(
    receipts: list[dict[str, Any]], wait: float, strict: bool, has_files: bool, quiet: bool
) -> None:
    """Raise when it has failed; say what becomes of it when it is not there yet."""
    if failed := [each for each in receipts if each["state"] in FAILED]:
        ends = ", ".join(f"{each['state']} for {each['to']}" for each in failed)
        raise DeliveryTimeout(f"Not delivered: {ends}.", hint="See: meshagent log")
    late = [each for each in receipts if each["state"] not in ARRIVED]
    if late and strict:
        raise DeliveryTimeout(
            f"Not delivered within {wait:g} s; it stays queued.", hint="See: meshagent outbox"
        )
    queued = ", ".join(each["to"] for each in late if each["state"] == "queued")
    on_its_way = ", ".join(each["to"] for each in late if each["state"] != "queued")
    if queued:
        notice(f"Queued: it goes out by itself when {queued} is here.", quiet)
    if on_its_way:
        until = "its files are whole there" if has_files else "it is safe there"
        notice(f"On its way to {on_its_way}: delivered when {until}.", quiet)


def _show(receipts: list[dict[str, Any]], common: Common) -> None:
    if common.json:
        print_json(receipts[0] if len(receipts) == 1 else receipts)
        return
    for receipt in receipts:
        click.echo(receipt_line(receipt))


def _check_files(files: Sequence[str], stream_name: str) -> None:
    if files.count("-") > 1:
        raise UsageError("Standard input can be attached once.")
    if stream_name and "-" not in files:
        raise UsageError("--attach-name names standard input.", hint="Say --attach - too.")


def _stored(
    mesh: MeshFolder, files: Sequence[str], stream_name: str, quiet: bool
) -> list[tuple[str, str]]:
    """Each file copied into the mesh's store as it is now: its name and SHA-256."""
    if not files:
        return []
    from meshagent.cli.progress import ProgressLine
    from meshagent.session import open_blobs
    from meshagent.storage.blobs.errors import DiskFull

    blobs, stored = open_blobs(mesh), []
    for file in files:
        source = sys.stdin.buffer if file == "-" else Path(file)
        name = (stream_name or "stdin") if file == "-" else Path(file).name
        # A file's name is bytes, and may be no text; what it is called there is text.
        name = os.fsencode(name).decode("utf-8", "replace")
        try:
            with ProgressLine(f"Reading {plain(name)}", quiet) as line:
                stored.append((name, blobs.put(source, line.update).sha256.hex()))
        except DiskFull as error:  # unlike an attachment that comes, it does not go on by itself
            raise LimitReached(error.message, hint="Free some space, and send it again.") from None
        except KeyboardInterrupt:
            notice("Nothing was sent.", quiet)
            raise
    return stored


def _text(text: str | None, files: Sequence[str]) -> str:
    if "-" in files and text == "-":
        raise UsageError(
            "Standard input is either the text or an attachment.",
            hint='Try: meshagent send PEER "text" --attach - --attach-name log.txt',
        )
    if text is None and files:
        return ""
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
