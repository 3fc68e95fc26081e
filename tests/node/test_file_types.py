"""What a session is told that an attachment is."""

from __future__ import annotations

import asyncio
from typing import Any

from meshagent.node import file_types as kinds
from meshagent.node.file_types import UNKNOWN, FileTypes
from meshagent.storage.blobs.errors import NotHeld
from meshagent.storage.blobs.store import Stored

SHA = bytes(32)


class SafeFolder:
    """Counts who looks."""

    def __init__(self, *stored: Stored) -> None:
        self.stored = {each.sha256: each for each in stored}
        self.looked: list[bytes] = []

    async def describe(self, sha256: bytes) -> Stored:
        self.looked.append(sha256)
        if sha256 not in self.stored:
            raise NotHeld(sha256)
        return self.stored[sha256]


def view(state: str) -> dict[str, Any]:
    claim = {"mime": "image/png", "width": 640, "height": 480}
    return {"attachments": [{"sha256": SHA.hex(), "state": state, **claim}]}


def test_what_is_here_is_told_by_its_contents_and_looked_at_once() -> None:
    async def scenario() -> None:
        shelf = SafeFolder(Stored(SHA, 1, "application/x-elf", 0, 0))
        told = FileTypes(shelf.describe)
        for _ in range(3):
            (message,) = await told.correct_all([view("ready")])
            (each,) = message["attachments"]
            assert (each["mime"], each["width"], each["height"]) == (
                "application/x-elf",
                None,
                None,
            )
        assert shelf.looked == [SHA]

    asyncio.run(scenario())


def test_what_is_not_here_keeps_the_claim_and_costs_no_look() -> None:
    async def scenario() -> None:
        shelf = SafeFolder()
        for state in ("receiving", "remote"):
            assert await FileTypes(shelf.describe).correct(view(state)) == view(state)
        assert not shelf.looked

    asyncio.run(scenario())


def test_what_went_meanwhile_is_unknown_and_not_the_claim() -> None:
    async def scenario() -> None:
        shelf = SafeFolder()
        told = FileTypes(shelf.describe)
        assert (await told.correct(view("ready")))["attachments"][0]["mime"] == UNKNOWN
        shelf.stored[SHA] = Stored(SHA, 1, "text/plain", 0, 0)
        assert await told.look(SHA) == ("text/plain", 0, 0)

    asyncio.run(scenario())


def test_what_is_remembered_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(kinds, "KNOWN_MAX", 2)

    async def scenario() -> None:
        stored = [Stored(bytes([each]) * 32, 1, "text/plain", 0, 0) for each in range(3)]
        shelf = SafeFolder(*stored)
        told = FileTypes(shelf.describe)
        for each in [*stored, *stored[1:]]:
            await told.look(each.sha256)
        assert len(shelf.looked) == 3
        await told.look(stored[0].sha256)
        assert len(shelf.looked) == 4

    asyncio.run(scenario())
