"""Help is light, and shells complete."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from end_to_end.processes.harness import Mesh

from meshagent import __version__
from meshagent.cli import group

pytestmark = pytest.mark.process

HEAVY = {"apsw", "msgpack", "nacl", "pydantic", "rich", "watchfiles", "zeroconf", "zmq"}
COMMANDS = group.list_commands(None)  # type: ignore[arg-type] # it looks at nothing

_HELP = """
import contextlib, io, json, sys
from meshagent.cli import main
told = {}
for arguments in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        try:
            main(arguments)
        except SystemExit as done:
            told[" ".join(arguments)] = [done.code, out.getvalue()]
print(json.dumps([told, sorted({name.split(".")[0] for name in sys.modules})]))
"""


def test_help_works_for_every_command_and_loads_nothing_heavy(shared: Mesh) -> None:
    calls = [["--help"], ["-h"], ["--version"], *([each, "--help"] for each in COMMANDS)]
    ran = subprocess.run(
        [sys.executable, "-P", "-c", _HELP, json.dumps(calls)],
        env=shared.environment(), cwd=shared.root, capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    assert ran.stderr == ""
    told, modules = json.loads(ran.stdout)
    assert {code for code, _ in told.values()} == {0}
    assert len(told) == len(calls)
    assert not HEAVY & set(modules)
    for command in COMMANDS:
        assert f"\n  {command} " in told["--help"][1]
        assert "Example:" in told[f"{command} --help"][1]
    assert told["--version"][1] == f"meshagent, version {__version__}\n"


def test_the_installed_command_is_the_module(shared: Mesh) -> None:
    ran = shared.run("--version")
    assert (ran.code, ran.out, ran.err) == (0, f"meshagent, version {__version__}\n", "")


def test_a_session_loads_neither_network_nor_database(shared: Mesh) -> None:
    """30 calls at once, or a hook at every step of an agent, must not cost a node's start each."""
    script = (
        "import sys\nfrom meshagent.cli import main\n"
        "try:\n    main(['peers'])\nexcept SystemExit as done:\n    print(done.code)\n"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    ran = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env=shared.environment(), cwd=shared.project, capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    code, modules = ran.stdout.splitlines()
    assert code == "5"
    assert not HEAVY & set(modules.split())


def test_a_command_that_asks_a_running_node_loads_nothing_heavy(mesh: Mesh) -> None:
    node, attached = mesh.join("tester"), mesh.root / "note.txt"
    absent = mesh.make_agent("backend").agent
    attached.write_text("a note")
    script = (
        "import contextlib, io, json, sys\nfrom meshagent.cli import main\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "        try:\n            main(words)\n"
        "        except SystemExit as done:\n            assert not done.code, words\n"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    sent = ["send", absent, "hello", "--wait", "0", "--as", node.agent]
    asks = [["status"], ["inbox"], sent, ["outbox"]]
    one_setting = [["init"], ["invite"], [*sent, "--attach", str(attached)]]
    for words, heavy in ((asks, HEAVY), (one_setting, {"pydantic"})):
        ran = subprocess.run(
            [sys.executable, "-P", "-c", script, json.dumps(words)],
            env=mesh.environment(), cwd=mesh.project, capture_output=True, text=True, timeout=20,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        assert not heavy & set(ran.stdout.split())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_that_its_shell_accepts(shared: Mesh, shell: str) -> None:
    ran = shared.run("completion", shell)
    assert ran.code == 0
    assert "_MESHAGENT_COMPLETE" in ran.out
    if shutil.which(shell):
        checked = subprocess.run([shell, "-n"], input=ran.out, text=True, capture_output=True)
        assert (checked.returncode, checked.stderr) == (0, "")


def test_bash_completes_commands_and_options(shared: Mesh) -> None:
    def completed(line: str) -> set[str]:
        words = line.split(" ")
        ran = shared.run(
            env={
                "_MESHAGENT_COMPLETE": "bash_complete",
                "COMP_WORDS": line,
                "COMP_CWORD": str(len(words) - 1),
            }
        )
        assert ran.err == ""
        return {each.partition(",")[2] for each in ran.out.splitlines()}

    assert completed("meshagent jo") == {"join"}
    assert completed("meshagent join --dis") == {"--discovery"}
    assert completed("meshagent join --discovery m") == {"mdns"}
