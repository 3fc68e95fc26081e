"""What a store reads of a message's bytes is what the message says."""

from __future__ import annotations

import pytest

from meshagent.core.model.attachments import Attachment
from meshagent.core.model.body_summary import BodySummary, summarize
from meshagent.core.model.messages import Message, pack_body

SHOT = Attachment("shot.png", 9, "image/png", bytes(32))


@pytest.mark.parametrize("text", ["hi", "long " * 2_000], ids=["small", "large"])
@pytest.mark.parametrize("attachments", [(), (SHOT,)], ids=["plain", "attached"])
def test_the_summary_has_what_the_message_says(
    text: str, attachments: tuple[Attachment, ...]
) -> None:
    message = Message(
        "m1", "task", text, 77, {"a": [1, 2]}, "thread", "m0", {"h": "x"}, attachments, 99, 3
    )
    assert summarize(pack_body(message)) == BodySummary("task", text, 77, bool(attachments))


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x9b" + bytes(5_000)])
def test_bytes_that_are_no_message_say_nothing(body: bytes) -> None:
    assert summarize(body) == BodySummary("", "", 0, False)
