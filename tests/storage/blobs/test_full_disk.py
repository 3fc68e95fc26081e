"""The blob store on a disk that is really full: a tmpfs of our own, in a mount namespace."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.namespaces

START = """
import io, os, sys
from pathlib import Path
import pytest
from storage.blobs.blob_files import *
from meshagent.storage.blobs import quota as room
from meshagent.storage.blobs.store import BlobStore, CHUNK_BYTES
from meshagent.storage.blobs.errors import DiskFull

disk = Path(sys.argv[1])
ballast = disk / "ballast"
store = BlobStore(disk / "blobs")
MIB = 1024 * 1024

def use_up(leave):
    ballast.unlink(missing_ok=True)
    stat = os.statvfs(disk)
    ballast.write_bytes(bytes(stat.f_bavail * stat.f_frsize - leave))
"""


def on_small_disk(folder: Path, script: str, size: str) -> None:
    code = START + textwrap.dedent(script)
    mount = f'mount -t tmpfs -o size={size} none "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "-m", "sh", "-c", mount, "sh", str(folder), sys.executable, code]
    result = subprocess.run(
        command, cwd="/", capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


def test_a_file_that_does_not_fit_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    on_small_disk(
        tmp_path,
        """
        room.MARGIN_BYTES = 0  # so that the disk itself says no, in the middle of a write
        use_up(leave=3 * MIB)
        class Endless(io.RawIOBase):
            def read(self, size): return bytes(size)
        real, room.free_bytes = room.free_bytes, lambda path: 2**60
        with pytest.raises(DiskFull, match="disk is full"):
            store.put(Endless())
        assert files_in(store.root) == []
        with pytest.raises(DiskFull) as caught:
            store.begin(sha(b""), 4 * MIB)
        assert caught.value.data["wanted"] == 4 * MIB
        assert files_in(store.root) == []
        room.free_bytes = real
        with pytest.raises(DiskFull):
            store.put(Endless())
        assert files_in(store.root) == []
        data = noise(2 * MIB)
        assert store.put(io.BytesIO(data)).sha256 == sha(data)
        """,
        "8m",
    )


def test_a_margin_stays_free_for_the_messages(tmp_path: Path) -> None:
    on_small_disk(
        tmp_path,
        """
        with pytest.raises(DiskFull) as caught:
            store.begin(bytes(32), 10 * MIB)
        assert caught.value.data["margin"] == room.MARGIN_BYTES
        with store.begin(bytes(32), 5 * MIB):
            free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
            assert free >= room.MARGIN_BYTES
        """,
        "40m",
    )


def test_what_was_reserved_arrives_on_a_disk_that_others_fill(tmp_path: Path) -> None:
    on_small_disk(
        tmp_path,
        """
        room.MARGIN_BYTES = 0
        data = noise(3 * MIB)
        partial = store.begin(sha(data), len(data))
        partial.write(data[:CHUNK_BYTES])
        use_up(leave=64 * 1024)  # the name needs a folder
        partial.write(data[CHUNK_BYTES : 2 * CHUNK_BYTES])
        partial.close()
        with store.begin(sha(data), len(data)) as partial:  # nothing more is needed
            assert partial.received == 2 * CHUNK_BYTES
            partial.write(data[2 * CHUNK_BYTES :])
            partial.finish()
        assert read_all(store, sha(data)) == data
        """,
        "8m",
    )


def test_a_transfer_goes_on_by_itself_when_space_returns(tmp_path: Path) -> None:
    on_small_disk(
        tmp_path,
        """
        room.MARGIN_BYTES = 0
        data = noise(3 * MIB)
        use_up(leave=0)
        for _ in range(3):
            with pytest.raises(DiskFull):
                store.begin(sha(data), len(data))
        use_up(leave=2 * MIB)
        for _ in range(3):
            with pytest.raises(DiskFull):
                store.begin(sha(data), len(data))
        ballast.unlink()
        with store.begin(sha(data), len(data)) as partial:
            partial.write(data)
            partial.finish()
        assert read_all(store, sha(data)) == data
        """,
        "8m",
    )
