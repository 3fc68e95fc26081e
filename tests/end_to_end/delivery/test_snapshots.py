"""A copy a day, for a week, and the way back from one."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

import meshagent
from meshagent.node.daily_backups import AGE_S, KEPT_MAX, take_snapshot
from meshagent.storage.folders.mesh_folder import MeshFolder

NOW = 1_800_000_000.0


@pytest.fixture
def mesh(tmp_path: Path) -> Path:
    folder = MeshFolder(tmp_path / ".meshagent")
    folder.create("snapshots")
    return folder.path


def test_a_snapshot_is_taken_once_a_day_and_kept_for_a_week(mesh: Path, tmp_path: Path) -> None:
    async def main() -> list[str]:
        folder = tmp_path / "backups"
        async with meshagent.join(
            role="keeper", dir=mesh, listen="127.0.0.1", discovery="none"
        ) as node:
            for day in range(KEPT_MAX + 3):
                now = NOW + day * AGE_S
                assert await take_snapshot(node._driver, folder, now)
                newest = max(folder.iterdir())
                os.utime(newest, (now, now))
                assert not await take_snapshot(node._driver, folder, now + AGE_S / 2)
        return sorted(each.name for each in folder.iterdir())

    kept = asyncio.run(main())
    assert len(kept) == KEPT_MAX
    assert kept[-1] > kept[0]


def test_a_restored_agent_sends_what_was_pending_then_and_nothing_twice(
    mesh: Path, tmp_path: Path
) -> None:
    copy = str(tmp_path / "copy")

    async def main() -> list[str]:
        options = {"dir": mesh, "listen": "127.0.0.1", "discovery": "file"}
        async with meshagent.join(role="reader", **options) as reader:  # type: ignore[arg-type]
            async with meshagent.join(role="writer", **options) as writer:  # type: ignore[arg-type]
                for text in ("one", "two"):
                    await (await writer.send(reader.agent, text)).delivered(10)
                await writer._driver.recovery.backup(copy)
                await (await writer.send(reader.agent, "three")).delivered(10)
                await writer._driver.recovery.restore(copy)
                await (await writer.send(reader.agent, "four")).delivered(10)
            letters = await reader._mailbox.inbox()
            return [letter["text"] for letter in letters]

    assert asyncio.run(main()) == ["one", "two", "three", "four"]
