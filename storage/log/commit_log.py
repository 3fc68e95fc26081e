"""What was committed and does not stand in the tables yet.

Every commit is appended to one file, which is the least that a disk can make durable. Later it is
folded into the tables, where it can be found: many commits at once, in steps, in a quiet moment or
before a question is answered. Never knows what a row means, nor what the tables are: `Tables` is
all it asks of them. Invariants: commits are folded once and in their order; one step does a bounded
amount of work; the file is begun anew only when the tables hold all of it durably.

The file is never full for long: what waits is kept smaller than the room that is left, so a flood
folds twice what it appends from the middle of the file on, and finds nothing waiting at its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from meshagent.storage.folders.files import mapped_errors, remove_quietly
from meshagent.storage.log.log_file import Commit, LogFile

__all__ = ["LOG_ENDING", "CommitLog", "Tables"]

LOG_ENDING = "-commits"  # of the file's name, behind the database's
FOLD_BYTES = 256 * 1024  # at a time: some ms, then a commit that waits has its turn
_new = tuple.__new__  # a named tuple's own way takes twice as long


class Tables(Protocol):
    """Where commits go."""

    def fold(self, rows: Sequence[Any], position: int) -> None:
        """Write these rows and that all up to this commit is here, or nothing; need not be
        durable."""

    def make_durable(self) -> None:
        """All that was written is on the disk on return; raises MeshError when it may not be."""


class _Entry(NamedTuple):
    """One commit."""

    position: int
    size: int
    rows: Sequence[Any]


class CommitLog:
    """The commits of one database that wait to be folded. Every method may raise MeshError."""

    def __init__(self, path: Path, tables: Tables) -> None:
        self._file = LogFile(path)
        self._tables = tables
        self.tag = b""
        """Of its commits: others in the file are not this database's."""
        self.position = 0
        """Of the last commit."""
        self._waiting: deque[_Entry] = deque()
        self._gone = 0
        """How many have left it since it was made."""
        self.size = 0
        """Of what waits, in bytes."""
        self.between: Callable[[], None] = lambda: None
        """Called between the steps of a long fold: commits that wait have their turn."""

    def open(self) -> bool:
        """Open or create the file; whether it was there. Then `read`, then `begin`."""
        with mapped_errors(self._file.path, "open"):
            return self._file.open()

    def read(self, tag: bytes | None) -> list[Commit]:
        """The commits with this tag in the file, whole or not; without a tag, whosever they are."""
        with mapped_errors(self._file.path, "read"):
            return self._file.read(tag)

    def begin(self, tag: bytes, position: int) -> None:
        """The next commit gets this tag, and the position behind this one. Nothing waits."""
        self.tag, self.position = tag, position
        self._waiting.clear()
        self.size = 0

    def keep(self, commit: Commit, rows: Sequence[Any]) -> None:
        """One that is in the file waits to be folded."""
        self.position = commit.position
        self._wait(len(commit.content), rows)

    def close(self, *, remove: bool) -> None:
        """Let go of the file, and remove it when nothing of it is needed; does nothing when not
        open."""
        self._file.close()
        if remove:
            remove_quietly(self._file.path)

    @property
    def used(self) -> int:
        """How much of the file was written since it was begun anew."""
        return self._file.used

    def append(self, content: bytes, rows: Sequence[Any]) -> None:
        """Durable on return, and waits to be folded; when it raises, it is not there."""
        if not self._file.has_room(len(content), self.size):
            self._make_room(len(content))
        with mapped_errors(self._file.path, "write to"):
            self._file.append(self.tag, self.position + 1, content)
        self.position += 1
        self._wait(len(content), rows)

    def _make_room(self, size: int) -> None:
        while self._waiting and not self._file.has_room(size, self.size):
            self.fold_some()
        if self._file.used and not self._file.has_room(size):
            self.rewind()

    def rewind(self) -> None:
        """Begin the file anew, once the tables have all of it; nothing waits."""
        assert not self._waiting, "what waits is nowhere else"
        self._tables.make_durable()
        with mapped_errors(self._file.path, "write to"):
            self._file.rewind()

    def rows_waiting(self) -> list[Any]:
        """Of all commits that are not folded, in order."""
        return [row for entry in self._waiting for row in entry.rows]

    def fold_all(self, *, alone: bool = False) -> None:
        """Afterwards the tables hold all that was committed before.

        `alone`: nothing comes between, and nothing waits then.
        """
        last = self._gone + len(self._waiting)
        while self._gone < last:
            self.fold_some()
            if self._gone < last and not alone:
                self.between()  # which may fold some of it by itself

    def fold_some(self) -> None:
        """Bring the oldest commits into the tables."""
        entries: list[_Entry] = []
        size = 0
        for entry in self._waiting:
            entries.append(entry)
            size += entry.size
            if size >= FOLD_BYTES:
                break
        if not entries:
            return
        self._tables.fold([row for entry in entries for row in entry.rows], entries[-1].position)
        for _ in entries:
            self._waiting.popleft()
        self._gone += len(entries)
        self.size -= size

    def _wait(self, size: int, rows: Sequence[Any]) -> None:
        self._waiting.append(_new(_Entry, (self.position, size, rows)))
        self.size += size
