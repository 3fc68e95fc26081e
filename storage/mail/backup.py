"""A copy of a running agent's database, and the way back from one.

Decides when a copy is good enough to stand in for the original. Never decides who may run:
whoever restores holds the agent's lock. Invariants: a file under the name of a backup is whole; a
restored database has an epoch of its own, so nobody takes its new messages for old ones.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from meshagent.errors import CorruptFile, MeshError, StorageError
from meshagent.storage.folders.files import (
    mapped_errors,
    remove_quietly,
    sync_file,
    sync_folder,
    temporary_beside,
    write_new,
)
from meshagent.storage.log.commit_log import LOG_ENDING

if TYPE_CHECKING:
    from meshagent.storage.mail.database import Database

__all__ = ["Snapshot", "restore_database"]

STEP_PAGES = 256  # a MiB, a few ms: then a commit that waits has its turn
DAMAGE_NAMED_MAX = 5
_A_BACKUP = "Give a file that 'meshagent backup' has written; nothing was changed."
COMPANIONS = ("-wal", "-shm", "-journal", LOG_ENDING)


class Snapshot:
    """A copy in the making. It belongs to the thread of its database."""

    def __init__(self, database: Database, target: Path) -> None:
        import apsw

        self._database, self._target = database, target
        self._temporary = temporary_beside(target)
        with mapped_errors(target, "write"):
            write_new(self._temporary, b"")
        database.snapshots.add(self)
        with database.mapped("back up to", target):
            self._copy = apsw.Connection(str(self._temporary))
            # Until it is renamed nobody relies on it: one sync at the end is enough.
            self._copy.pragma("journal_mode", "OFF")
            self._copy.pragma("synchronous", "OFF")
            # What this connection writes meanwhile goes into the copy too, so it is never behind.
            self._backup = self._copy.backup("main", database.connected(), "main")

    def step(self) -> bool:
        """Copy some pages; whether that was all."""
        self._database.log.fold_all(alone=True)  # what came meanwhile is to be in it
        with self._database.mapped("back up to", self._target):
            return bool(self._backup.step(STEP_PAGES))

    def finish(self) -> None:
        """Put the copy in its place, durably."""
        with self._database.mapped("back up to", self._target):
            self._backup.finish()
            self._database.note_stopped(self._copy)  # it needs no commit log
            self._copy.pragma("journal_mode", "DELETE")  # one file, without companions
            self._copy.close()
        with mapped_errors(self._target, "write"):
            sync_file(self._temporary)
            os.replace(self._temporary, self._target)
            sync_folder(self._target.parent)
        self._database.snapshots.discard(self)

    def abandon(self) -> None:
        """Leave no trace; does nothing when it is finished."""
        if self not in self._database.snapshots:
            return
        self._database.snapshots.discard(self)
        with contextlib.suppress(Exception):
            self._backup.close(True)
            self._copy.close(True)
        for ending in ("", *COMPANIONS):
            remove_quietly(self._temporary.with_name(self._temporary.name + ending))


def restore_database(backup: Path, database: Path) -> None:
    """Put a backup in the place of an agent's database; the agent must not be running.

    Everything pending in it gets new numbers under a new epoch. What is there already stays until
    the backup has been found good.
    """
    if not backup.is_file():
        raise StorageError(f"The file {backup} does not exist.", hint=_A_BACKUP, path=str(backup))
    temporary = temporary_beside(database)
    try:
        with mapped_errors(backup, "read"):
            write_new(temporary, b"")
            shutil.copyfile(backup, temporary)
        _renew(temporary, backup, _last_run(database))
        with mapped_errors(database, "restore"):
            sync_file(temporary)
            # The log of the old file would be taken for the new one's.
            for ending in COMPANIONS:
                database.with_name(database.name + ending).unlink(missing_ok=True)
            os.replace(temporary, database)
            sync_folder(database.parent)
    finally:
        for ending in ("", *COMPANIONS):
            remove_quietly(temporary.with_name(temporary.name + ending))


def _renew(copy: Path, backup: Path, run: int) -> None:
    """Check the copy, and make a database of its own of it."""
    from meshagent.storage.mail.database import Database

    database = Database(copy)
    try:
        database.open(create=False)
        problems = database.integrity() + database.damaged()
        if problems:
            raise CorruptFile(
                f"The backup {backup} is damaged: {'; '.join(problems[:DAMAGE_NAMED_MAX])}.",
                hint="Restore an older one; nothing was changed.",
                path=str(backup),
            )
        with database.repair() as connection:
            database.mail.start_over(connection)
        database.next_run(run)
    except MeshError as error:
        # The copy's name means nothing to a person.
        text = error.message.replace(str(copy), str(backup))
        hint = error.hint if error.data.get("sqlite") is None else _A_BACKUP
        raise type(error)(text, hint=hint, **{**error.data, "path": str(backup)}) from error
    finally:
        database.close()


def _last_run(path: Path) -> int:
    """The run of the database that is replaced, whose log is emptied into it; 0 when unknown."""
    from meshagent.storage.mail.database import Database

    if not path.exists():
        return 0
    database = Database(path)
    try:
        database.open(create=False)
        return int(database.meta().get("run", "0")) + 1
    except (MeshError, ValueError):
        return 0  # it is beyond help, which may be why somebody restores
    finally:
        with contextlib.suppress(MeshError):
            database.close()
