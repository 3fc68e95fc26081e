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
from meshagent.core.model.rows import (PeerRow)
from meshagent.errors import LimitReached, StorageError
from meshagent.storage.folders.files import write_private
from meshagent.storage.folders.mesh_folder import MeshFolder
from meshagent.storage.folders.agent_lock import AgentLock
from meshagent.storage.mail.sqlite_store import SqliteStore

disk = Path(sys.argv[1])
ballast = disk / "ballast"

def use_up(leave):
    ballast.unlink(missing_ok=True)
    stat = os.statvfs(disk)
    ballast.write_bytes(b"x" * (stat.f_bavail * stat.f_frsize - leave))
"""


def on_small_disk(folder: Path, script: str, size: str = "1m") -> None:
    """Run the script with `disk` a tmpfs of this size."""
    code = START + textwrap.dedent(script)
    mount = f'mount -t tmpfs -o size={size} none "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "-m", "sh", "-c", mount, "sh", str(folder), sys.executable, code]
    tests = str(Path(__file__).parent.parent.parent)
    result = subprocess.run(
        command, cwd="/", capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "PYTHONPATH": tests},
    )  # fmt: skip
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


def test_a_full_disk_accepts_nothing_that_is_not_kept_and_goes_on_by_itself(
    tmp_path: Path,
) -> None:
    on_small_disk(
        tmp_path,
        """
        from storage.mail.mail_rows import PEER, came, out
        from meshagent.core.model.rows import (NewEpoch, Watermark)

        async def fill(store, sent):
            while True:
                rows = [out(sent + 1, text="x" * 9_000), came(f"c{sent + 1}", text="y" * 9_000)]
                rows += [Watermark(PEER, bytes(8), sent + 1, bytes(16))]
                try:
                    await store.commit(rows)
                except LimitReached as error:
                    assert "disk is full" in error.message
                    return sent
                sent += 1

        async def check(store, sent):
            start = await store.mail_start()
            assert start.streams[0].next_seq == sent + 1
            assert start.unread == sent == start.watermarks[0].seq
            found = await store.pending(PEER, 1, 10_000)
            assert [entry.seq for entry in found] == list(range(1, sent + 1))

        async def main():
            store = SqliteStore(disk / "mesh.db")
            await store.open()
            use_up(leave=700_000)
            sent = await fill(store, 0)
            assert sent > 3
            await check(store, sent)
            with pytest.raises(LimitReached):
                await store.commit([NewEpoch(bytes(8)), out(sent + 1, text="x" * 900_000)])
            with pytest.raises(LimitReached):
                await store.backup(disk / "copy.db")
            assert sorted(os.listdir(disk))[:2] == ["ballast", "mesh.db"]
            await check(store, sent)
            ballast.unlink()
            more = await fill(store, sent)
            assert more > sent + 10
            await check(store, more)
            await store.close()
            await store.open()
            await check(store, more)
            assert (await store.facts())["quarantined"] == "0"
            await store.close()

        asyncio.run(main())
        """,
        size="2m",
    )


def test_a_full_disk_hides_nothing_that_was_committed(tmp_path: Path) -> None:
    on_small_disk(
        tmp_path,
        """
        from storage.mail.mail_rows import PEER, came, out
        from meshagent.storage.mail import store_thread
        store_thread.QUIET_S = 600.0

        async def main():
            store = SqliteStore(disk / "mesh.db")
            await store.open()
            await store.commit([out(1, text="x" * 200_000), came("c", text="y" * 200_000)])
            use_up(leave=0)
            for life in (1, 2):
                assert [entry.id for entry in await store.inbox(0, 9)] == ["c"]
                assert [entry.seq for entry in await store.pending(PEER, 1, 9)] == [1]
                with pytest.raises(LimitReached):
                    await store.commit([out(2, text="z" * 100_000)])
                await store.close()
                await store.open()
            ballast.unlink()
            await store.commit([out(2)])
            assert [entry.seq for entry in await store.pending(PEER, 1, 9)] == [1, 2]
            await store.close()

        asyncio.run(main())
        """,
        size="3m",
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
