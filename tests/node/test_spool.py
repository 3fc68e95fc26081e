"""The spool's driver: whose files wait, whose don't, and that no file speaks for another epoch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from core.made import MESH_ID, identity
from node.made import Sick, accepted, drop, node

from meshagent.core.delivery.spool_files import pack_drop, parse_drop
from meshagent.core.model.identity import Identity, verify
from meshagent.core.model.messages import Message, pack_body, parse_body
from meshagent.core.model.peers import AgentId
from meshagent.core.model.rows import NewEpoch, OutRow, OutState
from meshagent.core.turns import NOTHING, Turn
from meshagent.core.wire.frames import Mail
from meshagent.errors import RemoteProtocolError
from meshagent.node import spool as spool_module
from meshagent.node.driver import Driver
from meshagent.node.spool import FolderSpool
from meshagent.storage.mail.memory_store import MemoryStore
from meshagent.transports.spool import Spool

ME, BOB, EVE = identity("me"), identity("bob"), identity("eve")
OLD, NEW = b"oldepoch", b"newepoch"


class Engine:
    """What the spool asks of a driver and its engines, answered by the test."""

    runs = True
    log = logging.getLogger("test")

    def __init__(self) -> None:
        self.mesh = self.links = self.delivery = self.receiving = self
        self.loop = asyncio.get_running_loop()
        self.now = (OLD, 1)
        self.linked = False
        self.came: list[tuple[AgentId, int]] = []
        self.full_for: set[AgentId] = set()
        self.commits = asyncio.Event()
        self.commits.set()
        self.asked = asyncio.Event()

    def correspondents(self) -> list[AgentId]:
        return [BOB.agent]

    def numbers(self, peer: AgentId) -> tuple[bytes, int]:
        return self.now

    def is_linked(self, peer: AgentId) -> bool:
        return self.linked

    async def committed(self) -> None:
        self.asked.set()
        await self.commits.wait()

    def pin(self, agent: str, key: bytes) -> bytes:
        return key

    def take(self, sender: AgentId, mail: Mail, now: float) -> Turn:
        self.came.append((sender, mail.first))
        return NOTHING

    def perform(self, turn: Turn) -> None:
        pass

    def has(self, mail: Mail, peer: AgentId, spooled: bool) -> bool:
        return peer not in self.full_for


class Office:
    """A post with its folder, its store and an engine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.engine, self.store = folder, Engine(), MemoryStore()
        self.post = FolderSpool(
            Spool(folder, ME.agent), self.store, ME, MESH_ID, lambda peer: peer == BOB.agent
        )

    async def open(self) -> None:
        await self.store.open()
        await self.store.commit([NewEpoch(OLD)])
        await self.post.start(self.engine)  # type: ignore[arg-type]

    async def rest(self) -> None:
        """Until nothing is being dropped."""
        await asyncio.gather(*self.post._dropping.values())

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*/*.mail"))

    def drops_for_bob(self) -> list[Mail]:
        files = sorted((self.folder / BOB.agent).glob("*.mail"))
        return [parse_drop(f.read_bytes(), BOB.agent, MESH_ID, verify).mail for f in files]


def body(ident: str) -> bytes:
    return pack_body(Message(ident, "text", "", 1))


def leave(folder: Path, sender: Identity, to: Identity, mail: Mail) -> None:
    last = mail.first + len(mail.items) - 1
    data = pack_drop(sender, MESH_ID, to.agent, mail)
    Spool(folder, sender.agent).drop(to.agent, mail.epoch, mail.first, last, data)


def run(tmp_path: Path, script: Callable[[Office], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        office = Office(tmp_path)
        try:
            async with asyncio.timeout(20):
                await script(office)
        finally:
            office.engine.commits.set()
            await office.post.close()

    asyncio.run(whole())


def test_a_file_that_has_to_wait_holds_up_no_other_sender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "TAKE_FILES_MAX", 1)
    for sender in (BOB, EVE):
        for first in (1, 2, 3):
            leave(tmp_path, sender, ME, Mail(OLD, 1, first, (body(f"m{first}"),)))

    async def script(office: Office) -> None:
        office.engine.full_for = {BOB.agent}
        await office.open()
        await office.post._taking
        assert office.engine.came == [
            (BOB.agent, 1), (EVE.agent, 1), (EVE.agent, 2), (EVE.agent, 3),
        ]  # fmt: skip
        left = sorted(path.name for path in (tmp_path / ME.agent).iterdir())
        assert len(left) == 3
        assert all(name.startswith(BOB.agent) for name in left)

    run(tmp_path, script)


def test_a_box_that_takes_nothing_holds_up_no_other_recipient(tmp_path: Path) -> None:
    (tmp_path / BOB.agent).write_bytes(b"in the way of a folder")

    async def script(office: Office) -> None:
        office.engine.correspondents = lambda: [BOB.agent, EVE.agent]  # type: ignore[method-assign]
        office.post._is_local = lambda peer: True
        await office.open()
        await office.store.commit(
            [OutRow(each.agent, OLD, 1, each.agent, body("m"), 0) for each in (BOB, EVE)]
        )
        await office.post._drop_all()
        (mail,) = office.files()
        assert (tmp_path / EVE.agent / mail).exists()

    run(tmp_path, script)


def test_a_box_that_could_not_be_read_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "SETTLE_S", 0.0)
    monkeypatch.setattr(spool_module, "LOOK_S", 0.01)
    (tmp_path / ME.agent).write_bytes(b"in the way of a folder")

    async def script(office: Office) -> None:
        await office.open()
        (tmp_path / ME.agent).unlink()
        leave(tmp_path, EVE, ME, Mail(OLD, 1, 1, (body("m"),)))
        await office.engine.asked.wait()
        assert office.engine.came == [(EVE.agent, 1)]

    run(tmp_path, script)


def test_a_file_that_is_no_drop_is_removed_and_holds_up_nobody(tmp_path: Path) -> None:
    leave(tmp_path, EVE, ME, Mail(OLD, 1, 1, (body("m"),)))
    (tmp_path / ME.agent / "a.b.mail").write_bytes(b"junk")
    (tmp_path / ME.agent / "dangling.mail").symlink_to("/nowhere")

    async def script(office: Office) -> None:
        await office.open()
        await office.post._taking
        assert office.engine.came == [(EVE.agent, 1)]
        assert list((tmp_path / ME.agent).iterdir()) == []

    run(tmp_path, script)


def test_a_new_epoch_is_written_only_with_its_own_numbers(tmp_path: Path) -> None:
    async def script(office: Office) -> None:
        await office.open()
        rows = [OutRow(BOB.agent, OLD, n, f"m{n}", body(f"m{n}"), 0) for n in (1, 2, 3)]
        ended = [OutState(BOB.agent, n, f"m{n}", "delivered", "", 2) for n in (1, 2)]
        await office.store.commit([*rows, *ended])
        office.engine.now = (NEW, 1)  # decided, and not yet durable
        office.engine.commits.clear()
        office.post.pending(BOB.agent)
        await office.engine.asked.wait()
        await office.store.commit([NewEpoch(NEW)])
        office.engine.commits.set()
        await office.rest()
        assert office.drops_for_bob() == [Mail(NEW, 1, 1, (body("m3"),))]

    run(tmp_path, script)


@pytest.mark.parametrize("linked", [False, True])
def test_files_of_an_epoch_that_is_over_go_unless_they_are_the_only_copy(
    tmp_path: Path, linked: bool
) -> None:
    leave(tmp_path, ME, BOB, Mail(OLD, 1, 1, (body("kept"), None)))
    leave(tmp_path, ME, BOB, Mail(OLD, 1, 3, (body("accepted by a lost database"),)))
    leave(tmp_path, EVE, BOB, Mail(OLD, 1, 1, (body("hers"),)))

    async def script(office: Office) -> None:
        await office.open()
        await office.store.commit([OutRow(BOB.agent, OLD, 1, "kept", body("kept"), 0)])
        await office.store.commit([NewEpoch(NEW)])
        office.engine.now, office.engine.linked = (NEW, 1), linked
        office.post.pending(BOB.agent)
        await office.rest()
        names = [name.split(".")[:3] for name in office.files()]
        ours = [name[1:] for name in names if name[0] == ME.agent]
        still_there = [OLD.hex(), f"{3:016d}"]
        assert ours == ([still_there] if linked else [[NEW.hex(), f"{1:016d}"], still_there])
        assert len(names) == len(ours) + 1, "nobody touches another's files"

    run(tmp_path, script)


def test_what_is_taken_back_is_nothing_in_the_file(tmp_path: Path) -> None:
    async def script(office: Office) -> None:
        await office.open()
        rows = [OutRow(BOB.agent, OLD, n, f"m{n}", body(f"m{n}"), 0) for n in (1, 2)]
        await office.store.commit(rows)
        office.post.pending(BOB.agent)
        await office.rest()
        await office.store.commit([OutState(BOB.agent, 1, "m1", "cancelled", "", 2)])
        await office.post.withdrawn(BOB.agent)
        assert office.drops_for_bob() == [Mail(OLD, 1, 1, (None, body("m2")))]

    run(tmp_path, script)


def test_nothing_is_dropped_for_one_who_is_linked_or_elsewhere(tmp_path: Path) -> None:
    async def script(office: Office) -> None:
        await office.open()
        await office.store.commit([OutRow(BOB.agent, OLD, 1, "m", body("m"), 0)])
        office.engine.linked = True
        office.post.pending(BOB.agent)
        office.post.pending(EVE.agent)
        await office.rest()
        assert office.files() == []

    run(tmp_path, script)


def with_driver(
    tmp_path: Path, script: Callable[[FolderSpool, Driver, Sick], Coroutine[Any, Any, None]]
) -> None:
    """The same with a real driver."""

    async def whole() -> None:
        store = Sick()
        post = FolderSpool(Spool(tmp_path, ME.agent), store, ME, MESH_ID, lambda peer: True)
        driver = node(store, post)
        async with asyncio.timeout(20):
            await driver.start("127.0.0.1", [0])
            try:
                await script(post, driver, store)
            finally:
                await driver.stop()

    asyncio.run(whole())


def test_a_file_is_ours_only_when_all_of_it_is_durable(tmp_path: Path) -> None:
    async def script(post: FolderSpool, driver: Driver, store: Sick) -> None:
        assert await post._hand_in(drop("a", "b"))
        assert await post._hand_in(drop("a", "b")), "again"
        assert not await post._hand_in(drop("d", first=4)), "a file before it is missing"
        assert not await post._hand_in(drop("not b", "c", first=2)), "it is of another day"
        store.ill = True
        assert not await post._hand_in(drop("x", epoch=b"another!"))
        assert [entry.id for entry in await store.inbox(0, 9)] == ["a", "b"]
        assert not await post._hand_in(drop("y", epoch=b"another!")), "delivery is suspended"

    with_driver(tmp_path, script)


def test_a_file_of_one_who_is_known_with_another_key_is_refused(tmp_path: Path) -> None:
    async def script(post: FolderSpool, driver: Driver, store: Sick) -> None:
        driver.mesh.links.pin(BOB.agent, EVE.key)
        with pytest.raises(RemoteProtocolError, match="another key"):
            await post._hand_in(drop("a"))
        assert not await store.inbox(0, 9)

    with_driver(tmp_path, script)


def test_what_was_left_is_in_the_inbox_when_the_node_has_started_and_its_file_gone(
    tmp_path: Path,
) -> None:
    for first in (1, 2):
        leave(tmp_path, BOB, ME, Mail(OLD, 1, first, (body(f"m{first}"),)))

    async def script(post: FolderSpool, driver: Driver, store: Sick) -> None:
        assert [entry.id for entry in await store.inbox(0, 9)] == ["m1", "m2"]
        assert list((tmp_path / ME.agent).iterdir()) == []

    with_driver(tmp_path, script)


def test_what_waits_for_one_who_is_away_is_in_a_file_when_the_node_has_ended(
    tmp_path: Path,
) -> None:
    async def script(post: FolderSpool, driver: Driver, store: Sick) -> None:
        await accepted(driver, "m")

    with_driver(tmp_path, script)
    (file,) = (tmp_path / BOB.agent).glob("*.mail")
    mail = parse_drop(file.read_bytes(), BOB.agent, MESH_ID, verify).mail
    assert [parse_body(each).id for each in mail.items if each is not None] == ["m"]
