"""`meshagent doctor`: why is a peer not visible?"""

from __future__ import annotations

import click

from meshagent.cli.options import Common, common_options

__all__ = ["command"]


@click.command("doctor")
@common_options
def command(common: Common) -> None:
    """Diagnose this machine and mesh: what works, what does not, and what to do.

    Example:  meshagent doctor
    """
