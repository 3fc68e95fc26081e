"""The command line: verbs, options and exit codes of DESIGN 13. Loads each command on demand."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from meshagent._version import __version__
from meshagent.cli.output import print_error
from meshagent.errors import MeshError, UsageError

__all__ = ["main"]

INTERRUPTED_EXIT_CODE = 130

_COMMANDS = (
    "init",
    "invite",
    "join",
    "leave",
    "peers",
    "status",
    "send",
    "inbox",
    "read",
    "done",
    "save",
    "fetch",
    "outbox",
    "cancel",
    "log",
    "backup",
    "restore",
    "doctor",
    "bench",
    "completion",
)


class _ReaderGone(Exception):
    """Nobody reads our output any more."""


class _LazyGroup(click.Group):
    """Finds `meshagent.cli.<name>.command` when the command is used; in the order of the tour."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"meshagent.cli.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # click itself would end the process with code 1
            raise _ReaderGone from None


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start here:  meshagent join --role tester",
)
@click.version_option(__version__, prog_name="meshagent")
def group() -> None:
    """Let coding agents find each other and talk directly: no broker, no account, no set-up."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = group.main(args=list(arguments), prog_name="meshagent", standalone_mode=False)
    except MeshError as error:
        print_error(error, as_json="--json" in arguments)
        code = error.exit_code
    except click.exceptions.Exit as done:
        code = done.exit_code
    except click.ClickException as error:
        _show(error, as_json="--json" in arguments)
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        code = INTERRUPTED_EXIT_CODE
    except _ReaderGone:
        # `peers | head -1` is no failure; and Python must not complain at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code if isinstance(code, int) else 0)


def _show(error: click.ClickException, as_json: bool) -> None:
    """click's own errors, about options and arguments."""
    if not as_json:
        error.show()
        return
    where = getattr(error, "ctx", None)
    path = where.command_path if where is not None else "meshagent"
    print_error(UsageError(error.format_message(), hint=f"See: {path} --help"), as_json=True)
