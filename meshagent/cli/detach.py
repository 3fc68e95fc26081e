"""Starting a node in the background, and waiting until it has joined or said why not."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from typing import Any

import click

from meshagent.cli.options import Common
from meshagent.cli.output import print_json
from meshagent.errors import MeshError

__all__ = ["run_detached"]

JOIN_TIMEOUT_S = 20.0  # a join takes well under a second; a machine that swaps may need longer


def run_detached(mesh: Any, options: Any, common: Common) -> None:
    """Start the node in a session of its own; returns when it has joined."""
    read_end, write_end = os.pipe()
    try:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and arguments
            _command_line(mesh, options, write_end),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(write_end,),
            start_new_session=True,
            cwd="/",
        )
    finally:
        os.close(write_end)
    joined = _wait(read_end, process)
    if common.json:
        print_json(joined)
    else:
        click.echo(f"{joined['agent']} runs in the background (pid {process.pid}).")
        click.echo(f"End it with: meshagent leave --as {joined['agent']}", err=True)
    process.returncode = 0  # it lives on; Python must not warn about it


def _command_line(mesh: Any, options: Any, ready_fd: int) -> list[str]:
    # -P: a folder called meshagent in the current directory must not be imported instead of us.
    line = [sys.executable, "-P", "-m", "meshagent", "join", "--json", "--role", options.role]
    line += ["--dir", str(mesh.path.resolve()), "--ready-fd", str(ready_fd)]
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


def _wait(read_end: int, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The joined event, or the error that the node reported before it ended."""
    with os.fdopen(read_end, "rb") as ready:
        if not select.select([ready], [], [], JOIN_TIMEOUT_S)[0]:
            process.kill()
            process.wait()
            raise MeshError(
                f"The node did not join within {JOIN_TIMEOUT_S:.0f} s and was ended.",
                hint="Run the same command without --detach to see why.",
            )
        line = ready.readline()
    assert process.stderr is not None
    with process.stderr:
        if line:
            event: dict[str, Any] = json.loads(line)
            return event
        code = process.wait()
        words = _last_error(process.stderr.read())
    error = MeshError(words.get("message", "The node ended at once."), hint=words.get("hint", ""))
    error.exit_code = code or 1
    raise error


def _last_error(output: bytes) -> dict[str, str]:
    lines = output.decode(errors="replace").strip().splitlines()
    try:
        words: dict[str, str] = json.loads(lines[-1])["error"]
    except (IndexError, ValueError, KeyError, TypeError):
        return {"message": lines[-1]} if lines else {}
    return words
