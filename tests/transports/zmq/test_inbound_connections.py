"""Which connection a first frame came from, and that a late disconnect hurts no newer link."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from meshagent.transports.zmq.inbound_connections import InboundConnections


def test_a_disconnect_ends_the_link_of_that_connection():
    connections = InboundConnections()
    connections.accepted(1000)
    assert connections.claim(1000, 7) is not None
    connections.disconnected(1000)
    assert connections.take_lost() == ([7], 0)
    assert connections.take_lost() == ([], 0)


def test_one_who_sent_nothing_was_a_stranger():
    connections = InboundConnections()
    connections.accepted(1000)
    connections.disconnected(1000)
    connections.accepted(1000)
    assert connections.take_lost() == ([], 1)
    assert connections.claim(1000, 7) is not None


def test_of_two_connections_on_one_descriptor_neither_is_guessed():
    connections = InboundConnections()
    connections.accepted(1000)
    connections.disconnected(1000)
    connections.accepted(1000)
    assert connections.claim(1000, 7) is None
    assert connections.claim(1000, 8) is None
    assert connections.take_lost() == ([], 0)
    connections.disconnected(1000)
    assert connections.take_lost() == ([7, 8], 0)


# One thread makes, for each connection, accepted, frames, disconnected; another reads the two
# streams in its own time. Steps: make something on one of three descriptors, or read a little.
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("accept"), st.integers(0, 2)),
        st.tuples(st.just("frame"), st.integers(0, 2)),
        st.tuples(st.just("disconnect"), st.integers(0, 2)),
        st.tuples(st.just("read"), st.integers(0, 3)),
    ),
    max_size=60,
)


@settings(max_examples=500, deadline=None)
@given(STEPS)
def test_a_disconnect_is_never_held_against_a_living_link(steps):
    connections, events, frames = InboundConnections(), deque(), deque()
    living, opened, told, names = {}, set(), set(), iter(range(10_000))

    def read_monitor():
        while events:
            what, descriptor = events.popleft()
            getattr(connections, what)(descriptor)

    def read(count):
        read_monitor()
        for _ in range(count):
            if not frames:
                lost, _ = connections.take_lost()
                for link in lost:
                    assert link not in living.values(), f"link {link} lives"
                    assert link not in told
                    told.add(link)
                return
            descriptor, name = frames.popleft()
            if name not in opened:
                read_monitor()
                opened.add(name)
                connections.claim(1000 + descriptor, name)

    for what, value in steps:
        if what == "accept" and value not in living:
            living[value] = next(names)
            events.append(("accepted", 1000 + value))
        elif what == "frame" and value in living:
            frames.append((value, living[value]))
        elif what == "disconnect" and value in living:
            del living[value]
            events.append(("disconnected", 1000 + value))
        elif what == "read":
            read(value)
    read(1000)
    events.extend(("disconnected", 1000 + descriptor) for descriptor in living)
    living.clear()
    read(1000)
    assert told == opened, "in the end nobody is forgotten"
