"""Which filesystem holds a path: a pure function and its table."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshagent.storage.folders.mounts import (
    filesystem_of,
    is_network_filesystem,
    mounted_filesystem,
)

MOUNTS = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:50 / /home rw,relatime shared:5 - nfs4 server:/home rw,vers=4.2
31 30 0:51 / /home/ann/local rw - btrfs /dev/sdb1 rw
32 22 0:52 / /mnt/my\040share rw shared:7 master:3 - cifs //nas/x rw
33 22 0:53 / /mnt/c rw - 9p C:\134 rw
34 22 0:54 / /mnt/ssh rw - fuse.sshfs host:/ rw
35 22 0:55 / /srv rw - nfs server:/srv rw
36 35 0:56 / /srv rw - xfs /dev/sdc1 rw
broken line
"""

CASES = [
    ("/", "ext4"),
    ("/work/mesh", "ext4"),
    ("/homework", "ext4"),
    ("/home", "nfs4"),
    ("/home/ann/project", "nfs4"),
    ("/home/ann/local", "btrfs"),
    ("/home/ann/local/project", "btrfs"),
    ("/mnt/my share/project", "cifs"),
    ("/mnt/c/Users", "9p"),
    ("/mnt/ssh/x", "fuse.sshfs"),
    ("/srv/x", "xfs"),
]


@pytest.mark.parametrize(("path", "kind"), CASES)
def test_the_innermost_mount_tells_the_kind(path: str, kind: str) -> None:
    assert filesystem_of(path, MOUNTS) == kind


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "CIFS"])
def test_network_filesystems_are_known(kind: str) -> None:
    assert is_network_filesystem(kind)


@pytest.mark.parametrize("kind", ["", "ext4", "btrfs", "xfs", "tmpfs", "overlay", "fuse.bindfs"])
def test_local_and_unknown_filesystems_are_allowed(kind: str) -> None:
    assert not is_network_filesystem(kind)


def test_this_very_folder_is_found_in_the_real_table(tmp_path: Path) -> None:
    if not Path("/proc/self/mountinfo").exists():
        pytest.skip("this system has no table of mounts")
    assert mounted_filesystem(tmp_path)
