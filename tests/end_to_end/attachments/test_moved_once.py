"""The same bytes are stored once on a machine, and come to it once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from end_to_end.attachments.courier import MIB, Courier
from end_to_end.processes.harness import Node

pytestmark = pytest.mark.process

SIZE = 8 * MIB
NAMES = [f"reader{number}" for number in range(5)]


def test_five_local_agents_share_one_copy_and_nothing_is_moved(courier: Courier) -> None:
    wire = courier.wire
    sender = courier.start("tester")
    readers = [courier.join("backend", "--name", name) for name in NAMES]
    for each in readers:
        sender.wait_for_peer(each.agent, "alive")
    file, before = courier.file(SIZE), wire.moved
    used = _disk_bytes(courier.folder.path)
    for _ in range(2):
        told = _send_to_all(courier, sender, readers, file)
        assert len({each["path"] for each in told}) == 1
    assert wire.moved - before < SIZE // 8
    assert SIZE <= _disk_bytes(courier.folder.path) - used < 1.5 * SIZE
    path = Path(told[0]["path"])
    links = list(courier.folder.agents.glob(f"*/blobs/{told[0]['sha256']}"))
    assert len(links) == len(readers) + 1
    assert {each.stat().st_ino for each in links} == {path.stat().st_ino}


def test_to_five_agents_of_another_machine_it_is_moved_once(courier: Courier) -> None:
    wire = courier.wire
    sender = courier.start("tester")
    readers = [
        courier.join_elsewhere("backend", sender, arguments=("--name", name)) for name in NAMES
    ]
    for each in readers:
        sender.wait_for_peer(each.agent, "alive")
    file, before = courier.file(SIZE), wire.moved
    told = _send_to_all(courier, sender, readers, file)
    assert len({each["path"] for each in told}) == 1
    assert SIZE <= wire.moved - before < 1.2 * SIZE
    again = wire.moved
    _send_to_all(courier, sender, readers, file)
    assert wire.moved - again < SIZE // 8


def _send_to_all(
    courier: Courier, sender: Node, readers: list[Node], file: Path
) -> list[dict[str, Any]]:
    idents = [courier.send_files(sender.agent, each.agent, [file]) for each in readers]
    messages = [
        courier.wait_for_message(reader.agent, ident)
        for reader, ident in zip(readers, idents, strict=True)
    ]
    for ident, message in zip(idents, messages, strict=True):
        courier.assert_same(message, [file])
        courier.wait_for_state(sender.agent, ident, "delivered")
    return [message["attachments"][0] for message in messages]


def _disk_bytes(folder: Path) -> int:
    """As `du` counts: what several names share counts once."""
    stats = [each.lstat() for each in folder.rglob("*")]
    found = {each.st_ino: each.st_blocks * 512 for each in stats}
    return sum(found.values())
