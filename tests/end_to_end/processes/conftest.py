"""A mesh for each test, or for a file of tests that only look."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from end_to_end.processes.harness import Mesh


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    mesh = Mesh()
    try:
        yield mesh
    finally:
        mesh.close()


@pytest.fixture
def bare() -> Iterator[Mesh]:
    """A machine on which no mesh has been made."""
    mesh = Mesh(made=False)
    try:
        yield mesh
    finally:
        mesh.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Mesh]:
    """One mesh for all tests of a file; they leave it as they found it."""
    mesh = Mesh()
    try:
        yield mesh
    finally:
        mesh.close()
