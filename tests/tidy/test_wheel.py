"""What is installed: one package, typed, with the folders of the repository inside it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    copy = f"git ls-files -z -co --exclude-standard | xargs -0 cp --parents -t {source}"
    subprocess.run(copy, shell=True, check=True, cwd=ROOT)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-w", folder, source], check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_no_top_level_package_but_meshagent(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"meshagent"}


def test_wheel_is_typed_and_whole(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "meshagent/py.typed" in names
    for folder in ("meshagent", "transports", "discovery", "storage", "bench"):
        for path in (ROOT / folder).rglob("*.py"):
            inside = path.relative_to(ROOT).as_posix()
            shipped = inside if folder == "meshagent" else f"meshagent/{inside}"
            assert shipped in names, f"{inside} is not shipped"
    assert not any("tests" in name for name in names)


def test_wheel_is_called_meshagent_p2p(wheel: Path) -> None:
    assert wheel.name.startswith("meshagent_p2p-")
