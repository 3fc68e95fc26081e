"""Who is let in: every way to be somebody else is refused by name and counted."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from core.made import (
    EXAMPLES,
    MESH_ID,
    OTHER_SECRET,
    closes,
    hello_of,
    in_order,
    mesh_of,
    open_link,
    record_of,
    refusals,
    sent,
    word_of,
)

from meshagent.core.effects import (
    CloneFound,
    CloseLink,
    Dial,
    PeerChanged,
    Transmit,
)
from meshagent.core.links.engine import HANDLERS
from meshagent.core.links.handshake import make_hello, make_here, make_welcome, refuse_clone
from meshagent.core.links.link_table import LinkState
from meshagent.core.links.remembered_peers import SAVE_PEERS_S
from meshagent.core.mesh import Mesh
from meshagent.core.model.identity import Identity
from meshagent.core.model.peers import Candidate, LinkId
from meshagent.core.model.records import sign_record
from meshagent.core.model.rows import PeerRow
from meshagent.core.turns import Turn
from meshagent.core.wire.codec import decode, encode
from meshagent.core.wire.frames import (
    MEMBERS_MAX,
    Bye,
    Check,
    Frame,
    Gossip,
    Hello,
    Here,
    Nack,
    Ping,
    Refuse,
    Sync,
    Welcome,
)

A, B, C = in_order("ada", "bob", "cyd")  # by size of their ids
L1, L2 = LinkId(1), LinkId(2)


def arrives(mesh: Mesh, link: LinkId, frame: Frame, now: float = 0.0) -> Turn:
    """The frame comes in as bytes, as from a transport."""
    return mesh.received_parts(link, encode(frame), now)


def dial_out(mesh: Mesh, to: str = "", link: LinkId = L1, now: float = 0.0) -> Hello:
    """`mesh` dials somebody and greets."""
    mesh.found(Candidate(to, ("10.9.9.9:1",), "static"), now)
    (dial,) = [each for each in mesh.on_timer(now).free if isinstance(each, Dial)]
    mesh.dialled(dial.attempt, link)
    (hello,) = sent(mesh.opened(link, None, now))
    assert isinstance(hello, Hello)
    return hello


def welcome_of(who: Identity, hello: Hello, curve_key: bytes) -> Welcome:
    return make_welcome(who, MESH_ID, hello, curve_key, bytes(16), word_of(who).data)


def is_refused(mesh: Mesh, turn: Turn, why: str, link: LinkId = L1) -> None:
    """The other side is told why, the link is closed, it is counted, and nobody was believed."""
    assert refusals(turn) == [why]
    assert closes(turn, link)
    assert mesh.refused() == {why: 1}
    assert mesh.peers() == []
    assert mesh.links.agent_on(link) is None


# -- the dialler's word ---------------------------------------------------------------------------


def test_an_honest_hello_opens_the_link() -> None:
    mesh = mesh_of(A)
    turn = open_link(mesh, B, 1, 0.0)
    (welcome,) = [each for each in sent(turn) if isinstance(each, Welcome)]
    assert welcome.agent == A.agent
    assert mesh.links.agent_on(L1) == B.agent
    assert [peer.agent for peer in mesh.peers()] == [B.agent]
    assert not mesh.refused()


HELLO = hello_of(B, to=A.agent)
LIES: dict[str, tuple[Hello, bytes | None, str]] = {
    "another's id with one's own key": (replace(HELLO, agent=C.agent), B.curve_public, "impostor"),
    "another's id and key": (hello_of(C), B.curve_public, "impostor"),
    "a replayed hello under another link key": (HELLO, C.curve_public, "impostor"),
    "a link without a key": (HELLO, None, "impostor"),
    "a key that is no point": (replace(HELLO, key=bytes(32)), B.curve_public, "impostor"),
    "an id that is none": (replace(HELLO, agent="bob"), B.curve_public, "impostor"),
    "a hello meant for another": (hello_of(B, to=C.agent), B.curve_public, "not me"),
    "a hello meant for another, readdressed": (
        replace(hello_of(B, to=C.agent), to=A.agent), B.curve_public, "forged",
    ),
    "another nonce": (replace(HELLO, nonce=b"x" * 16), B.curve_public, "forged"),
    "another start": (replace(HELLO, started_ms=1), B.curve_public, "forged"),
    "another signature": (replace(HELLO, signature=bytes(64)), B.curve_public, "forged"),
    "another's record": (replace(HELLO, record=word_of(C).data), B.curve_public, "forged"),
    "a record of another mesh": (
        replace(HELLO, record=sign_record(record_of(B), B, OTHER_SECRET.mesh_id).data),
        B.curve_public, "forged",
    ),
    "a hello of another mesh": (
        make_hello(B, OTHER_SECRET.mesh_id, "", bytes(16), 1000, word_of(B).data),
        B.curve_public, "forged",
    ),
    "a record that is none": (replace(HELLO, record=b"x"), B.curve_public, "malformed"),
    "a later version": (replace(HELLO, version_low=2, version_high=9), B.curve_public, "version"),
    "an earlier version": (
        replace(HELLO, version_low=0, version_high=0), B.curve_public, "version",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("hello", "curve_key", "why"), LIES.values(), ids=LIES.keys())
def test_a_false_hello_is_refused_by_name(hello: Hello, curve_key: bytes | None, why: str) -> None:
    mesh = mesh_of(A)
    mesh.opened(L1, curve_key, 0.0)
    is_refused(mesh, arrives(mesh, L1, hello), why)


def test_a_member_in_the_middle_can_pass_on_neither_hello_nor_welcome() -> None:
    # B dials C, who passes B's greeting on to A as if B had dialled A.
    b, a = mesh_of(B), mesh_of(A)
    hello = dial_out(b)
    a.opened(L1, C.curve_public, 0.0)
    is_refused(a, arrives(a, L1, hello), "impostor")
    # A greets C honestly; C shows A's answer to B, who asked under another key.
    a = mesh_of(A)
    a.opened(L2, C.curve_public, 0.0)
    own = make_hello(C, MESH_ID, "", hello.nonce, 1000, word_of(C).data)
    (welcome,) = [each for each in sent(arrives(a, L2, own)) if isinstance(each, Welcome)]
    is_refused(b, arrives(b, L1, welcome), "forged")


# -- the answer -----------------------------------------------------------------------------------


def test_an_honest_welcome_opens_the_link_and_compares_notes() -> None:
    mesh = mesh_of(A)
    hello = dial_out(mesh, B.agent)
    turn = arrives(mesh, L1, welcome_of(B, hello, A.curve_public))
    assert mesh.links.agent_on(L1) == B.agent
    assert any(isinstance(each, Sync) for each in sent(turn, L1))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"their_nonce": b"x" * 16}, "replay"),
        ({"nonce": b"x" * 16}, "forged"),
        ({"agent": C.agent}, "not them"),
        ({"key": C.key}, "impostor"),
        ({"signature": bytes(64)}, "forged"),
        ({"record": word_of(C).data}, "forged"),
        ({"record": b""}, "malformed"),
        ({"version": 2}, "version"),
        ({"version": 0}, "version"),
    ],
)
def test_a_false_welcome_is_refused_by_name(change: dict[str, object], why: str) -> None:
    mesh = mesh_of(A)
    hello = dial_out(mesh, B.agent)
    welcome = replace(welcome_of(B, hello, A.curve_public), **change)  # type: ignore[arg-type]
    is_refused(mesh, arrives(mesh, L1, welcome), why)


def test_a_welcome_for_an_earlier_nonce_is_refused() -> None:
    mesh = mesh_of(A)
    first = dial_out(mesh, B.agent)
    mesh.closed(L1, "lost", 0.1)
    (dial,) = [each for each in mesh.on_timer(5.0).free if isinstance(each, Dial)]
    mesh.dialled(dial.attempt, L2)
    mesh.opened(L2, None, 5.0)
    is_refused(mesh, arrives(mesh, L2, welcome_of(B, first, A.curve_public)), "replay", L2)


def test_another_agent_at_the_address_is_not_taken_for_the_one_we_meant() -> None:
    mesh = mesh_of(A)
    hello = dial_out(mesh, B.agent)
    is_refused(mesh, arrives(mesh, L1, welcome_of(C, hello, A.curve_public)), "not them")


# -- the order of frames --------------------------------------------------------------------------


@pytest.mark.parametrize("frame", [Ping(1), Gossip(()), Nack(1), Sync(1, ())])
def test_nothing_counts_before_hello(frame: Frame) -> None:
    mesh = mesh_of(A)
    mesh.opened(L1, B.curve_public, 0.0)
    is_refused(mesh, arrives(mesh, L1, frame), "protocol")


def test_a_welcome_nobody_asked_for_is_refused() -> None:
    mesh = mesh_of(A)
    mesh.opened(L1, B.curve_public, 0.0)
    is_refused(mesh, arrives(mesh, L1, welcome_of(B, hello_of(A), A.curve_public)), "protocol")


def test_a_hello_on_a_link_that_we_dialled_is_refused() -> None:
    mesh = mesh_of(A)
    dial_out(mesh)
    is_refused(mesh, arrives(mesh, L1, hello_of(B)), "protocol")


def test_a_second_hello_on_a_link_is_refused() -> None:
    mesh = mesh_of(A)
    open_link(mesh, B, 1, 0.0)
    turn = arrives(mesh, L1, hello_of(B))
    assert refusals(turn) == ["protocol"]
    assert closes(turn, 1)
    assert mesh.refused() == {"protocol": 1}


@pytest.mark.parametrize("frame", [Check(bytes(16)), Here(bytes(16), 1, bytes(64))])
def test_a_stranger_gets_no_signature_from_us(frame: Frame) -> None:
    mesh = mesh_of(A)
    mesh.opened(L1, B.curve_public, 0.0)
    assert sent(arrives(mesh, L1, frame)) == []


def test_bytes_that_are_no_frame_end_the_link_whoever_sent_them() -> None:
    mesh = mesh_of(A)
    open_link(mesh, B, 1, 0.0)
    mesh.opened(L2, B.curve_public, 0.0)
    for link in (L1, L2):
        turn = mesh.received_parts(link, [b"\xc1"], 0.0)
        assert refusals(turn) == ["protocol"]
        assert closes(turn, link)
    assert mesh.refused() == {"protocol": 2}


def test_a_link_that_is_silent_is_closed_in_time() -> None:
    mesh = mesh_of(A)
    mesh.opened(L1, B.curve_public, 0.0)
    dial_out(mesh, link=L2)
    deadline = mesh.links.deadline()
    assert deadline is not None
    assert not closes(mesh.on_timer(4.9), 1)
    turn = mesh.on_timer(5.1)
    assert closes(turn, 1)
    assert closes(turn, 2)


def test_events_on_links_nobody_knows_do_nothing() -> None:
    mesh = mesh_of(A)
    unknown = LinkId(77)
    assert mesh.closed(unknown, "lost", 0.0).free == []
    assert arrives(mesh, unknown, HELLO).free == []
    mesh.dialled(99, unknown)
    assert mesh.received_parts(unknown, [b"\xc1"], 0.0).free == [CloseLink(unknown)]


# -- pinned keys ----------------------------------------------------------------------------------


def test_an_id_seen_with_another_key_before_is_refused() -> None:
    mesh = mesh_of(A)
    mesh.remember([PeerRow(B.agent, C.key, ())], 0.0)
    is_refused(mesh, open_link(mesh, B, 1, 0.0), "impostor")


def test_a_remembered_peer_is_dialled_and_let_in_with_its_key() -> None:
    mesh = mesh_of(A)
    mesh.remember([PeerRow(B.agent, B.key, ("10.0.0.5:1",))], 0.0)
    assert [each.address for each in mesh.on_timer(0.0).free if isinstance(each, Dial)] == [
        "10.0.0.5:1"
    ]
    open_link(mesh, B, 1, 0.0)
    assert mesh.links.agent_on(L1) == B.agent


def test_pinned_keys_are_bounded() -> None:
    mesh = mesh_of(A)
    rng = random.Random(1)
    ids = [f"n{n}-00000000" for n in range(3 * MEMBERS_MAX)]
    for each in ids:
        mesh.links.pin(each, rng.randbytes(32))
    open_link(mesh, B, 1, 0.0)
    assert mesh.links.agent_on(L1) == B.agent
    assert sum(mesh.links.key_of(each) is not None for each in ids) < MEMBERS_MAX


def test_a_peer_is_saved_once_and_only_when_something_changed() -> None:
    mesh = mesh_of(A)
    open_link(mesh, B, 1, 0.0)
    turn = mesh.on_timer(SAVE_PEERS_S)
    assert turn.may_wait, "it is a hint"
    assert turn.rows == [PeerRow(B.agent, B.key, ("10.0.0.1:7000",))]
    mesh.closed(L1, "lost", 2.0)
    open_link(mesh, B, 2, 2.0)
    assert not mesh.on_timer(4.0).rows


# -- two links, one peer --------------------------------------------------------------------------


class Wire:
    """Two engines and every link between them; frames travel at once."""

    def __init__(self, *who: Identity) -> None:
        self.who = who
        self.meshes = [mesh_of(each, seed) for seed, each in enumerate(who)]
        self.open: dict[int, int] = {}  # link -> who dialled it
        self.now = 0.0

    def dial(self, side: int) -> int:
        """`side` dials the other: the connection stands, nothing has been said yet."""
        link = len(self.open) + 1
        self.open[link] = side
        mesh = self.meshes[side]
        mesh.found(Candidate(self.who[1 - side].agent, (f"10.0.0.{link}:1",), "file"), self.now)
        (dial,) = [each for each in mesh.on_timer(self.now).free if isinstance(each, Dial)]
        mesh.dialled(dial.attempt, LinkId(link))
        return link

    def greet(self, *links: int) -> None:
        """All these links open at the same moment."""
        queue: list[tuple[int, Turn]] = []
        for link in links:
            side = self.open[link]
            dialler = self.who[side]
            queue.append((1 - side, self._opened(1 - side, link, dialler.curve_public)))
            queue.append((side, self._opened(side, link, None)))
        while queue:
            side, turn = queue.pop(0)
            for effect in turn.free:
                if isinstance(effect, Transmit) and effect.link in self.open:
                    parts = encode(effect.frame)
                    other = self.meshes[1 - side]
                    queue.append((1 - side, other.received_parts(effect.link, parts, self.now)))
                elif isinstance(effect, CloseLink) and self.open.pop(effect.link, None) is not None:
                    mesh = self.meshes[1 - side]
                    queue.append((1 - side, mesh.closed(effect.link, "lost", self.now)))

    def _opened(self, side: int, link: int, key: bytes | None) -> Turn:
        return self.meshes[side].opened(LinkId(link), key, self.now)


@pytest.mark.parametrize("first", [0, 1])
def test_two_that_dial_each_other_settle_on_the_link_of_the_smaller_id(first: int) -> None:
    wire = Wire(A, B)
    assert A.agent < B.agent
    links = [wire.dial(side) for side in (first, 1 - first)]
    wire.greet(*links)
    (kept,) = wire.open
    assert wire.open[kept] == 0
    assert wire.meshes[0].links.link_to(B.agent) == wire.meshes[1].links.link_to(A.agent) == kept
    assert not any(mesh.refused() for mesh in wire.meshes)


def test_a_second_link_from_the_same_dialler_is_given_up() -> None:
    wire = Wire(A, B)
    wire.greet(wire.dial(0))
    (first,) = wire.open
    mesh = wire.meshes[1]
    assert mesh.links.link_to(A.agent) == first
    turn = open_link(mesh, A, 50, 0.0)
    assert any(isinstance(each, Welcome) for each in sent(turn, 50))
    assert mesh.links.link_to(A.agent) == first  # the dialler chooses which one to close
    assert not closes(turn, first)


def test_a_linked_peer_is_not_dialled_again() -> None:
    mesh = mesh_of(A)
    open_link(mesh, B, 1, 0.0)
    mesh.found(Candidate(B.agent, ("10.0.0.7:1",), "file"), 0.0)
    assert not [each for each in mesh.on_timer(10.0).free if isinstance(each, Dial)]
    mesh.closed(L1, "lost", 11.0)
    assert [each.address for each in mesh.on_timer(11.0).free if isinstance(each, Dial)]


# -- copies of an agent ---------------------------------------------------------------------------


def test_a_refusal_as_a_clone_without_proof_stops_nobody() -> None:
    other = make_here(B, MESH_ID, bytes(16), 1)
    for proof in (b"", b"\xc1", b"\x91" * 4000, refuse_clone(other).proof):
        mesh = mesh_of(A)
        dial_out(mesh)
        turn = arrives(mesh, L1, Refuse("clone", "stop!", proof))
        assert not [each for each in turn.free if isinstance(each, CloneFound)]


@pytest.mark.parametrize(
    ("started", "own_nonce", "stops"), [(1, True, True), (1, False, False), (1000, True, False)]
)
def test_only_fresh_proof_of_an_earlier_start_stops_a_node(
    started: int, own_nonce: bool, stops: bool
) -> None:
    mesh = mesh_of(A)
    hello = dial_out(mesh)
    here = make_here(A, MESH_ID, hello.nonce if own_nonce else bytes(16), started)
    turn = arrives(mesh, L1, refuse_clone(here))
    assert [each.stop for each in turn.free if isinstance(each, CloneFound)] == [True] * stops


@pytest.mark.parametrize(("started", "stop"), [(500, True), (1500, False)])
def test_of_two_nodes_of_one_agent_the_later_goes(started: int, stop: bool) -> None:
    mesh = mesh_of(A)
    turn = open_link(mesh, A, 1, 0.0, started_ms=started)
    assert [each.stop for each in turn.free if isinstance(each, CloneFound)] == [stop]
    assert refusals(turn) == ([] if stop else ["clone"])
    assert mesh.peers() == []


def test_dialling_oneself_is_no_clone_and_is_not_repeated() -> None:
    mesh = mesh_of(A)
    hello = dial_out(mesh)
    mesh.opened(L2, A.curve_public, 0.0)
    turn = arrives(mesh, L2, hello)
    assert refusals(turn) == ["self"]
    assert not mesh.refused()
    turn = arrives(mesh, L1, Refuse("self", ""))
    assert not [each for each in turn.free if isinstance(each, CloneFound)]
    assert not [each for each in mesh.on_timer(100.0).free if isinstance(each, Dial)]


def test_a_third_node_shows_the_later_claimant_that_the_first_still_runs() -> None:
    mesh = mesh_of(C)
    open_link(mesh, A, 1, 0.0, started_ms=1000)
    turn = open_link(mesh, A, 2, 0.0, started_ms=2000, nonce=b"n" * 16)
    assert sent(turn) == [Check(b"n" * 16)]
    assert mesh.links.agent_on(L2) is None
    turn = arrives(mesh, L1, make_here(A, MESH_ID, b"n" * 16, 1000))
    assert refusals(turn) == ["clone"]
    assert closes(turn, 2)
    assert mesh.refused() == {"clone": 1}
    assert mesh.links.agent_on(L1) == A.agent


def test_a_silent_older_run_gives_way_to_the_restarted_one() -> None:
    mesh = mesh_of(C)
    open_link(mesh, A, 1, 0.0, started_ms=1000)
    open_link(mesh, A, 2, 0.0, started_ms=2000)
    deadline = mesh.links.deadline()
    assert deadline == pytest.approx(1.0)
    turn = mesh.on_timer(1.0)
    assert any(isinstance(each, Welcome) for each in sent(turn, 2))
    assert closes(turn, 1)
    assert mesh.links.agent_on(L2) == A.agent
    assert not mesh.refused()


def test_frames_of_a_claimant_that_is_being_checked_wait_and_do_no_harm() -> None:
    # It was dialled, has answered, and already counts the link as open.
    mesh = mesh_of(C)
    hello = dial_out(mesh, A.agent, link=L2)
    open_link(mesh, A, 1, 0.0, started_ms=500)
    turn = arrives(mesh, L2, welcome_of(A, hello, C.curve_public))
    assert [each for each in sent(turn) if isinstance(each, Check)]
    assert arrives(mesh, L2, Ping(1)).free == []
    mesh.on_timer(1.0)
    assert mesh.links.agent_on(L2) == A.agent
    assert not mesh.refused()


def test_goodbye_closes_the_link_and_is_no_offence() -> None:
    mesh = mesh_of(A)
    open_link(mesh, B, 1, 0.0)
    turn = arrives(mesh, L1, Bye("leaving"))
    assert closes(turn, 1)
    assert not mesh.refused()
    assert mesh.links.link_to(B.agent) is None


def test_who_leaves_tells_all_before_closing() -> None:
    mesh = mesh_of(A)
    open_link(mesh, B, 1, 0.0)
    open_link(mesh, C, 2, 0.0)
    dial_out(mesh, link=LinkId(3))  # it has our Hello, and may have counted us in
    turn = mesh.leave(1.0)
    for link in (1, 2, 3):
        kinds = [type(each) for each in sent(turn, link)]
        assert kinds == [Gossip, Bye]


def test_no_frame_that_leaves_is_unreadable() -> None:
    mesh = mesh_of(A)
    turn = open_link(mesh, B, 1, 0.0)
    assert any(isinstance(each, PeerChanged) for each in turn.free)
    for frame in sent(turn):
        assert decode(encode(frame)) == frame


NOT_IN_THE_TABLE = [
    (state, kind)
    for state in LinkState
    for kind in EXAMPLES
    if (state, kind) not in HANDLERS
    # On an open link all but the handshake is for the other engines.
    and (state is not LinkState.OPEN or kind in (Hello, Welcome))
]


@pytest.mark.parametrize(("state", "kind"), NOT_IN_THE_TABLE)
def test_a_frame_that_is_not_in_the_table_ends_the_link(
    state: LinkState, kind: type[Frame]
) -> None:
    mesh = mesh_of(A)
    mesh.opened(L1, B.curve_public, 0.0)
    known = mesh.links.table.get(L1)
    assert known is not None
    known.state = state
    assert refusals(arrives(mesh, L1, EXAMPLES[kind])) == ["protocol"]
