"""`meshagent save`: the attachments of a message as files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import click

from meshagent.cli.fetch import fetched
from meshagent.cli.node_session import node_session
from meshagent.cli.options import Common, common_options
from meshagent.cli.output import print_json, size_text
from meshagent.cli.progress import ProgressLine
from meshagent.errors import LimitReached, NoSuchPeer, StorageError

__all__ = ["command"]

BLOCK_BYTES = 1024 * 1024
ELSEWHERE = "Choose another folder with --to."


@click.command("save")
@click.argument("ident", metavar="ID")
@click.option("--to", default=".", metavar="DIR", help="The folder to save in; this one without.")
@common_options
def command(common: Common, ident: str, to: str) -> None:
    """Save the attachments of a message that came; nothing is overwritten.

    Example:  meshagent save 7k2m --to shots
    """
    from meshagent.core.model.file_names import file_name

    with node_session(common) as session:
        message = fetched(session, ident, common.quiet or common.json)
    if not message["attachments"]:
        raise NoSuchPeer(f"The message {message['id']} has no attachments.")
    folder = _folder(to)
    saved = []
    for each in message["attachments"]:
        path = folder / file_name(each["name"], _names_in(folder))
        with ProgressLine(f"Saving {path.name}", common.quiet or common.json) as line:
            _copy(each, path, line)
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
        is_file = isinstance(error, FileExistsError | NotADirectoryError)
        why = "it is not a folder" if is_file else error.strerror
        raise StorageError(f"Can't save in {folder}: {why}.", hint=ELSEWHERE) from None
    return folder


def _copy(attachment: dict[str, Any], target: Path, line: ProgressLine) -> None:
    """A new file with the blob's bytes; never through a link, never over another file."""
    from meshagent.storage.blobs.errors import mapped_to_disk_full

    size = attachment["size"]
    try:
        with (
            _opened(Path(attachment["path"])) as source,
            mapped_to_disk_full(target, "write", size),
            _new_file(target) as copy,
        ):
            while block := source.read(BLOCK_BYTES):
                copy.write(block)
                line.update(copy.tell(), size)
    except LimitReached as error:  # unlike an attachment that comes, it does not go on by itself
        raise LimitReached(
            error.message, hint="Free some space, or choose another folder with --to."
        ) from None
    except StorageError as error:
        raise StorageError(error.message, hint=ELSEWHERE) from None


def _names_in(folder: Path) -> list[str]:
    from meshagent.storage.folders.files import mapped_errors

    with mapped_errors(folder, "list"):
        return os.listdir(folder)


def _opened(path: Path) -> BinaryIO:
    from meshagent.storage.folders.files import mapped_errors

    with mapped_errors(path, "read"):
        return path.open("rb")


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """Removed again when it does not become whole."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(path, flags, 0o666)
    try:
        with open(descriptor, "wb") as file:
            yield file
    except BaseException:
        path.unlink(missing_ok=True)
        raise
