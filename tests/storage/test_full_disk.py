"""A disk that is really full, and one that is really read-only: a tmpfs of our own.

Each script runs in a mount namespace of its own, so that nothing of it outlives the test.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root"),
]

START = """
import asyncio, os, sys
from pathlib import Path
import pytest
from meshagent.core.ports import PeerRow
from meshagent.errors import LimitReached, StorageError
from meshagent.storage.files import write_private
from meshagent.storage.folder import MeshFolder
from meshagent.storage.lock import AgentLock
from meshagent.storage.sqlite import SqliteStore

disk = Path(sys.argv[1])
ballast = disk / "ballast"

def use_up(leave):
    ballast.unlink(missing_ok=True)
    stat = os.statvfs(disk)
    ballast.write_bytes(b"x" * (stat.f_bavail * stat.f_frsize - leave))
"""


def on_small_disk(folder: Path, script: str) -> None:
    """Run the script with `disk` a tmpfs of 1 MiB."""
    code = START + textwrap.dedent(script)
    mount = 'mount -t tmpfs -o size=1m none "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "-m", "sh", "-c", mount, "sh", str(folder), sys.executable, code]
    result = subprocess.run(
        command, cwd="/", capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_a_full_disk_refuses_keeps_what_it_accepted_and_goes_on_by_itself(tmp_path: Path) -> None:
    on_small_disk(
        tmp_path,
        """
        async def main():
            store = SqliteStore(disk / "mesh.db")
            await store.open()
            use_up(leave=400_000)
            kept = set()
            with pytest.raises(LimitReached, match="disk is full"):
                for number in range(1_000):
                    row = PeerRow(f"p{number}", b"k" * 32, ("x" * 16_000,))
                    await store.commit([row])
                    kept.add(row)
            assert 5 < len(kept) < 100
            for _ in range(3):
                with pytest.raises(LimitReached):
                    await store.commit([PeerRow("big", b"k" * 32, ("x" * 500_000,))])
            assert set(await store.peers()) == kept
            ballast.unlink()
            more = PeerRow("after", b"k" * 32, ("x" * 16_000,))
            await store.commit([more])
            await store.close()
            await store.open()
            assert set(await store.peers()) == kept | {more}
            assert (await store.facts())["quarantined"] == "0"
            await store.close()

        asyncio.run(main())
        """,
    )


def test_a_disk_that_is_full_at_the_start_is_a_limit_and_not_a_crash(tmp_path: Path) -> None:
    on_small_disk(
        tmp_path,
        """
        async def main():
            store = SqliteStore(disk / "mesh.db")
            for leave in (0, 4096, 8192, 40_960):
                use_up(leave)
                with pytest.raises(LimitReached, match="disk is full"):
                    await store.open()
            ballast.unlink()
            await store.open()
            await store.commit([PeerRow("a", b"k" * 32, ())])
            await store.close()

        asyncio.run(main())
        """,
    )


def test_a_full_disk_keeps_the_old_file_and_makes_no_half_mesh(tmp_path: Path) -> None:
    on_small_disk(
        tmp_path,
        """
        write_private(disk / "agent.toml", b"old")
        use_up(leave=0)
        with pytest.raises(LimitReached, match="disk is full"):
            write_private(disk / "agent.toml", b"y" * 100_000)
        assert (disk / "agent.toml").read_bytes() == b"old"
        mesh = MeshFolder(disk / ".meshagent")
        with pytest.raises(LimitReached, match="disk is full"):
            mesh.create("shop")
        assert sorted(os.listdir(disk)) == ["agent.toml", "ballast"]
        ballast.unlink()
        assert mesh.create("shop")
        """,
    )


def test_a_read_only_disk_is_explained(tmp_path: Path) -> None:
    on_small_disk(
        tmp_path,
        """
        async def main():
            store = SqliteStore(disk / "mesh.db")
            await store.open()
            await store.commit([PeerRow("a", b"k" * 32, ())])
            await store.close()
            os.system(f"mount -o remount,ro {disk}")
            with pytest.raises(StorageError, match="read-only"):
                await store.open()
            with pytest.raises(StorageError, match="read-only"):
                MeshFolder(disk / ".meshagent").create("shop")
            with pytest.raises(StorageError, match="read-only"):
                write_private(disk / "x", b"")
            with pytest.raises(StorageError, match="read-only"):
                AgentLock(disk / "lock").acquire()
            os.system(f"mount -o remount,rw {disk}")
            await store.open()
            assert len(list(await store.peers())) == 1
            await store.close()

        asyncio.run(main())
        """,
    )
