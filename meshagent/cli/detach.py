"""`join --detach`: a node in the background."""

from __future__ import annotations

from typing import Any

import click

from meshagent.background import start_in_background
from meshagent.cli.options import Common
from meshagent.cli.output import notice, print_json

__all__ = ["run_detached"]


def run_detached(mesh: Any, options: Any, common: Common) -> None:
    """Start the node in a session of its own; returns when it has joined."""
    joined = start_in_background(mesh.path, _options(options))
    if common.json:
        print_json(joined)
    else:
        click.echo(f"{joined['agent']} runs in the background (pid {joined['pid']}).")
        notice(f"End it with: meshagent leave --as {joined['agent']}", common.quiet)


def _options(options: Any) -> list[str]:
    line = ["--role", options.role]
    for option, value in (
        ("--name", options.name),
        ("--as", options.agent),
        ("--discovery", options.discovery),
        ("--listen", options.listen),
    ):
        if value is not None:
            line += [option, value]
    for capability in options.capabilities:
        line += ["--capability", capability]
    for peer in options.peers:
        line += ["--peer", peer]
    return line
