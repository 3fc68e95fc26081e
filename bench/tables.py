"""The report for people: each question's figures, the bars beside the headlines, who was left out.

Prints to the console that it is given, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from meshagent.bench import QUESTIONS
from meshagent.bench.guard import Comparison

__all__ = ["print_check", "print_report"]

VERDICT_STYLES = {"pass": "green", "miss": "red", "": ""}
FIGURES_ACROSS_MAX = 4  # more columns than that are read better as lines


def print_report(console: Console, report: Mapping[str, Any]) -> None:
    """Everything."""
    for question, part in report["questions"].items():
        console.print(f"\n[bold]{question}[/]: {QUESTIONS[question]} [dim]({part['seconds']} s)[/]")
        if part["failed"]:
            console.print(Text(f"  failed: {part['failed']}", "red"))
        if part["cases"]:
            console.print(_cases(part["cases"]))
        if part["headlines"]:
            console.print(_headlines(part["headlines"]))
        for each in part["left_out"]:
            console.print(f"  [dim]left out: {escape(each['what'])} ({escape(each['reason'])})[/]")
    console.print("\n[dim]" + escape(_facts(report)) + "[/]")
    console.print("[dim]A figure is a median over rounds (smallest to largest).[/]")


def print_check(console: Console, release: str | None, comparisons: Sequence[Comparison]) -> None:
    """Each ratio, as recorded and now."""
    if release is None:
        console.print("\nNo release's ratios are recorded yet: there is nothing to compare with.")
        return
    table = Table("ratio", title=f"since {release}", title_justify="left", box=None)
    for column in ("recorded", "now", "may be worse by", "verdict"):
        table.add_column(column, justify="right")
    for each in comparisons:
        verdict = "worse" if each.worse else "ok" if each.now is not None else "not measured"
        style = {"worse": "red", "ok": "green"}.get(verdict, "dim")
        table.add_row(
            each.name,
            number(each.recorded),
            "" if each.now is None else number(each.now),
            f"{each.margin:g} x",
            Text(verdict, style),
        )
    console.print()
    console.print(table)


def _cases(cases: Mapping[str, Any]) -> Table:
    names = list(dict.fromkeys(name for figures in cases.values() for name in figures))
    if len(names) > FIGURES_ACROSS_MAX:
        return _turned(cases, names)
    table = Table("", box=None)
    for name in names:
        table.add_column(_words(name), justify="right")
    for case, figures in cases.items():
        table.add_row(case, *(spread(figures[name]) if name in figures else "" for name in names))
    return table


def _turned(cases: Mapping[str, Any], names: Sequence[str]) -> Table:
    table = Table("", box=None)
    for case in cases:
        table.add_column(case, justify="right")
    for name in names:
        cells = (spread(figures[name]) if name in figures else "" for figures in cases.values())
        table.add_row(_words(name), *cells)
    return table


def _headlines(headlines: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("", box=None)
    for column in ("reached", "bar", ""):
        table.add_column(column, justify="right")
    for each in headlines:
        sign = "≤" if each["better"] == "lower" else "≥"
        bar = "" if each["bar"] is None else f"{sign} {each['bar']:g} {each['unit']}"
        reached = f"{spread(each)} {each['unit']}"
        verdict = Text(each["verdict"], VERDICT_STYLES[each["verdict"]])
        table.add_row(each["name"].partition(".")[2].replace("_", " "), reached, bar, verdict)
    return table


def spread(figure: Mapping[str, Any]) -> str:
    """Median and range; the median alone where there was one round."""
    if figure["rounds"] == 1:
        return number(figure["median"])
    return f"{number(figure['median'])} ({number(figure['low'])} to {number(figure['high'])})"


def number(value: float) -> str:
    """Three digits that mean something."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _words(name: str) -> str:
    return name.replace("mb_per_s", "MB/s").replace("_per_", "/").replace("_", " ")


def _facts(report: Mapping[str, Any]) -> str:
    facts = report["machine"]
    editable = (
        "; an editable install, which starts more slowly" if facts["editable_install"] else ""
    )
    return (
        f"meshagent {facts['meshagent']}, Python {facts['python']}, libzmq {facts['libzmq']}, "
        f"SQLite {facts['sqlite']}; {facts['system']}, {facts['processor']}, "
        f"{facts['cores']} cores, load before {facts['load_before']:.2f}; "
        f"disk: {facts['filesystem'] or 'unknown'} at {facts['disk']}{editable}"
    )
