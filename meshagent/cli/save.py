"""`meshagent save`: the attachments of a message as files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from meshagent.cli.fetch import fetched
from meshagent.cli.options import Common, common_options
from meshagent.cli.output import print_json, size_text
from meshagent.errors import NoSuchPeer, StorageError

__all__ = ["command"]


@click.command("save")
@click.argument("ident", metavar="ID")
@click.option("--to", default=".", metavar="DIR", help="The folder to save in; this one without.")
@common_options
def command(common: Common, ident: str, to: str) -> None:
    """Save the attachments of a message that came; nothing is overwritten.

    Example:  meshagent save 7k2m --to shots
    """
    from meshagent.core.names import file_name
    from meshagent.session import attach, open_mesh

    mesh = open_mesh(common.dir)
    with attach(mesh.registry, common.agent, os.environ) as session:
        message = fetched(session, ident, common.quiet or common.json)
    if not message["attachments"]:
        raise NoSuchPeer(f"The message {message['id']} has no attachments.")
    folder = _folder(to)
    saved = []
    for each in message["attachments"]:
        taken = [entry.name for entry in folder.iterdir()]
        path = _copy(each, folder / file_name(each["name"], taken))
        saved.append({"name": each["name"], "file": str(path), "size": each["size"]})
        if not common.json:
            click.echo(f"{path}  {size_text(each['size'])}")
    if common.json:
        print_json(saved)


def _folder(to: str) -> Path:
    folder = Path(to)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"Can't save in {folder}: {error.strerror}.", hint="Choose another folder with --to."
        ) from None
    return folder


def _copy(attachment: dict[str, Any], target: Path) -> Path:
    """A new file with the blob's bytes; never through a link, never over another file."""
    import shutil

    from meshagent.storage.refusals import mapped_to_disk_full

    with mapped_to_disk_full(target, "write", attachment["size"]):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        descriptor = os.open(target, flags, 0o666)
        try:
            with open(attachment["path"], "rb") as source, open(descriptor, "wb") as copy:
                shutil.copyfileobj(source, copy, 1024 * 1024)
        except BaseException:
            target.unlink(missing_ok=True)
            raise
    return target
