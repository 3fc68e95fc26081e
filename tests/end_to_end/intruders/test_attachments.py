"""Attachments from a member that means harm: refused by name, counted, and nothing else happens."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from end_to_end.intruders.attacker import Attacker
from end_to_end.intruders.conftest import Attacked, Members
from end_to_end.intruders.offers import Foe, body, foe, named, receipt

from meshagent.bench.nodes import NodeProcess
from meshagent.core.delivery.incomplete_messages import SENDER_FILES_MAX
from meshagent.core.model.attachments import grant_words
from meshagent.core.model.identity import Identity, MeshSecret
from meshagent.core.model.invites import Invite, format_invite
from meshagent.core.model.peers import AgentId
from meshagent.core.wire.codec import encode
from meshagent.core.wire.frames import CHUNK_BYTES, BlobAsk, BlobChunk, BlobEnd, BlobMore
from meshagent.session import open_blobs
from meshagent.storage.blobs.store import Stored
from meshagent.storage.folders.mesh_folder import MeshFolder

pytestmark = pytest.mark.process

KIB, MIB = 1 << 10, 1 << 20
HONEST_S = 10.0


@pytest.fixture(scope="module")
def far(members: Members) -> NodeProcess:
    """An honest member with another folder: what it sends really moves."""
    nodes, node, _ = members
    project = nodes.folder / "far"
    project.mkdir()
    secret = MeshSecret(MeshFolder(node.mesh).read_secret())
    code = format_invite(Invite(secret.reveal(), "attacked", node.agent, ()))
    words = ("--invite", "-", "--discovery", "none", "--peer", node.address)
    far = nodes.join(project, "far", *words, text=code)
    nodes.until(lambda: far.sees(node) and node.sees(far), 10, "the far one is here")
    return far


@pytest.fixture
def mallory(attacked: Attacked) -> Attacker:
    return Attacker(attacked.secret)


@pytest.fixture
def link(attacked: Attacked, mallory: Attacker, far: NodeProcess) -> Iterator[Foe]:
    with foe(mallory, attacked.address) as link:
        yield link


@pytest.fixture(autouse=True)
def nothing_outside(members: Members) -> Iterator[None]:
    """Whatever happens: no file appears anywhere but where files of the node belong."""
    nodes, node, _ = members
    before = strays(nodes.folder, node.mesh)
    yield
    assert strays(nodes.folder, node.mesh) == before
    assert not Path("/tmp/harmed-by-a-name").exists()


def strays(folder: Path, mesh: Path) -> set[str]:
    """All files but those of the stores, the agents, and what tests save on purpose."""
    homes = (mesh, folder / "far" / ".meshagent", folder / "saved")
    return {
        str(each)
        for each in folder.rglob("*")
        if not each.match("stderr-*") and not any(each.is_relative_to(home) for home in homes)
    }


def put(node: NodeProcess, content: bytes) -> Stored:
    return open_blobs(MeshFolder(node.mesh)).put(io.BytesIO(content))


def send(
    attacked: Attacked, sender: NodeProcess, to: str, content: bytes, wait_s: float = HONEST_S
) -> dict[str, Any]:
    """A file from an honest member."""
    attach = [("honest.bin", put(sender, content).sha256.hex())]
    (sent,) = attacked.nodes.ask(sender, "send", to=to, attach=attach, wait_s=wait_s, strict=True)
    return dict(sent)


def assert_honest_arrives(attacked: Attacked, far: NodeProcess, size: int = 300 * KIB) -> None:
    """A transfer beside the attack: it is complete, verified and byte-identical."""
    content = os.urandom(size)
    sent = send(attacked, far, attacked.node.agent, content)
    assert sent["state"] == "delivered", sent
    path = open_blobs(MeshFolder(attacked.node.mesh)).path(hashlib.sha256(content).digest())
    assert path.read_bytes() == content


def held(attacked: Attacked, ident: str) -> dict[str, Any]:
    return dict(attacked.nodes.ask(attacked.node, "message", ident=ident))


def printed(attacked: Attacked, *words: str) -> str:
    words = (*words, "--as", attacked.node.agent)
    return attacked.nodes.command(*words, cwd=attacked.node.mesh.parent)


def assert_clean(text: str) -> None:
    assert all(each.isprintable() or each == "\n" for each in text), repr(text)


# -- names ------------------------------------------------------------------------------------

NOT_A_NAME = [
    "", "a\0b", "a\nb", "\x1b[2J\x1b]0;owned\x07", "\x9b31m", "x" * 4_000, "gpj\u202eexe.a",
    "a\u200bb", "\u3164", "\ufeffa", 7, b"a",
]  # fmt: skip
ONLY_TEXT = [
    "../../../../../../../../tmp/harmed-by-a-name", "/tmp/harmed-by-a-name", "..", "CON",
    "nul.txt", "C:\\harmed", "..\\harmed", "-rf", ".bashrc", "\u0440\u0430y.png", "a\uff0fb", "~",
    "a:b|c?",
]  # fmt: skip


def test_names_that_can_not_be_shown_are_refused(
    attacked: Attacked, link: Foe, far: NodeProcess
) -> None:
    for name in NOT_A_NAME:
        why = link.why_refused(body(named(b"x", name)))
        assert why == "The name of attachment 1 is not acceptable.", name
    attacked.until_refused(len(NOT_A_NAME), "malformed message")
    assert_honest_arrives(attacked, far)


def test_names_that_are_paths_stay_text_and_are_saved_in_the_folder_only(
    attacked: Attacked, link: Foe
) -> None:
    contents = [name.encode() for name in ONLY_TEXT]
    attached = [named(each, name) for each, name in zip(contents, ONLY_TEXT, strict=True)]
    one = body(*attached, ident="namesofpaths", text="\x1b[2Jclear\x9b31m \x07")
    assert link.why_refused(one) == ""
    link.serve(*contents)
    assert link.end_of("namesofpaths") == ("delivered", "")

    saved, target = attacked.nodes.folder / "saved", attacked.nodes.folder / "saved" / "target"
    (saved / "to").mkdir(parents=True)
    target.write_text("untouched")
    (saved / "to" / "harmed-by-a-name").symlink_to(target)
    (saved / "to" / "_CON").symlink_to(saved / "nowhere")
    told = json.loads(
        printed(attacked, "save", "namesofpaths", "--to", str(saved / "to"), "--json")
    )
    files = [Path(each["file"]) for each in told]
    assert len(set(files)) == len(ONLY_TEXT)
    for file, content in zip(files, contents, strict=True):
        assert file.parent == saved / "to"
        assert not file.is_symlink()
        assert file.read_bytes() == content
    assert target.read_text() == "untouched"
    assert not (saved / "nowhere").exists()

    for words in (("inbox",), ("read", "namesofpaths"), ("log",)):
        assert_clean(printed(attacked, *words))
        json.loads(printed(attacked, *words, "--json"))


# -- what an offer says -----------------------------------------------------------------------


def test_offers_that_no_file_fits_are_refused_by_name(
    attacked: Attacked, link: Foe, far: NodeProcess
) -> None:
    malformed = {
        "The size of attachment 1 is not acceptable.": [
            named(b"x", size=-1), named(b"x", size=2**62), named(b"x", size=1.5),
        ],
        "Attachment 1 has a field of the wrong form.": [
            named(b"x", sha256=b"short"), named(b"x", grant=bytes(65)), named(b"x", width=-1),
        ],
        "The type of attachment 1 is not acceptable.": [
            named(b"x", mime="text/\x1b[2J"), named(b"x", mime="x" * 200),
        ],
        "Attachment 1 lacks fields.": [(), named(b"x")[:-1]],
    }  # fmt: skip
    count = 0
    for why, attachments in malformed.items():
        for each in attachments:
            assert link.why_refused(body(each)) == why
            count += 1
    for many, expected in (
        (257, "A message has at most 256 attachments."),
        (10_000, "The bytes are not one msgpack value: ValueError."),
    ):
        assert link.why_refused(body(*[named(b"x")] * many)) == expected
        count += 1
    why = link.why_refused(body(named(b"x"), named(b"x", size=2)))
    assert why == "Attachment 2 is a file with two sizes."
    attacked.until_refused(count + 1, "malformed message")

    assert link.why_refused(body(*[named(b"x")] * 33)) == "33 attachments; 32 are allowed"
    over = link.why_refused(body(named(b"x", size=11 << 30)))
    assert over == f"'a.bin' has {11 << 30} bytes; {10 << 30} are allowed"
    attacked.until_refused(2, "attachments beyond the limits")
    assert_honest_arrives(attacked, far)


def test_an_id_that_comes_twice_with_other_attachments_breaks_nothing(
    attacked: Attacked, link: Foe, far: NodeProcess
) -> None:
    first, second = os.urandom(50), os.urandom(60)
    link.post(body(named(first), ident="sameid"), body(named(second), ident="sameid"))
    link.serve(first)
    assert link.end_of("sameid") == ("delivered", "")
    shown = held(attacked, "sameid")
    assert [each["sha256"] for each in shown["attachments"]] == [hashlib.sha256(first).hexdigest()]
    assert_honest_arrives(attacked, far)


# -- what is sent -----------------------------------------------------------------------------


def test_a_wrong_hash_and_a_size_that_lies_are_refused_and_nothing_is_kept(
    attacked: Attacked, link: Foe, far: NodeProcess
) -> None:
    content = os.urandom(1000)
    sha256 = hashlib.sha256(content).digest()
    lies = {
        "wrongbytes": (named(content), os.urandom(1000)),
        "toosmall": (named(content, size=10), content[:10]),
        "toolarge": (named(content, size=2000), content),
        "onebyte": (named(content, size=CHUNK_BYTES + 1), content[:1]),
    }
    for ident, (attachment, data) in lies.items():
        link.post(body(attachment, ident=ident))
        ask = link.asked(sha256)
        link.wire.send(BlobChunk(ask.pull, 0, data))
        assert link.end_of(ident) == ("refused", "Nobody gives it: wrong contents."), ident
    link.post(body(named(content, size=0), ident="nothing"))
    assert link.end_of("nothing") == ("refused", "No file of that size has this hash.")
    attacked.until_refused(2, "wrong contents")
    attacked.until_refused(2, "chunk of a wrong length")
    attacked.until_refused(5, "attachments that can't be had")
    blobs = open_blobs(MeshFolder(attacked.node.mesh))
    assert not blobs.holds(sha256)
    assert not list((blobs.root / "partial").glob(f"{sha256.hex()}*"))
    assert_honest_arrives(attacked, far)


PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x01\0\0\0\x01\x08\0\0\0\0" + bytes(40)


def test_a_type_that_is_a_lie_is_found_out_by_the_contents(members: Members) -> None:
    nodes, *_ = members
    project = nodes.folder / "saved" / "picky"
    project.mkdir(parents=True)
    nodes.command("init", cwd=project)
    with (project / ".meshagent" / "mesh.toml").open("a") as settings:
        settings.write('attachments_types = ["image/*"]\n')
    picky = nodes.join(project, "picky", "--discovery", "file")
    mallory = Attacker(MeshSecret(MeshFolder(picky.mesh).read_secret()))
    script = b"#!/bin/sh\nrm -rf /\n"
    with foe(mallory, picky.address) as link:
        honest = named(script, mime="text/x-shellscript")
        assert link.why_refused(body(honest)).startswith("'a.bin' is text/x-shellscript; allowed")
        link.post(body(named(script, "cat.png", mime="image/png"), ident="lie"))
        link.serve(script)
        state, why = link.end_of("lie")
        assert state == "refused"
        assert why.endswith("; allowed: image/*.")
        link.post(body(named(PNG, "cat.png", mime="image/png"), ident="picture"))
        link.serve(PNG)
        assert link.end_of("picture") == ("delivered", "")
    nodes.end(picky)


def test_who_lies_about_a_type_is_found_out_where_it_is_shown(
    attacked: Attacked, link: Foe
) -> None:
    script = b"#!/bin/sh\nrm -rf / # " + os.urandom(8).hex().encode()
    ident = os.urandom(4).hex()
    link.post(body(named(script, "cat.png", mime="image/png", width=5, height=5), ident=ident))
    (before,) = held(attacked, ident)["attachments"]
    assert (before["state"], before["mime"]) == ("receiving", "image/png")
    assert "said to be image/png" in printed(attacked, "inbox")
    link.serve(script)
    assert link.end_of(ident) == ("delivered", "")
    (after,) = held(attacked, ident)["attachments"]
    assert after["state"] == "ready"
    assert after["mime"].startswith("text/")
    assert (after["width"], after["height"]) == (None, None)
    for words in (("inbox",), ("read", ident), ("log",)):
        (line,) = [each for each in printed(attacked, *words).splitlines() if "cat.png" in each]
        assert after["mime"] in line
        assert "image/png" not in line


def test_endless_chunks_and_chunks_never_asked_for_cost_no_memory(
    attacked: Attacked, link: Foe, far: NodeProcess
) -> None:
    size, full = 40 * CHUNK_BYTES, os.urandom(CHUNK_BYTES)
    link.post(body(named(b"", size=size, sha256=os.urandom(32)), ident="endless"))
    ask = link.asked()
    for index in range(ask.upto, ask.upto + 60):  # beyond the credit, and beyond the size
        link.wire.dealer.send_multipart(chunk(ask.pull, index, full))
    assert ask.upto > 1, "or these would be beyond the credit too"
    for _ in range(3):
        link.wire.dealer.send_multipart(chunk(ask.pull, 1, full))
    for number in range(200):
        link.wire.dealer.send_multipart(chunk(number, 0, full[:KIB]))
    link.wire.dealer.send_multipart(chunk(2**62, 2**62, b""))
    attacked.until_refused(60, "chunk beyond the credit")
    attacked.until_refused(3, "chunk out of order")
    attacked.until_refused(201, "chunk that was never asked for")
    assert held(attacked, "endless")["attachments"][0]["received"] == 0
    assert_honest_arrives(attacked, far)


def chunk(pull: int, index: int, data: bytes) -> list[bytes]:
    return list(encode(BlobChunk(pull, index, data)))


def test_who_closes_in_the_middle_leaves_a_message_that_waits_and_says_for_what(
    attacked: Attacked, mallory: Attacker, far: NodeProcess
) -> None:
    content = os.urandom(3 * CHUNK_BYTES)
    with foe(mallory, attacked.address) as link:
        link.post(body(named(content), ident="middle"))
        ask = link.asked(hashlib.sha256(content).digest())
        link.wire.send(BlobChunk(ask.pull, 0, content[:CHUNK_BYTES]))
        attacked.until(
            lambda: held(attacked, "middle")["attachments"][0]["received"] == CHUNK_BYTES,
            "one chunk is written",
        )
    assert_honest_arrives(attacked, far)
    with foe(mallory, attacked.address) as link:
        ask = link.asked(hashlib.sha256(content).digest())
        link.wire.send(BlobEnd(ask.pull, "busy", "\x1b[2Jlater\x07"))
        reasons: list[str] = []  # it is shown until the next try, which may be before we look again

        def is_shown() -> bool:
            reasons.append(str(held(attacked, "middle")["attachments"][0]["reason"]))
            return "later" in reasons[-1]

        attacked.until(is_shown, "the reason is shown")
        assert_clean(reasons[-1])
        assert held(attacked, "middle")["state"] == "receiving"
        assert_clean(printed(attacked, "inbox"))
        ask = link.asked(hashlib.sha256(content).digest())
        assert ask.first == 1  # what was written is not asked for again
        for index in (1, 2):
            part = content[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
            link.wire.send(BlobChunk(ask.pull, index, part))
        assert link.end_of("middle") == ("delivered", "")


# -- asking for what is others' ---------------------------------------------------------------


def identity_of(node: NodeProcess) -> Identity:
    from meshagent.storage.folders.agents import KEY_KIND, AgentFolder
    from meshagent.storage.folders.key_files import read_key

    folder = AgentFolder(node.mesh / "agents" / node.agent)
    seed, _ = read_key(folder.key_file, KEY_KIND, "")
    return Identity(folder.read().name, seed)


def test_a_blob_of_anothers_message_is_not_given(
    attacked: Attacked, mallory: Attacker, link: Foe, far: NodeProcess
) -> None:
    secret = os.urandom(1000)
    assert send(attacked, far, attacked.node.agent, secret)["state"] == "delivered"
    sha256, size = hashlib.sha256(secret).digest(), len(secret)
    me, node = mallory.identity.agent, AgentId(attacked.node.agent)
    for_node = identity_of(far).sign(
        grant_words(attacked.secret.mesh_id, AgentId(far.agent), node, sha256)
    )
    # She names it in a message of her own: it is there already, so it is delivered at once.
    link.post(body(named(secret), ident="stolen"))
    assert link.end_of("stolen") == ("delivered", "")
    tries = {
        "no grant": (sha256, node, b""),
        "no grant of the sender": (sha256, far.agent, b""),
        "a forged grant": (sha256, far.agent, os.urandom(64)),
        "one's own signature": (sha256, far.agent, link.grant(me, sha256)),
        "a grant for another": (sha256, far.agent, for_node),
        "one's own grant": (sha256, me, link.grant(me, sha256)),
        "nobody's grant": (sha256, "nobody-aaaaaaaa", bytes(64)),
        "a path as granter": (sha256, "../../far", bytes(64)),
        "a hash never stored": (os.urandom(32), node, b""),
    }
    for what, (wanted, granter, grant) in tries.items():
        answer = link.ask(wanted, size, granter, grant)
        assert isinstance(answer, BlobEnd), what
        assert answer.why == "not allowed", what
    attacked.until_refused(len(tries), "blob not granted")

    # An accomplice, with her grant for what she never had.
    helper = Attacker(attacked.secret, "helper")
    grant = link.grant(helper.identity.agent, sha256)
    with foe(helper, attacked.address) as other:
        answer = other.ask(sha256, size, me, grant)
        assert isinstance(answer, BlobEnd)
        assert answer.why == "not allowed"


def test_what_a_message_names_is_given_to_its_recipient_and_its_friends_and_when_cancelled_not(
    attacked: Attacked, mallory: Attacker, far: NodeProcess
) -> None:
    me = mallory.identity.agent
    kept, taken_back = os.urandom(700), os.urandom(800)
    with foe(mallory, attacked.address):
        pass  # now she is known
    for content in (kept, taken_back):
        sent = send(attacked, attacked.node, me, content, wait_s=0)
    attacked.nodes.ask(attacked.node, "cancel", ident=sent["id"])
    given = os.urandom(900)
    with foe(mallory, attacked.address) as link:
        answer = link.ask(hashlib.sha256(kept).digest(), 700, attacked.node.agent)
        assert isinstance(answer, BlobChunk)
        assert answer.data == kept
        answer = link.ask(hashlib.sha256(taken_back).digest(), 800, attacked.node.agent)
        assert isinstance(answer, BlobEnd)
        assert answer.why == "not allowed"
        # What she gave to the node, the node gives on at her word.
        link.post(body(named(given), ident="given"))
        link.serve(given)
        assert link.end_of("given") == ("delivered", "")
        helper = Attacker(attacked.secret, "helper")
        grant = link.grant(helper.identity.agent, hashlib.sha256(given).digest())
        with foe(helper, attacked.address) as other:
            answer = other.ask(hashlib.sha256(given).digest(), 900, me, grant)
            assert isinstance(answer, BlobChunk)
            assert answer.data == given


def test_ten_thousand_pulls_and_absurd_numbers_are_refused(
    attacked: Attacked, mallory: Attacker, link: Foe, far: NodeProcess
) -> None:
    content = os.urandom(5 * CHUNK_BYTES)
    sha256, size, node = hashlib.sha256(content).digest(), len(content), attacked.node.agent
    send(attacked, attacked.node, mallory.identity.agent, content, wait_s=0)
    absurd = [(5, 5), (9, 3), (0, 0), (0, 6), (2**62, 2**63 - 1), (0, 2**62)]
    for number, (first, upto) in enumerate(absurd):
        link.wire.send(BlobAsk(1000 + number, sha256, size, node, b"", first, upto))
    link.wire.send(BlobAsk(2000, sha256, 2**62, node, b"", 0, 1))
    attacked.until_refused(len(absurd) + 1, "absurd ask")
    link.wire.send(BlobAsk(1, sha256, size, node, b"", 0, 1))
    link.until(lambda frame: isinstance(frame, BlobChunk))
    for upto in (6, 64, 2**62):
        link.wire.send(BlobMore(1, upto))
    link.wire.send(BlobMore(77, 2))
    attacked.until_refused(3, "absurd credit")
    attacked.until_refused(1, "credit for no pull")
    link.wire.send(BlobAsk(1, sha256, size, node, b"", 0, 1))
    attacked.until_refused(1, "pull number used twice")
    for pull in range(10_000, 20_000):
        ask = BlobAsk(pull, os.urandom(32), size, node, b"", 0, 1)
        link.wire.dealer.send_multipart(encode(ask))  # waits when the link is full
        if pull % 500 == 0:
            for _ in link.frames(0.02):
                pass
    attacked.until_refused(10_000, "too many pulls at once", "blob not granted")
    assert_honest_arrives(attacked, far)


# -- crowds -----------------------------------------------------------------------------------


def test_ten_thousand_offers_at_once_are_held_back_and_others_are_not(
    attacked: Attacked, link: Foe, far: NodeProcess
) -> None:
    """Each of a file that is never sent: she has her share of places and of memory, no more."""
    offers = [body(named(b"", sha256=os.urandom(32), size=5)) for _ in range(10_000)]
    answer = link.post(*offers)
    assert answer.mode == 1  # wait
    waiting = [each for each in inbox(attacked) if each["from"] == link.identity.agent]
    assert SENDER_FILES_MAX <= len(waiting) + 1 <= SENDER_FILES_MAX + 1
    assert_honest_arrives(attacked, far)
    assert_honest_arrives(attacked, far, 3 * MIB)
    (text,) = attacked.nodes.ask(
        far, "send", to=attacked.node.agent, text="hello", wait_s=5, strict=True
    )
    assert text["state"] == "delivered"


def inbox(attacked: Attacked) -> list[dict[str, Any]]:
    return list(attacked.nodes.ask(attacked.node, "inbox", limit=20_000))


def test_what_expires_while_it_waits_is_dropped_at_its_time(attacked: Attacked, link: Foe) -> None:
    past = body(named(b"", sha256=os.urandom(32), size=5), ident="past", expires_ms=1)
    link.post(past)
    assert link.end_of("past", 3)[0] == "expired"


# -- speaking for others ----------------------------------------------------------------------


def test_receipts_for_others_messages_change_nothing(attacked: Attacked, link: Foe) -> None:
    absent = Attacker(attacked.secret, "absent").identity.agent
    with foe(Attacker(attacked.secret, "quiet"), attacked.address) as quiet:
        sent = send(attacked, attacked.node, absent, os.urandom(10), wait_s=0)
        taken = send(attacked, attacked.node, quiet.identity.agent, os.urandom(10), wait_s=0.5)
        for ident in (sent["id"], taken["id"]):
            for state in ("delivered", "seen", "done", "refused", "expired"):
                assert link.why_refused(receipt(ident, state)) == ""
        log = attacked.nodes.ask(attacked.node, "log")
        states = {each["id"]: each["state"] for each in log}
        assert states[sent["id"]] == "queued"
        assert states[taken["id"]] in ("queued", "sent")
    for bad in ("\x1b[2J", "x" * 300):
        why = link.why_refused(receipt(sent["id"], "refused", bad))
        assert why == "A receipt names a message, how far it has come, and why."
    why = link.why_refused(receipt(sent["id"], "cancelled"))
    assert why.startswith("A receipt names")
    attacked.until_refused(3, "malformed message")


# -- links in the store -----------------------------------------------------------------------


@pytest.mark.parametrize("where", ["shelf", "blob", "partial", "holder"])
def test_a_symbolic_link_in_the_store_is_never_followed(
    attacked: Attacked, far: NodeProcess, where: str
) -> None:
    mesh = attacked.node.mesh
    outside = attacked.nodes.folder / "saved" / f"outside-{where}"
    outside.mkdir(parents=True)
    content = fresh(mesh)
    sha256 = hashlib.sha256(content).hexdigest()
    shelf = mesh / "blobs" / sha256[:2]
    trap = {
        "shelf": shelf,
        "blob": shelf / sha256[2:],
        "partial": mesh / "blobs" / "partial",
        "holder": mesh / "agents" / attacked.node.agent / "blobs",
    }[where]
    aside = trap.with_name("aside")
    if where == "blob":
        shelf.mkdir(mode=0o700, exist_ok=True)
        outside = outside / "file"
        outside.write_text("untouched")
    elif trap.exists():
        trap.rename(aside)
    trap.symlink_to(outside)
    sent = send(attacked, far, attacked.node.agent, content, wait_s=1)
    if where == "blob":  # the link is replaced by the blob; what it led to is as it was
        assert sent["state"] == "delivered"
        assert not trap.is_symlink()
        assert outside.read_text() == "untouched"
        return
    assert sent["state"] == "sent"
    assert list(outside.iterdir()) == []
    ours = next(each for each in inbox(attacked) if each["id"] == sent["id"])
    assert ours["state"] == "receiving"
    assert "symbolic link" in ours["attachments"][0]["reason"]
    assert_clean(printed(attacked, "inbox"))
    (text,) = attacked.nodes.ask(
        far, "send", to=attacked.node.agent, text="hi", wait_s=5, strict=True
    )
    assert text["state"] == "delivered"
    trap.unlink()
    if aside.exists():
        aside.rename(trap)
    attacked.until(
        lambda: held(attacked, sent["id"])["state"] != "receiving", "it goes on by itself", 10
    )
    assert list(outside.iterdir()) == []
    if where == "shelf":  # once more, when it is here: the inbox is shown all the same
        shelf.rename(aside)
        shelf.symlink_to(outside)
        shown = held(attacked, sent["id"])["attachments"][0]
        assert "symbolic link" in shown["reason"]
        assert shown["path"] is None
        shelf.unlink()
        aside.rename(shelf)


def fresh(mesh: Path) -> bytes:
    """Something whose shelf is not there yet."""
    while True:
        content = os.urandom(500)
        if not (mesh / "blobs" / hashlib.sha256(content).hexdigest()[:2]).exists():
            return content
