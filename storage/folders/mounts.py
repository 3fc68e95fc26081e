"""Is a folder on a network filesystem? There, file locks and shared memory can't be trusted.

Pure, except for `mounted_filesystem`, which reads the system's table of mounts. Invariant: what
is not known to be a network filesystem is taken for a local one.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["NETWORK_FILESYSTEMS", "filesystem_of", "is_network_filesystem", "mounted_filesystem"]

NETWORK_FILESYSTEMS = frozenset(
    {"9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gfs2", "glusterfs", "gpfs"}
    | {"lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "smb2", "smb3", "smbfs"}
    | {"fuse.ceph-fuse", "fuse.davfs", "fuse.gcsfuse", "fuse.glusterfs", "fuse.gvfsd-fuse"}
    | {"fuse.rclone", "fuse.s3fs", "fuse.smbnetfs", "fuse.sshfs"}
)
MOUNT_TABLE = "/proc/self/mountinfo"


def is_network_filesystem(kind: str) -> bool:
    """Whether a filesystem of this kind keeps its files on another machine."""
    return kind.lower() in NETWORK_FILESYSTEMS


def mounted_filesystem(path: Path) -> str:
    """The kind of filesystem that holds `path`; empty where the system has no such table."""
    try:
        with open(MOUNT_TABLE, encoding="utf-8", errors="surrogateescape") as table:
            return filesystem_of(os.path.realpath(path), table.read())
    except OSError:
        return ""


def filesystem_of(path: str, mountinfo: str) -> str:
    """The kind of filesystem at an absolute path, from the text of /proc/self/mountinfo."""
    longest, kind = -1, ""
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 5:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # Of two mounts on one point the later one covers the earlier.
        if inside and len(point) >= longest:
            longest, kind = len(point), after.split(" ", 1)[0]
    return kind
