"""Verdicts on the attachments that are stored here, after each was read again.

Pure: judges what the store and the nodes said. A damaged file has been set aside by then, the one
thing that the doctor does and does not only look at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshagent.core.model.file_names import display_name
from meshagent.diagnosis.finding import Finding, few, note, ok, problem
from meshagent.storage.blobs.errors import as_size
from meshagent.storage.blobs.verification import Audit

__all__ = ["Naming", "check_damaged", "check_lost", "check_store", "namings"]

FILES_EXPLAINED_MAX = 10  # a disk that dies takes more than that, and the rest is alike
HASH_CHARACTERS = 12  # tell any two files of a store apart


@dataclass(frozen=True, slots=True)
class Naming:
    """A message of an agent here that names a file."""

    agent: str
    ident: str
    name: str
    is_ours: bool  # it was sent from here


def namings(agent: str, messages: Iterable[Mapping[str, Any]]) -> dict[str, list[Naming]]:
    """What messages, as a node tells them, say of files; by the SHA-256 of each in hex."""
    found: dict[str, list[Naming]] = {}
    for message in messages:
        for each in message["attachments"]:
            naming = Naming(agent, message["id"], each["name"], message["from"] == agent)
            found.setdefault(each["sha256"], []).append(naming)
    return found


def check_store(audit: Audit) -> Iterable[Finding]:
    """Whether what is stored is what was stored."""
    for why in audit.unread[:FILES_EXPLAINED_MAX]:
        yield problem("files", why, "See who owns it and whether the disk can be read.")
    if audit.sound:
        files = "file is" if audit.sound == 1 else "files are"
        yield ok("files", f"{audit.sound} {files} whole, {as_size(audit.sound_bytes)} in all")
    elif not (audit.damaged or audit.unread):
        yield ok("files", "none is stored here")


def check_damaged(
    damaged: Sequence[bytes],
    named: Mapping[str, Sequence[Naming]],
    needed_by: Mapping[bytes, Sequence[str]],
    aside: Path,
) -> Iterable[Finding]:
    """What was damaged until now."""
    for sha256 in damaged[:FILES_EXPLAINED_MAX]:
        who = _called(sha256, named.get(sha256.hex(), ()))
        text = f"{who} is damaged on this disk. It has been moved to {aside}, and nobody gets it."
        yield problem("files", text, _advice(named.get(sha256.hex(), ()), needed_by[sha256]))
    rest = len(damaged) - FILES_EXPLAINED_MAX
    if rest > 0:
        text = f"{rest} more files are damaged, and have been moved to {aside}."
        yield problem("files", text, "The disk may be failing: make backups now.")


def check_lost(
    lost: Sequence[bytes],
    named: Mapping[str, Sequence[Naming]],
    needed_by: Mapping[bytes, Sequence[str]],
) -> Iterable[Finding]:
    """What was found damaged earlier, is needed, and has not come again."""
    for sha256 in [each for each in lost if needed_by[each]][:FILES_EXPLAINED_MAX]:
        who = _called(sha256, named.get(sha256.hex(), ()))
        text = f"{who} was damaged, and is not here again yet."
        yield note("files", text, _advice(named.get(sha256.hex(), ()), needed_by[sha256]))


def _called(sha256: bytes, named: Sequence[Naming]) -> str:
    short = f"{sha256.hex()[:HASH_CHARACTERS]}…"
    if not named:
        return f"The file {short}"
    where = few([f"{each.ident} of {each.agent}" for each in named])
    return f"{display_name(named[0].name)} ({short}, in {where})"


def _advice(named: Sequence[Naming], needed_by: Sequence[str]) -> str:
    ours = next((each for each in named if each.is_ours), None)
    if ours is not None:
        return (
            "Attach the same file to any message again: "
            "it takes the damaged one's place wherever that is named."
        )
    if named:
        return f"Get it again: meshagent fetch {named[0].ident} --as {named[0].agent}"
    if needed_by:
        return (
            f"{few(list(needed_by))} can tell which messages name it: start that agent with "
            "'meshagent join --as', and ask again."
        )
    return "No message here names it any more: there is nothing to do."
