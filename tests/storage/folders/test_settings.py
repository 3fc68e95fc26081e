"""mesh.toml: what it may say, and how a mistake in it is explained."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from meshagent.errors import ConfigError
from meshagent.storage.folders.settings import (
    AgentSettings,
    Settings,
    format_agent,
    parse_agent,
    parse_settings,
)
from meshagent.storage.folders.toml_files import (
    format_settings,
    parse_toml,
    read_text,
    toml_string,
    toml_strings,
)

PATH = Path("/home/ann/shop/.meshagent/mesh.toml")
PLAIN = Settings(name="shop")


def test_every_setting_is_read() -> None:
    text = 'name = "shop"\ndiscovery = "file"\nlisten = "127.0.0.1"\npeers = ["a:1", "[::1]:2"]'
    expected = Settings(name="shop", discovery="file", listen="127.0.0.1", peers=("a:1", "[::1]:2"))
    assert parse_settings(text, PATH) == expected


def test_a_mesh_without_a_name_is_called_after_its_project() -> None:
    assert parse_settings("", PATH) == PLAIN


def test_the_comments_of_a_new_file_show_the_defaults() -> None:
    text = format_settings("shop")
    assert parse_settings(text, PATH) == PLAIN
    uncommented = re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE)
    assert parse_settings(uncommented, PATH) == PLAIN
    assert set(tomllib.loads(uncommented)) == {each.name for each in fields(Settings)}


@pytest.mark.parametrize(
    ("name", "shown"),
    [('a "b" \\c', 'a "b" \\c'), ("x\ny\x7f\t", "xy"), ("", "mesh"), ("n" * 300, "n" * 64)],
)
def test_any_folder_name_makes_a_valid_file(name: str, shown: str) -> None:
    assert parse_settings(format_settings(name), PATH).name == shown


def test_a_name_that_is_not_unicode_still_makes_a_valid_file() -> None:
    text = format_settings("caf\udce9")
    assert parse_settings(text.encode("utf-8").decode("utf-8"), PATH).name.startswith("caf")


@pytest.mark.parametrize(
    ("text", "field", "fix"),
    [
        ('discvery = "file"', "discvery", "Did you mean 'discovery'?"),
        ("colour = 1", "colour", "Known settings: name, discovery, listen, peers,"),
        ('discovery = "mdsn"', "discovery", "Did you mean 'mdns'?"),
        ('discovery = "carrier pigeon"', "discovery", "It may be auto, mdns, file, none."),
        ("name = 3", "name", "Write name as text"),
        ('name = ""', "name", "1 to 64 characters"),
        ('name = "a\\nb"', "name", "on one line"),
        ('peers = "a:1"', "peers", "a list of texts"),
        ("peers = [1]", "peers", "a list of texts"),
        ('peers = ["nas"]', "peers", "host:port"),
        ('peers = ["nas:99999"]', "peers", "host:port"),
        ('peers = ["nas:²"]', "peers", "host:port"),
        (f'listen = "{"x" * 256}"', "listen", "At most 255"),
        (f"peers = {['a:1'] * 65}", "peers", "At most 64"),
        ("[name]\nx = 1", "name", "Write name as text"),
        ('attachments_each = "10 gigs"', "attachments_each", '"100 MiB"'),
        ('attachments_eager = "-1 KiB"', "attachments_eager", '"100 MiB"'),
        ('attachments_quota = "1e999 TiB"', "attachments_quota", '"100 MiB"'),
        ('attachments_count = "3"', "attachments_count", "a whole number"),
        ("attachments_count = true", "attachments_count", "a whole number"),
        ("attachments_count = -1", "attachments_count", "0 for none"),
        ("attachments_each = 5", "attachments_each", "in quotes"),
    ],
)
def test_a_mistake_names_the_file_the_field_and_the_fix(text: str, field: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings(text, PATH)
    assert str(PATH) in caught.value.message
    assert field in caught.value.message
    assert fix in caught.value.hint
    assert caught.value.data["field"] == field


def test_a_syntax_error_names_line_and_column() -> None:
    with pytest.raises(ConfigError, match=r"mesh\.toml is not valid TOML: .*line 2, column 8"):
        parse_settings('name = "shop"\npeers= nas', PATH)


def test_absurd_nesting_is_a_mistake_and_not_a_crash() -> None:
    with pytest.raises(ConfigError, match="not valid TOML"):
        parse_settings("peers = " + "[" * 30_000, PATH)


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_bytes(b'name = "caf\xe9"')
    with pytest.raises(ConfigError, match=r"mesh\.toml is not UTF-8 text \(byte 11\)"):
        read_text(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        'q"uo"te',
        "back\\slash \\n \\u0041",
        "new\nline\r\n\ttab",
        "naïve ✓ 日本 🦊",
        "\x00\x01\x1f\x7f\x80",
        "'single' '''three''' \"\"\"",
        "# not a comment ]",
        "\u2028",
    ],
)
def test_what_is_written_is_read_back_unchanged(text: str) -> None:
    line = f"one = {toml_string(text)}\nmany = {toml_strings((text, 'x', text))}\n"
    assert parse_toml(line, PATH) == {"one": text, "many": [text, "x", text]}


AGENT = AgentSettings("tester", "qa", ("python", "web"))
_READ_AS_WRITTEN = """
import sys
from pathlib import Path
from meshagent.storage.folders.settings import parse_agent, parse_settings
parse_settings(Path(sys.argv[1]).read_text(), Path(sys.argv[1]))
parse_agent(Path(sys.argv[2]).read_text(), Path(sys.argv[2]))
print("pydantic" in sys.modules)
"""


def test_files_as_we_wrote_them_are_read_without_loading_pydantic(tmp_path: Path) -> None:
    """Its import would take a third of a join."""
    mesh, agent = tmp_path / "mesh.toml", tmp_path / "agent.toml"
    mesh.write_text(format_settings("shop"))
    agent.write_text(format_agent(AGENT))

    def loads_it() -> str:
        command = [sys.executable, "-P", "-c", _READ_AS_WRITTEN, str(mesh), str(agent)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert loads_it() == "False\n"
    agent.write_text(format_agent(AGENT) + "# mine\n")
    assert loads_it() == "True\n"


def test_a_file_as_we_wrote_it_says_what_an_edited_one_says() -> None:
    edit = "# a comment\n"
    assert parse_agent(format_agent(AGENT), PATH) == AGENT
    assert parse_agent(format_agent(AGENT) + edit, PATH) == AGENT
    assert parse_settings(format_settings("shop"), PATH) == PLAIN
    assert parse_settings(format_settings("shop") + edit, PATH) == PLAIN
