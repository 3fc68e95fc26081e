"""`meshagent invite`: let another machine in."""

from __future__ import annotations

import os

import click

from meshagent.cli.options import Common, common_options
from meshagent.cli.output import notice, print_json

__all__ = ["command"]


@click.command("invite")
@common_options
def command(common: Common) -> None:
    """Print a code that lets another machine join this mesh.

    Example:  meshagent invite | ssh laptop 'cd project && meshagent join --role tester --invite -'
    """
    from meshagent.core.model.invites import Invite, format_invite
    from meshagent.session import choose_agent, open_mesh, running_agents

    mesh = open_mesh(common.dir)
    wanted = common.agent or os.environ.get("MESHAGENT_AGENT")
    node = choose_agent(mesh.registry, running_agents(mesh.registry), wanted, True)
    secret = mesh.read_secret()
    name = mesh.read_name()
    code = format_invite(Invite(secret, name, node.agent, node.addresses))
    if common.json:
        print_json({"invite": code, "mesh": name, "inviter": node.agent})
        return
    notice(
        f"Whoever has this code can join {name!r} and read what is sent to it: pass it on in "
        "private.\nOn the other machine:  meshagent join --role tester --invite -",
        common.quiet,
    )
    click.echo(code)
