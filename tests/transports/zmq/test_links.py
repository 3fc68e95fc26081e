"""What only the ZeroMQ transport does: addresses, names, deadlines, threads."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import subprocess
import sys
import time

import pytest

from meshagent.core.model.network_addresses import parse_address
from meshagent.errors import PortBusy
from meshagent.transports.addresses import interface_addresses
from meshagent.transports.limits import LinkLimits, descriptors_for_links
from meshagent.transports.zmq.inbound_connections import shut_down


def stall(seconds: float) -> None:
    """Hold the loop while libzmq's own thread goes on: what comes meanwhile waits for us."""
    time.sleep(seconds)


def test_importing_the_package_does_not_load_libzmq():
    code = (
        "import sys, meshagent.transports, meshagent.transports.memory; print('zmq' in sys.modules)"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], cwd="/", text=True)
    assert printed.strip() == "False"


@pytest.mark.parametrize(("files", "links"), [(256, 128), (1024, 704), (20_000, 14_936), (8, 4)])
def test_links_leave_descriptors_for_the_rest(files, links):
    assert descriptors_for_links(files) == links


def test_a_wildcard_listener_names_every_useful_address(zmq_world):
    async def scenario():
        a = await zmq_world.node(listen="*")
        found = [parse_address(address) for address in a.transport.addresses()]
        hosts = [ipaddress.ip_address(host) for host, _ in found]
        assert {port for _, port in found} == {int(a.address.rpartition(":")[2])}
        assert str(hosts[-1]) == "127.0.0.1"
        assert not any(host.is_loopback or host.is_link_local for host in hosts[:-1])

    zmq_world.run(scenario)


def test_the_number_of_told_addresses_is_bounded():
    assert interface_addresses(ipv6=True, most=1) == ["127.0.0.1"]


@pytest.mark.parametrize("listen", ["*", "", "::1", "[::1]", "localhost"])
def test_a_link_works_however_the_listener_is_named(zmq_world, listen):
    async def scenario():
        a, b = await zmq_world.node(), await zmq_world.node(listen=listen)
        b.address = b.transport.addresses()[-1]
        await zmq_world.linked(a, b)

    zmq_world.run(scenario)


@pytest.mark.parametrize("listen", ["127.0.0.1", "::1"])
def test_a_host_name_is_tried_at_each_of_its_addresses(zmq_world, monkeypatch, listen):
    async def both(self, host, port, **_):
        return [(0, 0, 0, "", ("::1", port, 0, 0)), (0, 0, 0, "", ("127.0.0.1", port))]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", both)

    async def scenario():
        a, b = await zmq_world.node(), await zmq_world.node(listen=listen)
        b.address = "build-7:" + b.address.rpartition(":")[2]
        await zmq_world.linked(a, b)

    zmq_world.run(scenario)


@pytest.mark.parametrize("listen", ["203.0.113.7", "no.such.host.invalid"])
def test_an_address_that_is_not_ours_is_explained(zmq_world, listen, leftovers):
    async def scenario():
        before = None
        for _ in range(3):
            with pytest.raises(PortBusy) as raised:
                await zmq_world.node(listen=listen)
            before = before or leftovers()
        assert "not an address of this machine" in raised.value.message
        assert "--listen" in raised.value.hint
        assert leftovers()[0] == before[0]

    zmq_world.run(scenario)


def test_a_host_that_never_answers_is_given_up(zmq_world, until):
    """A listener whose queue is full: the connection is never accepted, nor refused."""

    async def scenario():
        a = await zmq_world.node(limits=LinkLimits(connect_s=0.3))
        with socket.create_server(("127.0.0.1", 0), backlog=0) as silent:
            port = silent.getsockname()[1]
            fillers = []
            for _ in range(4):
                filler = socket.socket()
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", port))
                fillers.append(filler)
            link = a.dial(f"127.0.0.1:{port}")
            await until(lambda: a.owner.closed, 3)
            for filler in fillers:
                filler.close()
        assert a.owner.closed == {link: "refused"}

    zmq_world.run(scenario)


def test_a_door_that_says_nothing_is_given_up(zmq_world, until):
    async def scenario():
        a = await zmq_world.node(limits=LinkLimits(handshake_s=0.3))
        with socket.create_server(("127.0.0.1", 0)) as server:
            link = a.dial(f"127.0.0.1:{server.getsockname()[1]}")
            await until(lambda: a.owner.closed)
        assert a.owner.closed == {link: "handshake"}

    zmq_world.run(scenario)


def test_a_dial_that_libzmq_forgets_ends_all_the_same(zmq_world, until, monkeypatch):
    async def scenario():
        monkeypatch.setattr(
            "meshagent.transports.zmq.transport.dialled_end", lambda event, opened: ""
        )
        monkeypatch.setattr("meshagent.transports.zmq.transport.TICK_S", 0.05)
        monkeypatch.setattr("meshagent.transports.zmq.transport.DIALLING_EVENTS", 0x8000)
        a = await zmq_world.node(limits=LinkLimits(connect_s=0.1, handshake_s=0.1))
        link = a.dial("127.0.0.1:1")
        await until(lambda: a.owner.closed == {link: "refused"})

    zmq_world.run(scenario)


def test_a_long_run_of_frames_leaves_the_loop_to_others(zmq_world, until):
    """10,000 frames wait; the loop's other work still gets its turn between 256 of them."""

    async def scenario():
        a, b = await zmq_world.node(), await zmq_world.node()
        ours, _ = await zmq_world.linked(a, b)
        most = last = 0
        sent = 0
        while len(b.owner.frames) < 10_001:
            while sent < 10_000 and a.send(ours, b"%d" % sent):
                sent += 1
            await asyncio.sleep(0)
            most, last = max(most, len(b.owner.frames) - last), len(b.owner.frames)
        # Two readers (frames and events) and one continuation may run in the same turn.
        assert most <= 3 * LinkLimits().turn_frames_max

    zmq_world.run(scenario)


@pytest.mark.parametrize("reader", ["dialler", "listener"])
def test_a_send_does_not_swallow_the_news_of_a_frame(zmq_world, until, monkeypatch, reader):
    """libzmq tells of a frame once, and any call on the socket may hear it."""

    async def scenario():
        monkeypatch.setattr("meshagent.transports.zmq.transport.TICK_S", 1000)
        a, b = await zmq_world.node(), await zmq_world.node()
        ours, theirs = await zmq_world.linked(a, b)
        mine, link, other, other_link = (
            (a, ours, b, theirs) if reader == "dialler" else (b, theirs, a, ours)
        )
        for i in range(10):
            assert other.send(other_link, b"%d" % i)
            stall(0.01)  # it is here now, and the loop has not heard of it
            assert mine.send(link, b"x")
            await until(lambda i=i: mine.owner.bodies[-1:] == [(b"%d" % i,)], 2)

    zmq_world.run(scenario)


def test_the_tick_finds_what_no_edge_told(zmq_world, until, monkeypatch):
    async def scenario():
        monkeypatch.setattr("meshagent.transports.zmq.transport.TICK_S", 0.05)
        a, b = await zmq_world.node(), await zmq_world.node()
        ours, theirs = await zmq_world.linked(a, b)
        assert b.send(theirs, b"x")
        stall(0.01)
        a.transport._links[ours].connection.dealer.poll(0)  # the edge is eaten, and nobody pokes
        await until(lambda: a.owner.frames, 2)

    zmq_world.run(scenario)


@pytest.mark.parametrize("listen", ["127.0.0.1", "::1"])
def test_frames_before_the_end_are_read_however_late_we_are(zmq_world, until, listen):
    async def scenario():
        a, b = await zmq_world.node(), await zmq_world.node(listen=listen)
        ours, theirs = await zmq_world.linked(a, b)
        for i in range(200):
            assert b.send(theirs, b"%d" % i)
        stall(0.1)
        connection = b.transport._links[theirs].connection
        shut_down(connection)
        stall(0.1)  # frames and disconnection wait together
        a.transport._links[ours].connection.dealer.poll(0)  # and libzmq hears of the latter first
        await until(lambda: a.owner.closed == {ours: "lost"})
        assert a.owner.bodies == [(b"%d" % i,) for i in range(200)]

    zmq_world.run(scenario)


def test_a_frame_for_one_who_has_gone_is_not_called_sent(zmq_world, until):
    async def scenario():
        a, b = await zmq_world.node(), await zmq_world.node()
        _, theirs = await zmq_world.linked(a, b)
        shut_down(b.transport._links[theirs].connection)
        stall(0.1)  # libzmq knows, our loop does not
        assert not b.send(theirs, b"hello?")
        await until(lambda: b.owner.closed == {theirs: "lost"})

    zmq_world.run(scenario)


def test_a_reused_descriptor_does_not_cost_a_new_link_its_life(zmq_world, until):
    """Links come and go so that descriptors are reused at once; only the right ones are lost."""

    async def scenario():
        a, b = await zmq_world.node(), await zmq_world.node()
        kept, kept_there = await zmq_world.linked(a, b)
        for _ in range(30):
            short = [a.dial(b) for _ in range(4)]
            await until(lambda short=short: set(short) <= set(a.owner.keys))
            for link in short:
                assert a.send(link, b"short")
                a.close_link(link)
            fresh, there = await zmq_world.linked(a, b)
            assert a.send(fresh, b"fresh")
            await until(lambda: b.owner.bodies[-1] == (b"fresh",))
            assert there not in b.owner.closed
            a.close_link(fresh)
        await until(lambda: len(b.owner.closed) == 30 * 5)
        assert kept_there not in b.owner.closed
        assert a.send(kept, b"kept")

    zmq_world.run(scenario)


@pytest.mark.parametrize("direction", ["to who was dialled", "to who has dialled"])
def test_who_waited_for_a_frame_goes_on_before_more_is_read(
    zmq_world, until, monkeypatch, direction
):
    """One that waits behind the first frame is not held up by all that came with it; and these are
    read without a further word from libzmq, which spoke once for all of them."""
    monkeypatch.setattr("meshagent.transports.zmq.transport.TICK_S", 1000)  # nobody else looks

    async def scenario():
        a, b = await zmq_world.node(), await zmq_world.node()
        ours, theirs = await zmq_world.linked(a, b)
        (here, link), there = (
            ((a, ours), b) if direction == "to who was dialled" else ((b, theirs), a)
        )
        seen = []

        def received(link, parts):
            seen.append(bytes(parts[0]))
            asyncio.get_running_loop().call_soon(seen.append, f"after {len(seen)}")

        there.owner.on_received = received
        for number in range(5):
            assert here.send(link, b"%d" % number)
        stall(0.2)
        await until(lambda: len(seen) == 10)
        assert seen[:2] == [b"0", "after 1"]
        assert [each for each in seen if isinstance(each, bytes)] == [b"%d" % n for n in range(5)]

    zmq_world.run(scenario)


def test_whoever_hands_libzmq_a_frame_lets_its_thread_go_first(zmq_world, monkeypatch):
    given = []
    way = lambda: lambda: given.append("way")  # noqa: E731
    monkeypatch.setattr("meshagent.transports.zmq.transport.CpuYield", way)

    async def scenario():
        a, b = await zmq_world.node(), await zmq_world.node()
        ours, theirs = await zmq_world.linked(a, b)
        for node, link in ((a, ours), (b, theirs)):
            given.clear()
            assert node.send(link, b"frame")
            assert given == ["way"]

    zmq_world.run(scenario)
