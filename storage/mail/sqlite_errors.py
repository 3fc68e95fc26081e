"""What SQLite's errors mean to a person: the one place where apsw's become ours.

Never touches a database. Invariant: every error names the file, the reason and the next step.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING

from meshagent.errors import CorruptFile, LimitReached, MeshError, StorageError

if TYPE_CHECKING:
    import apsw

__all__ = ["MOVE_AWAY", "database_error", "is_about_a_row"]

MOVE_AWAY = (
    "Stop the node, move the file and those beside it whose names begin like its own away, and "
    "join again: the agent keeps its identity. Restore the file from a backup if you have one."
)
_FREE_SPACE = "Free some space; it goes on by itself."

# apsw's exception -> which error it is here, the reason and the next step for a person.
_MEANINGS: dict[str, tuple[type[MeshError], str, str]] = {
    "BusyError": (StorageError, "another program keeps it locked", "Close that program."),
    "CantOpenError": (StorageError, "it can't be opened", "Check the folder and its permissions."),
    "CorruptError": (CorruptFile, "the file is damaged", MOVE_AWAY),
    "FullError": (LimitReached, "the disk is full", _FREE_SPACE),
    "IOError": (StorageError, "the disk failed", "Check the disk; the system log says more."),
    "NoMemError": (LimitReached, "the memory is used up", "Close some programs."),
    "NotADBError": (CorruptFile, "the file is not a database", MOVE_AWAY),
    "PermissionsError": (StorageError, "permission is denied", "Check the file's permissions."),
    "ReadOnlyError": (StorageError, "the file or its disk is read-only", "Make it writable."),
    "TooBigError": (LimitReached, "a row is too large", "Send it as an attachment."),
}

# SQLite calls these an I/O error: a full disk when it meets it in the log's index, a read-only one
# when the disk became so under an open file.
_BY_ERRNO = {
    errno.ENOSPC: "FullError",
    errno.EDQUOT: "FullError",
    errno.EROFS: "ReadOnlyError",
}


def database_error(error: apsw.Error, path: Path, doing: str, system_errno: int = 0) -> MeshError:
    """What a failed statement means."""
    name = type(error).__name__
    if name == "IOError":
        name = _BY_ERRNO.get(system_errno, name)
    fallback = (StorageError, str(error), "Run 'meshagent doctor'.")
    kind, reason, hint = _MEANINGS.get(name, fallback)
    return kind(f"Can't {doing} {path}: {reason}.", hint=hint, path=str(path), sqlite=name)


def is_about_a_row(error: Exception) -> bool:
    """Whether it comes from what a row says, and not from the disk."""
    import apsw

    if isinstance(error, MeshError):
        return error.data.get("sqlite") == apsw.ConstraintError.__name__
    return isinstance(error, apsw.ConstraintError) or not isinstance(error, apsw.Error)
