"""`meshagent doctor`: why is a peer not visible?"""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshagent.cli.options import Common, common_options
from meshagent.cli.output import print_json, terminal_width

if TYPE_CHECKING:
    from meshagent.diagnosis.finding import Finding

__all__ = ["command"]

MARKS = {"ok": "✓", "note": "!", "problem": "✗"}
PLAIN_MARKS = {"ok": "+", "note": "!", "problem": "x"}
ARROW, PLAIN_ARROW = "→", "->"
COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}
TEXT_WIDTH_MIN = 30  # in a narrower terminal lines run over its edge rather than down it


@click.command("doctor")
@click.argument("peer", metavar="[PEER]", required=False)
@click.option(
    "--listen",
    metavar="ADDR",
    envvar="MESHAGENT_LISTEN",
    help="Look at this address only, as a node that listens there would.",
)
@click.option("--files", is_flag=True, help="Read all attachments again; set damaged ones aside.")
@common_options
def command(common: Common, peer: str | None, listen: str | None, files: bool) -> None:
    """Explain why a peer is not visible: what works, what does not, and what to do.

    PEER (an id, a prefix, a name, or host:port) is explained in particular. Nothing is changed,
    but for a damaged attachment that --files finds: that one is set aside, and can be fetched anew.

    The exit code is 1 when there is a problem.

    Example:  meshagent doctor backend
    """
    from meshagent.diagnosis.examination import examine

    chosen = Path(common.dir) if common.dir else None
    with contextlib.ExitStack() as stack:
        watch = _watcher(stack, common.quiet or common.json) if files else None
        findings = examine(Path.cwd(), os.environ, chosen, listen, peer, common.agent, watch)
    if common.json:
        print_json([each.view() for each in findings])
    else:
        _print_report(common, findings)
    if any(each.state == "problem" for each in findings):
        raise click.exceptions.Exit(1)


def _print_report(common: Common, findings: Sequence[Finding]) -> None:
    problems = [each for each in findings if each.state == "problem"]
    shown = [each for each in findings if common.verbose or not each.detail]
    _print_findings(problems if common.quiet else shown)
    if not common.quiet:
        click.echo("\n" + _conclusion(len(problems)))


def _watcher(stack: contextlib.ExitStack, quiet: bool) -> Callable[[int, int | None], None]:
    """Shows how far it has come with the files, from when it comes to them."""
    from meshagent.cli.progress import ProgressLine

    lines: list[ProgressLine] = []

    def watch(done: int, total: int | None) -> None:
        if not lines:
            lines.append(stack.enter_context(ProgressLine("Reading attachments", quiet)))
        lines[0].update(done, total)

    return watch


def _print_findings(findings: Sequence[Finding]) -> None:
    width = terminal_width()
    plain = not _can_print("".join(MARKS.values()) + ARROW)
    marks, arrow = (PLAIN_MARKS, PLAIN_ARROW) if plain else (MARKS, ARROW)
    column = max((len(each.check) for each in findings), default=0)
    for each in findings:
        mark = click.style(marks[each.state], fg=COLOURS[each.state])
        first, *more = _fold(each.text, width - column - 4)
        _print_line(f"{mark} {each.check:<{column}}  {first}")
        for line in more:
            _print_line(" " * (column + 4) + line)
        for at, line in enumerate(_fold(each.hint, width - column - 7) if each.hint else ()):
            lead = arrow if at == 0 else " " * len(arrow)
            _print_line(" " * (column + 4) + f"{lead} {line}")


def _fold(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, max(width, TEXT_WIDTH_MIN), break_long_words=False, break_on_hyphens=False
    )


def _print_line(line: str) -> None:
    # A path may hold what the terminal can't show; that must not end the report.
    encoding = sys.stdout.encoding or "ascii"
    click.echo(line.encode(encoding, "replace").decode(encoding))


def _can_print(characters: str) -> bool:
    try:
        characters.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _conclusion(problems: int) -> str:
    if problems == 0:
        return "No problem found."
    return "One problem." if problems == 1 else f"{problems} problems."
