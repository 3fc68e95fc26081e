"""Options of the whole suite: how many workers run it, and what not every machine can run."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

WORKERS = 4  # for two cores: most tests wait for a process, a disk or a timer, few compute


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long", action="store_true", help="also run what takes minutes, and thousands of seeds"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run folders in parallel; a single file, `--pdb` and `-p no:xdist` stay in this process.

    Not by `-n` in pyproject.toml: there it would be an unknown option without pytest-xdist.
    """
    option = config.option
    is_worker = hasattr(config, "workerinput")
    is_undecided = getattr(option, "numprocesses", 0) is None
    if is_worker or not is_undecided or option.usepdb or option.collectonly:
        return
    if all(Path(each).is_dir() for each in config.args):
        option.numprocesses, option.dist = WORKERS, "loadfile"  # a file's tests may share nodes
        option.loadscopereorder = False  # the order below instead


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=_when)
    if config.getoption("--long"):
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="long: run with --long"))


def _when(item: pytest.Item) -> int:
    """What takes longest comes first, or the other workers would wait for it at the end.

    Fifty nodes at once come before all else: they would disturb tests of how soon something is.
    """
    if "scale" in item.path.parts:
        return 0
    return 1 if item.get_closest_marker("process") else 2


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests in namespaces are skipped where there can be none; in CI that is a failure."""
    if item.get_closest_marker("skip") or not item.get_closest_marker("namespaces"):
        return
    if why_not := _why_no_namespaces():
        if os.environ.get("CI") == "true":
            pytest.fail(f"This test must run in CI, but {why_not}.")
        pytest.skip(why_not)


def _why_no_namespaces() -> str:
    if not sys.platform.startswith("linux"):
        return "namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "making namespaces needs root"
    missing = [command for command in ("ip", "unshare") if shutil.which(command) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""
