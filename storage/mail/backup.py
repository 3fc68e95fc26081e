"""A copy of a running agent's database, and the way back from one.

Decides when a copy is good enough to stand in for the original. Never decides who may run:
whoever restores holds the agent's lock. Invariants: a file under the name of a backup is whole; a
database is restored for the agent that made it, and has a new epoch, so nobody takes its new
messages for old ones; whenever a restore is cut off, the old database is whole, in its place or in
the folder that keeps what was replaced.

    a copy is made, checked and numbered anew │ it gets its folder: decided │ old files go there │
    the new one takes their place

What is decided and was cut off is finished before the database is opened again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from meshagent.errors import CorruptFile, MeshError, StorageError
from meshagent.storage.folders.files import (
    mapped_errors,
    place_folder,
    remove_quietly,
    sync_file,
    sync_folder,
    temporary_beside,
    write_new,
)
from meshagent.storage.log.commit_log import LOG_ENDING
from meshagent.storage.mail.schema import MetaRow

if TYPE_CHECKING:
    from meshagent.storage.mail.database import Database

__all__ = ["Snapshot", "claim", "finish_restore", "restore_database", "unfinished_restores"]

STEP_PAGES = 256  # a MiB, a few ms: then a commit that waits has its turn
DAMAGE_NAMED_MAX = 5
_A_BACKUP = "Give a file that 'meshagent backup' has written; nothing was changed."
COMPANIONS = ("-wal", "-shm", "-journal", LOG_ENDING)
REPLACED = "-replaced-"  # then the time: the folder of a database that a backup has replaced
RESTORED = "restored.db"  # in that folder: what still has to take the place of the old one
_OWNER = "agent"


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
            remove_quietly(_beside(self._temporary, ending))


def claim(database: Database, agent: str) -> None:
    """Write down whose database this is; raise when it is another agent's."""
    owner = database.folded().meta().get(_OWNER, "")
    if owner and owner != agent:
        raise StorageError(
            f"The database {database.path} belongs to {owner}, and this agent is {agent}.",
            hint=f"Move it to the folder of {owner}; this agent then begins with an empty one.",
            path=str(database.path),
        )
    if not owner:
        database.write([MetaRow(_OWNER, agent)])


def restore_database(backup: Path, database: Path, agent: str = "") -> Path | None:
    """Put a backup in the place of this agent's database, which must not be open.

    Everything pending in it gets new numbers under a new epoch. Returns the folder that keeps what
    was there before; None when nothing was.
    """
    if not backup.is_file():
        raise StorageError(f"The file {backup} does not exist.", hint=_A_BACKUP, path=str(backup))
    temporary = temporary_beside(database)
    try:
        with mapped_errors(backup, "read"):
            for ending in ("", "-wal", LOG_ENDING):  # what was replaced may not have been closed
                if (part := _beside(backup, ending)).exists():
                    write_new(_beside(temporary, ending), b"")
                    shutil.copyfile(part, _beside(temporary, ending))
        _renew(temporary, backup, agent, _last_run(database))
        with mapped_errors(database, "restore"):
            sync_file(temporary)
        kept = _free_name(database)
        place_folder(kept, lambda folder: os.replace(temporary, folder / RESTORED))
    finally:
        for ending in ("", *COMPANIONS):
            remove_quietly(_beside(temporary, ending))
    finish_restore(database)
    return kept if kept.exists() else None


def unfinished_restores(database: Path) -> list[Path]:
    """Databases that were to take the place of this one when something cut it off."""
    return sorted(database.parent.glob(f"{database.name}{REPLACED}*/{RESTORED}"))


def finish_restore(database: Path) -> None:
    """Put a restored database in its place if one waits for that, and remove what a restore that
    was cut off before it was decided has left."""
    for restored in unfinished_restores(database):
        kept = restored.parent
        with mapped_errors(database, "restore"):
            for old in (_beside(database, ending) for ending in (*COMPANIONS, "")):
                if old.exists():
                    os.replace(old, kept / old.name)
            # The new one must not meet the log of the old one.
            sync_folder(kept)
            sync_folder(database.parent)
            os.replace(restored, database)
            sync_folder(database.parent)
            if not any(kept.iterdir()):
                kept.rmdir()
    for left in database.parent.glob(f".{database.name}*.tmp*"):
        remove_quietly(left)
        shutil.rmtree(left, ignore_errors=True)


def _beside(database: Path, ending: str) -> Path:
    return database.with_name(database.name + ending)


def _free_name(database: Path) -> Path:
    now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    name, count = _beside(database, f"{REPLACED}{now}"), 1
    while name.exists():
        count += 1
        name = _beside(database, f"{REPLACED}{now}-{count}")
    return name


def _renew(copy: Path, backup: Path, agent: str, run: int) -> None:
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
        _require_owner(database.meta().get(_OWNER, ""), agent, backup)
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


def _require_owner(owner: str, agent: str, backup: Path) -> None:
    if owner == agent:
        return
    named = f"belongs to {owner}" if owner else "does not say which agent it belongs to"
    raise StorageError(
        f"The backup {backup} {named}, and this agent is {agent}.",
        hint=f"Give a backup of this agent, or use --as {owner or 'AGENT'}; nothing was changed.",
        path=str(backup),
    )


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
