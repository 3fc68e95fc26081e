"""What was sent is what the file held when `send` returned, and it waits as messages do."""

from __future__ import annotations

import pytest
from end_to_end.attachments.courier import MIB, Courier, digest

pytestmark = pytest.mark.process


def test_a_file_changed_or_deleted_after_send_arrives_as_it_was(courier: Courier) -> None:
    sender = courier.start("tester")
    absent = courier.make_agent("backend", courier.elsewhere).agent
    files = [courier.file(3 * MIB, name) for name in ("changed", "cut short", "deleted", "moved")]
    wanted = [digest(each) for each in files]
    words = [word for each in files for word in ("--attach", str(each))]
    ran = courier.say(sender.agent, "send", absent, "look", *words, "--json")
    assert (ran.code, ran.json["state"]) == (0, "queued"), ran
    changed, short, deleted, moved = files
    with changed.open("r+b") as file:
        file.write(b"something else entirely")
    short.write_bytes(b"")
    deleted.unlink()
    moved.rename(moved.with_name("elsewhere now"))
    courier.join_elsewhere("backend", sender).joined  # noqa: B018 - waits
    message = courier.wait_for_message(absent, ran.json["id"])
    assert [each["sha256"] for each in message["attachments"]] == wanted
    for attachment in message["attachments"]:
        courier.assert_verified(attachment)


def test_a_local_agent_that_joins_later_gets_the_file_though_its_sender_has_gone(
    courier: Courier,
) -> None:
    sender = courier.start("tester")
    absent = courier.start("backend")
    agent = absent.agent
    sender.wait_for_peer(agent, "alive")
    courier.leave(absent)
    sender.wait_for_peer(agent, "left")
    file = courier.file(2 * MIB + 7)
    ident = courier.send_files(sender.agent, agent, [file], "for later")
    file.rename(file.with_name("away"))
    courier.leave(sender)
    courier.start("backend")
    message = courier.wait_for_message(agent, ident)
    assert message["text"] == "for later"
    courier.assert_verified(message["attachments"][0])
    courier.start("tester")
    courier.wait_for_state(sender.agent, ident, "delivered")
