"""For tests on networks of their own: they need root, and in CI they must run."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator

import pytest
from end_to_end.namespaces.lan import Lan

from meshagent.bench.nodes import NodeProcesses


def _why_not() -> str:
    if not sys.platform.startswith("linux"):
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    if shutil.which("ip") is None:
        return "the command `ip` (iproute2) is not installed"
    return ""


@pytest.fixture
def _namespaces_allowed() -> None:
    why_not = _why_not()
    if why_not and os.environ.get("CI") == "true":
        pytest.fail(f"These tests must run in CI, but {why_not}.")
    if why_not:
        pytest.skip(why_not)


@pytest.fixture
def lan(_namespaces_allowed: None) -> Iterator[Lan]:
    lan = Lan()
    try:
        lan.open()
        yield lan
    finally:
        lan.close()


@pytest.fixture
def nodes(lan: Lan) -> Iterator[NodeProcesses]:
    """Ended before the network is: a namespace lives as long as a process in it."""
    with NodeProcesses() as nodes:
        yield nodes
