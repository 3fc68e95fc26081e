"""What an attachment may be called: in a list, and as a file that a person saves.

A sender chooses the name, so it is text and never a path. Decides what of it is shown and what a
file may be named. Never touches a disk. Invariant: `display_name` fits on one line of a terminal
and moves nothing on it; `file_name` is one component of a path on every system we run on.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

__all__ = [
    "DISPLAY_CHARACTERS_MAX",
    "FALLBACK_NAME",
    "FILE_BYTES_MAX",
    "display_name",
    "file_name",
    "one_line",
]

DISPLAY_CHARACTERS_MAX = 120  # a line of a wide terminal
FILE_BYTES_MAX = 200  # most filesystems end at 255; this leaves room for "(2)" and a temporary name
EXTENSION_BYTES_MAX = 20  # beyond it, what follows the dot is not an extension but text
RAW_CHARACTERS_MAX = 4_096  # more is not looked at: a name of a megabyte costs nothing
MARKS_MAX = 3  # combining marks upon one letter; living languages need two or three
FALLBACK_NAME = "attachment"

# They count as printable, and nobody can see them: fillers, blanks, joiners, variation selectors.
_INVISIBLE = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0"
    + "".join(map(chr, range(0xFE00, 0xFE10)))
    + "".join(map(chr, range(0xE0100, 0xE01F0)))
)
_NOT_IN_A_FILE_NAME = frozenset(
    ':<>|?*"\ufffd'
    "\u2024\u2025\u2026\ufe52\uff0e"  # look like dots
    "\u2044\u2215\u29f8\uff0f\u2571\u27cb"  # look like a slash
    "\u2216\u29f5\u29f9\ufe68\uff3c\u2572\u27cd"  # look like a backslash
    "\u02d0\u2236\ua789\ufe13\ufe55\uff1a"  # look like a colon
)
# Windows opens a device by these names, in any folder and with any extension.
_DEVICES = frozenset(
    ["con", "prn", "aux", "nul", "conin$", "conout$", "clock$"]
    + [f"{port}{digit}" for port in ("com", "lpt") for digit in "0123456789\u00b9\u00b2\u00b3"]
)


def display_name(raw: str) -> str:
    """The name as a list or a terminal may show it: one line, visible, never empty."""
    name = _visible(raw)
    if len(name) > DISPLAY_CHARACTERS_MAX:
        stem, extension = _split(name)
        room = DISPLAY_CHARACTERS_MAX - len(extension) - 1
        name = f"{stem[:room].rstrip()}\u2026{extension}"
    return name or FALLBACK_NAME


def one_line(raw: str) -> str:
    """What another member says, as a terminal may show it; a word when nothing is left of it."""
    return _visible(raw) or "?"


def file_name(raw: str, taken: Iterable[str] = ()) -> str:
    """The name as a single component of a path, unlike all that are `taken` in that folder."""
    name = _shortened(_component(raw))
    used = {_folded(each) for each in taken}
    candidate, number = name, 1
    while _folded(candidate) in used:
        number += 1
        candidate = _shortened(name, f" ({number})")
    return candidate


def _visible(raw: str) -> str:
    """Without what can't be seen, with a mark where something was that must not be shown."""
    text = unicodedata.normalize("NFC", "".join(map(_shown, raw[:RAW_CHARACTERS_MAX])))
    kept: list[str] = []
    marks = MARKS_MAX  # a mark in front would sit on what the terminal printed before the name
    for character in text:
        marks = marks + 1 if unicodedata.category(character) in ("Mn", "Me") else 0
        if marks <= MARKS_MAX:
            kept.append(character)
    return " ".join("".join(kept).split())


def _shown(character: str) -> str:
    if character in _INVISIBLE:
        return ""
    if character.isprintable():
        return character
    if character.isspace():
        return " "
    # A format character only ever changes how its neighbours look: zero width, other direction.
    return "" if unicodedata.category(character) == "Cf" else "\ufffd"


def _component(raw: str) -> str:
    """The last part of what looks like a path, with nothing that a filesystem or a shell minds."""
    parts = [part for part in _visible(raw).replace("\\", "/").split("/") if part.strip(". ")]
    last = parts[-1] if parts else ""
    return _guarded("".join("_" if each in _NOT_IN_A_FILE_NAME else each for each in last))


def _guarded(name: str) -> str:
    """Neither hidden, nor an option, nor a device, nor ending in what Windows cuts off."""
    name = name.lstrip(".- ").rstrip(". ")
    if name.partition(".")[0].rstrip().casefold() in _DEVICES:
        name = f"_{name}"
    return name or FALLBACK_NAME


def _shortened(name: str, number: str = "") -> str:
    """Within the bound, by cutting the stem; `number` goes in front of the extension."""
    stem, extension = _split(name)
    room = FILE_BYTES_MAX - len((number + extension).encode())
    return _cut(stem, room).rstrip(". ") + number + extension


def _cut(text: str, size: int) -> str:
    return text.encode()[:size].decode(errors="ignore")


def _split(name: str) -> tuple[str, str]:
    """The stem and the extension with its dot: `a.tar.gz` is `a` and `.tar.gz`."""
    stem, dot, ending = name.rpartition(".")
    extension = dot + ending
    if not stem or len(extension.encode()) > EXTENSION_BYTES_MAX or " " in extension:
        return name, ""
    if stem.lower().endswith(".tar") and len(stem) > len(".tar"):
        stem, extension = stem[: -len(".tar")], stem[-len(".tar") :] + extension
    return stem, extension


def _folded(name: str) -> str:
    """Equal for names that a filesystem which ignores case, or accents' spelling, holds equal."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
