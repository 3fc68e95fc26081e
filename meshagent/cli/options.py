"""Options that every command takes, after its name (DESIGN 13)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

__all__ = ["Common", "common_options"]


@dataclass(frozen=True, slots=True)
class Common:
    """What the shared options say."""

    dir: str | None
    agent: str | None
    json: bool
    quiet: bool
    verbose: bool


def common_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command --dir, --as, --json, -q and -v, as its first argument `common`."""

    @click.option("--dir", "dir_", metavar="DIR", envvar="MESHAGENT_DIR", help="Mesh folder.")
    @click.option("--as", "agent", metavar="AGENT", help="Speak as this agent (id, prefix, name).")
    @click.option("--json", "json_", is_flag=True, help="Print JSON with stable keys.")
    @click.option("-q", "--quiet", is_flag=True, help="No notices on standard error.")
    @click.option("-v", "--verbose", is_flag=True, help="Say more.")
    @functools.wraps(function)
    def wrapped(
        dir_: str | None, agent: str | None, json_: bool, quiet: bool, verbose: bool, **rest: Any
    ) -> Any:
        return function(Common(dir_, agent, json_, quiet, verbose), **rest)

    return wrapped
