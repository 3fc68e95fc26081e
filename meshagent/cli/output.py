"""What people and programs read: tables that fit the terminal, JSON, relative times, errors."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import click

from meshagent.errors import MeshError

__all__ = [
    "ago",
    "notice",
    "peer_cells",
    "print_error",
    "print_json",
    "print_table",
    "size_text",
    "warn",
]

PEER_COLUMNS = ("agent", "role", "state", "status", "capabilities", "address", "last heard")
STATE_COLOURS = {"alive": "green", "suspect": "yellow", "gone": "red", "left": "bright_black"}
STATE_ORDER = {"alive": 0, "suspect": 1, "gone": 2, "left": 3}
PIPE_WIDTH = 10_000  # nothing is cut when a program reads


def print_json(value: object) -> None:
    """One JSON document on one line."""
    click.echo(json.dumps(value, ensure_ascii=False))


def styled(text: str, **style: Any) -> str:
    """`text` in a style, unless NO_COLOR asks for none; click drops it where nobody looks."""
    return text if os.environ.get("NO_COLOR") else click.style(text, **style)


def notice(text: str, quiet: bool = False) -> None:
    """Something a person should know, on standard error."""
    if not quiet:
        click.echo(text, err=True)


def warn(texts: Sequence[str], quiet: bool = False) -> None:
    """Warnings, one line each, on standard error."""
    for text in texts:
        notice(styled("warning: ", fg="yellow") + text, quiet)


def print_error(error: MeshError, as_json: bool) -> None:
    """What happened and the next step, on standard error."""
    if as_json:
        words = {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}
        click.echo(json.dumps({"error": words}, ensure_ascii=False), err=True)
        return
    click.echo(styled("meshagent: ", fg="red") + error.message, err=True)
    if error.hint:
        click.echo(f"  {error.hint}", err=True)


def ago(moment: str | None, now: datetime | None = None) -> str:
    """How long ago an ISO time was, for people."""
    if moment is None:
        return "never"
    now = now or datetime.now(UTC)
    seconds = max(0.0, (now - datetime.fromisoformat(moment)).total_seconds())
    if seconds < 2:
        return "now"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return "now"


def duration(seconds: float) -> str:
    """A span of time, for people."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}".replace(".0 ", " ")
    return f"{int(seconds)} s"


def peer_cells(peer: Mapping[str, Any]) -> tuple[str, ...]:
    """One row of the peers table."""
    status = peer["status"]
    if peer["presence"] != "idle":
        status = f"{peer['presence']}: {status}" if status else peer["presence"]
    addresses = peer["addresses"]
    more = f" +{len(addresses) - 1}" if len(addresses) > 1 else ""
    return (
        peer["agent"],
        peer["role"],
        peer["state"],
        status,
        ",".join(peer["capabilities"]),
        (addresses[0] + more) if addresses else "",
        ago(peer["last_heard"]) if peer["last_heard"] or peer["state"] != "alive" else "by others",
    )


def sort_peers(peers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those who are here first."""
    return sorted(peers, key=lambda each: (STATE_ORDER.get(each["state"], 9), each["agent"]))


def size_text(count: int) -> str:
    """A number of bytes, for people."""
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 1000 or unit == "TiB":
            break
    return f"{size:.1f} {unit}" if size < 10 else f"{size:.0f} {unit}"


def terminal_width(stream: Any = None) -> int:
    """How much fits on a line; a pipe takes everything."""
    terminal = (stream or sys.stdout).isatty()
    return shutil.get_terminal_size((80, 24)).columns if terminal else PIPE_WIDTH


def fit(cells: Sequence[Sequence[str]], width: int, keep: Sequence[int]) -> list[list[str]]:
    """Rows padded into columns; empty columns go, then the last ones that are not in `keep`."""
    columns = [at for at in range(len(cells[0])) if at in keep or any(row[at] for row in cells[1:])]
    while True:
        widths = {at: max(len(row[at]) for row in cells) for at in columns}
        spare = [at for at in columns if at not in keep]
        if sum(widths.values()) + 2 * (len(columns) - 1) <= width or not spare:
            break
        columns.remove(spare[-1])
    return [[row[at].ljust(widths[at]) for at in columns] for row in cells]


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], keep: Sequence[int]) -> None:
    """A table; states are coloured where colours are wanted."""
    width = terminal_width()
    table = fit([[each.upper() for each in header], *rows], width, keep)
    for number, cells in enumerate(table):
        line = "  ".join(cells).rstrip()[:width]
        if number == 0:
            click.echo(styled(line, dim=True))
            continue
        state = next((each.strip() for each in cells if each.strip() in STATE_COLOURS), "")
        if state:
            line = line.replace(state, styled(state, fg=STATE_COLOURS[state]), 1)
        click.echo(line)
