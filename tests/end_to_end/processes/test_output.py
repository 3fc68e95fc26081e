"""What programs parse and what people see: stable keys, calm views, no stray escape codes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from end_to_end.processes.harness import COMMAND, Mesh, Node, finish, wait_until

from meshagent.cli.live import LineView, describe_change
from meshagent.cli.mail import print_message
from meshagent.cli.output import peer_cells
from meshagent.session import attach

pytestmark = pytest.mark.process

# DESIGN 13; on a line of their own, what the issue and DESIGN 7 add.
PEER_KEYS = {
    "agent", "name", "role", "state", "status", "capabilities", "addresses", "host", "last_heard",
    "version",
    "presence",
}  # fmt: skip
STATUS_KEYS = {
    "agent", "name", "role", "mesh", "pid", "uptime_s", "addresses", "peers", "outbox", "inbox",
    "presence", "status", "refused", "ignored", "health", "damage", "version",
}  # fmt: skip
JOINED_KEYS = {"event", "agent", "addresses"} | {"role", "mesh", "pid"}

ESCAPE = "\x1b"
CURSOR_HIDDEN, CURSOR_SHOWN = "\x1b[?25l", "\x1b[?25h"


def seen(state: str, last_heard: str | None = None) -> dict[str, Any]:
    return {
        "agent": "bob-aaaaaaaa", "role": "backend", "state": state, "presence": "idle",
        "status": "", "capabilities": [], "addresses": [], "last_heard": last_heard,
    }  # fmt: skip


def test_who_was_gone_before_we_came_is_not_told_of() -> None:
    assert describe_change(None, seen("left")) == describe_change(None, seen("gone")) == ""
    assert describe_change(None, seen("alive")) == "bob-aaaaaaaa (backend) is here"
    assert describe_change("alive idle ", seen("left")) == "bob-aaaaaaaa (backend) left"


def test_who_is_alive_by_the_word_of_others_was_not_never_heard() -> None:
    assert peer_cells(seen("alive"))[-1] == "by others"
    assert peer_cells(seen("gone"))[-1] == "never"
    assert peer_cells(seen("alive", "2020-01-01T00:00:00+00:00"))[-1].endswith("d ago")


def test_files_are_named_where_a_message_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    file = {
        "name": "shot.png", "size": 20, "mime": "image/png", "state": "ready", "received": 20,
        "reason": None,
    }  # fmt: skip
    message = {
        "id": "7k2m", "from": "bob-aaaaaaaa", "text": "look\nhere", "attachments": [file],
        "sent_at": "2020-01-01T00:00:00+00:00", "reply_to": "", "data": None,
    }  # fmt: skip
    LineView.message(LineView.__new__(LineView), message)
    assert capsys.readouterr().out == "bob-aaaaaaaa: look  [shot.png 20 B image/png]\n"
    print_message(message, "tester")
    assert "Save with: meshagent save 7k2m --as tester\n" in capsys.readouterr().out


def test_status_counts_mail(shared: Mesh, pair: tuple[Node, Node]) -> None:
    ran = shared.run("status", "--as", pair[0].agent)
    lines = dict(line.split(maxsplit=1) for line in ran.out.splitlines())
    assert (lines["inbox"], lines["outbox"]) == ("0 unread", "0 queued, 0 sent")


@pytest.fixture(scope="module")
def pair(shared: Mesh) -> Iterator[tuple[Node, Node]]:
    """Two who have met, for the tests that only look."""
    first = shared.join("backend", "--capability", "python", "--capability", "sql")
    second = shared.join("tester")
    first.wait_for_peer(second.agent, "alive")
    second.wait_for_peer(first.agent, "alive")
    yield first, second
    for node in (first, second):
        node.signal(signal.SIGTERM)
        assert node.wait() == 0, node.told()


def test_json_keys_are_those_of_the_design(shared: Mesh, pair: tuple[Node, Node]) -> None:
    first, second = pair
    joined = first.joined.event
    assert set(joined) == JOINED_KEYS
    assert (joined["event"], joined["agent"]) == ("joined", first.agent)
    assert re.fullmatch(r"127\.0\.0\.1:\d+", joined["addresses"][0])

    event = second.wait_for_peer(first.agent, "alive").event
    assert set(event) == PEER_KEYS | {"event"}
    listed = shared.run("peers", "--json", "--as", second.agent)
    (peer,) = listed.json
    assert set(peer) == PEER_KEYS
    assert peer["agent"] == first.agent
    assert peer["capabilities"] == ["python", "sql"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", peer["last_heard"])
    assert len(listed.out.splitlines()) == 1

    ran = shared.run("status", "--json", "--as", first.agent)
    status = ran.json
    assert set(status) == STATUS_KEYS
    assert status["pid"] == first.pid
    assert status["peers"] == {"alive": 1, "suspect": 0, "gone": 0}
    assert set(status["outbox"]) == {"queued", "sent"}
    assert set(status["inbox"]) == {"unread"}
    assert ran.err == ""


def test_watch_is_one_object_per_line_and_ends_with_its_node(
    shared: Mesh, pair: tuple[Node, Node]
) -> None:
    first, second = pair
    watched = shared.join("watched")
    watched.wait_for_peer(first.agent, "alive")
    watched.wait_for_peer(second.agent, "alive")
    stream = shared.command("peers", "--watch", "--json", "--as", watched.agent)
    assert stream.stdout is not None
    begin = [json.loads(stream.stdout.readline()) for _ in range(2)]
    assert {each["agent"] for each in begin} == {first.agent, second.agent}
    assert shared.run("status", "at lunch", "--presence", "away", "--as", first.agent).code == 0
    change = json.loads(stream.stdout.readline())
    for each in (*begin, change):
        assert set(each) == PEER_KEYS | {"event"}
        assert each["event"] == "peer"
    assert (change["agent"], change["presence"], change["status"]) == (
        first.agent, "away", "at lunch",
    )  # fmt: skip
    watched.signal(signal.SIGTERM)
    ended = finish(stream)
    assert (ended.code, ended.out) == (0, "")
    assert watched.agent in ended.err
    with attach(shared.folder.registry, first.agent, {}) as session:
        session.ask("status", text="", presence="idle")


def test_a_pipe_gets_no_escape_codes_and_nothing_cut(shared: Mesh, pair: tuple[Node, Node]) -> None:
    ran = shared.run("peers", env={"COLUMNS": "20"})
    assert ran.code == 0
    assert ESCAPE not in ran.out + ran.err
    for node in pair:
        assert node.agent in ran.out
    assert "python,sql" in ran.out


def test_colours_are_for_terminals_and_no_color_is_heeded(
    shared: Mesh, pair: tuple[Node, Node]
) -> None:
    coloured = shared.screen("peers", columns=120)
    plain = shared.screen("peers", columns=120, NO_COLOR="1")
    narrow = shared.screen("peers", columns=30, NO_COLOR="1")
    assert [each.wait() for each in (coloured, plain, narrow)] == [0, 0, 0]
    assert f"{ESCAPE}[32malive" in coloured.drawn
    assert ESCAPE not in plain.drawn
    for node in pair:
        assert node.agent in plain.drawn
        assert node.agent in narrow.drawn
    assert max(map(len, narrow.drawn.splitlines())) <= 30


def test_a_reader_that_stops_reading_ends_a_command_quietly(
    shared: Mesh, pair: tuple[Node, Node]
) -> None:
    for arguments in (["peers"], ["status", "--as", pair[0].agent]):
        process = shared.command(*arguments)
        assert process.stdout is not None
        process.stdout.close()  # as `| head -0` does, and before anything was written
        process.stdout = None
        ran = finish(process)
        assert (ran.code, ran.err) == (0, "")


def test_a_node_whose_reader_has_gone_leaves(shared: Mesh, pair: tuple[Node, Node]) -> None:
    process = shared.command("join", "--role", "piped", "--json", "--discovery", "file")
    assert process.stdout is not None
    joined = json.loads(process.stdout.readline())
    pair[0].wait_for_peer(joined["agent"], "alive")
    process.stdout.close()
    process.stdout = None
    shared.run("status", "news for the reader", "--as", pair[1].agent)
    ran = finish(process)
    assert (ran.code, ran.err) == (0, "")
    pair[0].wait_for_peer(joined["agent"], "left", within=2.0)


def test_the_live_view_fits_a_narrow_terminal_and_ctrl_c_leaves(
    shared: Mesh, pair: tuple[Node, Node]
) -> None:
    screen = shared.screen("join", "--role", "person", "--discovery", "file")
    screen.wait_for("Ctrl-C leaves")
    for node in pair:
        screen.wait_for(node.agent)
    with attach(shared.folder.registry, pair[1].agent, {}) as session:
        for number in range(8):  # more than there is room for: the last one counts
            session.ask("status", text=f"writing test {number}", presence="working")
            wait_until(
                lambda text=f"test {number}": any(
                    text in event["status"] for event in pair[0].peer_events(pair[1].agent)
                ),
                "news of the tester",
            )
        session.ask("status", text="", presence="away")
    wait_until(lambda: "(tester) is a…" in _plain(screen.drawn), "what just happened")
    screen.wait_for("Ctrl-C leaves")
    assert _plain(screen.drawn).rindex("Ctrl-C leaves") > _plain(screen.drawn).index("is a…")
    screen.type(b"\x03")
    assert screen.wait() == 0, screen.drawn
    drawn = _plain(screen.drawn)
    person = re.search(r"person-\w{8}", drawn)
    assert person, drawn
    assert max(map(len, re.split(r"[\r\n]+", drawn))) <= 40, "no line wraps"
    assert "Traceback" not in drawn
    assert screen.drawn.rindex(CURSOR_SHOWN) > screen.drawn.rindex(CURSOR_HIDDEN)
    assert f"{person[0]} has left." in drawn
    pair[0].wait_for_peer(person[0], "left", within=1.0)


def test_a_simple_terminal_and_a_pipe_get_plain_lines(
    shared: Mesh, pair: tuple[Node, Node]
) -> None:
    simple = shared.screen("join", "--role", "simple", "--discovery", "file", TERM="dumb")
    piped = subprocess.Popen(
        [*COMMAND, "join", "--role", "piped", "--discovery", "file"],
        cwd=shared.project, env=shared.environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert piped.stdout is not None
        first_line = piped.stdout.readline()
        assert re.match(r"joined as piped-\w{8} \(role piped\) in mesh 'project' at", first_line)
        for node in pair:
            screen_line = f"{node.agent} ({node.joined.event['role']}) is here"
            simple.wait_for(screen_line)
        simple.type(b"\x03")
        assert simple.wait() == 0
        assert ESCAPE not in simple.drawn
        piped.send_signal(signal.SIGTERM)
        ran = finish(piped)
    finally:
        piped.kill()
        piped.wait()
    assert ran.code == 0
    assert re.fullmatch(r"piped-\w{8} has left\.\n", ran.err)
    assert ESCAPE not in ran.out
    assert f"{pair[0].agent} (backend) is here" in ran.out


def _plain(drawn: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)
