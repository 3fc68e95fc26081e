"""Verdicts on mail that was damaged on disk: which message it is, and what to do about it.

A node that runs says what it has set aside. The files of an agent that does not run are copied,
and the copy is opened as the next join would open them. Invariant: the originals stay as they are.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from meshagent.diagnosis.finding import Finding, few, note, problem
from meshagent.errors import MeshError
from meshagent.node.damage_watch import damage_text
from meshagent.node.views import damage_view
from meshagent.storage.folders.agent_lock import AgentLock
from meshagent.storage.folders.agents import AgentFolder
from meshagent.storage.log.commit_log import LOG_ENDING
from meshagent.storage.mail.database import Database

__all__ = ["check_damage", "check_resting", "damage_at_rest"]

NAMED_MAX = 10  # of one agent: who has more has another disk to find
COPY_BYTES_MAX = 64 * 1024 * 1024  # of one agent's files: a second, and room in a temporary folder
ALL_S = 3.0  # for all agents together

_SEE = "'meshagent outbox' and 'meshagent log' show what is there."
_HINTS = {
    "outbox": "It is lost, unless the recipient has it already. Send it again.",
    "inbox": "What it said is lost here. Ask its sender to send it again.",
    "log": f"If you sent it, send it again; if it came, ask its sender for it. {_SEE}",
}
_UNNAMED_COMMIT = f"Nobody can tell which messages that was. {_SEE} Send again what is missing."
_OTHER_ROW = "It is learned again by itself, as soon as its peer is met."


def check_damage(agent: str, damage: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    """What an agent's store has set aside, the newest first."""
    for each in damage[: -NAMED_MAX - 1 : -1]:
        hint = _HINTS.get(each["origin"], _OTHER_ROW)
        if each["origin"] == "log" and not each["message_id"]:
            hint = _UNNAMED_COMMIT
        yield problem("mail", f"{agent}: {damage_text(each)}. Found at {each['found_at']}.", hint)
    if (rest := len(damage) - NAMED_MAX) > 0:
        yield problem("mail", f"{agent}: {rest} more were damaged on disk before.", _SEE)


def check_resting(folders: Iterable[AgentFolder]) -> Iterator[Finding]:
    """The same for agents that do not run."""
    until = time.monotonic() + ALL_S
    left_out: list[str] = []
    for folder in folders:
        if not folder.database.exists():
            continue
        if time.monotonic() > until or _size(folder.database) > COPY_BYTES_MAX:
            left_out.append(folder.agent)
            continue
        try:
            yield from check_damage(folder.agent, damage_at_rest(folder))
        except MeshError as error:
            yield problem("mail", f"{folder.agent}: {error.message}", error.hint)
    if left_out:
        yield note(
            "mail",
            f"The mail of {few(left_out)} was not looked at: that would take too long.",
            "Join as that agent; then its node says what is damaged.",
        )


def damage_at_rest(folder: AgentFolder) -> list[dict[str, str]]:
    """What is damaged in the files of an agent that does not run; nothing when it starts just now.

    Raises MeshError when the database can't be opened.
    """
    with tempfile.TemporaryDirectory(prefix="meshagent-") as temporary:
        copy = Path(temporary) / folder.database.name
        for part in _parts(folder.database):
            shutil.copyfile(part, copy.with_name(part.name))
        if AgentLock(folder.lock_file).holder() is not None:
            return []
        try:
            return _damage_in(copy)
        except MeshError as error:
            text = error.message.replace(str(copy), str(folder.database))
            raise type(error)(text, hint=error.hint, **error.data) from error


def _damage_in(copy: Path) -> list[dict[str, str]]:
    database = Database(copy)
    try:
        database.open(create=False)
        if database.damaged():  # whoever reads it next finds out, and names it
            database.peers()
            database.reader.start()
            database.reader.read_out("TRUE", ())
            database.reader.read_in("TRUE", ())
        return [damage_view(each) for each in database.damage()]
    finally:
        database.close()


def _parts(database: Path) -> list[Path]:
    named = [database.with_name(database.name + each) for each in ("", "-wal", LOG_ENDING)]
    return [each for each in named if each.exists()]


def _size(database: Path) -> int:
    return sum(each.stat().st_size for each in _parts(database))
