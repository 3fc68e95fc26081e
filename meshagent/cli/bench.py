"""`meshagent bench`: what the mesh does on this machine, next to what one would pick instead."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshagent.bench import CONTESTANTS, QUESTIONS
from meshagent.cli.options import Common, common_options
from meshagent.cli.output import notice, print_json, terminal_width
from meshagent.errors import UsageError

if TYPE_CHECKING:
    from meshagent.bench.guard import Comparison

__all__ = ["command"]

PIPE_WIDTH = 160  # a table for a file or a pager; rich would fill whatever it is given


@click.command("bench")
@click.argument("questions", metavar="[QUESTION]...", nargs=-1, type=click.Choice([*QUESTIONS]))
@click.option("--quick", "extent", flag_value="quick", default=True, help="Two minutes in all.")
@click.option("--full", "extent", flag_value="full", help="More rounds, larger sizes: much longer.")
@click.option("--tiny", "extent", flag_value="tiny", hidden=True)
@click.option("--plot", type=click.Path(file_okay=False), metavar="DIR", help="Draw SVGs there.")
@click.option(
    "--compare",
    default=",".join(CONTESTANTS),
    metavar="NAMES",
    show_default=True,
    help="Measure these beside it, where installed; none with ''.",
)
@click.option("--check", is_flag=True, help="Exit 1 when a ratio is worse than recorded.")
@click.option("--record", is_flag=True, hidden=True)
@common_options
def command(common: Common, questions: tuple[str, ...], extent: Any, **rest: Any) -> None:
    """Measure this machine: the mesh, its floor, and what you would pick instead.

    QUESTION is latency, throughput, receipts, bulk, interference, discovery, replay, scale or startup; all
    by default. Runs on loopback, on the disk of the current folder or of --dir, and leaves nothing.

    Example:  meshagent bench latency throughput
    """
    compare = _contestants(rest["compare"])
    disk = Path(common.dir or ".").resolve()
    if not disk.is_dir():
        raise UsageError(f"{disk} is no folder.", hint="Name a folder on the disk to measure.")
    from meshagent.bench import guard, plots, suite

    if rest["plot"]:
        plots.check_plots()
    asked = list(dict.fromkeys(questions)) or [*QUESTIONS]
    report = suite.ask_all(
        asked, extent, disk, compare,
        lambda question: notice(f"{question}: {QUESTIONS[question]} …", common.quiet),
    )  # fmt: skip
    release, comparisons = guard.compare(report, guard.read()) if rest["check"] else (None, [])
    if rest["check"]:
        checked = [each.as_json() for each in comparisons]
        report["check"] = {"release": release, "ratios": checked}
    _show(report, comparisons, common)
    if rest["plot"]:
        for path in plots.draw(report, Path(rest["plot"])):
            notice(f"drawn: {path}", common.quiet)
    if rest["record"]:
        notice(f"recorded: {guard.record(report)}", common.quiet)
    failed = any(part["failed"] for part in report["questions"].values())
    unguarded = rest["check"] and not any(each.now is not None for each in comparisons)
    if failed or unguarded or any(each.worse for each in comparisons):
        raise click.exceptions.Exit(1)


def _contestants(names: str) -> frozenset[str]:
    wanted = frozenset(name.strip() for name in names.split(",") if name.strip())
    unknown = sorted(wanted - set(CONTESTANTS))
    if unknown:
        raise UsageError(
            f"There is no contestant {unknown[0]!r}.", hint=f"There are: {', '.join(CONTESTANTS)}."
        )
    return wanted


def _show(report: dict[str, Any], comparisons: list[Comparison], common: Common) -> None:
    if common.json:
        print_json(report)
        return
    from rich.console import Console

    from meshagent.bench.tables import print_check, print_report

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # no character may cost minutes of measuring
    console = Console(width=terminal_width() if sys.stdout.isatty() else PIPE_WIDTH)
    print_report(console, report)
    if "check" in report:
        print_check(console, report["check"]["release"], comparisons)
