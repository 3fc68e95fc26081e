"""Invite codes: all or nothing, and the secret stays in the code."""

from __future__ import annotations

import string
import traceback

import pytest
from core.made import identity
from hypothesis import given, settings
from hypothesis import strategies as st

from meshagent.core.model.invites import PREFIX, Invite, format_invite, parse_invite
from meshagent.errors import InviteError

INVITER = identity("alice").agent
SECRET = b"sixteen or more bytes of secret"
INVITE = Invite(SECRET, "project", INVITER, ("192.168.1.5:7001", "[fe80::1]:7001"))
CODE = format_invite(INVITE)
ALPHABET = string.ascii_letters + string.digits + "-_+/=. é\x00"


@settings(max_examples=100, deadline=None)
@given(
    st.binary(min_size=16, max_size=64),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40),
    st.lists(st.from_regex(r"[a-z0-9.:]{1,30}", fullmatch=True), max_size=16).map(tuple),
)
def test_an_invite_survives_its_code(secret: bytes, name: str, addresses: tuple[str, ...]) -> None:
    invite = Invite(secret, name, INVITER, addresses)
    code = format_invite(invite)
    assert parse_invite(code) == invite
    assert not set(code) - set(string.ascii_letters + string.digits + "-_")


@pytest.mark.parametrize("size", [16, 17, 18])  # all paddings of base64
def test_a_code_with_any_one_character_changed_is_refused(size: int) -> None:
    code = format_invite(Invite(SECRET[:size], "project", INVITER, ("192.168.1.5:7001",)))
    for at, right in enumerate(code):
        for wrong in ALPHABET:
            if wrong == right or wrong.isspace():
                continue
            with pytest.raises(InviteError):
                print(at, wrong, parse_invite(code[:at] + wrong + code[at + 1 :]))


def test_a_code_cut_short_or_lengthened_is_refused() -> None:
    for size in range(len(CODE)):
        with pytest.raises(InviteError):
            parse_invite(CODE[:size])
    for extra in ("A", "=", "AAAA", CODE):
        with pytest.raises(InviteError):
            parse_invite(CODE + extra)


def test_two_characters_swapped_are_refused() -> None:
    for at in range(len(CODE) - 1):
        if CODE[at] != CODE[at + 1]:
            with pytest.raises(InviteError):
                parse_invite(CODE[:at] + CODE[at + 1] + CODE[at] + CODE[at + 2 :])


@pytest.mark.parametrize("between", ["\n", "\r\n", " ", "\t", "\n   "])
def test_line_wraps_and_spaces_do_no_harm(between: str) -> None:
    wrapped = between.join(CODE[at : at + 20] for at in range(0, len(CODE), 20))
    assert parse_invite(f" {between}{wrapped}{between}\n") == INVITE


@pytest.mark.parametrize("text", ["", "  \n", "hello", "mesh2-abc", PREFIX, PREFIX + "A" * 100_000])
def test_what_is_no_code_is_refused_with_the_next_step(text: str) -> None:
    with pytest.raises(InviteError) as caught:
        parse_invite(text)
    assert "meshagent invite" in caught.value.hint


@pytest.mark.parametrize(
    "invite",
    [
        Invite(b"short", "project", INVITER, ()),
        Invite(SECRET, "two\nlines", INVITER, ()),
        Invite(SECRET, "project", "nobody", ()),
        Invite(SECRET, "project", INVITER, ("\x1b[2J:1",)),
    ],
)
def test_absurd_contents_are_refused(invite: Invite) -> None:
    with pytest.raises(InviteError):
        parse_invite(format_invite(invite))


def test_neither_repr_nor_error_shows_the_secret() -> None:
    assert "sixteen" not in repr(INVITE)
    assert SECRET.hex() not in repr(INVITE)
    for broken in (CODE[:-1], CODE + "A", CODE[1:]):
        with pytest.raises(InviteError) as caught:
            parse_invite(broken)
        shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value.data)
        assert CODE[10:30] not in shown
        assert "sixteen" not in shown
