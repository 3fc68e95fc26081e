"""Messages with attachments: held until those are here, and who may ask for which blob."""

from __future__ import annotations

from pathlib import Path

import pytest
from storage.mail.mail_rows import OTHER, PEER, became, came, live, out, receipt, word

from meshagent.core.model.rows import Arrived, InRow, OutState, TurnedAway
from meshagent.core.ports import Store
from meshagent.storage.mail.memory_store import MemoryStore
from meshagent.storage.mail.sqlite_store import SqliteStore

SHOT, TRACE = bytes(31) + b"1", bytes(31) + b"2"


@pytest.fixture(params=["sqlite", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return SqliteStore(tmp_path / "mesh.db") if request.param == "sqlite" else MemoryStore()


def held(ident: str, *blobs: bytes, sender: str = PEER) -> InRow:
    return came(ident, sender)._replace(blobs=blobs or (SHOT,))


async def visible(store: Store) -> list[str]:
    listed = [entry.id for entry in await store.inbox(0, 99)]
    assert [entry.id for entry in await store.recent(99)] == listed
    return listed


def test_a_held_message_is_out_of_sight_and_survives_a_restart(store: Store) -> None:
    async def receive(store: Store) -> None:
        await store.commit([came("m1"), held("big"), came("m2")])

    async def look(store: Store) -> None:
        assert await visible(store) == ["m1", "m2"]
        assert [(each.id, each.state) for each in await store.receiving()] == [("big", "receiving")]
        assert (await store.mail_start()).unread == 2

    live(store, receive, look)


def test_a_held_message_becomes_visible_behind_all_others(store: Store) -> None:
    async def script(store: Store) -> None:
        await store.commit([held("big"), came("m2")])
        seen = await store.newest()
        await store.commit([Arrived(PEER, "big")])
        assert await visible(store) == ["m2", "big"]
        assert [entry.id for entry in await store.inbox(seen, 9)] == ["big"]
        assert list(await store.receiving()) == []
        assert (await store.mail_start()).unread == 2

    live(store, script)


def test_a_held_message_is_kept_once_and_cannot_be_marked(store: Store) -> None:
    async def script(store: Store) -> None:
        await store.commit([held("big"), held("big"), became("big", "done")])
        await store.commit([Arrived(PEER, "big"), Arrived(PEER, "big"), held("big")])
        assert [(each.id, each.state) for each in await store.inbox(0, 9)] == [("big", "unread")]
        assert list(await store.receiving()) == []

    live(store, script)


def test_a_message_that_was_turned_away_is_gone_with_what_it_named(store: Store) -> None:
    async def script(store: Store) -> None:
        await store.commit([held("big", SHOT, TRACE), held("other", TRACE)])
        await store.commit([TurnedAway(PEER, "big"), TurnedAway(PEER, "m1")])
        assert [each.id for each in await store.receiving()] == ["other"]
        assert set(await store.blobs()) == {TRACE}
        await store.commit([Arrived(PEER, "other"), TurnedAway(PEER, "other")])
        assert await visible(store) == ["other"], "what has arrived is not turned away"

    live(store, script)


def test_what_is_held_is_never_dropped_as_history(store: Store) -> None:
    async def script(store: Store) -> None:
        await store.commit([held("big")])
        assert await store.retain(10**13, 0, 0) == 0
        assert len(await store.receiving()) == 1

    live(store, script)


def test_a_peer_may_ask_for_what_a_message_to_it_names_and_for_nothing_else(store: Store) -> None:
    async def script(store: Store) -> None:
        await store.commit([out(1, "m1")._replace(blobs=(SHOT,)), held("m2", TRACE)])
        assert await store.names_blob(SHOT, PEER, "out")
        assert not await store.names_blob(SHOT, OTHER, "out")
        assert not await store.names_blob(TRACE, PEER, "out")
        assert await store.names_blob(TRACE, PEER, "in")
        assert set(await store.blobs()) == {SHOT, TRACE}

    live(store, script)


@pytest.mark.parametrize("state", ["cancelled", "expired", "refused"])
def test_what_was_taken_back_or_refused_may_not_be_asked_for(store: Store, state: str) -> None:
    async def script(store: Store) -> None:
        await store.commit([out(1, "m1")._replace(blobs=(SHOT,))])
        await store.commit([OutState(PEER, 1, "m1", state, "", 1)])
        assert not await store.names_blob(SHOT, PEER, "out")
        await store.commit([out(2, "m2")._replace(blobs=(SHOT,))])
        assert await store.names_blob(SHOT, PEER, "out")

    live(store, script)


def test_an_id_that_comes_again_names_nothing_more(store: Store) -> None:
    async def script(store: Store) -> None:
        await store.commit([held("m1", SHOT)])
        await store.commit([held("m1", TRACE)])
        assert not await store.names_blob(TRACE, PEER, "in")
        assert set(await store.blobs()) == {SHOT}

    live(store, script)


def test_blobs_are_named_as_long_as_their_messages_are_kept(store: Store) -> None:
    async def script(store: Store) -> None:
        rows = [out(1, "m1"), out(2, "m2")]
        await store.commit([row._replace(blobs=(SHOT,)) for row in rows])
        await store.commit([word("m1", "delivered", 5)])
        assert await store.retain(1_000_000, 0, 0) == 1
        assert set(await store.blobs()) == {SHOT}, "m2 still needs it"
        await store.commit([word("m2", "refused", 5)])
        assert await store.retain(1_000_000, 0, 0) == 1
        assert set(await store.blobs()) == set()

    live(store, script)


@pytest.mark.parametrize("end", ["delivered", "refused", "expired", "done"])
def test_a_message_that_was_taken_is_settled_and_pending_until_its_recipient_says_how_it_ended(
    store: Store, end: str
) -> None:
    async def send(store: Store) -> None:
        await store.commit([out(1, "m1", expires_ms=9)._replace(blobs=(SHOT,)), out(2, "m2")])
        await store.commit([word("m1", "sent")._replace(taken=True)])

    async def look(store: Store) -> None:
        start = await store.mail_start()
        assert start.taken == ((PEER, "m1"),)
        assert start.streams[0].floor == 2
        assert [(each.id, each.state) for each in await store.outbox(9)] == [
            ("m1", "sent"), ("m2", "queued"),
        ]  # fmt: skip
        assert list(await store.due(10**13, 9)) == [], "its recipient counts the time now"
        assert await store.next_expiry() is None
        assert await store.retain(10**13, 0, 0) == 0
        await store.commit([receipt("m1", end)])
        assert (await store.mail_start()).taken == ()
        assert [each.id for each in await store.outbox(9)] == ["m2"]
        assert await store.retain(10**13, 0, 0) == 1

    live(store, send, look)


def test_a_message_that_was_taken_back_too_late_is_settled_when_its_recipient_took_it(
    store: Store,
) -> None:
    async def script(store: Store) -> None:
        await store.commit([out(1, "m1")._replace(blobs=(SHOT,)), word("m1", "expired")])
        await store.commit([word("m1", "sent")._replace(taken=True)])
        (entry,) = await store.outgoing("m1")
        assert (entry.state, entry.settled) == ("expired", True)
        await store.commit([receipt("m1", "delivered")])
        assert (await store.outgoing("m1"))[0].state == "delivered"

    live(store, script)
