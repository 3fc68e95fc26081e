"""An mDNS record is a hint: what does not answer as a member is never shown as a peer."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from end_to_end.namespaces.lan import Host, Lan

from meshagent.bench.nodes import NodeProcesses

pytestmark = [pytest.mark.process, pytest.mark.namespaces]

ANNOUNCER = Path(__file__).with_name("announcer.py")
WATCHED_S = 8.0  # longer than a handshake may take (5 s) and a silent host is given (3 s)


@contextlib.contextmanager
def announcer(host: Host, tag: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*host.within, sys.executable, "-P", str(ANNOUNCER), tag, host.address],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_stale_record_never_shows_as_a_peer(lan: Lan, nodes: NodeProcesses) -> None:
    here, there, elsewhere = lan.host(), lan.host(), lan.host()
    project = nodes.init("first")
    tag = json.loads(nodes.command("init", "--json", cwd=project))["tag"]
    first = nodes.join(project, "first", "--discovery", "mdns", within=here.within)
    with announcer(there, tag) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "announced\n"
        assert process.stdout.readline() == "dialled\n"  # so the record was heard and tried
        dialled = time.monotonic()
        second = nodes.join(project, "second", "--discovery", "mdns", within=elsewhere.within)
        nodes.until(lambda: first.sees(second) and second.sees(first), 5, "members still meet")
        time.sleep(max(0.0, dialled + WATCHED_S - time.monotonic()))
    assert set(first.view) == {second.agent}
    assert set(second.view) == {first.agent}
    for node in (first, second):
        listed = json.loads(nodes.command("peers", "--json", "--as", node.agent, cwd=project))
        assert len(listed) == 1
        assert node.states_of(first if node is second else second) == ["alive"]
