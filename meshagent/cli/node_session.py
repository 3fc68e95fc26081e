"""The session of a command with this agent's node. Never starts a node.

The session module is imported only when a command needs it: `--help` must stay fast.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from meshagent.cli.output import print_json

if TYPE_CHECKING:
    from meshagent.cli.options import Common
    from meshagent.session import Session

__all__ = ["node_session", "print_answer"]


@contextmanager
def node_session(common: Common) -> Iterator[Session]:
    """Attach to the node that the shared options name."""
    from meshagent.session import attach, open_mesh

    mesh = open_mesh(common.dir)
    with attach(mesh.registry, common.agent, os.environ) as session:
        yield session


def print_answer(common: Common, answer: Any, line: str) -> None:
    """Print the node's answer: as JSON, or as one line for people."""
    if common.json:
        print_json(answer)
    else:
        click.echo(line)
