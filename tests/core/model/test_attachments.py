"""What a message may say of its attachments, and what a recipient takes."""

from __future__ import annotations

from typing import Any

import pytest

from meshagent.core.model.attachments import (
    ATTACHMENTS_MAX,
    SIZE_MAX,
    Attachment,
    AttachmentLimits,
    grant_words,
    parse_attachments,
)
from meshagent.core.model.messages import Message, pack_body, parse_body
from meshagent.core.model.peers import AgentId
from meshagent.errors import RemoteProtocolError, UsageError

GOOD = Attachment("shot.png", 5, "image/png", b"x" * 32, 2, 3, b"g" * 64)
ALICE, BOB = AgentId("alice"), AgentId("bob")


def raw(**changes: Any) -> tuple[Any, ...]:
    values = GOOD._asdict() | changes
    return tuple(values.values())


def test_what_is_well_formed_is_taken_as_it_is() -> None:
    assert parse_attachments((raw(),)) == (GOOD,)
    assert parse_attachments(()) == ()


def test_fields_of_a_later_version_are_ignored() -> None:
    assert parse_attachments(((*raw(), "later"),)) == (GOOD,)


@pytest.mark.parametrize(
    "name",
    [
        "", " ", "a\0b", "a\nb", "\x1b[2Ja", "a\u202egnp.exe", "a\u200bb", "\u3164", "a" * 121,
        "x" * 4_000, " a", "a  b", "a\x7f", "a\x9b31m", "e\u0301", "\ufeffa", "\ud800", 7, None,
        b"a",
    ],
)  # fmt: skip
def test_a_name_that_no_sanitiser_would_leave_is_refused(name: object) -> None:
    with pytest.raises(RemoteProtocolError, match="name of attachment 2"):
        parse_attachments((raw(), raw(name=name)))


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "C:\\x", "CON", "\u0430.png"])
def test_a_name_that_is_only_text_is_taken_as_text(name: str) -> None:
    assert parse_attachments((raw(name=name),))[0].name == name


@pytest.mark.parametrize("size", [-1, SIZE_MAX + 1, 2**62, 2**63, 1.0, True, "5", None])
def test_a_size_that_no_file_has_is_refused(size: object) -> None:
    with pytest.raises(RemoteProtocolError, match="size of attachment 1"):
        parse_attachments((raw(size=size),))


@pytest.mark.parametrize(
    "mime", ["", "png", "/png", "image/", "image/\x1b[m", "imäge/png", "a/" + "b" * 100, 1, None]
)
def test_a_type_that_is_none_is_refused(mime: object) -> None:
    with pytest.raises(RemoteProtocolError, match="type of attachment 1"):
        parse_attachments((raw(mime=mime),))


@pytest.mark.parametrize(
    "changes",
    [
        {"sha256": b""}, {"sha256": b"x" * 31}, {"sha256": "x" * 32}, {"width": -1},
        {"height": 2**31}, {"width": 1.5}, {"grant": b"g" * 65}, {"grant": None},
    ],
)  # fmt: skip
def test_other_fields_of_the_wrong_form_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError, match="Attachment 1 has a field"):
        parse_attachments((raw(**changes),))


@pytest.mark.parametrize("bad", [(), ("a",), raw()[:-1], 5, None, "text", {"name": "a"}])
def test_what_lacks_fields_is_refused(bad: object) -> None:
    with pytest.raises(RemoteProtocolError, match="Attachment 1 lacks fields"):
        parse_attachments((bad,))


def test_more_than_any_message_may_have_are_refused() -> None:
    assert len(parse_attachments((raw(),) * ATTACHMENTS_MAX)) == ATTACHMENTS_MAX
    for count in (ATTACHMENTS_MAX + 1, 10_000):
        with pytest.raises(RemoteProtocolError, match="at most 256"):
            parse_attachments((raw(),) * count)
    with pytest.raises(RemoteProtocolError, match="at most 256"):
        parse_attachments({})


def test_one_file_with_two_sizes_is_refused_and_with_two_names_is_not() -> None:
    assert len(parse_attachments((raw(), raw(name="again.png")))) == 2
    with pytest.raises(RemoteProtocolError, match="Attachment 3 is a file with two sizes"):
        parse_attachments((raw(), raw(sha256=b"y" * 32), raw(size=6)))


def test_a_message_carries_them_and_a_bad_one_can_not_even_be_sent() -> None:
    message = Message("m1", "text", "hi", 1, attachments=(GOOD,))
    assert parse_body(pack_body(message)) == message
    with pytest.raises(UsageError, match="size of attachment 1"):
        pack_body(message._replace(attachments=(GOOD._replace(size=-1),)))


def test_a_grant_is_for_one_mesh_one_granter_one_peer_and_one_blob() -> None:
    words = {
        grant_words(mesh, granter, to, sha256)
        for mesh in (b"m", b"n")
        for granter in (ALICE, BOB)
        for to in (ALICE, BOB)
        for sha256 in (b"x" * 32, b"y" * 32)
    }
    assert len(words) == 16


# -- limits -----------------------------------------------------------------------------------


def test_by_default_32_of_10_gib_of_any_type_are_taken() -> None:
    limits = AttachmentLimits()
    largest = GOOD._replace(size=10 * 1024**3, mime="application/x-anything")
    assert limits.refusal([largest] * 32) == ""
    assert limits.refusal([GOOD] * 33) == "33 attachments; 32 are allowed"
    assert limits.refusal([GOOD, largest._replace(size=largest.size + 1)]) == (
        "'shot.png' has 10737418241 bytes; 10737418240 are allowed"
    )


def test_a_refusal_by_type_names_what_is_allowed() -> None:
    limits = AttachmentLimits(types=("image/*", "application/pdf"))
    assert limits.refusal([GOOD, GOOD._replace(mime="application/pdf")]) == ""
    assert limits.refusal([GOOD._replace(mime="application/zip")]) == (
        "'shot.png' is application/zip; allowed: image/*, application/pdf"
    )
    assert not limits.allows("image")
    assert not limits.allows("application/pdf2")


def test_eager_is_up_to_and_including_the_limit() -> None:
    limits = AttachmentLimits(eager_bytes=5)
    assert limits.is_eager(GOOD)
    assert not limits.is_eager(GOOD._replace(size=6))
