"""Scenarios on a disk that is really full, or fails: run in a mount namespace of their own.

The project's folder is a disk of a few MiB with one agent on it; `elsewhere` has room. What a
scenario promises is asserted here; the test that starts it only looks at how it ends.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from end_to_end.delivery.post import Post, texts
from end_to_end.processes.harness import Node, wait_until

from meshagent.errors import MeshError

DISK_BYTES = 40 * 1024 * 1024
LARGE = "x" * 200_000
RECOVERY_S = 15.0
LIMIT_EXIT_CODE = 6
IDLE_S = 1.0
IDLE_CPU_S = 0.25 * IDLE_S  # a node that can't write must not spin


def mount(path: str, size: int) -> None:
    options = ["-t", "tmpfs", "-o", f"size={size}"]
    subprocess.run(["mount", *options, "none", path], check=True)


class SmallDisk(Post):
    """The project's folder has little room."""

    def __init__(self) -> None:
        super().__init__()
        kept = {
            path.name: path.read_bytes() for path in self.folder.path.iterdir() if path.is_file()
        }
        self.mount()
        self.folder.path.mkdir(mode=0o700)
        for name, content in kept.items():
            path = self.folder.path / name
            path.touch(mode=0o600)
            path.write_bytes(content)
        self.ballast = self.project / "ballast"

    def mount(self) -> None:
        mount(str(self.project), DISK_BYTES)

    def use_up(self, leave: int) -> None:
        stat = os.statvfs(self.project)
        with self.ballast.open("ab") as file:
            file.write(b"x" * max(0, stat.f_bavail * stat.f_frsize - leave))

    def free(self) -> None:
        self.ballast.unlink()

    def close(self) -> None:
        for each in self._started:
            each.end()
        subprocess.run(["umount", "-l", str(self.project)], check=False)
        super().close()

    def send_until_full(self, agent: str, to: str, size: int = len(LARGE)) -> list[str]:
        accepted: list[str] = []
        with self.session(agent) as session:
            for number in range(1000):
                text = f"{number} " + "x" * size
                try:
                    session.ask("send", to=to, text=text)
                except MeshError as error:
                    if error.exit_code != LIMIT_EXIT_CODE or "full" not in error.message:
                        raise
                    return accepted
                accepted.append(text)
        raise AssertionError("the disk never was full")

    def assert_calm(self, node: Node, why: str = "full") -> None:
        """It lives, says what is wrong, and does not burn the processor over it."""
        assert node.process.poll() is None, node.told()
        assert why in self.ask(node.agent, "status")["health"]["store"]
        assert_idle(node)
        told = self.say(node.agent, "status").out
        assert "trouble" in told
        assert why in told
        assert "Traceback" not in node.err, node.err

    def wait_until_well(self, node: Node) -> None:
        wait_until(
            lambda: self.ask(node.agent, "status")["health"]["store"] == "ok",
            "the store to be well again",
            RECOVERY_S,
        )


class FailingDisk(SmallDisk):
    """A filesystem that turns read-only after an error, as most do, under files that are open."""

    def mount(self) -> None:
        image = self.root / "disk.img"
        if not image.exists():
            with image.open("wb") as file:
                file.truncate(DISK_BYTES)
            subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
        options = ["-o", "loop,errors=remount-ro"]
        subprocess.run(["mount", *options, str(image), str(self.project)], check=True)

    def fail(self) -> None:
        subprocess.run(["mount", "-o", "remount,abort", str(self.project)], check=True)

    def repair(self) -> None:
        """As after a reboot; nobody has a file open there."""
        subprocess.run(["umount", str(self.project)], check=True)
        subprocess.run(["e2fsck", "-fy", str(self.root / "disk.img")], stdout=-3, check=False)
        self.mount()


def assert_idle(node: Node) -> None:
    process = psutil.Process(node.pid)
    before = sum(process.cpu_times()[:2])
    time.sleep(IDLE_S)
    assert sum(process.cpu_times()[:2]) - before < IDLE_CPU_S


def accepting(post: SmallDisk) -> None:
    """Refused at the sender with exit 6; what was accepted before arrives, and what comes after."""
    node = post.start("tester")
    absent = post.make_agent("backend", post.elsewhere).agent
    post.use_up(leave=3_000_000)
    accepted = post.send_until_full(node.agent, absent)
    assert accepted
    for _ in range(3):
        ran = post.say(node.agent, "send", absent, "-", "--json", text=LARGE)
        assert (ran.code, ran.out) == (LIMIT_EXIT_CODE, ""), ran
        assert "Free some space" in ran.err
    post.assert_calm(node)
    assert texts(post.ask(node.agent, "outbox")) == accepted
    post.free()
    post.wait_until_well(node)
    post.send(node.agent, absent, "after")
    post.join_elsewhere("backend", node).joined  # noqa: B018 - waits
    post.wait_for_texts(absent, [*accepted, "after"])


def receiving(post: SmallDisk) -> None:
    """The sender keeps it queued, and it arrives by itself when there is room."""
    node = post.start("tester")
    sender = post.join_elsewhere("backend", node)
    sender.wait_for_peer(node.agent, "alive")
    post.use_up(leave=2_000_000)
    wanted = [f"{number} {LARGE}" for number in range(30)]
    ids = post.send(sender.agent, node.agent, *wanted)
    wait_until(
        lambda: "full" in post.ask(node.agent, "status")["health"]["store"], "the disk to be full"
    )
    post.assert_calm(node)
    kept = texts(post.inbox(node.agent))
    assert kept == wanted[: len(kept)], [each.split()[0] for each in kept]
    assert len(kept) < len(wanted)
    states = [post.state(sender.agent, each) for each in ids]
    assert set(states[: len(kept)]) <= {"delivered", "queued", "sent"}
    assert "delivered" not in states[len(kept) :]
    post.free()
    post.wait_until_well(node)
    post.wait_for_texts(node.agent, wanted)
    post.wait_for_state(sender.agent, ids[-1], "delivered")


def checkpointing(post: SmallDisk) -> None:
    """The log has room and the database has not: many small commits, and a kill in the middle."""
    node = post.start("tester")
    absent = post.make_agent("backend", post.elsewhere).agent
    accepted = [f"before {number} " + "x" * 20_000 for number in range(100)]
    post.send(node.agent, absent, *accepted)  # about half of what the log takes before a checkpoint
    post.use_up(leave=3_000_000)
    accepted += post.send_until_full(node.agent, absent, 4_000)
    node.end()
    post.free()
    node = post.start("tester")
    assert texts(post.ask(node.agent, "outbox")) == accepted
    post.join_elsewhere("backend", node).joined  # noqa: B018 - waits
    post.wait_for_texts(absent, accepted)


def acknowledging(post: SmallDisk) -> None:
    """Delivered, and no room to note it: it is asked again without end or hurry, and kept once."""
    node = post.start("tester")
    absent = post.make_agent("backend", post.elsewhere).agent
    post.use_up(leave=3_000_000)
    accepted = post.send_until_full(node.agent, absent)
    post.use_up(leave=0)
    back = post.join_elsewhere("backend", node)
    back.joined  # noqa: B018 - waits
    time.sleep(3.0)
    assert_idle(node)
    post.free()
    post.wait_for_texts(absent, accepted)
    wait_until(
        lambda: post.ask(node.agent, "status")["outbox"] == {"queued": 0, "sent": 0}, "the answers"
    )
    assert texts(post.inbox(absent)) == accepted


def spooling(post: SmallDisk) -> None:
    """Mail in the spool waits for a recipient whose own disk is full; its sender has gone."""
    sender = post.start("backend")
    node = post.start("tester")
    agent = node.agent
    post.leave(node)
    wanted = [f"{number} {LARGE}" for number in range(10)]
    post.send(sender.agent, agent, *wanted)
    post.leave(sender)
    post.use_up(leave=300_000)
    node = post.join("tester")
    time.sleep(3.0)
    if node.process.poll() is None:
        kept = texts(post.inbox(agent))
        assert kept == wanted[: len(kept)]
        assert len(kept) < len(wanted)
        post.leave(node)
    else:  # not even its registry file has room
        _refused_for_space(node)
    post.free()
    node = post.start("tester")
    post.wait_for_texts(agent, wanted)


def joining(post: SmallDisk) -> None:
    """Wherever the room runs out: a join that fails says why, with exit 6, and later it works."""
    post.leave(post.start("tester"))
    post.use_up(leave=0)
    _refused_for_space(post.join("tester"))
    post.free()
    registry = str(post.folder.registry)  # its file comes last, when all others had room
    mount(registry, 8192)
    (post.folder.registry / "ballast").write_bytes(b"x" * 8192)
    _refused_for_space(post.join("tester"))
    subprocess.run(["umount", registry], check=True)
    post.start("tester")


def _refused_for_space(node: Node) -> None:
    assert node.wait() == LIMIT_EXIT_CODE, node.told()
    assert "space" in node.err
    assert "Traceback" not in node.err


def turning_read_only(post: FailingDisk) -> None:
    """Refused with the reason, nothing accepted that is not kept; after the repair all is there."""
    node = post.start("tester")
    peer = post.join_elsewhere("backend", node)
    peer.wait_for_peer(node.agent, "alive")
    absent = post.make_agent("absent", post.elsewhere).agent
    accepted = [f"before {number}" for number in range(5)]
    post.send(node.agent, absent, *accepted)
    ids = post.send(peer.agent, node.agent, "it came before")
    post.wait_for_state(peer.agent, ids[0], "delivered")
    post.fail()
    for _ in range(2):
        ran = post.say(node.agent, "send", absent, "too late", "--json")
        assert (ran.code, ran.out) == (1, ""), ran
        assert "read-only" in ran.err, ran.err
    ids += post.send(peer.agent, node.agent, "it comes later")
    post.assert_calm(node, "read-only")
    assert post.state(peer.agent, ids[1]) != "delivered"
    assert texts(post.ask(node.agent, "outbox")) == accepted
    assert texts(post.inbox(node.agent)) == ["it came before"]
    node.end()
    post.repair()
    node = post.start("tester")
    post.wait_for_texts(node.agent, ["it came before", "it comes later"])
    post.send(node.agent, absent, "after")
    post.join_elsewhere("absent", node).joined  # noqa: B018 - waits
    post.wait_for_texts(absent, [*accepted, "after"])


def refusing_every_write(post: SmallDisk) -> None:
    """Whatever keeps a node from writing: when it is over, the node goes on by itself."""
    node = post.start("tester")
    peer = post.join_elsewhere("backend", node)
    peer.wait_for_peer(node.agent, "alive")
    (first,) = post.send(node.agent, peer.agent, "before")
    post.wait_for_state(node.agent, first, "delivered")
    limits = resource.prlimit(node.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    ran = post.say(node.agent, "send", peer.agent, "refused", "--json")
    assert (ran.code, ran.out) == (1, ""), ran
    (ident,) = post.send(peer.agent, node.agent, "it waits")
    post.assert_calm(node, "mesh.db")
    assert post.state(peer.agent, ident) != "delivered"
    resource.prlimit(node.pid, resource.RLIMIT_FSIZE, limits)
    post.wait_until_well(node)
    post.send(node.agent, peer.agent, "after")
    post.wait_for_texts(node.agent, ["it waits"])
    post.wait_for_texts(peer.agent, ["before", "after"])


Scenario = Callable[[SmallDisk], None] | Callable[[FailingDisk], None]
SCENARIOS: dict[str, tuple[type[SmallDisk], Scenario]] = {
    each.__name__: (SmallDisk, each)
    for each in (
        accepting, receiving, checkpointing, acknowledging, spooling, joining,
        refusing_every_write,
    )
} | {turning_read_only.__name__: (FailingDisk, turning_read_only)}  # fmt: skip
LONG = ("acknowledging", "spooling")  # what the others show in part, at some length


def main(name: str) -> None:
    disk, scenario = SCENARIOS[name]
    post = disk()
    try:
        scenario(post)  # type: ignore[arg-type]
    except BaseException:
        for log in [*Path(post.root).rglob("node.log")]:
            print(log, "\n".join(log.read_text().splitlines()[-30:]), file=sys.stderr)
        raise
    finally:
        post.close()


if __name__ == "__main__":
    main(sys.argv[1])
