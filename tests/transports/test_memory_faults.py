"""The faults of the network in memory: told by its seed, and of the kinds a real one has."""

from __future__ import annotations

import pytest


def test_a_cut_holds_frames_back_and_heals_in_order(memory_world, until):
    async def scenario():
        a, b = await memory_world.node(), await memory_world.node()
        ours, theirs = await memory_world.linked(a, b)
        memory_world.network.cut(a.address, b.address, one_way=True)
        assert a.send(ours, b"1")
        assert a.send(ours, b"2")
        assert b.send(theirs, b"the other way is open")
        await until(lambda: a.owner.frames)
        assert b.owner.bodies == [(b"hello",)]
        memory_world.network.heal()
        await until(lambda: b.owner.bodies == [(b"hello",), (b"1",), (b"2",)])
        assert not a.owner.closed
        assert not b.owner.closed

    memory_world.run(scenario)


@pytest.mark.parametrize("one_way", [True, False])
def test_a_dial_across_a_cut_ends_refused(memory_world, until, one_way):
    async def scenario():
        from meshagent.transports.limits import LinkLimits

        a, b = await memory_world.node(limits=LinkLimits(connect_s=0.05)), await memory_world.node()
        memory_world.network.cut(b.address, a.address, one_way=one_way)
        link = a.dial(b)
        await until(lambda: a.owner.closed == {link: "refused"})

    memory_world.run(scenario)


def test_broken_links_are_lost_on_both_sides(memory_world, until):
    async def scenario():
        a, b, c = [await memory_world.node() for _ in range(3)]
        ours, theirs = await memory_world.linked(a, b)
        other, _ = await memory_world.linked(a, c)
        memory_world.network.break_links(a.address, b.address)
        await until(lambda: a.owner.closed and b.owner.closed)
        assert (a.owner.closed, b.owner.closed) == ({ours: "lost"}, {theirs: "lost"})
        assert a.send(other, b"x")

    memory_world.run(scenario)


def test_a_refusing_address_refuses(memory_world, until):
    async def scenario():
        a, b = await memory_world.node(), await memory_world.node()
        memory_world.network.refusing.add(b.address)
        link = a.dial(b)
        await until(lambda: a.owner.closed == {link: "refused"})

    memory_world.run(scenario)


def test_frames_of_different_delay_do_not_overtake(memory_world, until):
    async def scenario():
        a, b = await memory_world.node(), await memory_world.node()
        ours, _ = await memory_world.linked(a, b)
        memory_world.network.delay_s = (0.0, 0.02)
        for i in range(100):
            assert a.send(ours, b"%d" % i)
        a.close_link(ours)
        await until(lambda: b.owner.closed)
        assert b.owner.bodies[1:] == [(b"%d" % i,) for i in range(100)]

    memory_world.run(scenario)


def test_the_seed_decides_what_breaks_and_order_is_kept(memory_world, until):
    def breaks_at() -> list[int]:
        found = []
        for _ in range(3):
            world = type(memory_world)()

            async def scenario(world=world):
                a, b = await world.node(), await world.node()
                ours, _ = await world.linked(a, b)
                world.network.delay_s = (0.0, 0.002)
                world.network.loss = 0.02
                sent = 0
                while a.send(ours, b"%d" % sent):
                    sent += 1
                    await until(lambda sent=sent: len(b.owner.frames) > sent or b.owner.closed)
                    if b.owner.closed:
                        break
                assert b.owner.bodies[1:] == [(b"%d" % i,) for i in range(sent - 1)]
                found.append(sent)

            world.run(scenario)
        return found

    assert len(set(breaks_at())) == 1
