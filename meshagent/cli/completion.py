"""`meshagent completion`: completion for the shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from meshagent.cli.options import Common, common_options
from meshagent.cli.output import print_json

__all__ = ["command"]


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@common_options
def command(common: Common, shell: str) -> None:
    """Print the completion script for a shell.

    Example:  eval "$(meshagent completion bash)"
    """
    from meshagent.cli import group

    kind = get_completion_class(shell)
    assert kind is not None, shell
    source = kind(group, {}, "meshagent", "_MESHAGENT_COMPLETE").source()
    if common.json:
        print_json({"shell": shell, "script": source})
    else:
        click.echo(source)
