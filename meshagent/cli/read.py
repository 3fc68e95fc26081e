"""`meshagent read`: one message that came."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from meshagent.cli.mail import print_message
from meshagent.cli.options import Common, common_options
from meshagent.cli.output import print_json, terminal_width

if TYPE_CHECKING:
    from meshagent.storage.folders.mesh_folder import MeshFolder

__all__ = ["command"]


@click.command("read")
@click.argument("ident", metavar="ID")
@click.option("--no-preview", is_flag=True, help="No pictures in the terminal.")
@common_options
def command(common: Common, ident: str, no_preview: bool) -> None:
    """One message, whole; its sender learns that it was seen.

    Attached pictures are shown small, in terminals that can: kitty, Ghostty, iTerm2, WezTerm.

    Example:  meshagent read 7k2m
    """
    from meshagent.session import attach, open_mesh

    mesh = open_mesh(common.dir)
    with attach(mesh.registry, common.agent, os.environ) as session:
        message = session.ask("read", ident=ident)
    if common.json:
        print_json(message)
        return
    print_message(message, common.agent)
    if sys.stdout.isatty() and message["attachments"] and not no_preview:
        _show_pictures(mesh, message["attachments"])


def _show_pictures(mesh: MeshFolder, attachments: list[dict[str, Any]]) -> None:
    from meshagent.cli.preview import graphics_of, previews
    from meshagent.session import open_blobs

    graphics = graphics_of(os.environ)
    if graphics is not None:
        for each in previews(attachments, open_blobs(mesh), graphics, terminal_width()):
            click.echo(each)
