"""A network of its own for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from end_to_end.namespaces.lan import Lan

from meshagent.bench.nodes import NodeProcesses


@pytest.fixture
def lan() -> Iterator[Lan]:
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
