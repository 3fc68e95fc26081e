"""What every Transport promises, over the real one and the one in memory."""

from __future__ import annotations

import asyncio
import time

import pytest

from meshagent.errors import LocalProtocolError, PortBusy, RemoteProtocolError
from meshagent.transports.limits import LinkLimits


def test_one_dialled_link_carries_frames_both_ways(world, until):
    async def scenario():
        a, b = await world.node(), await world.node()
        ours, theirs = await world.linked(a, b)
        assert a.send(ours, b"there")
        assert b.send(theirs, b"and back")
        await until(lambda: b.owner.bodies[-1] == (b"there",))
        await until(lambda: a.owner.bodies == [(b"and back",)])
        assert a.owner.frames[0][0] == ours
        assert b.owner.frames[-1][0] == theirs

    world.run(scenario)


def test_order_and_parts_are_kept(world, until):
    async def scenario():
        a, b = await world.node(), await world.node()
        ours, theirs = await world.linked(a, b)
        sent = [(b"%d" % i, b"", b"x" * i)[: 1 + i % 3] for i in range(2000)]
        for there, back in zip(sent, reversed(sent), strict=True):
            await until(lambda there=there: a.send(ours, *there))
            await until(lambda back=back: b.send(theirs, *back))
        await until(lambda: len(b.owner.frames) == 2001 and len(a.owner.frames) == 2000)
        assert b.owner.bodies[1:] == sent
        assert a.owner.bodies == sent[::-1]

    world.run(scenario)


def test_a_full_frame_arrives(world, until):
    async def scenario():
        a, b = await world.node(), await world.node()
        ours, _ = await world.linked(a, b)
        limits = LinkLimits()
        full = [b"h" * 1000, b"p" * (limits.frame_bytes_max - 1000)]
        many = [b"x"] * limits.frame_parts_max
        assert a.send(ours, *full)
        assert a.send(ours, *many)
        await until(lambda: b.owner.bodies[1:] == [tuple(full), tuple(many)])

    world.run(scenario)


def test_our_own_oversize_frames_are_an_error_here(world):
    async def scenario():
        a, b = await world.node(), await world.node()
        ours, _ = await world.linked(a, b)
        limits = LinkLimits()
        for bad in ([], [b"x"] * (limits.frame_parts_max + 1), [b"x" * limits.frame_bytes_max] * 2):
            with pytest.raises(LocalProtocolError):
                a.send(ours, *bad)

    world.run(scenario)


def test_an_inbound_link_carries_the_diallers_own_key(world):
    async def scenario():
        a, b, c = [await world.node() for _ in range(3)]
        from_a, at_c = await world.linked(a, c)
        _, also_at_c = await world.linked(b, c)
        assert c.owner.keys == {at_c: a.key, also_at_c: b.key}
        assert a.owner.keys == {from_a: None}

    world.run(scenario)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:1", "", "nowhere", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:99999", "::1:5",
     "[::1]:1", "a;tcp://127.0.0.1:1", "no.such.host.invalid:1", "*:1", "x" * 300 + ":1"],
)  # fmt: skip
def test_dialling_nobody_ends_refused(world, until, address):
    async def scenario():
        a = await world.node()
        link = a.dial(address)
        assert a.owner.closed == {}
        await until(lambda: a.owner.closed)
        assert a.owner.closed == {link: "refused"}
        assert a.owner.keys == {}

    world.run(scenario)


@pytest.mark.parametrize("closer", ["dialler", "listener"])
@pytest.mark.parametrize("how", ["link", "transport"])
def test_a_close_is_seen_as_lost_after_the_last_frames(world, until, closer, how):
    async def scenario():
        a, b = await world.node(), await world.node()
        ours, theirs = await world.linked(a, b)
        mine, link, other, other_link = (a, ours, b, theirs)
        if closer == "listener":
            mine, link, other, other_link = (b, theirs, a, ours)
        other.owner.frames.clear()
        sent = [(b"%d" % i, b"x" * 65536) for i in range(20)]
        for parts in sent:
            assert mine.send(link, *parts)
        if how == "link":
            mine.close_link(link)
        else:
            await mine.transport.close()
        await until(lambda: other.owner.closed)
        assert other.owner.closed == {other_link: "lost"}
        assert other.owner.bodies == sent
        assert mine.owner.closed == {}
        assert not other.send(other_link, b"late")

    world.run(scenario)


def test_without_the_secret_a_link_never_opens(world, until):
    async def scenario():
        a, b = await world.node(), await world.node()
        ours, _ = await world.linked(a, b)
        stranger = await world.node(door="theirs")
        link = stranger.dial(b)
        back = b.dial(stranger)
        await until(lambda: stranger.owner.closed and b.owner.closed)
        assert stranger.owner.closed == {link: "handshake"}
        assert b.owner.closed == {back: "handshake"}
        await until(lambda: b.refused["outsider"] == 1 and stranger.refused["outsider"] == 1)
        assert stranger.owner.keys == {}
        assert a.send(ours, b"still here")
        await until(lambda: b.owner.bodies[-1] == (b"still here",))

    world.run(scenario)


def test_nothing_is_sent_on_a_link_that_is_not_open(world, until):
    async def scenario():
        a, b = await world.node(), await world.node()
        early = a.dial(b)
        assert not a.send(early, b"too early")
        await until(lambda: early in a.owner.keys)
        a.close_link(early)
        assert not a.send(early, b"too late")
        assert not a.send(999, b"never was")
        a.close_link(999)
        await until(lambda: b.refused["outsider"] == 1)  # came, said nothing, went
        assert b.owner.keys == {}

    world.run(scenario)


def test_no_event_follows_close_link(world, until):
    async def scenario():
        a, b = await world.node(), await world.node()
        ours, theirs = await world.linked(a, b)
        refused = a.dial("127.0.0.1:1")
        a.close_link(refused)
        for i in range(50):
            b.send(theirs, b"%d" % i)
        a.close_link(ours)
        await until(lambda: b.owner.closed)
        assert a.owner.closed == {}
        assert a.owner.frames == []

    world.run(scenario)


def test_a_link_closed_inside_an_event_stays_silent(world, until):
    async def scenario():
        a, b = await world.node(), await world.node()
        b.owner.on_received = lambda link, parts: b.close_link(link)
        ours = a.dial(b)
        await until(lambda: ours in a.owner.keys)
        for i in range(100):
            a.send(ours, b"%d" % i)
        await until(lambda: a.owner.closed)
        assert b.owner.bodies == [(b"0",)]
        assert b.owner.closed == {}

    world.run(scenario)


def test_events_are_never_re_entrant(world, until):
    """The owner calls back into the transport from every event; Owner notes any nesting."""

    async def scenario():
        a, b = await world.node(), await world.node()

        def answer(link, parts):
            if len(b.owner.frames) < 50:
                b.send(link, *parts)
                b.dial("127.0.0.1:1")
                b.close_link(b.dial(a))

        b.owner.on_received = answer
        b.owner.on_opened = lambda link: len(b.owner.keys) == 1 and b.dial(a)
        ours = a.dial(b)
        await until(lambda: ours in a.owner.keys)
        for i in range(60):
            a.send(ours, b"%d" % i)
        await until(lambda: len(b.owner.frames) == 60)
        await until(lambda: len(a.owner.frames) == 49 and len(b.owner.closed) == 49)

    world.run(scenario)


@pytest.mark.parametrize("sender", ["dialler", "listener"])
def test_a_stalled_reader_stops_the_sender_and_loses_nothing(world, until, sender):
    async def scenario():
        limits = LinkLimits(queue_frames_max=16)
        a, b = await world.node(limits=limits), await world.node(limits=limits)
        ours, theirs = await world.linked(a, b)
        b.owner.frames.clear()
        mine, link, other = (a, ours, b) if sender == "dialler" else (b, theirs, a)
        body = b"x" * 65536
        sent = _fill(mine, link, body)  # the loop is ours meanwhile: nobody reads
        assert 16 <= sent < 500, "bounded by the two queues and the kernel's buffers"
        await until(lambda: len(other.owner.frames) == sent)
        assert [int(number) for number, _ in other.owner.bodies] == list(range(sent))
        assert mine.send(link, b"more", body), "room again"
        await until(lambda: other.owner.bodies[-1][0] == b"more")

    world.run(scenario)


def _fill(node, link, body) -> int:
    """Send until the link stays full; libzmq's thread needs a moment to fill what it has."""
    sent = refusals = 0
    while refusals < 10 and sent < 10_000:
        if node.send(link, b"%d" % sent, body):
            sent, refusals = sent + 1, 0
        else:
            refusals += 1
            time.sleep(0.02)
    return sent


def test_links_are_capped_and_the_cap_is_visible(world, until):
    async def scenario():
        a = await world.node(limits=LinkLimits(links_max=3))
        b = await world.node(limits=LinkLimits(links_max=2))
        c = await world.node()
        for _ in range(2):
            await world.linked(a, b)
        third, fourth = a.dial(b), a.dial(c)
        assert a.owner.closed == {}
        await until(lambda: len(a.owner.closed) == 2)
        assert a.owner.closed == {third: "handshake", fourth: "limit"}
        assert b.refused["limit"] == 1
        ours, _ = await world.linked(a, c)  # the failed ones have given their place back
        assert a.send(ours, b"room again")

    world.run(scenario)


def test_an_owner_that_fails_loses_that_link_only(world, until, caplog):
    async def scenario():
        a, b = await world.node(), await world.node()
        good, _ = await world.linked(a, b)
        bad, at_bad = await world.linked(a, b)
        rude, at_rude = await world.linked(a, b)
        b.owner.on_received = _fail
        a.send(bad, b"bug")
        a.send(rude, b"rude")
        await until(lambda: len(a.owner.closed) == 2)
        assert b.owner.closed == {at_bad: "closed", at_rude: "closed"}
        assert a.owner.closed == {bad: "lost", rude: "lost"}
        assert b.refused["protocol"] == 1
        assert a.send(good, b"undisturbed")
        await until(lambda: b.owner.bodies[-1] == (b"undisturbed",))

    def _fail(link, parts):
        if parts == [b"bug"]:
            raise ValueError("our own bug")
        if parts == [b"rude"]:
            raise RemoteProtocolError("bad bytes")

    world.run(scenario)
    assert caplog.text.count("failed; the link is closed") == 1


def test_a_denied_agent_stays_out_for_a_while(world, until):
    async def scenario():
        a, b, c = [await world.node() for _ in range(3)]
        c.transport.deny(a.key, 3600)
        link = a.dial(c)
        await until(lambda: a.owner.closed == {link: "handshake"})
        await until(lambda: c.refused == {"denied": 1})
        await world.linked(b, c)
        c.transport.deny(a.key, -1)
        await world.linked(a, c)
        assert c.refused == {"denied": 1}

    world.run(scenario)


def test_a_taken_address_is_explained(world):
    async def scenario():
        a = await world.node()
        host, _, port = a.address.rpartition(":")
        with pytest.raises(PortBusy) as raised:
            await world.node(listen=host, port=int(port))
        assert a.address in raised.value.message
        assert raised.value.hint

    world.run(scenario)


def test_a_transport_can_be_reached_again_after_a_restart_at_the_same_address(world, until):
    async def scenario():
        a, b = await world.node(), await world.node()
        ours, _ = await world.linked(a, b)
        await b.transport.close()
        await until(lambda: a.owner.closed == {ours: "lost"})
        host, _, port = b.address.rpartition(":")
        again = await world.node(listen=host, port=int(port))
        await world.linked(a, again)

    world.run(scenario)


def test_close_leaves_nothing_behind(world, until, leftovers):
    async def scenario():
        seen, had = [], leftovers()[1:]  # a worker of pytest has threads of its own
        for _ in range(20):
            a, b = await world.node(), await world.node()
            await world.linked(a, b)
            await world.linked(b, a)
            a.dial("127.0.0.1:1")
            await a.transport.close()
            await b.transport.close()
            await a.transport.close()
            # The first round imports; and the kernel reaps a thread a little after it is joined.
            await until(lambda: leftovers()[1:] == had)
            seen.append(leftovers())
            assert len(asyncio.all_tasks()) == 1
            with pytest.raises(LocalProtocolError):
                a.dial(b)
            assert not a.send(1, b"x")
        assert set(seen[1:]) == set(seen[:1])

    world.run(scenario)
