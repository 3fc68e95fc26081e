"""What mesh.toml and agent.toml may say, and how a mistake in one is explained.

pydantic checks what a person has written; a file that is still as we wrote it needs no check, and
then pydantic is not even imported, which would take a third of a join. Never reads a file or an
environment. Invariant: a `Settings` or an `AgentSettings` that was parsed is valid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from meshagent.core.model.peers import check_name
from meshagent.errors import ConfigError, LimitReached, MeshError, UsageError
from meshagent.storage.folders.toml_files import (
    MESH_NAME_CHARACTERS_MAX,
    QUOTA_BYTES,
    default_mesh_name,
    format_settings,
    is_mesh_name,
    parse_size,
    parse_toml,
    toml_string,
    toml_strings,
)

__all__ = [
    "DISCOVERY_CHOICES",
    "AgentSettings",
    "Settings",
    "format_agent",
    "parse_agent",
    "parse_settings",
]

DISCOVERY_CHOICES = ("auto", "mdns", "file", "none")
LIST_ITEMS_MAX = 64
STRING_CHARACTERS_MAX = 255


def _mesh_name(value: str) -> str:
    if not is_mesh_name(value):
        raise ValueError(f"Use 1 to {MESH_NAME_CHARACTERS_MAX} characters on one line.")
    return value


def _discovery(value: str) -> str:
    if value not in DISCOVERY_CHOICES:
        guess = _did_you_mean(value, DISCOVERY_CHOICES)
        raise ValueError(f"{guess} It may be {', '.join(DISCOVERY_CHOICES)}.".strip())
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


def _count(value: object) -> object:
    if type(value) is not int or value < 0:
        raise ValueError("Use a whole number, 0 for none.")
    return value


def _name(value: str) -> str:
    try:
        return check_name(value, "text")
    except UsageError as error:
        raise ValueError(f"{error.message} {error.hint}") from None


@dataclass(frozen=True, slots=True)
class _Check:
    """Tells pydantic to call this on a value: on what was written, or on what became of it."""

    check: Callable[[Any], Any]
    before: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core import core_schema as schema

        if self.before:
            return schema.no_info_before_validator_function(self.check, handler(source))
        return schema.no_info_after_validator_function(self.check, handler(source))


@dataclass(frozen=True, slots=True)
class _AtMost:
    """Tells pydantic how long a text or a list may be."""

    limit: int

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(source) | {"max_length": self.limit}


Text = Annotated[str, _AtMost(STRING_CHARACTERS_MAX)]
Name = Annotated[Text, _Check(_name)]
Size = Annotated[int, _Check(_size, before=True)]
Peers = Annotated[tuple[Annotated[Text, _Check(_peer)], ...], _AtMost(LIST_ITEMS_MAX)]
Texts = Annotated[tuple[Text, ...], _AtMost(LIST_ITEMS_MAX)]
Names = Annotated[tuple[Name, ...], _AtMost(LIST_ITEMS_MAX)]


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a mesh, shared by all who use its folder. Options of a command win."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    name: Annotated[Text, _Check(_mesh_name)]
    """What people call the mesh. For display: the secret, not the name, tells meshes apart."""

    discovery: Annotated[Text, _Check(_discovery)] = "auto"
    """How agents look for each other. `auto` is everything at once. `mdns` alone keeps no
    registry file but needs multicast; `file` alone is silent on the network but sees only this
    machine; `none` leaves `peers`, which is the quietest and must be kept up by hand."""

    listen: Text = ""
    """The address to listen on. Empty is every interface: found from anywhere on the LAN.
    `127.0.0.1` keeps the agents of this machine among themselves."""

    peers: Peers = ()
    """`host:port` addresses to dial at start, for networks where discovery can't reach. One is
    enough, since the rest is learned from it; each more is one more way in when one is away."""

    attachments_eager: Size = 100 * 2**20
    """Attachments up to this size are fetched at once, and a message is handed out when they are
    here. Larger ones wait until somebody asks. More means fuller disks and later messages."""

    attachments_each: Size = 10 * 2**30
    """A larger attachment is refused, and its sender told."""

    attachments_count: Annotated[int, _Check(_count, before=True)] = 32
    """A message with more attachments is refused."""

    attachments_types: Texts = ()
    """If any are named, attachments of other types are refused: `image/*`, `application/pdf`."""

    attachments_quota: Size = QUOTA_BYTES
    """What all attachments of this mesh may take on this machine. Beyond it, sending and receiving
    them is refused; what no message needs any more is removed by itself."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Who an agent is, apart from its key."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    name: Name
    role: Name
    capabilities: Names = ()


def parse_settings(text: str, path: Path) -> Settings:
    """The settings in `text`, the content of `path`; a ConfigError names the field and the fix."""
    table = {"name": default_mesh_name(path.resolve().parent.parent.name)} | parse_toml(text, path)
    with contextlib.suppress(TypeError):
        if text == format_settings(table["name"]):
            return Settings(table["name"])
    return _validated(Settings, table, path)


def parse_agent(text: str, path: Path) -> AgentSettings:
    """The same of an agent.toml."""
    table = parse_toml(text, path)
    with contextlib.suppress(KeyError, TypeError, MeshError):
        said = AgentSettings(table["name"], table["role"], tuple(table["capabilities"]))
        if text == format_agent(said):
            return said
    return _validated(AgentSettings, table, path)


def format_agent(agent: AgentSettings) -> str:
    """The text of agent.toml; a UsageError when `parse_agent` would not take it back."""
    check_name(agent.name, "name")
    check_name(agent.role, "role")
    for capability in agent.capabilities:
        check_name(capability, "capability")
    if len(agent.capabilities) > LIST_ITEMS_MAX:
        raise LimitReached(
            f"{len(agent.capabilities)} capabilities are too many.",
            hint=f"At most {LIST_ITEMS_MAX} are possible.",
            limit=LIST_ITEMS_MAX,
        )
    lines = [
        "# Who this agent is. Its key is in agent.key; the two belong together.",
        f"name = {toml_string(agent.name)}",
        f"role = {toml_string(agent.role)}",
        f"capabilities = {toml_strings(agent.capabilities)}",
    ]
    return "\n".join(lines) + "\n"


_Model = TypeVar("_Model", Settings, AgentSettings)


def _validated(model: type[_Model], table: dict[str, Any], path: Path) -> _Model:
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(model).validate_python(table)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    field = str(first["loc"][0])
    problem, fix = _explained(first, field, [each.name for each in fields(model)])
    raise ConfigError(f"{path}{problem}", hint=fix, path=str(path), field=field)


_KINDS = {
    "string_type": 'text, such as "…"',
    "tuple_type": 'a list of texts, such as ["…", "…"]',
}


def _explained(error: Any, field: str, known: Sequence[str]) -> tuple[str, str]:
    """What is wrong and how to put it right; `error` is one of pydantic's."""
    kind, value, limits = error["type"], error["input"], error.get("ctx", {})
    if kind == "unexpected_keyword_argument":
        fix = _did_you_mean(field, known) or f"Known settings: {', '.join(known)}."
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


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    import difflib

    close = difflib.get_close_matches(word, known, n=1)
    return f"Did you mean {close[0]!r}?" if close else ""
