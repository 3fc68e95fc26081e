"""Whatever comes between, a file arrives whole, and next to nothing of it is moved twice."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile

import pytest
from end_to_end.attachments.courier import MIB, Courier, free_port, peak_kib, resident_kib
from end_to_end.processes.harness import wait_until

pytestmark = pytest.mark.process

GROWTH_KIB_MAX = 64 * 1024
BACK_S = 30.0


class Ordeal:
    """A transfer that is interrupted again and again, each time where the wire was held."""

    def __init__(self, courier: Courier) -> None:
        self.courier, self.wire = courier, courier.wire
        self.sender, self.receiver = courier.pair()

    def run(self, size: int, interruptions: list[str], share: float) -> None:
        courier, wire = self.courier, self.wire
        file = courier.file(size)
        before = wire.moved
        step = size // (len(interruptions) + 1)
        wire.hold_at(before + step)
        ident = courier.send_files(self.sender.agent, self.receiver.agent, [file])
        file.unlink()
        for number, name in enumerate(interruptions, 2):
            wire.wait_for(before + (number - 1) * step, BACK_S)
            assert self._state(ident) == "receiving"
            getattr(self, name)()
            wire.hold_at(before + number * step)
        wire.hold_at(None)
        message = courier.wait_for_message(self.receiver.agent, ident, 120.0)
        moved = wire.moved - before
        (attachment,) = message["attachments"]
        assert (attachment["state"], attachment["size"]) == ("ready", size)
        courier.assert_verified(attachment)
        courier.wait_for_state(self.sender.agent, ident, "delivered")
        assert size <= moved < share * size

    def cut(self) -> None:
        self.wire.cut()

    def kill_sender(self) -> None:
        self.sender.end()
        self.sender = self.courier.start("tester")

    def kill_receiver(self) -> None:
        self.receiver.end()
        self.receiver = self.courier.join_elsewhere("backend", self.sender)
        self.receiver.joined  # noqa: B018 - waits

    def restart_sender(self) -> None:
        self.sender.process.terminate()
        assert self.sender.wait() == 0, self.sender.told()
        self.sender = self.courier.start("tester")

    def move_sender(self) -> None:
        """It comes back at another address, where nobody looks for it."""
        before = self.sender.joined.event["addresses"]
        self._wait_until_remembered()
        self.sender.end()
        self.sender = self.courier.start("tester", "--listen", f"127.0.0.1:{free_port()}")
        assert self.sender.joined.event["addresses"] != before

    def _wait_until_remembered(self) -> None:
        """Who was met is written down a moment later: before that nobody could find back."""
        folder = self.courier.folder.agents / self.sender.agent

        def is_known() -> bool:
            """In a copy: the file itself is the node's alone while it runs."""
            with tempfile.TemporaryDirectory() as place:
                for name in ("mesh.db", "mesh.db-wal"):
                    shutil.copy(folder / name, place)
                with (
                    contextlib.suppress(sqlite3.DatabaseError),  # it was written to meanwhile
                    contextlib.closing(sqlite3.connect(f"{place}/mesh.db")) as read,
                ):
                    return bool(read.execute("SELECT count(*) FROM peers").fetchone()[0])
            return False

        wait_until(is_known, "the receiver to be remembered")

    def _state(self, ident: str) -> str:
        found = self.courier.message(self.receiver.agent, ident)
        return found["state"] if found else "not there"


# The receiver last: had it to begin again, most of the file would be moved twice.
KINDS = ["cut", "kill_sender", "move_sender", "restart_sender", "kill_receiver"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mib", "interruptions", "share"),
    # A window, 4 MiB, may be lost with each link: that weighs more when there is less to move.
    [(60, KINDS, 1.3), pytest.param(300, KINDS * 2, 1.1, marks=pytest.mark.long)],
    ids=["60 MiB, five times", "300 MiB, ten times"],
)
def test_it_ends_whole_after_kills_cuts_and_moves_and_little_is_moved_twice(
    courier: Courier, mib: int, interruptions: list[str], share: float
) -> None:
    courier.settings(courier.elsewhere, eager="1 GiB")
    Ordeal(courier).run(mib * MIB, interruptions, share)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mib", [300, pytest.param(1024, marks=pytest.mark.long)])
def test_memory_stays_flat_while_a_large_file_passes(courier: Courier, mib: int) -> None:
    courier.settings(courier.elsewhere, eager="2 GiB")
    sender, receiver = courier.pair()
    before = {node: resident_kib(node) for node in (sender, receiver)}
    ident = courier.send_files(sender.agent, receiver.agent, [courier.file(mib * MIB)])
    message = courier.wait_for_message(receiver.agent, ident, 300.0)
    assert message["attachments"][0]["state"] == "ready"
    for node, resident in before.items():
        assert peak_kib(node) - resident < GROWTH_KIB_MAX
