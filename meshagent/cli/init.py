"""`meshagent init`: a mesh for a project."""

from __future__ import annotations

from pathlib import Path

import click

from meshagent.cli.options import Common, common_options
from meshagent.cli.output import notice, print_json

__all__ = ["command"]


@click.command("init")
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path())
@click.option("--name", help="What people call the mesh; the folder's name otherwise.")
@common_options
def command(common: Common, folder: str | None, name: str | None) -> None:
    """Make this project's mesh, in a .meshagent folder.

    Example:  meshagent init
    """
    from meshagent.core.model.identity import MeshSecret
    from meshagent.storage.folders.mesh_folder import FOLDER_NAME, MeshFolder

    project = Path(folder or common.dir or ".").resolve()
    mesh = MeshFolder(project if project.name == FOLDER_NAME else project / FOLDER_NAME)
    created = mesh.create(name or mesh.path.parent.name or "mesh")
    shown = mesh.read_name()
    if common.json:
        tag = MeshSecret(mesh.read_secret()).tag
        print_json({"mesh": shown, "dir": str(mesh.path), "created": created, "tag": tag})
        return
    word = "Made" if created else "There is already"
    click.echo(f"{word} the mesh {shown!r} in {mesh.path}")
    notice(
        "Next:   meshagent join --role tester      in each terminal or editor of this project\n"
        "        meshagent invite                  for another machine",
        common.quiet,
    )
