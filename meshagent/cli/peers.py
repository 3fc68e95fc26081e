"""`meshagent peers`: who is here."""

from __future__ import annotations

import os
from typing import Any

import click

from meshagent.cli.options import Common, common_options
from meshagent.cli.output import (
    PEER_COLUMNS,
    notice,
    peer_cells,
    print_json,
    print_table,
    sort_peers,
)

__all__ = ["command"]


@click.command("peers")
@click.option("--watch", is_flag=True, help="Go on, with a line for each change.")
@common_options
def command(common: Common, watch: bool) -> None:
    """List the agents of this mesh: who, what role, in what state.

    Example:  meshagent peers --watch
    """
    from meshagent.session import attach, open_mesh, running_agents

    mesh = open_mesh(common.dir)
    wanted = common.agent or os.environ.get("MESHAGENT_AGENT")
    # Asked from outside, with several agents here, the one that happens to answer is listed too.
    include_me = not wanted and len(running_agents(mesh.registry)) > 1
    with attach(mesh.registry, common.agent, os.environ, any_will_do=True) as session:
        changes = session.watch() if watch else iter([{"snapshot": session.ask("peers")}])
        snapshot = next(changes)["snapshot"]
        peers = [*snapshot["peers"], *([snapshot["me"]] if include_me else [])]
        if watch and common.json:  # a stream is one object per line from the first on
            for peer in sort_peers(peers):
                print_json({"event": "peer", **peer})
        else:
            _print_list(sort_peers(peers), common, session.agent)
        for change in changes:
            if change.get("event") == "peer":
                _print_change(change, common)
    if watch:
        notice(f"The node of {session.agent} has ended.", common.quiet)


def _print_list(peers: list[Any], common: Common, agent: str) -> None:
    if common.json:
        print_json(peers)
    elif peers:
        print_table(PEER_COLUMNS, [peer_cells(each) for each in peers], keep=(0, 1, 2))
    else:
        notice(f"{agent} sees nobody else yet. 'meshagent doctor' explains why.", common.quiet)


def _print_change(change: dict[str, Any], common: Common) -> None:
    if common.json:
        print_json(change)
    else:
        click.echo("  ".join(peer_cells(change)[:4]).rstrip())
