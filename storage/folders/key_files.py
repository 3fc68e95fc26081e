"""Key files: one line, `<kind>:` and 32 bytes in hex, readable by their owner only.

Decides whether a key file may be trusted. Never tells what is in it: no error, log line or repr
made here holds any part of a key. Invariant: a key that is returned is exactly 32 bytes long.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from pathlib import Path

from meshagent.errors import CorruptFile, StorageError
from meshagent.storage.folders.files import read_bounded

__all__ = ["KEY_BYTES", "format_key", "read_key"]

KEY_BYTES = 32
KEY_FILE_BYTES_MAX = 1024  # one line of about 80; the rest is room for a stray line ending


def format_key(kind: str, key: bytes) -> bytes:
    """The content of a key file."""
    assert len(key) == KEY_BYTES, "keys and secrets are 32 bytes"
    return f"{kind}:{key.hex()}\n".encode("ascii")


def read_key(path: Path, kind: str, repair: str) -> tuple[bytes, list[str]]:
    """The key, and a warning for each thing that was put right; `repair` is the hint on damage."""
    data = read_bounded(path, KEY_FILE_BYTES_MAX, follow_links=False)
    warnings = _close_to_others(path)
    match = re.fullmatch(rb"([a-z0-9]+):([0-9a-f]{%d})\r?\n?" % (2 * KEY_BYTES), data)
    if match is None or match[1].decode("ascii") != kind:
        raise CorruptFile(
            f"The key file {path} is damaged: {_damage(data, kind)}.", hint=repair, path=str(path)
        )
    return bytes.fromhex(match[2].decode("ascii")), warnings


def _damage(data: bytes, kind: str) -> str:
    """Why this is no key file, without a byte of what it holds."""
    if not data.strip():
        return "it is empty"
    if not data.startswith(f"{kind}:".encode("ascii")):
        return f"it does not begin with '{kind}:'"
    return f"what follows '{kind}:' is not {2 * KEY_BYTES} hexadecimal digits on one line"


def _close_to_others(path: Path) -> list[str]:
    """Tighten the mode to 0600 where it is wider; refuse a file that we can't tighten."""
    if sys.platform == "win32":  # the folder's access list decides there
        return []
    status = path.lstat()
    if not stat.S_IMODE(status.st_mode) & 0o077:
        return []
    ours = status.st_uid == os.geteuid()
    try:
        path.chmod(0o600)
    except OSError:
        if not ours:
            raise StorageError(
                f"The key file {path} can be read by other users and belongs to one of them.",
                hint="Use a mesh folder of your own: 'meshagent init', or --dir.",
                path=str(path),
            ) from None
    if stat.S_IMODE(path.lstat().st_mode) & 0o077:
        return [f"{path} can be read by other users, and this filesystem keeps no modes."]
    return [f"{path} could be read by other users; it is now closed to them (mode 0600)."]
