"""Nodes in this very process: a mesh folder of their own, loopback only."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshagent.storage.folders.mesh_folder import MeshFolder


@pytest.fixture(autouse=True)
def project(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with a mesh; the current folder is in it."""
    root = Path(tempfile.mkdtemp(prefix="ma-", dir="/tmp"))  # a socket's path must stay short
    project = root / "project"
    for folder in (project, root / "run", root / "home"):
        folder.mkdir(mode=0o700)
    MeshFolder(project / ".meshagent").create("project")
    monkeypatch.setenv("HOME", str(root / "home"))
    monkeypatch.setenv("XDG_DATA_HOME", str(root / "data"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(root / "run"))
    monkeypatch.setenv("MESHAGENT_LISTEN", "127.0.0.1")
    monkeypatch.delenv("MESHAGENT_DIR", raising=False)
    monkeypatch.delenv("MESHAGENT_AGENT", raising=False)
    monkeypatch.chdir(project)
    yield project
    shutil.rmtree(root)
