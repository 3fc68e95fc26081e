"""Pictures in the terminal: only where they are known to be understood, and nothing leaks."""

from __future__ import annotations

import base64
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from end_to_end.attachments.courier import Courier
from end_to_end.processes.harness import COMMAND, Screen

from meshagent.cli import preview
from meshagent.cli.preview import Graphics, graphics_of, picture_text, previews
from meshagent.storage.blobs.store import BlobStore

KITTY_PIECE = re.compile(r"\x1b_G([a-zA-Z0-9=,]*);([A-Za-z0-9+/=]{1,4096})\x1b\\")
ITERM = re.compile(r"\x1b\]1337;File=([a-zA-Z0-9=;]*):([A-Za-z0-9+/=]+)\x07")


def png(width: int, height: int, padding: int = 0) -> bytes:
    """A picture that is grey; with so many bytes of nothing in it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress((b"\0" + bytes(width)) * min(height, 2000))
    noise = chunk(b"prVt", (b"\x1b\\\x07\x1b]0;owned\x07" * (padding // 10 + 1))[:padding])
    start = b"\x89PNG\r\n\x1a\n"
    return start + chunk(b"IHDR", head) + noise + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + bytes(20)


def kitty_parts(text: str) -> tuple[str, bytes]:
    """The first head and the whole payload; everything else would be a leak."""
    pieces = KITTY_PIECE.findall(text)
    assert "".join(f"\x1b_G{head};{data}\x1b\\" for head, data in pieces) == text
    more = [head.split(",")[-1] for head, _ in pieces]
    assert more == ["m=1"] * (len(pieces) - 1) + ["m=0"]
    return pieces[0][0], base64.b64decode("".join(data for _, data in pieces), validate=True)


@pytest.mark.parametrize(
    ("environ", "graphics"),
    [
        ({"TERM": "xterm-kitty"}, Graphics.KITTY),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1"}, Graphics.KITTY),
        ({"TERM": "xterm-ghostty"}, Graphics.KITTY),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "ghostty"}, Graphics.KITTY),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "iTerm.app"}, Graphics.ITERM),
        ({"TERM": "xterm-256color", "LC_TERMINAL": "iTerm2"}, Graphics.ITERM),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "WezTerm"}, Graphics.ITERM),
        ({"TERM": "xterm-256color"}, None),
        ({}, None),
        # an editor that was started from kitty, and a terminal that shows none
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1", "TERM_PROGRAM": "vscode"}, None),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "Apple_Terminal"}, None),
        ({"TERM": "dumb", "KITTY_WINDOW_ID": "1"}, None),
        ({"TERM": "linux", "KITTY_WINDOW_ID": "1"}, None),
        ({"TERM": "xterm-kitty", "NO_COLOR": "1"}, None),
        ({"TERM": "xterm-kitty", "TMUX": "/tmp/tmux-0/default,1,0"}, None),
        ({"TERM": "screen-256color", "KITTY_WINDOW_ID": "1"}, None),
        ({"TERM": "tmux-256color", "TERM_PROGRAM": "iTerm.app"}, None),
        ({"TERM": "xterm-256color", "STY": "1.pts", "TERM_PROGRAM": "iTerm.app"}, None),
    ],
)
def test_only_terminals_that_are_known_to_show_pictures_get_one(
    environ: dict[str, str], graphics: Graphics | None
) -> None:
    assert graphics_of(environ) is graphics


def test_kitty_gets_the_whole_picture_in_pieces_and_nothing_else() -> None:
    data = png(800, 600, padding=20_000)  # full of what would drive a terminal
    head, got = kitty_parts(picture_text(data, Graphics.KITTY, 80))
    assert got == data
    assert head.startswith("a=T,f=100,q=2,")


def test_iterm_gets_the_whole_picture_at_once_and_nothing_else() -> None:
    for data in (png(800, 600, padding=20_000), gif(800, 600)):
        found = ITERM.fullmatch(picture_text(data, Graphics.ITERM, 80))
        assert found
        assert base64.b64decode(found[2], validate=True) == data
        assert f"size={len(data)}" in found[1]
        assert "inline=1" in found[1]


@pytest.mark.parametrize(
    ("width", "height", "columns", "kitty", "iterm"),
    [
        (4000, 2000, 80, "c=40", "width=40"),
        (1000, 4000, 80, "r=14", "height=14"),
        (4000, 500, 20, "c=19", "width=19"),
        (32, 32, 80, "", ""),  # an icon stays one
    ],
)
def test_a_large_picture_is_kept_small_and_a_small_one_as_it_is(
    width: int, height: int, columns: int, kitty: str, iterm: str
) -> None:
    data = png(width, height)
    head, _ = kitty_parts(picture_text(data, Graphics.KITTY, columns))
    sizes = re.findall(r"[cr]=\d+", head)
    assert sizes == ([kitty] if kitty else [])
    found = ITERM.fullmatch(picture_text(data, Graphics.ITERM, columns))
    assert found
    assert re.findall(r"(?:width|height)=\d+", found[1]) == ([iterm] if iterm else [])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x1b]0;owned\x07",
        b"\x89PNG\r\n\x1a\n",  # says so, and is none
        png(60_000, 60_000),  # a small file that takes gigabytes when it is unpacked
        png(10, 10, padding=preview.FILE_BYTES_MAX),
    ],
)
def test_what_is_no_picture_or_too_large_a_one_is_not_shown(data: bytes) -> None:
    for graphics in Graphics:
        assert picture_text(data, graphics, 80) == ""


def test_kitty_gets_no_picture_that_it_can_not_unpack() -> None:
    assert picture_text(gif(100, 100), Graphics.KITTY, 80) == ""


def test_only_pictures_that_are_here_are_looked_at_and_only_so_many(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path / "blobs")
    (tmp_path / "x.png").write_bytes(data := png(50, 50))
    sha256 = blobs.put(tmp_path / "x.png").sha256.hex()
    ready = {"state": "ready", "mime": "image/png", "size": len(data), "sha256": sha256}

    def count(*attachments: dict[str, object]) -> int:
        return len(previews(list(attachments), blobs, Graphics.KITTY, 80))

    assert count(ready, ready) == 2
    assert count(*[ready] * 32) == preview.PICTURES_MAX
    assert count(ready | {"state": "remote"}) == 0
    assert count(ready | {"mime": "text/plain"}) == 0
    assert count(ready | {"sha256": bytes(32).hex()}) == 0  # it went meanwhile


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def received() -> Iterator[tuple[Courier, list[str]]]:
    """A message with a picture, and the words that read it."""
    courier = Courier()
    try:
        sender, receiver = courier.start("tester"), courier.start("backend")
        sender.wait_for_peer(receiver.agent, "alive")
        (courier.root / "shot.png").write_bytes(png(64, 64))
        ident = courier.send_files(sender.agent, receiver.agent, [courier.root / "shot.png"])
        courier.wait_for_message(receiver.agent, ident)
        yield courier, ["read", ident, "--as", receiver.agent]
    finally:
        courier.close()


def on_screen(courier: Courier, words: list[str], **environ: str) -> str:
    command = [*COMMAND, *words]
    screen = Screen(command, 80, 24, cwd=courier.project, env=courier.environment(**environ))
    try:
        assert screen.wait() == 0, screen.drawn
        return screen.drawn
    finally:
        screen.end()


@pytest.mark.process
def test_read_shows_a_picture_in_a_terminal_that_can(received: tuple[Courier, list[str]]) -> None:
    courier, words = received
    drawn = on_screen(courier, words, TERM="xterm-kitty")
    assert "[shot.png" in drawn
    (piece,) = KITTY_PIECE.findall(drawn)
    assert base64.b64decode(piece[1]) == png(64, 64)
    assert ITERM.search(on_screen(courier, words, TERM="xterm", TERM_PROGRAM="iTerm.app"))


@pytest.mark.process
def test_read_shows_none_elsewhere_nor_when_it_is_not_wanted(
    received: tuple[Courier, list[str]],
) -> None:
    courier, words = received
    assert "\x1b_G" not in on_screen(courier, [*words, "--no-preview"], TERM="xterm-kitty")
    assert "\x1b_G" not in on_screen(courier, [*words, "--json"], TERM="xterm-kitty")
    drawn = on_screen(courier, words, TERM="xterm-256color")
    assert "\x1b_G" not in drawn
    assert "1337" not in drawn
    piped = courier.run(*words, env={"TERM": "xterm-kitty"})
    assert "\x1b" not in piped.out
    assert "[shot.png" in piped.out
