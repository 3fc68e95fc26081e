"""The doctor with real nodes, broken folders and broken networks, through the command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from diagnosis.place import Place, eventually, matching

pytestmark = pytest.mark.process


NODES_OWN = (
    "mesh.db", "mesh.db-wal", "mesh.db-shm", "mesh.db-commits", "node.log", "registry",
)  # fmt: skip
"""What a running node writes all the time."""


def everything(folder: Path, but: tuple[str, ...] = ()) -> dict[str, tuple[int, int, bytes]]:
    """Mode, time of change and content of every file: what must not differ afterwards."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if not {path.name, path.parent.name} & set(but):
            status = path.lstat()
            content = path.read_bytes() if path.is_file() else b""
            found[str(path)] = (status.st_mode, status.st_mtime_ns, content)
    assert found
    return found


def problems(findings: list[dict[str, str]]) -> list[str]:
    return [each["text"] for each in findings if each["state"] == "problem"]


def test_no_mesh_is_told_and_none_is_made(place: Place) -> None:
    findings = place.doctor()
    assert "There is no mesh" in matching(findings, "mesh", "note")
    assert not problems(findings)
    assert list(place.root.iterdir()) == [place.project]
    assert not list(place.project.iterdir())


def test_a_fresh_clone_is_told_to_take_an_invite(place: Place) -> None:
    place.mesh.mkdir()
    (place.mesh / "mesh.toml").write_text('name = "x"\n')
    assert "--invite" in matching(place.doctor(), "mesh", "problem")


def test_looking_at_a_healthy_mesh_finds_no_problem_and_leaves_no_trace(place: Place) -> None:
    place.init()
    tester, backend = place.join("tester"), place.join("backend")
    eventually(lambda: "seen" in matching(place.doctor(), "peers", "ok"))
    before = everything(place.mesh, but=NODES_OWN)
    findings = place.doctor()
    assert not problems(findings), findings
    assert everything(place.mesh, but=NODES_OWN) == before
    for each in (tester, backend):
        assert f"{each.agent} takes connections at {each.address}" in matching(
            findings, "port", "ok"
        )
    assert "only this machine can reach them" in matching(findings, "listen", "note")
    assert tester.agent in matching(place.doctor("tester"), "peers", "ok")
    # The doctor knocked at every door several times and was never taken for an intruder.
    status = json.loads(place.run("status", "--json", "--as", "tester").stdout)
    assert status["refused"] == {}


def test_an_agent_to_speak_as_that_does_not_run_is_told(place: Place) -> None:
    place.init()
    tester = place.join("tester")
    assert "'other'" in matching(place.doctor(MESHAGENT_AGENT="other"), "peers", "problem")
    assert "'other'" in matching(place.doctor("--as", "other"), "peers", "problem")
    assert not problems(place.doctor("--as", tester.agent))


def test_a_stopped_node_is_named_within_the_bound(place: Place) -> None:
    place.init()
    tester, _ = place.join("tester"), place.join("backend")
    os.kill(tester.pid, signal.SIGSTOP)
    began = time.monotonic()
    findings = place.doctor()
    assert time.monotonic() - began < 10  # of which 2 are patience, and the rest a busy machine's
    words = matching(findings, "nodes", "problem")
    assert f"{tester.agent} (pid {tester.pid}) hangs" in words
    assert f"kill -CONT {tester.pid}" in words


def test_a_killed_node_is_explained_by_its_stale_file(place: Place) -> None:
    place.init()
    tester = place.join("tester")
    os.kill(tester.pid, signal.SIGKILL)
    eventually(lambda: "stale" in matching(place.doctor(), "registry", "note"))
    findings = place.doctor("tester")
    assert f"{tester.agent}.json is stale" in matching(findings, "registry", "note")
    assert f"meshagent join --as {tester.agent}" in matching(findings, "peers", "problem")


def test_a_node_of_another_mesh_that_knocks_is_explained_on_both_sides(place: Place) -> None:
    place.init()
    tester = place.join("tester")
    other = place.root / "other"
    place.init(other)
    place.join("stranger", "--peer", tester.address, at=other)
    eventually(lambda: "knocked" in matching(place.doctor(), "refused", "note"))
    words = matching(place.doctor(), "refused", "note")
    assert f"without this mesh's secret knocked at {tester.agent}" in words
    assert "meshagent invite" in words
    seen_from_there = matching(place.doctor(tester.address, at=other), "peers", "problem")
    assert f"{tester.address} is of another mesh" in seen_from_there


def test_a_key_that_was_replaced_under_a_running_node_is_noticed(place: Place) -> None:
    place.init()
    tester = place.join("tester")
    other = place.root / "other"
    place.init(other)
    shutil.copy(other / ".meshagent" / "mesh.key", place.mesh / "mesh.key")
    findings = place.doctor()
    assert "another mesh" in matching(findings, "registry", "problem")
    assert "does not open with mesh.key" in matching(findings, "port", "problem")
    assert tester.agent in matching(findings, "port", "problem")


def test_damage_is_named_and_nothing_is_touched(place: Place) -> None:
    place.init()
    tester, backend = place.join("tester"), place.join("backend")
    for each in (tester, backend):
        assert place.run("leave", "--as", each.agent).returncode == 0
    (place.mesh / "mesh.toml").write_text('discovery = "mnds"\n')
    (place.mesh / "mesh.key").write_text("meshkey1:12\n")
    (place.mesh / "agents" / tester.agent / "agent.key").write_text("")
    (place.mesh / "agents" / backend.agent / "agent.toml").write_text("role = 1\n")
    (place.mesh / "agents" / backend.agent / "agent.key").chmod(0o600)
    (place.mesh / "registry" / "nonsense.json").write_text("{")
    before = everything(place.root)
    findings = place.doctor("-v")
    assert everything(place.root) == before
    assert "mnds" in matching(findings, "settings", "problem")
    assert "mesh.key is no use: it is damaged" in matching(findings, "key", "problem")
    assert "12" not in matching(findings, "key", "problem").replace(str(place.mesh), "")
    agents = matching(findings, "agents", "problem")
    assert f"{tester.agent}/agent.key is no use: it is empty" in agents
    assert f"{backend.agent}/agent.toml" in agents
    assert "nonsense.json is ignored: it is not JSON" in matching(findings, "registry", "note")


def test_a_key_that_others_can_read_is_told_and_left_as_it_is(place: Place) -> None:
    place.init()
    tester = place.join("tester")
    assert place.run("leave").returncode == 0
    (place.mesh / "mesh.key").chmod(0o644)
    (place.mesh / "agents" / tester.agent / "agent.key").chmod(0o644)
    before = everything(place.root)
    findings = place.doctor()
    assert everything(place.root) == before
    assert "mode 0644" in matching(findings, "key", "note")
    assert f"{tester.agent}/agent.key can be read by other users" in matching(
        findings, "agents", "note"
    )


def test_people_get_aligned_lines_with_problems_last(place: Place) -> None:
    place.init()
    (place.mesh / "mesh.toml").write_text("nam = 1\n")
    done = place.run("doctor")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    marks = [line[0] for line in lines if line[:1] in "✓!✗" and line]
    assert marks == sorted(marks, key="✓!✗".index)
    assert lines[-1] == "One problem."
    assert lines[-3].lstrip().startswith("→")
    column = lines[-4].index("/")  # where the text of the last problem, a path, begins
    assert all(line[column - 2 : column] == "  " for line in lines[:-2] if line[:1] in "✓!✗")


def test_quiet_leaves_only_problems(place: Place) -> None:
    place.init()
    assert place.run("doctor", "-q").stdout == ""
    (place.mesh / "mesh.key").write_text("")
    done = place.run("doctor", "-q")
    assert [line[0] for line in done.stdout.splitlines()] == ["✗", " "]


def test_a_terminal_without_unicode_still_gets_the_report(place: Place) -> None:
    place.init()
    folder = place.root / "grün"
    done = place.run("doctor", "--dir", str(folder), PYTHONIOENCODING="ascii")
    assert done.returncode == 1
    assert done.stdout.isascii()
    assert "x mesh" in done.stdout
    assert "-> " in done.stdout


@pytest.mark.namespaces
def test_a_machine_whose_loopback_is_down_is_explained(place: Place) -> None:
    place.init()
    findings = place.doctor(before=("unshare", "-n"))
    assert "loopback interface is down" in matching(findings, "interfaces", "problem")
    assert "127.0.0.1 (lo: down)" in matching(findings, "interfaces", "problem")
    assert "does not work on 127.0.0.1" in matching(findings, "multicast", "problem")


@pytest.mark.namespaces
def test_a_read_only_folder_is_explained(place: Place) -> None:
    place.init()
    place.join("tester")
    assert place.run("leave").returncode == 0
    mount = f"mount --bind {place.mesh} {place.mesh} && mount -o remount,ro,bind {place.mesh}"
    inside = ("unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh")
    findings = place.doctor(before=inside)
    assert "can't be written" in matching(findings, "folder", "problem")
    assert subprocess.run(["mountpoint", "-q", place.mesh]).returncode != 0
