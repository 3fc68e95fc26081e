"""What our own contestant counts as sent and arrived, with a node that does as the test says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from meshagent.bench.agent import Agent
from meshagent.bench.bulk import MIB, blob_path, new_file
from meshagent.storage.folders.mesh_folder import MeshFolder


class FakeReceipt:
    def __init__(self, gate: asyncio.Event) -> None:
        self._gate = gate

    async def delivered(self) -> None:
        await self._gate.wait()


class FakeNode:
    """Texts are delivered at once; what has an attachment when `gate` opens."""

    def __init__(self) -> None:
        self.gate, self.open = asyncio.Event(), asyncio.Event()
        self.open.set()
        self.sent: list[dict[str, Any]] = []

    async def send(self, to: str, text: str, **rest: Any) -> FakeReceipt:
        self.sent.append({"to": to, "text": text, **rest})
        await asyncio.sleep(0)
        return FakeReceipt(self.gate if rest else self.open)

    async def send_many(self, to: str, texts: list[str]) -> list[FakeReceipt]:
        self.sent += [{"to": to, "text": text} for text in texts]
        return [FakeReceipt(self.open) for _ in texts]


def test_an_attachment_has_arrived_when_it_is_in_the_others_store(tmp_path: Path) -> None:
    async def scenario() -> None:
        node, there = FakeNode(), tmp_path / "there"
        moving = asyncio.create_task(Agent(node).attach("peer", "file", str(there)))
        node.gate.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not moving.done()
        there.touch()
        whole, after = await moving
        assert whole >= after > 0
        assert node.sent == [{"to": "peer", "text": "see attached", "attach": ["file"]}]

    asyncio.run(scenario())


def test_texts_are_sent_for_as_long_as_the_attachment_moves() -> None:
    async def scenario() -> None:
        node = FakeNode()
        agent = Agent(node)
        beside = asyncio.create_task(agent.texts_beside("peer", "file", "", 10))
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(node.sent) > 5
        assert not beside.done()
        node.gate.set()
        taken = await beside
        assert len(taken) == len(node.sent) - 1

    asyncio.run(scenario())


def test_a_burst_sends_each_message_once_however_many_coroutines_share_it() -> None:
    async def scenario() -> None:
        node = FakeNode()
        await Agent(node).burst("peer", count=103, size=7, coroutines=10)
        assert [each["text"] for each in node.sent] == ["x" * 7] * 103
        await Agent(node).many("peer", count=2001, size=3)
        assert len(node.sent) == 103 + 2001

    asyncio.run(scenario())


def test_every_file_is_new_to_every_store(tmp_path: Path) -> None:
    mesh = MeshFolder(tmp_path / ".meshagent")
    files = [new_file(tmp_path, MIB) for _ in range(2)]
    assert [path.stat().st_size for path in files] == [MIB, MIB]
    first, second = (blob_path(mesh, path) for path in files)
    assert first != second
    assert first.parent.parent == mesh.blobs
