"""For all tests of the doctor."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from diagnosis.place import Place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    runtime = tempfile.mkdtemp(prefix="ma", dir="/tmp")  # sockets need a short path
    place = Place(tmp_path, runtime)
    try:
        yield place
    finally:
        place.end_all()
        shutil.rmtree(runtime, ignore_errors=True)
