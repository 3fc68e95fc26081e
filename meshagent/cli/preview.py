"""Pictures in the terminal, where it is known to show them.

Decides whether a terminal can show a picture and in which words it is told; pure but for reading
the blob. Invariant: what is printed is a fixed head, numbers of ours and base64, so no byte of a
picture can drive the terminal; without a terminal that is known to understand it, nothing is.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from meshagent.errors import MeshError
from meshagent.storage.blobs.image_sizes import NO_PICTURE, dimensions

if TYPE_CHECKING:
    from meshagent.storage.blobs.store import BlobStore

__all__ = ["Graphics", "graphics_of", "picture_text", "previews"]

FILE_BYTES_MAX = 8 * 1024 * 1024  # a terminal far away over ssh gets it all
PIXELS_MAX = 50_000_000  # the terminal unpacks it: a small file may hold a huge white sheet
PICTURES_MAX = 4  # of one message
COLUMNS_MAX, ROWS_MAX = 40, 14
CELL_WIDTH, CELL_HEIGHT = 8, 16  # pixels of a character, about; smaller pictures are not blown up
PIECE_CHARACTERS = 4096  # kitty takes no more at once

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
_GIF = b"GIF8"


class Graphics(StrEnum):
    """A protocol for pictures among text."""

    KITTY = "kitty"  # PNG alone can be sent as it is
    ITERM = "iTerm2"


_TAKES = {Graphics.KITTY: (_PNG,), Graphics.ITERM: (_PNG, _JPEG, _GIF)}
_PROGRAMS = {
    "ghostty": Graphics.KITTY,
    "kitty": Graphics.KITTY,
    "iTerm.app": Graphics.ITERM,
    "WezTerm": Graphics.ITERM,
    "mintty": Graphics.ITERM,
}
_KITTY_SIDES = {"width": "c", "height": "r"}  # columns, rows
_TERMINALS = {"xterm-kitty": Graphics.KITTY, "xterm-ghostty": Graphics.KITTY}


def graphics_of(environ: Mapping[str, str]) -> Graphics | None:
    """What the terminal understands, as far as its environment tells."""
    term = environ.get("TERM", "")
    between = environ.get("TMUX") or environ.get("STY") or term.startswith(("screen", "tmux"))
    if between or environ.get("NO_COLOR") or term in ("", "dumb", "linux"):
        return None
    if program := environ.get("TERM_PROGRAM"):
        return _PROGRAMS.get(program)  # the innermost one: what started it may show pictures
    if term in _TERMINALS:
        return _TERMINALS[term]
    if environ.get("LC_TERMINAL") == "iTerm2":
        return Graphics.ITERM  # which ssh passes on
    return Graphics.KITTY if environ.get("KITTY_WINDOW_ID") else None


def picture_text(data: bytes, graphics: Graphics, columns: int) -> str:
    """What shows the picture at the cursor; empty when this is none that the terminal takes."""
    width, height = dimensions(data)
    if not data.startswith(_TAKES[graphics]) or (width, height) == NO_PICTURE:
        return ""
    if len(data) > FILE_BYTES_MAX or width * height > PIXELS_MAX:
        return ""
    side, cells = _bound(width, height, max(1, min(COLUMNS_MAX, columns - 1)))
    encoded = base64.b64encode(data).decode()
    if graphics is Graphics.ITERM:
        size = f";{side}={cells};preserveAspectRatio=1" if cells else ""
        return f"\x1b]1337;File=inline=1;size={len(data)}{size}:{encoded}\x07"
    size = f",{_KITTY_SIDES[side]}={cells}" if cells else ""
    pieces = [
        encoded[at : at + PIECE_CHARACTERS] for at in range(0, len(encoded), PIECE_CHARACTERS)
    ]
    heads = [f"a=T,f=100,q=2{size},", *[""] * (len(pieces) - 1)]
    return "".join(
        f"\x1b_G{head}m={0 if number == len(pieces) else 1};{piece}\x1b\\"
        for number, (head, piece) in enumerate(zip(heads, pieces, strict=True), 1)
    )


def _bound(width: int, height: int, columns: int) -> tuple[str, int]:
    """Which side keeps a picture in its place, and in how many cells; 0 when it is small anyway."""
    across = width / (columns * CELL_WIDTH)
    down = height / (ROWS_MAX * CELL_HEIGHT)
    if max(across, down) <= 1:
        return "width", 0
    return ("width", columns) if across >= down else ("height", ROWS_MAX)


def previews(
    attachments: list[dict[str, Any]], blobs: BlobStore, graphics: Graphics, columns: int
) -> list[str]:
    """What shows the pictures among the attachments that are here."""
    shown: list[str] = []
    for each in attachments:
        if len(shown) == PICTURES_MAX:
            break
        is_picture = each["state"] == "ready" and each["mime"].startswith("image/")
        if is_picture and each["size"] <= FILE_BYTES_MAX:
            text = picture_text(_contents(blobs, each["sha256"]), graphics, columns)
            shown += [text] if text else []
    return shown


def _contents(blobs: BlobStore, sha256: str) -> bytes:
    try:
        with blobs.open(bytes.fromhex(sha256)) as reader:
            return reader.head(FILE_BYTES_MAX + 1)
    except MeshError:  # a picture that can't be read is shown by its name alone
        return b""
