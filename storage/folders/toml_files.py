"""mesh.toml and agent.toml as text: how they are read, written, and look when they are new.

Decides what one value on its own may be, for commands that need no more: the models of the whole
files are in settings.py. Never guesses a value. Invariant: what `toml_string` writes, tomllib
reads back unchanged.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from meshagent.errors import ConfigError
from meshagent.storage.folders.files import read_bounded

__all__ = [
    "MESH_NAME_CHARACTERS_MAX",
    "QUOTA_BYTES",
    "default_mesh_name",
    "format_settings",
    "is_mesh_name",
    "parse_size",
    "parse_toml",
    "read_text",
    "toml_string",
    "toml_strings",
]

TOML_FILE_BYTES_MAX = 64 * 1024  # a thousand peers fit; a file larger than this is not ours
MESH_NAME_CHARACTERS_MAX = 64  # it is shown in one line of a narrow terminal
QUOTA_BYTES = 50 * 2**30  # of attachments, unless mesh.toml says otherwise
_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def read_text(path: Path) -> str:
    """A small text file; a ConfigError when it is not UTF-8."""
    try:
        return read_bounded(path, TOML_FILE_BYTES_MAX).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text (byte {error.start}).",
            hint="Save it as UTF-8 in your editor.",
            path=str(path),
        ) from None


def parse_toml(text: str, path: Path) -> dict[str, Any]:
    """What the text sets, not yet checked."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not valid TOML: {error or 'it is nested too deeply'}.",
            hint="Correct that line; the comments in the file show how each setting is written.",
            path=str(path),
        ) from None


def is_mesh_name(value: object) -> bool:
    """Whether a mesh may be called so: one short line that drives no terminal."""
    return (
        isinstance(value, str)
        and 0 < len(value) <= MESH_NAME_CHARACTERS_MAX
        and value.isprintable()
    )


def default_mesh_name(text: str) -> str:
    """A valid name of a mesh made from any text, such as a folder's name."""
    plain = "".join(character for character in text if character.isprintable())
    return plain[:MESH_NAME_CHARACTERS_MAX].strip() or "mesh"


def parse_size(value: object) -> int:
    """`100 MiB` as a number of bytes; ValueError when it is not a size."""
    if not isinstance(value, str):
        raise ValueError("a size is text")
    number, _, unit = value.strip().partition(" ")
    try:
        size = int(float(number) * _UNITS[unit.strip().lower() or "b"])
    except (KeyError, OverflowError) as error:
        raise ValueError("not a size") from error
    if size < 0:
        raise ValueError("less than nothing")
    return size


def toml_string(text: str) -> str:
    """`text` as a TOML basic string, quotes included."""
    # JSON's escapes are TOML's, except that TOML also wants DEL escaped. A lone surrogate (from a
    # folder name that is not UTF-8) has no place in either.
    clean = text.encode("utf-8", "replace").decode("utf-8")
    return json.dumps(clean, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_strings(texts: tuple[str, ...]) -> str:
    """A TOML array of strings, on one line."""
    return f"[{', '.join(toml_string(text) for text in texts)}]"


def format_settings(name: str) -> str:
    """The text of a new mesh.toml: the name, and every other setting as a comment."""
    return _TEMPLATE.replace("NAME", toml_string(default_mesh_name(name)), 1)


_TEMPLATE = """\
# Settings of this mesh. Safe to commit: the secret is in mesh.key, which .gitignore keeps out.
name = NAME

# How agents find each other: "auto" (everything at once), "mdns" (the local network),
# "file" (this machine only, nothing on the network) or "none" (only the peers below).
# discovery = "auto"

# The address to listen on. Empty is every interface; "127.0.0.1" is this machine only.
# listen = ""

# Addresses to dial at start, where discovery can't reach: ["192.168.1.5:7400"].
# peers = []

# What is taken as attachments: fetched at once up to this size, larger ones when asked for;
# refused beyond "each" and "count", or when types are named and it is of none of them
# (["image/*", "application/pdf"]). All of them together may take "quota" on this machine.
# attachments_eager = "100 MiB"
# attachments_each = "10 GiB"
# attachments_count = 32
# attachments_types = []
# attachments_quota = "50 GiB"
"""
