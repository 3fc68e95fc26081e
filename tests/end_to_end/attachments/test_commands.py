"""The commands' words, exit codes and keys; and nothing but data in a pipe."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from end_to_end.attachments.courier import KIB, Courier, digest
from end_to_end.processes.harness import COMMAND, Node, Screen, wait_until

from meshagent.session import open_blobs

pytestmark = pytest.mark.process

MESSAGE_KEYS = {
    "id", "from", "to", "kind", "text", "data", "thread", "reply_to", "attachments",
    "sent_at", "received_at", "state",
}  # fmt: skip
# So slow to read that a bar is shown wherever one may be.
SLOW = """
import sys, time
for _ in range(4):
    sys.stdout.write('x' * 100000)
    sys.stdout.flush()
    time.sleep(0.4)
"""
ATTACHMENT_KEYS = {"name", "size", "mime", "sha256", "state", "path"}


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[Courier, Node, Node]]:
    courier = Courier()
    try:
        sender, receiver = courier.start("tester"), courier.start("backend")
        sender.wait_for_peer(receiver.agent, "alive")
        receiver.wait_for_peer(sender.agent, "alive")
        yield courier, sender, receiver
    finally:
        courier.close()


def test_standard_input_is_attached_under_the_name_it_is_given(
    two: tuple[Courier, Node, Node],
) -> None:
    courier, sender, receiver = two
    data = os.urandom(300 * KIB)
    words = ["send", receiver.agent, "look", "--attach", "-", "--as", sender.agent, "--json"]
    for name, wanted in ((["--attach-name", "trace.bin"], "trace.bin"), ([], "stdin")):
        ran = subprocess.run(
            [*COMMAND, *words, *name], input=data, capture_output=True, check=False,
            cwd=courier.project, env=courier.environment(), timeout=30,
        )  # fmt: skip
        assert (ran.returncode, ran.stderr) == (0, b""), ran
        message = courier.inbox(receiver.agent)[-1]
        (attachment,) = message["attachments"]
        assert (attachment["name"], attachment["size"]) == (wanted, len(data))
        assert Path(attachment["path"]).read_bytes() == data


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["look", "--attach", "folder"], 2, "folder"),
        (["look", "--attach", "nowhere.png"], 2, "nowhere.png"),
        (["look", "--attach-name", "x"], 2, "--attach -"),
        (["-", "--attach", "-"], 2, "either the text or an attachment"),
        (["look", "--attach", "-", "--attach", "-"], 2, "once"),
        (["look", "--attach", "pipe"], 2, "pipe"),
    ],
)
def test_what_cannot_be_attached_is_refused_with_advice_and_nothing_is_sent(
    two: tuple[Courier, Node, Node], words: list[str], code: int, told: str
) -> None:
    courier, sender, receiver = two
    (courier.project / "folder").mkdir(exist_ok=True)
    if not (courier.project / "pipe").exists():
        os.mkfifo(courier.project / "pipe")
    before = len(courier.ask(sender.agent, "outbox", ended=True))
    ran = courier.say(sender.agent, "send", receiver.agent, *words, "--json")
    assert (ran.code, ran.out) == (code, ""), ran
    assert told in ran.err, ran.err
    assert "Traceback" not in ran.err
    assert len(courier.ask(sender.agent, "outbox", ended=True)) == before


def test_a_folder_is_refused_with_the_command_that_packs_it(
    two: tuple[Courier, Node, Node],
) -> None:
    courier, sender, receiver = two
    (courier.project / "folder").mkdir(exist_ok=True)
    ran = courier.say(sender.agent, "send", receiver.agent, "look", "--attach", "folder")
    assert "is a folder" in ran.err
    assert "tar" in ran.err or "zip" in ran.err


def test_save_overwrites_nothing_and_stays_in_the_folder(
    two: tuple[Courier, Node, Node],
) -> None:
    courier, sender, receiver = two
    folder = courier.root / "saved"
    folder.mkdir()
    outside = courier.root / "outside"
    (folder / "shot.png").write_text("mine")
    (folder / "link").symlink_to(outside)
    file = courier.file(5 * KIB)
    names = ["shot.png", "../../up", "/etc/passwd", "link", "shot.png", ".bashrc", "CON"]
    sha256 = open_blobs(courier.folder).put(file).sha256.hex()
    attach = [(name, sha256) for name in names]
    (receipt,) = courier.ask(sender.agent, "send", to=receiver.agent, text="", attach=attach)
    courier.wait_for_message(receiver.agent, receipt["id"])
    ran = courier.say(receiver.agent, "save", receipt["id"], "--to", str(folder), "--json")
    assert ran.code == 0, ran
    saved = [Path(each["file"]) for each in ran.json]
    assert [each["name"] for each in ran.json] == names
    assert len(set(saved)) == len(names)
    for each in saved:
        assert each.parent == folder
        assert not each.is_symlink()
        assert digest(each) == digest(file)
        assert not each.name.startswith(".")
    assert (folder / "shot.png").read_text() == "mine"
    assert not outside.exists()
    assert len(list(folder.iterdir())) == len(names) + 2


def test_json_has_the_keys_of_the_design(two: tuple[Courier, Node, Node]) -> None:
    courier, sender, receiver = two
    file = courier.file(KIB, "keys.bin")
    sent = courier.say(
        sender.agent, "send", receiver.agent, "keys", "--attach", str(file), "--json"
    ).json
    assert {"id", "to", "state", "elapsed_ms"} <= set(sent)
    message = courier.say(receiver.agent, "inbox", "--json").json[-1]
    assert set(message) >= MESSAGE_KEYS
    assert set(message["attachments"][0]) >= ATTACHMENT_KEYS
    for verb in ("read", "fetch"):
        told = courier.say(receiver.agent, verb, sent["id"], "--json").json
        assert set(told) >= MESSAGE_KEYS
        assert set(told["attachments"][0]) >= ATTACHMENT_KEYS
    outgoing = courier.say(sender.agent, "log", "--json").json[-1]
    assert set(outgoing["attachments"][0]) >= ATTACHMENT_KEYS


def test_progress_is_for_terminals_and_leaves_a_pipe_clean(
    two: tuple[Courier, Node, Node],
) -> None:
    courier, sender, receiver = two
    words = ["send", receiver.agent, "slow", "--attach", "-", "--as", sender.agent]
    with subprocess.Popen(["python3", "-c", SLOW], stdout=subprocess.PIPE) as source:
        ran = subprocess.run(
            [*COMMAND, *words], stdin=source.stdout, capture_output=True, check=False,
            cwd=courier.project, env=courier.environment(), timeout=30,
        )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, b""), ran
    (line,) = ran.stdout.decode().splitlines()
    assert line.endswith("delivered")
    assert "\r" not in line


def test_a_long_import_shows_a_bar_on_a_terminal_and_wipes_it(
    two: tuple[Courier, Node, Node],
) -> None:
    courier, sender, receiver = two
    shell = (
        f'python3 -c "{SLOW}" | {" ".join(COMMAND)} send {receiver.agent} hi --attach - '
        f"--as {sender.agent} >/dev/null"
    )
    screen = Screen(
        ["/bin/sh", "-c", shell], 100, 20, cwd=courier.project,
        env=courier.environment(TERM="xterm-256color"),
    )  # fmt: skip
    try:
        screen.wait()
        assert "Reading stdin" in screen.drawn
        assert screen.drawn.endswith("\r\x1b[K"), screen.drawn
    finally:
        screen.end()


def test_a_name_that_is_no_text_is_sent_with_marks_in_it(two: tuple[Courier, Node, Node]) -> None:
    courier, sender, receiver = two
    (courier.project / os.fsdecode(b"log\xff.txt")).write_text("x")
    words = [b"send", receiver.agent.encode(), b"look", b"--attach", b"log\xff.txt"]
    ran = subprocess.run(
        [*COMMAND, *words, "--as", sender.agent], capture_output=True, check=False,
        cwd=courier.project, env=courier.environment(), timeout=30,
    )  # fmt: skip
    assert ran.returncode == 0, ran
    (attachment,) = courier.inbox(receiver.agent)[-1]["attachments"]
    assert attachment["name"] == "log\ufffd.txt"


def test_who_is_not_there_is_told_before_anything_is_read(two: tuple[Courier, Node, Node]) -> None:
    courier, sender, _ = two
    file = courier.file(KIB)
    ran = courier.say(sender.agent, "send", "nobody", "look", "--attach", str(file))
    assert (ran.code, ran.out) == (4, ""), ran
    assert not open_blobs(courier.folder).holds(bytes.fromhex(digest(file)))


def test_what_a_peer_has_not_taken_yet_is_on_its_way_and_not_said_to_be_away(
    two: tuple[Courier, Node, Node],
) -> None:
    courier, sender, receiver = two
    file = courier.file(KIB)
    os.kill(receiver.pid, signal.SIGSTOP)
    try:
        words = ("send", receiver.agent, "look", "--attach", str(file), "--wait", "1")
        ran = courier.say(sender.agent, *words)
    finally:
        os.kill(receiver.pid, signal.SIGCONT)
    assert ran.code == 0, ran
    assert ran.out.endswith(": sent\n")
    assert ran.err == f"On its way to {receiver.agent}: delivered when its files are whole there.\n"


def ended(courier: Courier, shell: str, when: Callable[[Screen], None]) -> str:
    """What a command draws until Ctrl-C at that moment, and then."""
    screen = Screen(
        ["/bin/sh", "-c", shell], 100, 20, cwd=courier.project,
        env=courier.environment(TERM="xterm"),
    )  # fmt: skip
    try:
        when(screen)
        screen.type(b"\x03")
        assert screen.wait() != 0
        return screen.drawn
    finally:
        screen.end()


def test_who_ends_a_send_learns_what_became_of_it(two: tuple[Courier, Node, Node]) -> None:
    courier, sender, receiver = two
    command = f"{' '.join(COMMAND)} send {receiver.agent} look --as {sender.agent} --attach"
    endless = "while true; do head -c 1500000 /dev/zero; sleep 0.2; done"
    before = len(courier.ask(sender.agent, "outbox", ended=True))
    drawn = ended(courier, f"({endless}) | {command} -", lambda it: it.wait_for("Reading stdin"))
    assert drawn.endswith("Nothing was sent.\r\n\r\n")
    assert len(courier.ask(sender.agent, "outbox", ended=True)) == before

    def accepted(_: Screen) -> None:
        wait_until(lambda: courier.ask(sender.agent, "outbox"), "it to be accepted")

    os.kill(receiver.pid, signal.SIGSTOP)
    try:
        drawn = ended(courier, f"exec {command} {courier.file(KIB)}", accepted)
    finally:
        os.kill(receiver.pid, signal.SIGCONT)
    assert "meshagent outbox" in drawn
    assert "Nothing was sent." not in drawn


@pytest.mark.parametrize(("to", "told"), [("file", "not a folder"), ("/proc", "/proc/keys.bin")])
def test_a_place_where_nothing_can_be_saved_is_told_with_the_option_that_helps(
    two: tuple[Courier, Node, Node], to: str, told: str
) -> None:
    courier, sender, receiver = two
    (courier.project / "file").write_text("mine")
    ident = courier.send_files(sender.agent, receiver.agent, [courier.file(KIB, "keys.bin")])
    courier.wait_for_message(receiver.agent, ident)
    ran = courier.say(receiver.agent, "save", ident, "--to", to)
    assert (ran.code, ran.out) == (1, ""), ran
    assert told in ran.err
    assert "--to" in ran.err
    assert "--dir" not in ran.err
    assert (courier.project / "file").read_text() == "mine"
