"""A receiver whose disk fills while a file comes: run in a mount namespace of its own.

`elsewhere`, where the receiver is, is a small disk of its own. What is promised is asserted here;
the test that starts a scenario only looks at how it ends.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from end_to_end.attachments.courier import MIB, Courier
from end_to_end.delivery.full_disk import assert_idle, mount
from end_to_end.processes.harness import Node, wait_until

from meshagent.core.wire.frames import CHUNK_BYTES

DISK_BYTES = 150 * MIB
MARGIN_BYTES = 32 * MIB  # what the store leaves to the databases
SIZE = 40 * MIB


class SmallDisk(Courier):
    """The other folder has little room."""

    def __init__(self) -> None:
        super().__init__()
        self.place = self.elsewhere.path.parent
        secret = self.folder.read_secret()
        mount(str(self.place), DISK_BYTES)
        self.elsewhere.create("project", secret)
        self.settings(self.elsewhere)
        self.ballast = self.place / "ballast"

    def use_up(self, leave: int) -> None:
        with self.ballast.open("ab") as file:
            file.truncate(0)
            for tries_left in reversed(range(100)):
                stat = os.statvfs(self.place)
                try:
                    os.posix_fallocate(file.fileno(), 0, stat.f_bavail * stat.f_frsize - leave)
                    return
                except OSError:  # the node took some of it between the two calls
                    if not tries_left:
                        raise

    def close(self) -> None:
        for each in self._started:
            each.end()
        subprocess.run(["umount", "-l", str(self.place)], check=False)
        super().close()

    def assert_told_and_texts_flow(self, sender: Node, receiver: Node, ident: str) -> None:
        """`inbox` says what it waits for, and whatever else is sent arrives."""
        wait_until(lambda: self.message(receiver.agent, ident), "the message to come")
        wait_until(lambda: self.attachment(receiver, ident)["reason"], "the reason to be told")
        attachment = self.attachment(receiver, ident)
        assert attachment["state"] == "receiving"
        assert attachment["reason"].startswith("the disk is full")
        shown = self.say(receiver.agent, "inbox", cwd=self.place, env={"COLUMNS": "300"}).out
        assert "receiving" in shown
        assert "(the disk is full" in shown, shown
        for agent, to in ((sender, receiver), (receiver, sender)):
            (text,) = self.send(agent.agent, to.agent, "a text")
            self.wait_for_state(agent.agent, text, "delivered")
        assert self.state(sender.agent, ident) == "sent"
        assert self.ask(receiver.agent, "status")["health"]["store"] == "ok"
        assert_idle(receiver)
        assert "Traceback" not in receiver.err, receiver.err

    def attachment(self, receiver: Node, ident: str) -> dict[str, Any]:
        message = self.message(receiver.agent, ident)
        assert message is not None
        (attachment,) = message["attachments"]
        found: dict[str, Any] = attachment
        return found


def before_it_begins(disk: SmallDisk) -> None:
    """There is no room for it; it comes by itself when there is."""
    sender, receiver = disk.pair()
    disk.use_up(leave=MARGIN_BYTES + SIZE // 2)
    file = disk.file(SIZE)
    ident = disk.send_files(sender.agent, receiver.agent, [file])
    disk.assert_told_and_texts_flow(sender, receiver, ident)
    reason = disk.attachment(receiver, ident)["reason"]
    assert re.fullmatch(r"the disk is full: [\d.]+ MiB more are needed", reason), reason
    disk.ballast.unlink()
    disk.assert_same(disk.wait_for_message(receiver.agent, ident), [file])
    disk.wait_for_state(sender.agent, ident, "delivered")


def in_the_middle(disk: SmallDisk) -> None:
    """Others take the space while it comes; what has come is not moved again."""
    wire = disk.wire
    sender, receiver = disk.pair()
    before = wire.moved
    wire.hold_at(before + SIZE // 2)
    file = disk.file(SIZE)
    ident = disk.send_files(sender.agent, receiver.agent, [file])
    wire.wait_for(before + SIZE // 2, 20.0)
    # Its space is reserved, so that nobody else can take it, but a user who removes the reserve.
    # All that the wire let through is written: whoever still writes would use up space beside us.
    half = SIZE // 2 - CHUNK_BYTES
    wait_until(lambda: disk.attachment(receiver, ident)["received"] >= half, "half of it")
    (partial,) = (disk.elsewhere.blobs / "partial").glob("*.data")
    os.truncate(partial, SIZE // 2 - 2 * MIB)
    disk.use_up(leave=0)
    wire.hold_at(None)
    wait_until(lambda: disk.attachment(receiver, ident)["reason"], "the reason to be told")
    assert disk.attachment(receiver, ident)["reason"].startswith("the disk is full")
    os.truncate(disk.ballast, os.stat(disk.ballast).st_size - 16 * MIB)
    disk.assert_told_and_texts_flow(sender, receiver, ident)
    disk.ballast.unlink()
    disk.assert_same(disk.wait_for_message(receiver.agent, ident), [file])
    disk.wait_for_state(sender.agent, ident, "delivered")
    assert wire.moved - before < 1.3 * SIZE


SCENARIOS: dict[str, Callable[[SmallDisk], None]] = {
    each.__name__: each for each in (before_it_begins, in_the_middle)
}


def main(name: str) -> None:
    disk = SmallDisk()
    try:
        SCENARIOS[name](disk)
    except BaseException:
        for log in [*Path(disk.root).rglob("node.log")]:
            print(log, "\n".join(log.read_text().splitlines()[-30:]), file=sys.stderr)
        raise
    finally:
        disk.close()


if __name__ == "__main__":
    main(sys.argv[1])
