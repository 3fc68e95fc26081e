"""A sender chooses the name: whatever it is, it is one visible line and one component of a path."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshagent.core.model.file_names import (
    DISPLAY_CHARACTERS_MAX,
    FALLBACK_NAME,
    FILE_BYTES_MAX,
    display_name,
    file_name,
)

FILES = [
    ("shot.png", "shot.png"),
    ("Grüße aus Köln.pdf", "Grüße aus Köln.pdf"),
    ("日本語.txt", "日本語.txt"),
    ("../../etc/passwd", "passwd"),
    ("/etc/shadow", "shadow"),
    ("..\\..\\windows\\system32\\cmd.exe", "cmd.exe"),
    ("C:\\Users\\me\\a.txt", "a.txt"),
    ("C:evil.txt", "C_evil.txt"),
    ("file.txt:stream", "file.txt_stream"),
    ("folder/", "folder"),
    ("a/..", "a"),
    ("", FALLBACK_NAME),
    (".", FALLBACK_NAME),
    ("..", FALLBACK_NAME),
    ("/", FALLBACK_NAME),
    ("...   ", FALLBACK_NAME),
    ("\u200b\u202e", FALLBACK_NAME),
    (".bashrc", "bashrc"),
    ("-rf", "rf"),
    ("--output=x", "output=x"),
    (" - . hidden.txt", "hidden.txt"),
    ("trailing. . ", "trailing"),
    ("a\0b.png", "a_b.png"),
    ("a\nb\tc.png", "a b c.png"),
    ("\x1b[31mred\x1b[0m.txt", "_[31mred_[0m.txt"),
    ("photo\u202egnp.exe", "photognp.exe"),
    ("in\u200bvoice\ufeff.pdf", "invoice.pdf"),
    ("a\u3164b\u2800c.png", "abc.png"),
    ("a\u2215b\uff0fc\u2216d.txt", "a_b_c_d.txt"),
    ("\u2024\u2024/x", "x"),
    ("\ud800bad.txt", "_bad.txt"),
    ("cafe\u0301.txt", "caf\u00e9.txt"),
    ('what<>|?*".txt', "what______.txt"),
    ("CON", "_CON"),
    ("nul.txt", "_nul.txt"),
    ("Com1.tar.gz", "_Com1.tar.gz"),
    ("lpt\u00b9", "_lpt\u00b9"),
    ("aux .c", "_aux.c"),
    ("console.log", "console.log"),
    ("COM10", "COM10"),
]


@pytest.mark.parametrize(("raw", "safe"), FILES, ids=[ascii(raw) for raw, _ in FILES])
def test_a_file_is_named_after_what_is_harmless_in_the_name(raw: str, safe: str) -> None:
    assert file_name(raw) == safe


def test_a_long_name_keeps_its_extension() -> None:
    for extension in (".png", ".tar.gz"):
        for letter in ("x", "ü", "語", "\U0001f600"):
            name = file_name(letter * 4_000 + extension)
            assert name.endswith(letter + extension)
            assert FILE_BYTES_MAX - 4 < len(name.encode()) <= FILE_BYTES_MAX
    assert len(file_name("a." + "b" * 4_000).encode()) == FILE_BYTES_MAX


def test_a_name_that_is_taken_gets_a_number_before_its_extension() -> None:
    assert file_name("a.png", ["a.png"]) == "a (2).png"
    assert file_name("a.png", ["A.PNG", "a (2).png"]) == "a (3).png"
    assert file_name("a.tar.gz", {"a.tar.gz"}) == "a (2).tar.gz"
    assert file_name("Makefile", ["makefile"]) == "Makefile (2)"
    assert file_name("STRASSE", ["straße"]) == "STRASSE (2)"
    assert file_name("caf\u00e9", ["cafe\u0301"]) == "caf\u00e9 (2)"
    long = file_name("x" * 4_000 + ".png")
    assert file_name("x" * 4_000 + ".png", [long]).endswith("x (2).png")
    assert len(file_name("x" * 4_000 + ".png", [long]).encode()) == FILE_BYTES_MAX


SHOWN = [
    ("shot.png", "shot.png"),
    ("../x", "../x"),
    ("", FALLBACK_NAME),
    (" \n\t ", FALLBACK_NAME),
    ("a\r\nb", "a b"),
    ("\x1b]0;title\x07.txt", "\ufffd]0;title\ufffd.txt"),
    ("a\u202eb\u2066c\u200dd", "abcd"),
    ("a\u2028b\u00a0c", "a b c"),
    ("\u0301\u0301a", "a"),
    ("e" + "\u0323" * 50 + ".txt", "\u1eb9" + "\u0323" * 3 + ".txt"),
]


@pytest.mark.parametrize(("raw", "shown"), SHOWN, ids=[ascii(raw)[:20] for raw, _ in SHOWN])
def test_a_list_shows_one_plain_line(raw: str, shown: str) -> None:
    assert display_name(raw) == shown


def test_a_long_name_is_shown_with_its_extension() -> None:
    name = display_name("x" * 4_000 + ".png")
    assert len(name) == DISPLAY_CHARACTERS_MAX
    assert name.endswith("x\u2026.png")
    assert len(display_name("x" * 9_000_000)) == DISPLAY_CHARACTERS_MAX


HOSTILE = st.text(
    st.one_of(
        st.characters(),
        st.sampled_from(list("./\\:-~ \0\n\x1b\u202e\u200b\u0301\u2024\uff0f.CONcon1")),
    ),
    max_size=300,
)


@given(HOSTILE, st.lists(HOSTILE, max_size=5))
@example("CON", ["_con"])
@example("a.\u0301", [])
@example("\u0301.txt", [])
@example("." * 300, [])
def test_no_name_whatever_gets_out_of_its_folder(raw: str, others: list[str]) -> None:
    taken = [file_name(other) for other in others] + [file_name(raw)]
    for name in (file_name(raw), file_name(raw, taken)):
        assert 0 < len(name.encode()) <= FILE_BYTES_MAX
        assert name.isprintable()
        assert not set(name) & set('/\\:\0<>|?*"')
        assert name[0] not in ".- "
        assert name[-1] not in ". "
        assert name.split(".")[0].rstrip().upper() not in ("CON", "NUL", "COM1")
        assert unicodedata.is_normalized("NFC", name)
        assert file_name(name) == name
    folded = {unicodedata.normalize("NFC", each).casefold() for each in taken}
    assert file_name(raw, taken).casefold() not in folded


@given(HOSTILE)
def test_no_name_whatever_moves_the_terminal(raw: str) -> None:
    name = display_name(raw)
    assert 0 < len(name) <= DISPLAY_CHARACTERS_MAX
    assert name.isprintable()
    assert name == name.strip()
