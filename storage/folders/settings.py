"""What may be set in mesh.toml, what each setting costs, and how the file looks when it is new.

Never reads a file or an environment. Invariant: a `Settings` that exists is valid.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from meshagent.errors import ConfigError
from meshagent.storage.folders.toml_files import parse_table, toml_string

__all__ = ["DISCOVERY_CHOICES", "Settings", "format_settings", "parse_settings"]

DISCOVERY_CHOICES = ("auto", "mdns", "file", "none")
MESH_NAME_CHARACTERS_MAX = 64  # it is shown in one line of a narrow terminal

_FIELDS: dict[str, type] = {
    "name": str,
    "discovery": str,
    "listen": str,
    "peers": tuple,
    "attachments_eager": str,
    "attachments_each": str,
    "attachments_count": int,
    "attachments_types": tuple,
    "attachments_quota": str,
}
_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a mesh, shared by all who use its folder. Options of a command win."""

    name: str
    """What people call the mesh. For display: the secret, not the name, tells meshes apart."""

    discovery: str = "auto"
    """How agents look for each other. `auto` is everything at once. `mdns` alone keeps no
    registry file but needs multicast; `file` alone is silent on the network but sees only this
    machine; `none` leaves `peers`, which is the quietest and must be kept up by hand."""

    listen: str = ""
    """The address to listen on. Empty is every interface: found from anywhere on the LAN.
    `127.0.0.1` keeps the agents of this machine among themselves."""

    peers: tuple[str, ...] = ()
    """`host:port` addresses to dial at start, for networks where discovery can't reach. One is
    enough, since the rest is learned from it; each more is one more way in when one is away."""

    attachments_eager: str = "100 MiB"
    """Attachments up to this size are fetched at once, and a message is handed out when they are
    here. Larger ones wait until somebody asks. More means fuller disks and later messages."""

    attachments_each: str = "10 GiB"
    """A larger attachment is refused, and its sender told."""

    attachments_count: int = 32
    """A message with more attachments is refused."""

    attachments_types: tuple[str, ...] = ()
    """If any are named, attachments of other types are refused: `image/*`, `application/pdf`."""

    attachments_quota: str = "50 GiB"
    """What all attachments of this mesh may take on this machine. Beyond it, sending and receiving
    them is refused; what no message needs any more is removed by itself."""

    def bytes_of(self, field: str) -> int:
        """A size in bytes."""
        return parse_size(getattr(self, field))


def parse_size(text: str) -> int:
    """`100 MiB` as a number of bytes; ValueError when it is not a size."""
    number, _, unit = text.strip().partition(" ")
    return int(float(number) * _UNITS[unit.strip().lower() or "b"])


def parse_settings(text: str, path: Path) -> Settings:
    """The settings in `text`, the content of `path`; a ConfigError names the field and the fix."""
    table: dict[str, Any] = parse_table(text, path, _FIELDS)
    settings = Settings(**({"name": _shown_name(path.resolve().parent.parent.name)} | table))
    _check_name(settings.name, path)
    _check_discovery(settings.discovery, path)
    for peer in settings.peers:
        _check_peer(peer, path)
    for field in ("attachments_eager", "attachments_each", "attachments_quota"):
        _check_size(field, getattr(settings, field), path)
    if settings.attachments_count < 0:
        count = str(settings.attachments_count)
        raise _bad(path, "attachments_count", count, "Use a number, 0 for none.")
    return settings


def _check_size(field: str, value: str, path: Path) -> None:
    try:
        if parse_size(value) >= 0:
            return
    except (KeyError, OverflowError, ValueError):
        pass
    raise _bad(path, field, value, 'Write it as "100 MiB"; KiB, MiB, GiB and TiB are known.')


def _check_name(name: str, path: Path) -> None:
    if not (0 < len(name) <= MESH_NAME_CHARACTERS_MAX and name.isprintable()):
        raise _bad(
            path, "name", name, f"Use 1 to {MESH_NAME_CHARACTERS_MAX} characters on one line."
        )


def _check_discovery(value: str, path: Path) -> None:
    if value in DISCOVERY_CHOICES:
        return
    close = difflib.get_close_matches(value, DISCOVERY_CHOICES, n=1)
    guess = f"Did you mean {close[0]!r}? " if close else ""
    raise _bad(path, "discovery", value, f"{guess}It may be {', '.join(DISCOVERY_CHOICES)}.")


def _check_peer(peer: str, path: Path) -> None:
    host, _, port = peer.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise _bad(path, "peers", peer, 'Write each as "host:port", such as "192.168.1.5:7400".')


def _bad(path: Path, field: str, value: str, fix: str) -> ConfigError:
    return ConfigError(
        f"{path}: {field} can't be {value!r}.", hint=fix, path=str(path), field=field
    )


def format_settings(name: str) -> str:
    """The text of a new mesh.toml: the name, and every other setting as a comment."""
    return _TEMPLATE.replace("NAME", toml_string(_shown_name(name)), 1)


def _shown_name(text: str) -> str:
    """A valid name of a mesh made from any text, such as a folder's name."""
    plain = "".join(character for character in text if character.isprintable())
    return plain[:MESH_NAME_CHARACTERS_MAX].strip() or "mesh"


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

assert set(_FIELDS) == {field.name for field in fields(Settings)}
