"""Writes docs/cli.md and the frame table of docs/protocol.md from the code that they describe.

python tests/tidy/reference.py          writes both
"""

from __future__ import annotations

import inspect
from pathlib import Path

import click

from meshagent.cli import group
from meshagent.core.wire.frames import FRAMES, OPTIONAL_FROM, field_names

__all__ = ["cli_reference", "frame_table"]

ROOT = Path(__file__).resolve().parents[2]
BEGIN = "<!-- frames: written by tests/tidy/reference.py -->"
END = "<!-- end of frames -->"
HEAD = """# Commands

Written from `--help` by `tests/tidy/reference.py`; a test keeps the two together.

Exit codes: 0 done, 1 unexpected, 2 usage, 3 not delivered in time, 4 no such or ambiguous peer,
5 not admitted (or not running), 6 limit or space.
"""


def cli_reference() -> str:
    """Every command's help, as it is printed."""
    context = click.Context(group, info_name="meshagent", max_content_width=90, terminal_width=90)
    parts = [HEAD]
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, name
        inner = click.Context(
            command, context, info_name=name, max_content_width=90, terminal_width=90
        )
        parts.append(f"## {name}\n\n```text\n{command.get_help(inner)}\n```\n")
    return "\n".join(parts)


def frame_table() -> str:
    """Every frame with its code, its sentence, and each field with its limit."""
    lines = [BEGIN, ""]
    for code, kind in sorted(FRAMES.items()):
        need = "optional" if code >= OPTIONAL_FROM else "required"
        lines += [f"### {code} {kind.__name__} ({need})", "", inspect.getdoc(kind) or "", ""]
        for name, check in zip(field_names(kind), kind.checks, strict=True):
            lines.append(f"- `{name}`: {_sentence(check)}")
        lines.append("")
    return "\n".join([*lines, END])


def _sentence(check: object) -> str:
    """A field's limit in words: the check's own docstring, or the maker's with its argument."""
    own = inspect.getdoc(check)
    if own:
        return own[0].lower() + own[1:]
    closure = inspect.getclosurevars(check).nonlocals  # type: ignore[arg-type]
    if "size" in closure:
        return f"{closure['size']} bytes."
    item = _sentence(closure["item"]).rstrip(".")
    return f"a list of at most {closure['limit']}, each {item}."


def with_frames(text: str) -> str:
    """docs/protocol.md with its table renewed."""
    before, rest = text.split(BEGIN)
    return before + frame_table() + rest.split(END)[1]


if __name__ == "__main__":
    (ROOT / "docs/cli.md").write_text(cli_reference())
    protocol = ROOT / "docs/protocol.md"
    protocol.write_text(with_frames(protocol.read_text()))
