"""`meshagent join`: run a node, in the foreground or detached."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from meshagent.cli.options import Common, common_options
from meshagent.cli.output import notice, warn
from meshagent.errors import AmbiguousPeer, NoSuchPeer, UsageError

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
@click.option("--until-idle", type=float, hidden=True)
@common_options
def command(common: Common, role: str | None, invite: str | None, **rest: Any) -> None:
    """Join the mesh as an agent and stay until Ctrl-C.

    Example:  meshagent join --role tester
    """
    from meshagent.node.wiring import JoinOptions, check_options
    from meshagent.session import open_mesh

    wanted = common.agent or (os.environ.get("MESHAGENT_AGENT") if role is None else None)
    if role is None and wanted is None:
        raise UsageError(
            "A role is needed: what does this agent do?", hint="Try: meshagent join --role tester"
        )
    detach, ready_fd = rest["detach"], rest["ready_fd"]
    options = JoinOptions(
        role="unknown" if role is None else role,
        name=rest["name"],
        capabilities=tuple(rest["capabilities"]),
        discovery=rest["discovery"],
        listen=rest["listen"],
        peers=tuple(rest["peers"]),
    )
    check_options(options)  # before an invite or a first join makes a mesh
    directory = common.dir
    if invite is not None:
        directory, hints = _accept_invite(invite, common)
        options = replace(options, peers=(*options.peers, *hints))
    mesh = open_mesh(directory, make_personal=wanted is None)
    if wanted is not None:
        folder = _find_agent(mesh, wanted)
        options = replace(options, agent=folder.agent, role=role or folder.read().role)
    if detach:
        from meshagent.cli.detach import run_detached

        run_detached(mesh, options, common)
    else:
        asyncio.run(_run(mesh, options, common, ready_fd, rest["until_idle"]))


async def _run(
    mesh: Any, options: Any, common: Common, ready_fd: int | None, until_idle: float | None
) -> None:
    from meshagent.cli.live import choose_view
    from meshagent.node.garbage_collection import ease_garbage_collection
    from meshagent.node.wiring import open_node

    async with open_node(mesh, options) as node:
        for number in _ending_signals():
            asyncio.get_running_loop().add_signal_handler(number, node.driver.end)
        warn(node.warnings, common.quiet)
        if common.verbose:
            node.log.addHandler(logging.StreamHandler(sys.stderr))
        if until_idle is not None:
            node.end_when_idle(until_idle)
        ease_garbage_collection()
        await _show(node, choose_view(node, common, ready_fd))
    if not common.json:
        notice(f"{node.driver.agent} has left.", common.quiet)


async def _show(node: Any, view: Any) -> None:
    """Until the node ends, or nobody can be shown anything: who reads us has gone."""
    with node.driver.changes.subscribe(
        node.driver.views.events, ("peer", "clone", "damage")
    ) as events:
        work = (view.run(events), view.mail(node.driver.inbox_start), node.driver.wait())
        tasks = [asyncio.create_task(each) for each in work]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            view.close()


def _ending_signals() -> list[signal.Signals]:
    """A closed terminal is a way to leave too, unless nohup says otherwise."""
    hang_up = signal.SIGHUP
    closing = [hang_up] if signal.getsignal(hang_up) == signal.SIG_DFL else []
    return [signal.SIGINT, signal.SIGTERM, *closing]


def _accept_invite(source: str, common: Common) -> tuple[str | None, tuple[str, ...]]:
    """Make the invited mesh in this folder; the mesh folder and the addresses to try."""
    from meshagent.core.model.invites import parse_invite
    from meshagent.storage.folders.mesh_folder import FOLDER_NAME, MeshFolder

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


def _find_agent(mesh: Any, wanted: str) -> Any:
    """The agent of this folder that `--as` means: by id, name or unique prefix."""
    from meshagent.storage.folders.agents import list_agents

    agents = list_agents(mesh)
    matching = [each for each in agents if wanted in (each.agent, each.agent.rpartition("-")[0])]
    matching = matching or [each for each in agents if each.agent.startswith(wanted)]
    if not matching:
        known = ", ".join(each.agent for each in agents) or "none yet"
        raise NoSuchPeer(
            f"There is no agent {wanted!r} in {mesh.agents} to resume.",
            hint=f"Agents here: {known}. A new one needs a role: meshagent join --role tester",
        )
    if len(matching) > 1:
        ids = ", ".join(each.agent for each in matching)
        raise AmbiguousPeer(
            f"{len(matching)} agents here answer to {wanted!r}: {ids}.",
            hint=f"Say which one: --as {matching[0].agent}",
        )
    return matching[0]
