"""What was damaged on disk is told once, to the log, the feed of changes and `status`."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import apsw
import pytest
from storage.mail.mail_rows import PEER, came, outs

from meshagent.core.ports import Damage
from meshagent.node.changes import ChangeFeed
from meshagent.node.damage_watch import DamageWatch, damage_text
from meshagent.node.views import damage_view
from meshagent.storage.mail.sqlite_store import SqliteStore

LOG = logging.getLogger("test damage")


class Owner:
    """What a watch needs of a node."""

    def __init__(self, store: SqliteStore) -> None:
        self.store, self.log, self.changes = store, LOG, ChangeFeed(LOG)
        self.heard: list[Damage] = []
        self.changes.listen(Damage, self.heard.append)
        self.damage = DamageWatch(self)  # type: ignore[arg-type]


def spoil(path: Path, table: str) -> None:
    connection = apsw.Connection(str(path))
    connection.execute(f"UPDATE {table} SET body = body || x'00' WHERE position = 1")
    connection.close()


def test_each_damage_is_told_once_and_not_by_the_next_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "mesh.db"

    async def scenario() -> None:
        store = SqliteStore(path)
        await store.open()
        await store.commit([*outs(2), came("c")])
        await store.close()
        spoil(path, "outbox")
        await store.open()
        owner = Owner(store)
        await owner.damage.look()
        assert owner.heard == []
        seen = store.damage_found
        await store.outbox(9)
        assert store.damage_found != seen, "whoever reads it finds it"
        for _ in range(2):
            await owner.damage.look()
            assert [(each.origin, each.peer, each.message_id) for each in owner.heard] == [
                ("outbox", PEER, "b1")
            ]
        assert list(owner.damage.found) == list(owner.damage.known) == owner.heard
        later = Owner(store)
        later.damage._began = "9"  # the clock of a later run
        await later.damage.look()
        assert (later.heard, len(later.damage.known)) == ([], 1)
        await store.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    told = [each.message for each in caplog.records if each.name == LOG.name]
    assert len(told) == 1
    assert f"a message to {PEER} (b1) was damaged on disk and set aside" in told[0]


def test_what_is_damaged_is_forgotten_after_as_long_as_all_that_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "mesh.db"

    async def scenario() -> None:
        store = SqliteStore(path)
        await store.open()
        await store.commit([came("c")])
        await store.close()
        spoil(path, "inbox")
        await store.open()
        await store.inbox(0, 9)
        (damage,) = await store.damage()
        assert (damage.origin, damage.peer, damage.message_id) == ("inbox", PEER, "c")
        await store.retain(10_000, 5_000, 1 << 40)
        assert await store.damage() == [damage]
        await store.retain(1 << 42, 5_000, 1 << 40)
        assert await store.damage() == []
        await store.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (("outbox", PEER, "b1"), f"a message to {PEER} (b1)"),
        (("inbox", PEER, "c"), f"a message from {PEER} (c)"),
        (("log", PEER, "b1"), f"a message to or from {PEER} (b1)"),
        (("log", "", ""), "a part of the commit log"),
        (("peers", PEER, ""), f"a row of the table 'peers' about {PEER}"),
    ],
)
def test_a_sentence_says_what_is_damaged(damage: tuple[str, str, str], words: str) -> None:
    found: Any = damage_view(Damage(1, *damage, "why", "2026-01-01T00:00:00+00:00"))
    assert damage_text(found) == f"{words} was damaged on disk and set aside: why"
