"""A copy of the agent's database every day, kept for a week.

Never stands in anybody's way: what fails is logged, and tried again an hour later.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from pathlib import Path

from meshagent.errors import MeshError
from meshagent.node.driver import Driver
from meshagent.storage.folders.files import make_private_folder, mapped_errors

__all__ = ["keep_snapshots", "take_snapshot"]

FIRST_S = 60.0
CHECK_S = 3600.0
AGE_S = 24 * 3600.0
KEPT_MAX = 7
SUFFIX = ".backup"


async def keep_snapshots(driver: Driver, folder: Path) -> None:
    """For as long as the node runs; one that runs for a minute needs none."""
    await asyncio.sleep(FIRST_S)
    while True:
        try:
            await take_snapshot(driver, folder, time.time())
        except MeshError as error:
            driver.log.warning("no snapshot: %s", error)
        await asyncio.sleep(CHECK_S)


async def take_snapshot(driver: Driver, folder: Path, now: float) -> bool:
    """Make a copy when the newest one is a day old, and drop the oldest; True when it did."""
    make_private_folder(folder)
    kept = _kept(folder)
    # A copy from the future was made before the clock was put back: it is as good as none.
    if kept and 0 <= now - kept[-1][0] < AGE_S:
        return False
    name = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H%M%SZ")
    await driver.recovery.backup(str(folder / f"{name}{SUFFIX}"))
    for _, old in _kept(folder)[:-KEPT_MAX]:
        old.unlink(missing_ok=True)
    return True


def _kept(folder: Path) -> list[tuple[float, Path]]:
    """The copies with their times, oldest first."""
    with mapped_errors(folder, "list"):
        return sorted((each.stat().st_mtime, each) for each in folder.glob(f"*{SUFFIX}"))
