"""Texts pass what is large; and a transfer ends well, or with a word, whoever goes away."""

from __future__ import annotations

import pytest
from end_to_end.attachments.courier import MIB, Courier
from end_to_end.delivery.post import texts
from end_to_end.processes.harness import wait_until

pytestmark = pytest.mark.process


def test_texts_behind_a_large_attachment_pass_it_in_their_order(courier: Courier) -> None:
    wire = courier.wire
    sender, receiver = courier.pair()
    courier.send_files(sender.agent, receiver.agent, [courier.file(MIB)], "small")
    courier.wait_for_texts(receiver.agent, ["small"])
    start = wire.moved
    wire.hold_at(start + 4 * MIB)
    ident = courier.send_files(sender.agent, receiver.agent, [courier.file(80 * MIB)], "large")
    wire.wait_for(start + 4 * MIB, 20.0)
    behind = [f"text {number}" for number in range(50)]
    ids = courier.send(sender.agent, receiver.agent, *behind)
    wire.hold_at(None)
    courier.wait_for_state(sender.agent, ident, "delivered")
    assert texts(courier.inbox(receiver.agent)) == ["small", *behind, "large"]
    assert {courier.state(sender.agent, each) for each in ids} == {"delivered"}


def test_a_message_that_expires_while_its_file_comes_is_dropped_and_its_sender_told(
    courier: Courier,
) -> None:
    wire = courier.wire
    sender, receiver = courier.pair()
    wire.hold_at(wire.moved + 2 * MIB)
    file = courier.file(20 * MIB)
    ran = courier.say(
        sender.agent, "send", receiver.agent, "old news", "--attach", str(file), "--ttl", "2s",
        "--wait", "0", "--json",
    )  # fmt: skip
    assert ran.code == 0, ran
    ident = ran.json["id"]
    wait_until(lambda: courier.message(receiver.agent, ident), "it to be on its way")
    wait_until(lambda: not courier.message(receiver.agent, ident), "it to expire")
    wire.hold_at(None)
    courier.wait_for_state(sender.agent, ident, "expired")
    assert courier.inbox(receiver.agent) == []
    partial = courier.elsewhere.blobs / "partial"
    wait_until(lambda: not list(partial.iterdir()), "what had come to be thrown away")
    again = courier.send_files(sender.agent, receiver.agent, [file], "news")
    courier.assert_same(courier.wait_for_message(receiver.agent, again), [file])


def test_a_neighbour_of_a_sender_that_is_gone_for_ever_gives_what_it_promised(
    courier: Courier,
) -> None:
    wire = courier.wire
    sender = courier.start("tester")
    neighbour = courier.start("helper")
    receiver = courier.join_elsewhere("backend", sender, neighbour)
    for each in (sender, neighbour):
        receiver.wait_for_peer(each.agent, "alive")
        each.wait_for_peer(receiver.agent, "alive")
    file = courier.file(24 * MIB)
    before = wire.moved
    wire.hold_at(before + 8 * MIB)
    ident = courier.send_files(sender.agent, receiver.agent, [file])
    wire.wait_for(before + 8 * MIB, 20.0)
    sender.end()
    wire.hold_at(None)
    courier.assert_same(courier.wait_for_message(receiver.agent, ident), [file])
    assert wire.moved - before < 1.01 * 24 * MIB + 4 * MIB


def test_a_file_that_its_sender_has_lost_is_refused_and_texts_still_flow(
    courier: Courier,
) -> None:
    wire = courier.wire
    sender, receiver = courier.pair()
    courier.leave(receiver)
    ident = courier.send_files(sender.agent, receiver.agent, [courier.file(MIB)])
    (name,) = {each.name for each in courier.folder.agents.glob("*/blobs/*")}
    for each in (
        courier.folder.blobs / name[:2] / name[2:],
        *courier.folder.agents.glob("*/blobs/*"),
    ):
        each.unlink()
    receiver = courier.join_elsewhere("backend", sender)
    courier.wait_for_state(sender.agent, ident, "refused")
    (told,) = [each for each in courier.ask(sender.agent, "log") if each["id"] == ident]
    assert told["reason"] == "Nobody gives it: absent."
    assert courier.inbox(receiver.agent) == []
    (text,) = courier.send(sender.agent, receiver.agent, "after")
    courier.wait_for_state(sender.agent, text, "delivered")
    assert wire.moved < MIB // 2
