"""What a recipient takes is its own choice; a refusal says which one, and what waits can be had."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from end_to_end.attachments.courier import KIB, MIB, Courier, digest
from end_to_end.processes.harness import wait_until

pytestmark = pytest.mark.process

LIMIT_EXIT_CODE = 6


@pytest.mark.parametrize(
    ("settings", "names", "why"),
    [
        ({"each": "1 MiB"}, ["large.bin"], "'large.bin' has 2097152 bytes; 1048576 are allowed"),
        ({"count": 2}, ["a", "b", "c"], "3 attachments; 2 are allowed"),
        (
            {"types": ("image/*", "application/pdf")},
            ["tool.bin"],
            "'tool.bin' is application/octet-stream; allowed: image/*, application/pdf",
        ),
    ],
    ids=["size", "count", "type"],
)
def test_a_refusal_says_which_limit_of_the_recipient_it_was(
    courier: Courier, settings: dict[str, Any], names: list[str], why: str
) -> None:
    courier.settings(courier.elsewhere, **settings)
    sender, receiver = courier.pair()
    files = [courier.file(2 * MIB, name) for name in names]
    words = [word for each in files for word in ("--attach", str(each))]
    ran = courier.say(sender.agent, "send", receiver.agent, *words, "--json")
    assert ran.code == 3, ran
    assert (ran.json["state"], ran.json["reason"]) == ("refused", why)
    assert courier.inbox(receiver.agent) == []
    (after,) = courier.send(sender.agent, receiver.agent, "after")
    courier.wait_for_state(sender.agent, after, "delivered")


def test_beyond_the_eager_limit_it_is_had_on_demand_also_after_the_sender_restarted(
    courier: Courier,
) -> None:
    courier.settings(courier.elsewhere, eager="1 MiB")
    sender, receiver = courier.pair()
    files = [courier.file(3 * MIB, "large.bin"), courier.file(100 * KIB, "small.bin")]
    ident = courier.send_files(sender.agent, receiver.agent, files, "look")
    message = courier.wait_for_message(receiver.agent, ident)
    courier.wait_for_state(sender.agent, ident, "delivered")
    assert [each["state"] for each in message["attachments"]] == ["remote", "ready"]
    assert message["attachments"][0]["path"] is None
    elsewhere = courier.elsewhere.path.parent
    shown = courier.say(receiver.agent, "inbox", cwd=elsewhere, env={"COLUMNS": "300"}).out
    assert "[large.bin 3.0 MiB, not fetched]" in shown, shown
    sender.end()
    courier.start("tester")
    fetched = courier.say(receiver.agent, "fetch", ident, "--json", cwd=elsewhere)
    assert fetched.code == 0, fetched
    courier.assert_same(fetched.json, files)
    ran = courier.say(receiver.agent, "save", ident, "--to", "here", "--json", cwd=elsewhere)
    assert ran.code == 0, ran
    saved = [elsewhere / each["file"] for each in ran.json]
    assert [digest(each) for each in saved] == [digest(each) for each in files]


def test_a_fetch_that_is_given_up_leaves_no_session_behind(courier: Courier) -> None:
    courier.settings(courier.elsewhere, eager="1 MiB")
    sender, receiver = courier.pair()
    file = courier.file(2 * MIB)
    ident = courier.send_files(sender.agent, receiver.agent, [file])
    courier.wait_for_message(receiver.agent, ident)
    courier.leave(sender)
    receiver.wait_for_peer(sender.agent, "left")
    folder = Path(f"/proc/{receiver.pid}/fd")
    before = len(list(folder.iterdir()))
    fetches = [
        courier.command("fetch", ident, "--as", receiver.agent, cwd=courier.elsewhere.path.parent)
        for _ in range(3)
    ]
    # Each waits on one connection, and looks how far it has come over another.
    wait_until(lambda: len(list(folder.iterdir())) >= before + 6, "them to wait")
    for each in fetches:
        each.send_signal(signal.SIGINT)
        each.communicate(timeout=20)
    wait_until(lambda: len(list(folder.iterdir())) <= before, "their sessions to end")
    courier.start("tester")
    wait_until(
        lambda: courier.message(receiver.agent, ident)["attachments"][0]["state"] == "ready",
        "it to come nevertheless",
    )


def test_save_gets_what_is_not_here(courier: Courier) -> None:
    courier.settings(courier.elsewhere, eager="0")
    sender, receiver = courier.pair()
    file = courier.file(MIB, "late.bin")
    ident = courier.send_files(sender.agent, receiver.agent, [file])
    courier.wait_for_message(receiver.agent, ident)
    folder = courier.elsewhere.path.parent
    ran = courier.say(receiver.agent, "save", ident, cwd=folder)
    assert (ran.code, ran.err) == (0, ""), ran
    assert digest(folder / "late.bin") == digest(file)


def test_a_full_quota_is_refused_with_the_figures_at_either_end(courier: Courier) -> None:
    courier.settings(courier.elsewhere, quota="3 MiB")
    sender, receiver = courier.pair()
    first = courier.send_files(sender.agent, receiver.agent, [courier.file(2 * MIB)])
    courier.wait_for_state(sender.agent, first, "delivered")
    ran = courier.say(
        sender.agent, "send", receiver.agent, "--attach", str(courier.file(2 * MIB)), "--json"
    )
    assert ran.code == 3, ran
    assert ran.json["state"] == "refused"
    figures = "2.0 MiB of attachments do not fit: 2.0 MiB of the quota of 3.0 MiB are used."
    assert ran.json["reason"] == figures
    back = courier.say(
        receiver.agent, "send", sender.agent, "--attach", str(courier.file(2 * MIB)), "--json",
        cwd=courier.elsewhere.path.parent,
    )  # fmt: skip
    assert (back.code, back.out) == (LIMIT_EXIT_CODE, ""), back
    assert figures in back.err
    assert list((courier.elsewhere.blobs / "partial").iterdir()) == []
    small = courier.send_files(sender.agent, receiver.agent, [courier.file(MIB // 2)])
    courier.wait_for_state(sender.agent, small, "delivered")
