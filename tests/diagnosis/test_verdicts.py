"""Each verdict, from the facts that lead to it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshagent.diagnosis import folder, network, nodes, peers
from meshagent.diagnosis.finding import Finding, State, few, span
from meshagent.diagnosis.probes import Device, DialAnswer, NodeAnswer, Surroundings
from meshagent.discovery.registry import RegistryEntry, this_host
from meshagent.storage.folders.mesh_folder import MeshFolder

OK, NOTE, PROBLEM = State.OK, State.NOTE, State.PROBLEM
LO = Device("lo", ("127.0.0.1", "::1"), True)
ETH = Device("eth0", ("192.168.1.5", "fe80::1"), True)
ETH_DOWN = replace(ETH, up=False)
ETH_BARE = Device("eth0", (), False)
NOW = 1_800_000_000.0
OPEN_KEY = folder.KeyFacts(Path("k"), mode=0o644)
DEAD_PID = 2**22 + 1  # above the kernel's limit


def said(finding: Finding | None) -> str:
    assert finding is not None
    return f"{finding.text} {finding.hint}"


# -- network --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listen", "host"),
    [
        ("", ""),
        ("*", ""),
        ("0.0.0.0", ""),
        ("::", ""),
        (":4711", ""),
        ("*:4711", ""),
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1:4711", "127.0.0.1"),
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("[::1]:4711", "::1"),
        ("localhost", "localhost"),
        ("box.lan:4711", "box.lan"),
    ],
)
def test_the_host_of_a_listen_setting(listen: str, host: str) -> None:
    assert network.host_of(listen) == host


@pytest.mark.parametrize(
    ("asked", "advertised", "setting", "hosts"),
    [
        ("127.0.0.1", ["192.168.1.5:1"], "10.0.0.1", ["127.0.0.1"]),
        ("", ["192.168.1.5:1", "192.168.1.5:2", "[fd00::1]:1"], "", ["192.168.1.5", "fd00::1"]),
        ("", [], "127.0.0.1", ["127.0.0.1"]),
        ("", [], "", ["192.168.1.5", "fe80::1"]),
    ],
)
def test_only_the_addresses_in_question_are_looked_at(
    asked: str, advertised: list[str], setting: str, hosts: list[str]
) -> None:
    assert network.hosts_in_question(asked, advertised, setting, [LO, ETH]) == hosts


@pytest.mark.parametrize(
    ("addresses", "state", "words"),
    [
        (["127.0.0.1:4"], NOTE, "only this machine can reach it"),
        (["[::1]:4", "127.0.0.1:4"], NOTE, "only this machine can reach it"),
        (["127.0.0.1:4", "192.168.1.5:4"], OK, "192.168.1.5:4"),
        ([], PROBLEM, "no address"),
    ],
)
def test_who_can_reach_a_listener(addresses: list[str], state: State, words: str) -> None:
    (finding,) = network.check_listen({"tester-aaaaaaaa": addresses})
    assert finding.state is state
    assert words in finding.text


@pytest.mark.parametrize(
    ("devices", "wanted", "expected"),
    [
        ([LO, ETH], [], [(OK, "lo, eth0")]),
        ([LO, ETH], ["192.168.1.5"], [(OK, "eth0")]),
        ([LO, ETH], ["10.0.0.1"], [(PROBLEM, "No interface that is up has the address 10.0.0.1")]),
        ([LO], ["127.0.0.1"], [(NOTE, "No interface to other machines")]),
        ([ETH], [], [(PROBLEM, "loopback interface is down")]),
        (
            [LO, ETH_DOWN],
            ["192.168.1.5"],
            [(PROBLEM, "eth0, which has 192.168.1.5, is down"), (NOTE, "No interface to other")],
        ),
        (
            [LO, ETH_BARE],
            ["192.168.1.5"],
            [(PROBLEM, "(eth0: down)"), (NOTE, "No interface to other")],
        ),
        ([LO, ETH], ["a.name.lan"], [(OK, "eth0")]),
    ],
)
def test_interfaces_that_are_down_or_missing_are_named(
    devices: list[Device], wanted: list[str], expected: list[tuple[State, str]]
) -> None:
    findings = network.check_interfaces(devices, wanted)
    assert [each.state for each in findings] == [state for state, _ in expected]
    for finding, (_, words) in zip(findings, expected, strict=True):
        assert words in finding.text


@pytest.mark.parametrize(
    ("answer", "state", "words"),
    [
        (DialAnswer.OURS, OK, "takes connections"),
        (DialAnswer.REFUSED, PROBLEM, "refused"),
        (DialAnswer.DROPPED, PROBLEM, "firewall"),
        (DialAnswer.UNREACHABLE, PROBLEM, "no way to it"),
        (DialAnswer.SILENT, PROBLEM, "says nothing"),
        (DialAnswer.FOREIGN, PROBLEM, "another key"),
        (DialAnswer.OTHER, PROBLEM, "another program"),
        (DialAnswer.UNKNOWN, PROBLEM, "not known"),
        (None, PROBLEM, "in time"),
    ],
)
def test_a_port_of_ours_that_does_not_open_is_explained(
    answer: DialAnswer | None, state: State, words: str
) -> None:
    finding = network.check_port("tester-aaaaaaaa", "192.168.1.5:4", answer)
    assert finding.state is state
    assert words in said(finding)


@pytest.mark.parametrize(
    ("host", "trouble", "state"),
    [("127.0.0.1", "", OK), ("192.168.1.5", "", OK), ("192.168.1.5", "no such device", PROBLEM)],
)
def test_blocked_multicast_is_a_problem_with_a_way_round(
    host: str, trouble: str, state: State
) -> None:
    finding = network.check_multicast(host, trouble)
    assert finding.state is state
    assert ("--peer" in finding.hint) == (state is PROBLEM)


@pytest.mark.parametrize(
    ("machine", "devices", "words"),
    [
        (Surroundings(), [LO, ETH], []),
        (Surroundings(wsl=True), [LO, ETH], ["WSL"]),
        (Surroundings(container="Docker"), [LO, ETH], ["Docker"]),
        (Surroundings(macos=True), [LO, ETH], ["macOS"]),
        (Surroundings(), [LO, Device("wg0", ("10.8.0.2",), True)], ["wg0"]),
        (Surroundings(), [LO, Device("tailscale0", ("100.64.0.1",), True)], ["tailscale0"]),
        (Surroundings(), [LO, Device("tun0", ("10.8.0.2",), False)], []),
        (Surroundings(), [LO, Device("utun3", ("fe80::2",), True)], []),
    ],
)
def test_what_stands_between_us_and_the_network_is_noted(
    machine: Surroundings, devices: list[Device], words: list[str]
) -> None:
    findings = network.check_surroundings(machine, devices, local_only=False)
    assert [each.state for each in findings] == [NOTE] * len(words)
    assert all(word in each.text for word, each in zip(words, findings, strict=True))
    assert network.check_surroundings(machine, devices, local_only=True) == []


@pytest.mark.parametrize(("limit", "state"), [(256, NOTE), (1024, OK), (1 << 20, OK)])
def test_a_low_file_limit_is_noted(limit: int, state: State) -> None:
    finding = network.check_descriptors("A node", limit)
    assert finding is not None
    assert finding.state is state
    assert network.check_descriptors("A node", None) is None


# -- nodes ----------------------------------------------------------------------------------------


def report(agent: str = "tester-aaaaaaaa", trouble: str = "", **status: Any) -> nodes.NodeReport:
    seen = status.pop("seen", ())
    answer = NodeAnswer({"uptime_s": 60.0, **status}, seen, trouble, hangs="within" in trouble)
    return nodes.NodeReport(agent, 42, answer)


def peer(agent: str, state: str = "alive", *addresses: str, version: str = "1.0") -> dict[str, Any]:
    return {
        "agent": agent, "state": state, "addresses": list(addresses), "host": "box",
        "last_heard": "2027-01-15T07:59:00.000Z", "version": version,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("node", "state", "words"),
    [
        (report(), OK, "answers"),
        (report(trouble="no answer within 2 s"), PROBLEM, "hangs: no answer within 2 s"),
        (replace(report(trouble="no answer within 2 s"), stopped=True), PROBLEM, "kill -CONT 42"),
        (report(trouble="Connection refused"), PROBLEM, "no session can attach"),
    ],
)
def test_a_node_that_can_not_be_used_is_named(
    node: nodes.NodeReport, state: State, words: str
) -> None:
    finding = nodes.check_node(node)
    assert finding.state is state
    assert words in said(finding)


def test_versions_that_differ_are_named_once() -> None:
    seen = (peer("old-aaaaaaaa", version="0.9"), peer("same-aaaaaaaa"))
    two = [report(version="1.0", seen=seen), report("b-aaaaaaaa", version="0.8", seen=seen)]
    texts = [each.text for each in nodes.check_versions("1.0", two)]
    assert texts == [
        "The node of b-aaaaaaaa runs version 0.8; this command is 1.0.",
        "old-aaaaaaaa has version 0.9; this command is 1.0.",
    ]
    assert nodes.check_versions("1.0", [report(version="1.0")])[0].state is OK


def test_a_source_that_fails_is_told_with_its_reason() -> None:
    health = {"file": "ok", "mdns": "multicast is not available: x", "store": "ok", "new": "odd"}
    findings = nodes.check_sources(report(health=health))
    assert [each.state for each in findings] == [PROBLEM, PROBLEM, OK]
    assert "multicast is not available: x" in findings[0].text
    assert "odd" in findings[1].text


def counted_reasons() -> set[str]:
    """Every reason that the code counts in `refused`, read from the code itself."""
    import re

    import meshagent.core
    import meshagent.transports

    found: set[str] = set()
    for package in (meshagent.core, meshagent.transports):
        for path in Path(str(package.__path__[0])).rglob("*.py"):
            text = path.read_text()
            found |= set(re.findall(r'refused\["([^"]+)"\]', text))
            found |= set(re.findall(r'Refusal\(\s*"([^"]+)"', text))
            found |= set(re.findall(r'refusal = "([^"]+)"', text))
            if path.name == "zap.py":
                found |= set(re.findall(r'return "([a-z]+)"', text))
    return found


def test_every_reason_for_a_refusal_has_a_sentence() -> None:
    assert {"outsider", "version", "clone", "impostor", "mechanism"} <= counted_reasons()
    assert counted_reasons() <= set(nodes._REFUSALS)


@pytest.mark.parametrize(
    ("reason", "count", "state", "words"),
    [
        ("outsider", 1, NOTE, "without this mesh's secret knocked at tester-aaaaaaaa once"),
        ("outsider", 7, NOTE, "7 times: another mesh, a wrong invite"),
        ("version", 2, PROBLEM, "incompatible version"),
        ("clone", 1, PROBLEM, "copied folder"),
        ("impostor", 1, PROBLEM, "another agent's id"),
        ("limit", 1, PROBLEM, "ulimit"),
        ("something new", 3, NOTE, "turned somebody away 3 times: something new"),
    ],
)
def test_refusals_become_sentences(reason: str, count: int, state: State, words: str) -> None:
    (finding,) = nodes.check_refusals(report(refused={reason: count}))
    assert finding.state is state
    assert words in said(finding)
    assert "{" not in said(finding)


# -- peers ----------------------------------------------------------------------------------------


def gone(*addresses: str, state: str = "gone") -> peers.PeerFacts:
    seen = (peer("backend-bbbbbbbb", state, *addresses),)
    return peers.peers_of([report(seen=seen)])[0]


@pytest.mark.parametrize(
    ("answer", "state", "words"),
    [
        (DialAnswer.REFUSED, NOTE, "no node listens"),
        (DialAnswer.DROPPED, PROBLEM, "firewall"),
        (DialAnswer.UNREACHABLE, PROBLEM, "no way to"),
        (DialAnswer.FOREIGN, PROBLEM, "does not know our secret"),
        (DialAnswer.OTHER, PROBLEM, "not a mesh node"),
        (DialAnswer.SILENT, PROBLEM, "hangs"),
        (DialAnswer.OURS, NOTE, "a node of this mesh answers"),
        (DialAnswer.OPEN, NOTE, "mesh.key"),
        (DialAnswer.UNKNOWN, PROBLEM, "not known"),
        (None, PROBLEM, "in time"),
    ],
)
def test_a_peer_that_is_gone_is_explained_by_who_answers(
    answer: DialAnswer | None, state: State, words: str
) -> None:
    known = peers.LocalKnowledge(now=NOW)
    finding = peers.check_peer(gone("192.168.1.9:4"), {"192.168.1.9:4": answer}, known)
    assert finding.state is state
    assert words in said(finding)
    assert "backend-bbbbbbbb is gone, last heard 1 min ago" in finding.text
    given = peers.check_address("192.168.1.9:4", answer)
    assert given.state is (OK if answer is DialAnswer.OURS else PROBLEM)
    assert "192.168.1.9:4" in given.text
    assert "{" not in said(finding) + said(given)


def test_the_most_telling_address_speaks_for_a_peer() -> None:
    answers = {"a:1": DialAnswer.UNREACHABLE, "b:1": DialAnswer.FOREIGN, "c:1": DialAnswer.REFUSED}
    assert (
        "b:1" in peers.check_peer(gone("a:1", "b:1", "c:1"), answers, peers.LocalKnowledge()).text
    )


@pytest.mark.parametrize(
    ("state", "known", "verdict", "words"),
    [
        ("alive", peers.LocalKnowledge(), OK, "is seen by tester-aaaaaaaa"),
        ("left", peers.LocalKnowledge(), NOTE, "left on purpose"),
        ("suspect", peers.LocalKnowledge(), PROBLEM, "no address of it is known"),
        (
            "gone",
            peers.LocalKnowledge(agents=("backend-bbbbbbbb",)),
            NOTE,
            "join --as backend-bbbbbbbb",
        ),
        (
            "gone",
            peers.LocalKnowledge(
                {"backend-bbbbbbbb": report("backend-bbbbbbbb", "none within 2 s")}
            ),
            PROBLEM,
            "hangs",
        ),
    ],
)
def test_a_peer_is_explained_without_knocking(
    state: str, known: peers.LocalKnowledge, verdict: State, words: str
) -> None:
    finding = peers.check_peer(gone(state=state), {}, known)
    assert finding.state is verdict
    assert words in said(finding)


def test_knocking_is_bounded_and_only_where_somebody_is_missing() -> None:
    many = tuple(
        peer(f"p{n}-aaaaaaaa", "gone", *(f"10.0.{n}.{k}:1" for k in range(9))) for n in range(99)
    )
    alive = peer("here-aaaaaaaa", "alive", "10.9.9.9:1")
    hung = peer("hung-aaaaaaaa", "gone", "10.9.9.8:1")
    everyone = peers.peers_of([report(seen=(alive, hung, *many))])
    known = peers.LocalKnowledge({"hung-aaaaaaaa": report("hung-aaaaaaaa", "none within 2 s")})
    tried = peers.addresses_to_try(everyone, known)
    assert len(tried) == peers.ADDRESSES_TRIED_MAX
    assert not {"10.9.9.9:1", "10.9.9.8:1"} & set(tried)


def test_a_peer_counts_as_its_best_witness_sees_it() -> None:
    two = [report(seen=(peer("x-aaaaaaaa", "gone"),)), report("b", seen=(peer("x-aaaaaaaa"),))]
    assert [(each.state, each.seen_by) for each in peers.peers_of(two)] == [("alive", "b")]


def test_nodes_of_one_folder_that_miss_each_other_are_named() -> None:
    a, b = report("a-aaaaaaaa", seen=(peer("b-aaaaaaaa"),)), report("b-aaaaaaaa")
    assert ["b-aaaaaaaa does not see a-aaaaaaaa" in f.text for f in peers.check_each_other([a, b])]
    assert len(peers.check_each_other([a, b])) == 1
    young = report("b-aaaaaaaa", uptime_s=1.0)
    assert peers.check_each_other([a, young]) == []


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("backend-bbbbbbbb", ["backend-bbbbbbbb"]),
        ("backend", ["backend-bbbbbbbb", "backend-cccccccc"]),
        ("backend-c", ["backend-cccccccc"]),
        ("front", []),
    ],
)
def test_a_peer_is_found_by_id_name_or_prefix(wanted: str, found: list[str]) -> None:
    everyone = peers.peers_of([report(seen=(peer("backend-bbbbbbbb"), peer("backend-cccccccc")))])
    assert [each.agent for each in peers.find_peers(wanted, everyone)] == found


@pytest.mark.parametrize(
    ("known", "answering", "state", "words"),
    [
        (peers.LocalKnowledge(), False, PROBLEM, "no node of this mesh runs"),
        (peers.LocalKnowledge(), True, PROBLEM, "ever heard of 'backend'"),
        (peers.LocalKnowledge(agents=("backend-bbbbbbbb",)), True, PROBLEM, "does not run"),
        (
            peers.LocalKnowledge({"backend-bbbbbbbb": report("backend-bbbbbbbb")}),
            True,
            OK,
            "runs on this",
        ),
        (peers.LocalKnowledge({"backend-bbbbbbbb": report(trouble="x")}), False, PROBLEM, "hangs"),
    ],
)
def test_a_peer_that_nobody_knows_is_explained(
    known: peers.LocalKnowledge, answering: bool, state: State, words: str
) -> None:
    finding = peers.unknown_peer("backend", known, answering)
    assert finding.state is state
    assert words in said(finding)


# -- on disk --------------------------------------------------------------------------------------


def entry(**changes: Any) -> RegistryEntry:
    here = RegistryEntry(
        "tester-aaaaaaaa", "tag", "run", ("127.0.0.1:4",), os.getpid(), None, this_host(), "t",
        NOW - 10, {}, Path("/r/tester-aaaaaaaa.json"),
    )  # fmt: skip
    return replace(here, **changes)


@pytest.mark.parametrize(
    ("one", "tag", "state", "words"),
    [
        (entry(), "tag", None, ""),
        (entry(), "", None, ""),
        (entry(), "other", PROBLEM, "of another mesh"),
        (entry(pid=DEAD_PID), "tag", NOTE, "is stale"),
        (entry(host="elsewhere"), "tag", NOTE, "another machine"),
        (entry(host="elsewhere", heartbeat=NOW - 7200), "tag", NOTE, "stale"),
        ("not JSON", "tag", NOTE, "it is not JSON"),
        ("a new reason", "tag", NOTE, "a new reason"),
    ],
)
def test_odd_files_of_the_registry_are_named(
    one: RegistryEntry | str, tag: str, state: State | None, words: str
) -> None:
    finding = folder.check_registry_entry(Path("/r/tester-aaaaaaaa.json"), one, tag, NOW)
    if state is None:
        assert finding is None
    else:
        assert finding is not None
        assert finding.state is state
        assert words in finding.text
        assert "tester-aaaaaaaa" in finding.text


@pytest.mark.parametrize(
    ("facts", "state", "words"),
    [
        (folder.KeyFacts(Path("k"), key=b"x"), OK, "private"),
        (folder.KeyFacts(Path("k"), mode=0o640, key=b"x"), NOTE, "mode 0640"),
        (folder.KeyFacts(Path("k"), mode=0o644, ours=False, key=b"x"), PROBLEM, "one of them"),
        (folder.KeyFacts(Path("k"), trouble="it is empty"), PROBLEM, "it is empty"),
    ],
)
def test_a_key_that_is_damaged_or_open_is_told(
    facts: folder.KeyFacts, state: State, words: str
) -> None:
    finding = folder.check_key(facts)
    assert finding.state is state
    assert words in finding.text


def test_key_facts_never_show_the_key() -> None:
    assert "secret" not in repr(folder.KeyFacts(Path("k"), key=b"secret"))


@pytest.mark.parametrize(
    ("facts", "state", "words"),
    [
        (folder.AgentFacts("a-aaaaaaaa"), OK, "does not run"),
        (folder.AgentFacts("a-aaaaaaaa", 7, listed=True), OK, "runs (pid 7)"),
        (folder.AgentFacts("a-aaaaaaaa", 7), PROBLEM, "held by a process (pid 7)"),
        (folder.AgentFacts("a-aaaaaaaa", 0), PROBLEM, "some process"),
        (folder.AgentFacts("a-aaaaaaaa", trouble="Broken."), PROBLEM, "Broken."),
        (folder.AgentFacts("a-aaaaaaaa", key=OPEN_KEY), NOTE, "k can be read"),
    ],
)
def test_agents_that_can_not_run_or_can_not_be_found_are_named(
    facts: folder.AgentFacts, state: State, words: str
) -> None:
    finding = folder.check_agent(facts)
    assert finding.state is state
    assert words in finding.text


@pytest.mark.parametrize(
    ("free", "writable", "state"),
    [
        (10**12, True, OK),
        (None, True, OK),
        (folder.FREE_BYTES_MIN - 1, True, PROBLEM),
        (10**12, False, PROBLEM),
    ],
)
def test_a_folder_without_room_or_right_to_write_is_told(
    free: int | None, writable: bool, state: State
) -> None:
    assert folder.check_room(MeshFolder(Path("/m")), free, writable).state is state


@pytest.mark.parametrize(("kind", "told"), [("ext4", False), ("", False), ("nfs4", True)])
def test_a_network_filesystem_is_told(kind: str, told: bool) -> None:
    assert (folder.check_filesystem(Path("/m"), kind) is not None) is told


@pytest.mark.parametrize(
    ("mode", "user", "path", "state"),
    [
        (0o40700, 5, "/tmp/m", OK),
        (0o40755, 5, "/tmp/m", PROBLEM),
        (0o40700, 6, "/tmp/m", PROBLEM),
        (0o100600, 5, "/tmp/m", PROBLEM),
        (None, 5, "/tmp/m", OK),
        (0o40700, 5, "/tmp/" + "m" * 80, PROBLEM),
    ],
)
def test_the_place_of_sessions_is_private_and_short(
    mode: int | None, user: int, path: str, state: State
) -> None:
    status = None if mode is None else os.stat_result((mode, 0, 0, 0, 5, 0, 0, 0, 0, 0))
    assert folder.check_runtime_folder(Path(path), status, user).state is state


@pytest.mark.parametrize(
    ("beat", "year", "state"),
    [(NOW - 5, 2027, OK), (NOW + 5, 2027, OK), (NOW + 600, 2027, PROBLEM), (NOW, 1970, PROBLEM)],
)
def test_a_clock_that_can_not_be_right_is_told(beat: float, year: int, state: State) -> None:
    assert folder.check_clock(NOW, [("tester-aaaaaaaa", beat)], year).state is state


@pytest.mark.parametrize(
    ("seconds", "words"), [(-5, "0 s"), (59, "59 s"), (61, "1 min"), (7300, "2 h"), (2e5, "2 d")]
)
def test_spans_for_people(seconds: float, words: str) -> None:
    assert span(seconds) == words


def test_long_lists_end_in_a_count() -> None:
    assert few(list("abc")) == "a, b, c"
    assert few(list("abcdefgh")) == "a, b, c, d, e and 3 more"
