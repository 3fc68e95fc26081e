"""`meshagent join`: run a node, in the foreground or detached."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path
from typing import Any

import click

from meshagent.cli.options import Common, common_options
from meshagent.cli.output import notice, warn
from meshagent.errors import UsageError

__all__ = ["command"]


@click.command("join")
@click.option("--role", help="What this agent does here: tester, backend, reviewer …")
@click.option("--name", help="Its name; the role otherwise.")
@click.option(
    "--capability", "capabilities", multiple=True, help="Something it can do; repeatable."
)
@click.option(
    "--discovery",
    type=click.Choice(["auto", "mdns", "file", "none"]),
    help="How to find others: everything at once, the LAN only, this machine only, --peer only.",
)
@click.option("--peer", "peers", multiple=True, metavar="H:P", help="Dial this one; repeatable.")
@click.option(
    "--listen",
    metavar="ADDR",
    envvar="MESHAGENT_LISTEN",
    help="Address, or address:port, to listen on; all interfaces otherwise.",
)
@click.option("--invite", metavar="-", help="Join by invite: '-' reads the code, or asks for it.")
@click.option("--detach", is_flag=True, help="Run in the background; 'meshagent leave' ends it.")
@click.option("--ready-fd", type=int, hidden=True)
@common_options
def command(common: Common, role: str | None, invite: str | None, **rest: Any) -> None:
    """Join the mesh as an agent and stay until Ctrl-C.

    Example:  meshagent join --role tester
    """
    from meshagent.node.wiring import JoinOptions, open_mesh

    if role is None and common.agent is None:
        raise UsageError(
            "A role is needed: what does this agent do?", hint="Try: meshagent join --role tester"
        )
    detach, ready_fd = rest["detach"], rest["ready_fd"]
    peers = tuple(rest["peers"])
    if invite is not None:
        directory, hints = _accept_invite(invite, common)
        peers = (*peers, *hints)
    else:
        directory = common.dir
    mesh = open_mesh(directory)
    options = JoinOptions(
        role=role or _role_of(mesh, common.agent),
        name=rest["name"],
        capabilities=tuple(rest["capabilities"]),
        discovery=rest["discovery"],
        listen=rest["listen"],
        peers=peers,
        agent=_full_id(mesh, common.agent),
    )
    if detach:
        from meshagent.cli.detach import run_detached

        run_detached(mesh, options, common)
    else:
        asyncio.run(_run(mesh, options, common, ready_fd))


async def _run(mesh: Any, options: Any, common: Common, ready_fd: int | None) -> None:
    from meshagent.cli.live import choose_view
    from meshagent.node.wiring import open_node

    async with open_node(mesh, options) as node:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, node.driver.end)
        warn(node.warnings, common.quiet)
        if common.verbose:
            node.log.addHandler(logging.StreamHandler(sys.stderr))
        view = choose_view(node, common, ready_fd)
        with node.driver.subscribers.subscribe() as events:
            show = asyncio.create_task(view.run(events))
            try:
                await node.driver.wait()
            finally:
                show.cancel()
                await asyncio.gather(show, return_exceptions=True)
                view.close()
    if not common.json:
        notice(f"{node.driver.agent} has left.", common.quiet)


def _accept_invite(source: str, common: Common) -> tuple[str | None, tuple[str, ...]]:
    """Make the invited mesh in this folder; the mesh folder and the addresses to try."""
    from meshagent.core.invites import parse_invite
    from meshagent.storage.folder import FOLDER_NAME, MeshFolder

    if source != "-":
        raise UsageError(
            "An invite code does not belong on the command line, where others can read it.",
            hint="Use '--invite -' and paste the code, or pipe it in.",
        )
    if sys.stdin.isatty():
        code = click.prompt("Invite code", hide_input=True, err=True)
    else:
        code = sys.stdin.readline()
    invite = parse_invite(code)
    folder = Path(common.dir) if common.dir else Path.cwd()
    mesh = MeshFolder(folder if folder.name == FOLDER_NAME else folder / FOLDER_NAME)
    created = mesh.create(invite.mesh_name, invite.secret)
    if created and not common.json:
        notice(f"Made {mesh.path}, invited by {invite.inviter}.", common.quiet)
    return str(mesh.path), invite.addresses


def _full_id(mesh: Any, wanted: str | None) -> str | None:
    """`--as` may be a unique prefix or a name of an agent in this folder."""
    from meshagent.storage.agents import list_agents

    if wanted is None:
        return None
    agents = [each.agent for each in list_agents(mesh)]
    matching = [each for each in agents if each == wanted or each[:-9] == wanted]
    matching = matching or [each for each in agents if each.startswith(wanted)]
    return matching[0] if len(matching) == 1 else wanted


def _role_of(mesh: Any, wanted: str | None) -> str:
    from meshagent.storage.agents import list_agents

    agent = _full_id(mesh, wanted)
    folder = next((each for each in list_agents(mesh) if each.agent == agent), None)
    if folder is None:
        raise UsageError(
            f"There is no agent {wanted} here to resume.",
            hint="Give a role to make a new one: meshagent join --role tester",
        )
    return folder.read().role
