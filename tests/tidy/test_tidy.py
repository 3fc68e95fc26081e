"""The tree keeps its promises about itself: direction of imports, size, order, documents."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from tidy.reference import ROOT, cli_reference, with_frames

from meshagent.cli import group

FUNCTION_LINES_MAX = 70
FOLDERS = ("meshagent", "transports", "discovery", "storage", "bench")
SHIPPED = {"transports", "discovery", "storage", "bench"}

# Who may import whom; a package that is not listed may import anything of ours.
ALLOWED = {
    "meshagent.core": ("meshagent.core", "meshagent.errors"),
    "meshagent.errors": (),
    "meshagent.transports": ("meshagent.transports", "meshagent.core", "meshagent.errors"),
    "meshagent.discovery": ("meshagent.discovery", "meshagent.core", "meshagent.errors"),
    "meshagent.storage": ("meshagent.storage", "meshagent.core", "meshagent.errors"),
    "meshagent.simulator": ("meshagent.simulator", "meshagent.core", "meshagent.errors"),
    "meshagent.node.driver": ("meshagent.node", "meshagent.core", "meshagent.errors"),
    "meshagent.node": (
        "meshagent.node",
        "meshagent.core",
        "meshagent.errors",
        "meshagent.storage",
        "meshagent.discovery",
        "meshagent.transports",
        "meshagent.session",
        "meshagent._version",
    ),
}
ADAPTERS_MAY_TAKE_FROM_CORE = {
    "meshagent.core.delivery.mailbox",  # the meaning of a row
    "meshagent.core.delivery.word_search",
    "meshagent.core.model.body_summary",
    "meshagent.core.model.message_states",
    "meshagent.core.model.peers",
    "meshagent.core.model.rows",
    "meshagent.core.ports",
}
IMPURE = {"asyncio", "socket", "time", "os", "pathlib", "sqlite3", "apsw", "zmq", "zeroconf"}


def modules() -> Iterator[tuple[str, Path]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(("meshagent", *parts) if folder in SHIPPED else parts)
            yield name.removesuffix(".__init__"), path


MODULES = dict(modules())


def imports_of(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def parsed(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_one_way(name: str) -> None:
    rule = max((each for each in ALLOWED if f"{name}.".startswith(f"{each}.")), key=len, default="")
    if not rule:
        return
    for imported in imports_of(parsed(name)):
        if imported.split(".")[0] == "meshagent":
            assert imported.startswith(ALLOWED[rule]), f"{name} must not import {imported}"
        adapter = name.split(".")[1:2] and name.split(".")[1] in SHIPPED - {"bench"}
        if adapter and imported.startswith("meshagent.core"):
            assert imported in ADAPTERS_MAY_TAKE_FROM_CORE, f"{name} must not import {imported}"


@pytest.mark.parametrize("name", [each for each in MODULES if each.startswith("meshagent.core")])
def test_core_has_no_clock_socket_or_disk(name: str) -> None:
    impure = {each.split(".")[0] for each in imports_of(parsed(name))} & IMPURE
    assert not impure, f"{name} imports {impure}"


@pytest.mark.parametrize("name", MODULES)
def test_functions_fit_a_screen(name: str) -> None:
    for node in ast.walk(parsed(name)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            assert lines <= FUNCTION_LINES_MAX, f"{name}.{node.name} has {lines} lines"


@pytest.mark.parametrize("name", MODULES)
def test_modules_say_what_they_are_and_list_their_names_in_order(name: str) -> None:
    tree = parsed(name)
    assert ast.get_docstring(tree), f"{name} has no docstring"
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
            # ruff's order: constants, then classes, then the rest, each by the alphabet
            kinds = {True: 0, False: 1}
            order = sorted(
                names,
                key=lambda each: (
                    0 if each.isupper() else 1 + kinds[each[0].isupper()],
                    each,
                ),
            )
            assert names == order, f"{name}.__all__ is not sorted"


def commands() -> list[click.Command]:
    context = click.Context(group)
    found = [group.get_command(context, each) for each in group.list_commands(context)]
    return [each for each in found if each is not None]


@pytest.mark.parametrize("command", commands(), ids=lambda command: str(command.name))
def test_every_command_explains_itself_with_an_example(command: click.Command) -> None:
    assert command.help
    assert "Example:" in command.help
    assert command.help.split("Example:")[0].strip().splitlines()[0].endswith(".")
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert parameter.help, f"{command.name} {parameter.opts} has no help"
    offered = {name for each in command.params for name in each.opts}
    assert {"--dir", "--as", "--json", "-q", "-v"} <= offered


def words(text: str) -> list[str]:
    """Without line breaks: another version of click may wrap elsewhere."""
    return text.split()


def test_command_reference_is_what_help_prints() -> None:
    assert words((ROOT / "docs/cli.md").read_text()) == words(cli_reference()), (
        "run: python tests/tidy/reference.py"
    )


def test_protocol_document_has_every_frame_and_limit() -> None:
    text = (ROOT / "docs/protocol.md").read_text()
    assert text == with_frames(text), "run: python tests/tidy/reference.py"


def blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A person's environment, on loopback, from which no node outlives the test."""
    (tmp_path / "project").mkdir()
    environ = {
        **os.environ,
        "HOME": str(tmp_path),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "MESHAGENT_LISTEN": "127.0.0.1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    yield environ
    for entry in (tmp_path / "project/.meshagent/registry").glob("*.json"):
        run(f"meshagent leave --as {entry.stem}", tmp_path / "project", environ)


def run(
    line: str, folder: Path, environ: dict[str, str], check: bool = True
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        line, shell=True, cwd=folder, env=environ, capture_output=True, text=True, timeout=60
    )
    assert not check or done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done


@pytest.mark.process
def test_readme_commands_run_as_printed(home: dict[str, str], tmp_path: Path) -> None:
    lines = [
        line.removeprefix("$ ")
        for block in blocks("console")
        for line in block.splitlines()
        if line.startswith("$ ")
    ]
    assert lines[0] == "meshagent init"
    for line in lines:
        run(line, tmp_path / "project", home)


@pytest.mark.process
def test_readme_program_runs_as_printed(home: dict[str, str], tmp_path: Path) -> None:
    run("meshagent init && meshagent join --role tester --detach", tmp_path / "project", home)
    for number, block in enumerate(blocks("python")):
        program = tmp_path / f"snippet{number}.py"
        program.write_text(block)
        said = run(f"{sys.executable} {program}", tmp_path / "project", home).stdout
        assert "please look at the diff" in said
        assert "tester-" in said
