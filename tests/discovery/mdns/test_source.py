"""mDNS on loopback: hostile records, floods, a machine without multicast."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import zeroconf.asyncio
from discovery.seen import Seen, announcement, eventually, fresh_tag
from hypothesis import given
from hypothesis import strategies as st
from zeroconf._dns import DNSAddress, DNSPointer, DNSRecord, DNSService, DNSText
from zeroconf._protocol.outgoing import DNSOutgoing
from zeroconf.const import _CLASS_IN as IN
from zeroconf.const import _CLASS_UNIQUE as UNIQUE
from zeroconf.const import _TYPE_A as A
from zeroconf.const import _TYPE_PTR as PTR
from zeroconf.const import _TYPE_SRV as SRV
from zeroconf.const import _TYPE_TXT as TXT

from meshagent.core.model.peers import Candidate
from meshagent.core.ports import Announcement
from meshagent.discovery.mdns import source as mdns
from meshagent.discovery.mdns.records import (
    ADDRESSES_MAX,
    SERVICE_TYPE,
    instance_name,
    publishable,
    read_candidate,
    txt_of,
)
from meshagent.discovery.mdns.source import MdnsDiscovery

LOOPBACK = ["127.0.0.1"]
RESPONSE = 0x8400
GROUP = ("224.0.0.251", 5353)


class Attacker:
    """Sends raw packets to the group, on loopback only."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        loopback = socket.inet_aton("127.0.0.1")
        self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, loopback)

    async def send(self, *packets: bytes) -> None:
        for packet in packets:
            self._socket.sendto(packet, GROUP)
            await asyncio.sleep(0)  # the receiver shares this loop: let its buffer drain

    async def say(self, records: Iterable[DNSRecord]) -> None:
        out = DNSOutgoing(RESPONSE)
        for record in records:
            out.add_answer_at_time(record, 0)
        await self.send(*out.packets())

    def close(self) -> None:
        self._socket.close()


def service(
    instance: str, text: bytes, port: int = 4711, addresses: Iterable[str] = LOOPBACK
) -> list[DNSRecord]:
    """The records of one announced service."""
    name, host = f"{instance}.{SERVICE_TYPE}", f"{instance}.local."
    return [
        DNSPointer(SERVICE_TYPE, PTR, IN, 4500, name),
        DNSService(name, SRV, IN | UNIQUE, 120, 0, 0, port, host),
        DNSText(name, TXT, IN | UNIQUE, 4500, text),
        *(DNSAddress(host, A, IN | UNIQUE, 120, socket.inet_aton(ip)) for ip in addresses),
    ]


def txt(**fields: str | bytes) -> bytes:
    """A TXT record's bytes."""
    text = b""
    for key, value in fields.items():
        item = key.encode() + b"=" + (value if isinstance(value, bytes) else value.encode())
        text += bytes([len(item)]) + item
    return text


@contextlib.asynccontextmanager
async def victim(me: Announcement) -> AsyncIterator[tuple[MdnsDiscovery, Seen, Attacker]]:
    """A discovery under attack. Anything that escapes into the loop fails the test."""
    escaped: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: escaped.append(context))
    discovery, saw, attacker = MdnsDiscovery(LOOPBACK), Seen(), Attacker()
    try:
        await discovery.start(me, saw)
        await eventually(lambda: discovery._published is not None)
        yield discovery, saw, attacker
    finally:
        await discovery.close()
        attacker.close()
    assert escaped == []


def run(main: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(main())


@pytest.fixture
def alice() -> Announcement:
    return announcement("alice", fresh_tag(), 5001)


@pytest.fixture
def bob(alice: Announcement) -> Announcement:
    return announcement("bob", alice.mesh_tag, 5002)


def test_hostile_records_are_counted_and_the_honest_one_is_found(
    alice: Announcement, bob: Announcement, caplog: pytest.LogCaptureFixture
) -> None:
    good = txt(v="1", mesh=alice.mesh_tag, id="mallory-mmmmmmmm")
    many = [f"10.{i // 250}.{i % 250}.1" for i in range(1000)]
    hostile = [
        ("mesh", service("m1", txt(v="1", mesh="other", id="mallory-mmmmmmmm"))),
        ("mesh", service("m2", b"")),
        ("mesh", service("m3", os.urandom(200))),
        ("txt", service("m4", good + txt(x=b"y" * 250) * 30)),
        ("id", service("m5", txt(mesh=alice.mesh_tag, id=b"\xff\xfe\x00"))),
        ("id", service("m6", txt(mesh=alice.mesh_tag, id="../../etc/passwd"))),
        ("id", service("m7", txt(mesh=alice.mesh_tag, id="mallory-mmmmmmmm\n"))),
        ("port", service("m8", good, port=0)),
        ("addresses", service("m9", good, addresses=["0.0.0.0", "224.0.0.1"])),
        ("name", service("m\x07bell", good)),
    ]

    async def main() -> None:
        async with victim(alice) as (discovery, saw, attacker):
            for _, records in hostile:
                await attacker.say(records)
            await attacker.say(service("many", good, addresses=many))
            await attacker.say(service("esc\\.ape.d\\032name", good, addresses=["10.9.9.9"]))
            await attacker.say(service(bob.agent, txt(**txt_of(bob)), port=5002))
            await saw.until_has(bob)
            for reason, _ in hostile:
                assert discovery.ignored[reason], reason
            assert max(len(candidate.addresses) for candidate in saw) == ADDRESSES_MAX
            assert {candidate.agent for candidate in saw} == {"mallory-mmmmmmmm", bob.agent}

    with caplog.at_level(logging.INFO):
        run(main)
    assert len(caplog.records) < 5


@pytest.mark.parametrize("seed", [1, 2])
def test_broken_packets_do_no_harm(
    seed: int, alice: Announcement, bob: Announcement, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(seed)

    def broken() -> bytes:
        out = DNSOutgoing(RESPONSE)
        for record in service(f"x{chance.randrange(99)}", txt(**txt_of(bob))):
            out.add_answer_at_time(record, 0)
        packet = bytearray(out.packets()[0])
        for _ in range(chance.randrange(1, 12)):
            packet[chance.randrange(len(packet))] = chance.randrange(256)
        return bytes(packet[: chance.randrange(1, len(packet) + 1)])

    async def main() -> None:
        async with victim(alice) as (_, saw, attacker):
            await attacker.send(*(broken() for _ in range(300)))
            await attacker.say(service("honest", txt(**txt_of(bob)), port=5002))
            await saw.until_has(bob)

    with caplog.at_level(logging.INFO):
        run(main)
    assert len(caplog.records) < 5


def test_a_flood_of_instances_stays_under_the_bound(alice: Announcement) -> None:
    async def main() -> None:
        async with victim(alice) as (discovery, saw, attacker):
            good = txt(v="1", mesh=alice.mesh_tag, id="mallory-mmmmmmmm")
            for number in range(2000):
                await attacker.say(service(f"flood{number}", good))
            await eventually(lambda: len(saw) + discovery.ignored["full"] >= 1900)
            assert len(saw) == mdns.CANDIDATES_MAX
            assert "newcomers are ignored" in discovery.health()

    run(main)


def test_names_without_records_are_resolved_a_few_at_a_time(alice: Announcement) -> None:
    async def main() -> None:
        async with victim(alice) as (discovery, saw, attacker):
            for number in range(2000):
                name = f"ghost{number}.{SERVICE_TYPE}"
                await attacker.say([DNSPointer(SERVICE_TYPE, PTR, IN, 4500, name)])
            await eventually(lambda: discovery.ignored["busy"] > 1000)
            resolvers = [it for it in asyncio.all_tasks() if it.get_name() == "mdns-resolver"]
            assert len(resolvers) == mdns.RESOLUTIONS_MAX
            assert not saw
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main)


def test_records_that_come_late_are_asked_for(alice: Announcement, bob: Announcement) -> None:
    """A pointer alone, and an honest responder that answers questions about the rest."""

    async def main() -> None:
        async with victim(alice) as (_, saw, attacker):
            pointer, *rest = service("late", txt(**txt_of(bob)), port=5002)
            await attacker.say([pointer])
            await eventually(
                lambda: any(t.get_name() == "mdns-resolver" for t in asyncio.all_tasks())
            )
            await attacker.say(rest)
            await saw.until_has(bob)

    run(main)


def test_goodbye_makes_others_forget(alice: Announcement, bob: Announcement) -> None:
    async def main() -> None:
        async with victim(alice) as (discovery, saw, _):
            leaver = MdnsDiscovery(LOOPBACK)
            await leaver.start(bob, Seen())
            await saw.until_has(bob)
            assert discovery._known
            await leaver.close()
            await eventually(lambda: not discovery._known)

    run(main)


def test_without_multicast_it_says_why_and_tries_again(
    alice: Announcement, bob: Announcement, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(zeroconf.asyncio.AsyncZeroconf):
        refusals = 0

        def __init__(self, **options: object) -> None:
            if Refusing.refusals < 3:
                Refusing.refusals += 1
                raise OSError(19, "No such device")
            super().__init__(**options)  # type: ignore[arg-type]

    async def main() -> None:
        monkeypatch.setattr(zeroconf.asyncio, "AsyncZeroconf", Refusing)
        monkeypatch.setattr(mdns, "RETRY_FIRST_S", 0.01)
        async with contextlib.AsyncExitStack() as stack:
            discovery, saw = MdnsDiscovery(LOOPBACK), Seen()
            stack.push_async_callback(discovery.close)
            await discovery.start(alice, saw)
            assert "No such device" in discovery.health()
            other = MdnsDiscovery(LOOPBACK)
            stack.push_async_callback(other.close)
            await other.start(bob, Seen())
            await saw.until_has(bob)
            assert discovery.health() == "ok"

    run(main)


def test_an_address_of_another_machine_is_explained(alice: Announcement) -> None:
    async def main() -> None:
        discovery = MdnsDiscovery(["198.51.100.7"])  # for documentation: nobody has it
        await discovery.start(alice, Seen())
        assert discovery.health() == "this machine has no interface with 198.51.100.7"
        await discovery.close()

    run(main)


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::"])
def test_a_wildcard_means_every_interface(wildcard: str) -> None:
    """Not started: here it would speak on the machine's real network."""
    assert MdnsDiscovery([wildcard])._given is None


def test_it_may_close_while_it_has_no_multicast(
    alice: Announcement, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(19, "No such device")

    async def main() -> None:
        monkeypatch.setattr(zeroconf.asyncio, "AsyncZeroconf", refuse)
        discovery = MdnsDiscovery(LOOPBACK)
        await discovery.start(alice, Seen())
        await discovery.update(replace(alice, addresses=("127.0.0.1:6001",)))
        await discovery.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main)


def test_the_instance_name_differs_between_runs_and_fits_a_label() -> None:
    me = Announcement("a.b" * 10 + "-aaaaaaaa", "tag", "1763274819", ())
    assert instance_name(me) != instance_name(replace(me, run="1763274820"))
    assert "." not in instance_name(me)
    assert len(instance_name(me)) <= 63


def test_the_text_record_holds_nothing_but_version_tag_and_id(alice: Announcement) -> None:
    assert txt_of(alice) == {"v": "1", "mesh": alice.mesh_tag, "id": alice.agent}


@pytest.mark.parametrize(
    ("addresses", "loopback", "published"),
    [
        (["127.0.0.1:1", "10.0.0.1:1"], False, (["10.0.0.1"], 1)),
        (["127.0.0.1:1"], True, (["127.0.0.1"], 1)),
        (["127.0.0.1:1"], False, ([], 0)),
        (["10.0.0.1:1", "10.0.0.2:2", "10.0.0.3:2"], False, (["10.0.0.2", "10.0.0.3"], 2)),
        (["[2001:db8::1]:1", "[fe80::1%eth0]:1", "box:1", "junk"], False, (["2001:db8::1"], 1)),
    ],
)
def test_only_addresses_that_mean_something_to_others_are_published(
    addresses: list[str], loopback: bool, published: tuple[list[str], int]
) -> None:
    assert publishable(addresses, loopback) == published


@given(st.binary(max_size=600), st.none() | st.integers(), st.lists(st.ip_addresses(), max_size=40))
def test_any_record_gives_a_bounded_candidate_or_a_reason(
    text: bytes,
    port: int | None,
    ips: list[ipaddress.IPv4Address | ipaddress.IPv6Address],
) -> None:
    known = txt(mesh="tag", id="bob-bbbbbbbb")
    for whole in (text, known + text):
        verdict = read_candidate(whole, port, ips, "tag", False)
        if isinstance(verdict, Candidate):
            assert 1 <= len(verdict.addresses) <= ADDRESSES_MAX


@pytest.mark.namespaces
def test_interfaces_are_followed_and_loopback_stays_on_loopback() -> None:
    """In a network namespace of its own, where every interface may be used."""
    script = Path(__file__).with_name("lan_in_namespace.py")
    path = filter(None, [os.environ.get("PYTHONPATH")])
    done = subprocess.run(
        ["unshare", "--net", sys.executable, str(script)],
        cwd="/",
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(script.parents[2]), *path])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["unplugged", "found", "followed", "confined"]
