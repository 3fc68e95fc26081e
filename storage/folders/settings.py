"""What mesh.toml and agent.toml may say, as models, and how a mistake in one is explained.

Never reads a file or an environment. Invariant: a `Settings` or an `AgentSettings` that exists is
valid. Imports pydantic, which takes longer than a whole command: whatever a command needs at its
start is in toml_files.py.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    ValidationError,
)

from meshagent.core.model.peers import check_name
from meshagent.errors import ConfigError, UsageError
from meshagent.storage.folders.toml_files import (
    LIST_ITEMS_MAX,
    MESH_NAME_CHARACTERS_MAX,
    QUOTA,
    default_mesh_name,
    is_mesh_name,
    parse_size,
    parse_toml,
)

__all__ = ["DISCOVERY_CHOICES", "AgentSettings", "Settings", "parse_agent", "parse_settings"]

DISCOVERY_CHOICES = ("auto", "mdns", "file", "none")
STRING_CHARACTERS_MAX = 255


def _mesh_name(value: str) -> str:
    if not is_mesh_name(value):
        raise ValueError(f"Use 1 to {MESH_NAME_CHARACTERS_MAX} characters on one line.")
    return value


def _discovery(value: str) -> str:
    if value not in DISCOVERY_CHOICES:
        close = difflib.get_close_matches(value, DISCOVERY_CHOICES, n=1)
        guess = f"Did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"{guess}It may be {', '.join(DISCOVERY_CHOICES)}.")
    return value


def _peer(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError('Write each as "host:port", such as "192.168.1.5:7400".')
    return value


def _size(value: object) -> int:
    try:
        return parse_size(value)
    except ValueError:
        raise ValueError(
            'Write it as "100 MiB", in quotes; KiB, MiB, GiB and TiB are known.'
        ) from None


def _name(value: str) -> str:
    try:
        return check_name(value, "text")
    except UsageError as error:
        raise ValueError(f"{error.message} {error.hint}") from None


Text = Annotated[str, Field(max_length=STRING_CHARACTERS_MAX)]
Name = Annotated[Text, AfterValidator(_name)]
Size = Annotated[int, BeforeValidator(_size)]
AtMost = Field(max_length=LIST_ITEMS_MAX)


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Settings(_Settings):
    """The settings of a mesh, shared by all who use its folder. Options of a command win."""

    name: Annotated[Text, AfterValidator(_mesh_name)]
    """What people call the mesh. For display: the secret, not the name, tells meshes apart."""

    discovery: Annotated[Text, AfterValidator(_discovery)] = "auto"
    """How agents look for each other. `auto` is everything at once. `mdns` alone keeps no
    registry file but needs multicast; `file` alone is silent on the network but sees only this
    machine; `none` leaves `peers`, which is the quietest and must be kept up by hand."""

    listen: Text = ""
    """The address to listen on. Empty is every interface: found from anywhere on the LAN.
    `127.0.0.1` keeps the agents of this machine among themselves."""

    peers: Annotated[tuple[Annotated[Text, AfterValidator(_peer)], ...], AtMost] = ()
    """`host:port` addresses to dial at start, for networks where discovery can't reach. One is
    enough, since the rest is learned from it; each more is one more way in when one is away."""

    attachments_eager: Size = 100 * 2**20
    """Attachments up to this size are fetched at once, and a message is handed out when they are
    here. Larger ones wait until somebody asks. More means fuller disks and later messages."""

    attachments_each: Size = 10 * 2**30
    """A larger attachment is refused, and its sender told."""

    attachments_count: Annotated[StrictInt, Field(ge=0)] = 32
    """A message with more attachments is refused."""

    attachments_types: Annotated[tuple[Text, ...], AtMost] = ()
    """If any are named, attachments of other types are refused: `image/*`, `application/pdf`."""

    attachments_quota: Size = parse_size(QUOTA)
    """What all attachments of this mesh may take on this machine. Beyond it, sending and receiving
    them is refused; what no message needs any more is removed by itself."""


class AgentSettings(_Settings):
    """Who an agent is, apart from its key."""

    name: Name
    role: Name
    capabilities: Annotated[tuple[Name, ...], AtMost] = ()


def parse_settings(text: str, path: Path) -> Settings:
    """The settings in `text`, the content of `path`; a ConfigError names the field and the fix."""
    default = {"name": default_mesh_name(path.resolve().parent.parent.name)}
    return _validated(Settings, default | parse_toml(text, path), path)


def parse_agent(text: str, path: Path) -> AgentSettings:
    """The same of an agent.toml."""
    return _validated(AgentSettings, parse_toml(text, path), path)


_Model = TypeVar("_Model", bound=_Settings)


def _validated(model: type[_Model], table: dict[str, Any], path: Path) -> _Model:
    try:
        return model.model_validate(table)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0])
        problem, fix = _explained(first, field, list(model.model_fields))
        raise ConfigError(f"{path}{problem}", hint=fix, path=str(path), field=field) from None


_KINDS = {
    "string_type": 'text, such as "…"',
    "int_type": "a whole number",
    "tuple_type": 'a list of texts, such as ["…", "…"]',
}


def _explained(error: Any, field: str, known: list[str]) -> tuple[str, str]:
    """What is wrong and how to put it right; `error` is one of pydantic's."""
    kind, value, limits = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        close = difflib.get_close_matches(field, known, n=1)
        fix = f"Did you mean {close[0]!r}?" if close else f"Known settings: {', '.join(known)}."
        return f" has an unknown setting {field!r}.", fix
    if kind == "missing":
        return f": {field} is missing.", f'Add the line {field} = "…".'
    if kind in _KINDS:
        wanted = _KINDS[kind if len(error["loc"]) == 1 else "tuple_type"]
        wrong = f": {field} has a value of the wrong type ({type(value).__name__})."
        return wrong, f"Write {field} as {wanted}."
    if "max_length" in limits:
        return f": {field} is too long ({len(value)}).", f"At most {limits['max_length']} fit."
    if kind == "value_error":
        return f": {field} can't be {value!r}.", str(limits["error"])
    return f": {field} can't be {value!r}.", error["msg"].replace("Input", field, 1) + "."
