"""Files of every size arrive byte for byte, between folders that share nothing but an invite."""

from __future__ import annotations

import pytest
from end_to_end.attachments.courier import KIB, MIB, Courier

pytestmark = pytest.mark.process

SIZES = (0, 1, 255 * KIB, 256 * KIB, 256 * KIB + 1, 10 * MIB)


def test_every_size_and_32_files_at_once_arrive_byte_for_byte(courier: Courier) -> None:
    sender = courier.start("tester")
    receiver = courier.join_invited("backend")
    files = [courier.file(size) for size in SIZES]
    many = [courier.file(number * 1_001, f"{number}.bin") for number in range(32)]
    for each in ([files[0]], files, many):
        ident = courier.send_files(sender.agent, receiver, each)
        courier.assert_same(courier.wait_for_message(receiver, ident), each)
        courier.wait_for_state(sender.agent, ident, "delivered")
    assert courier.folder.blobs != courier.elsewhere.blobs


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_gigabyte_arrives_byte_for_byte(courier: Courier) -> None:
    courier.settings(courier.elsewhere, eager="2 GiB")
    sender, receiver = courier.pair()
    file = courier.file(1024 * MIB)
    ident = courier.send_files(sender.agent, receiver.agent, [file])
    courier.assert_same(courier.wait_for_message(receiver.agent, ident, 300.0), [file])
