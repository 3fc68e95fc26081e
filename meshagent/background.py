"""Starting a node in the background, and waiting until it has joined or said why not."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshagent.errors import MeshError

__all__ = ["start_in_background"]

JOIN_TIMEOUT_S = 20.0  # a join takes well under a second; a machine that swaps may need longer


def start_in_background(mesh: Path, options: Sequence[str]) -> dict[str, Any]:
    """Start `meshagent join` with these options in a session of its own; its joined event."""
    read_end, write_end = os.pipe()
    # -P: a folder called meshagent in the current directory must not be imported instead of us.
    line = [sys.executable, "-P", "-m", "meshagent", "join", "--json", *options]
    line += ["--dir", str(mesh.resolve()), "--ready-fd", str(write_end)]
    try:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and arguments
            line,
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
    process.returncode = 0  # it lives on; Python must not warn about it
    return joined


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
