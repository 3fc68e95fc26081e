"""Programs attach paths, bytes and open files, and hold what came as paths or bytes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from end_to_end.attachments.courier import KIB, MIB

import meshagent
from meshagent.storage.blobs.store import Stored
from meshagent.storage.folders.mesh_folder import MeshFolder

pytestmark = pytest.mark.process

PATIENCE_S = 20.0


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Two folders of one mesh; those of the second one fetch little by themselves."""
    root = Path(tempfile.mkdtemp(prefix="ma-", dir="/tmp"))  # a socket's path must stay short
    here, there = MeshFolder(root / "here" / ".meshagent"), MeshFolder(root / "there/.meshagent")
    for folder in (root / "here", root / "there", root / "run", root / "home"):
        folder.mkdir(mode=0o700)
    here.create("project")
    there.create("project", here.read_secret())
    with (there.path / "mesh.toml").open("a") as file:
        file.write('attachments_eager = "1 MiB"\n')
    monkeypatch.setenv("HOME", str(root / "home"))
    monkeypatch.setenv("XDG_DATA_HOME", str(root / "data"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(root / "run"))
    monkeypatch.setenv("MESHAGENT_LISTEN", "127.0.0.1")
    yield here.path, there.path
    shutil.rmtree(root)


@contextlib.asynccontextmanager
async def two(folders: tuple[Path, Path]) -> AsyncIterator[tuple[meshagent.Node, meshagent.Node]]:
    here, there = folders
    async with (
        asyncio.timeout(PATIENCE_S),
        meshagent.join("tester", dir=here, discovery="none") as sender,
    ):
        peers = sender.status()["addresses"]
        async with meshagent.join("backend", dir=there, discovery="none", peers=peers) as receiver:
            yield sender, receiver


async def first(receiver: meshagent.Node) -> meshagent.ReceivedMessage:
    async for letter in receiver.inbox():
        return letter
    raise AssertionError("the node ended")


def test_paths_bytes_and_open_files_arrive_with_their_letter(folders: tuple[Path, Path]) -> None:
    path = folders[0].parent / "notes.txt"
    path.write_text("line\n" * 1000)
    copied: list[tuple[int, int | None]] = []

    async def scenario() -> None:
        async with two(folders) as (sender, receiver):
            receipt = await sender.send(
                receiver.agent,
                "look",
                attach=[path, str(path), ("data", b"1234"), ("open", io.BytesIO(b"x" * 300 * KIB))],
                progress=lambda done, size: copied.append((done, size)),
            )
            path.unlink()
            letter = await first(receiver)
            await receipt.delivered(PATIENCE_S)
            names = [each.name for each in letter.attachments]
            assert names == ["notes.txt", "notes.txt", "data", "open"]
            contents = [await each.read() for each in letter.attachments]
            assert contents == [b"line\n" * 1000] * 2 + [b"1234", b"x" * 300 * KIB]
            assert all(each.path is not None for each in letter.attachments)
            back = await letter.reply("thanks", attach=[("back", b"5678")])
            assert await (await first(sender)).attachments[0].read() == b"5678"
            await back.delivered(PATIENCE_S)

    asyncio.run(scenario())
    assert (5000, 5000) in copied


def test_what_did_not_come_by_itself_is_fetched_with_progress(folders: tuple[Path, Path]) -> None:
    data = bytes(range(256)) * (3 * MIB // 256)
    seen: list[tuple[int, int]] = []

    async def scenario() -> None:
        async with two(folders) as (sender, receiver):
            await sender.send(receiver.agent, attach=[("large", data)])
            (attachment,) = (await first(receiver)).attachments
            assert attachment.path is None
            # Two at once, and one that gives up, share a transfer and do not disturb each other.
            given_up = asyncio.create_task(attachment.fetch())
            await asyncio.sleep(0)
            given_up.cancel()
            ways = await asyncio.gather(
                attachment.fetch(lambda done, size: seen.append((done, size))), attachment.fetch()
            )
            assert ways[0] == ways[1] == attachment.path
            assert ways[0].read_bytes() == data

    asyncio.run(scenario())
    assert seen == sorted(seen)
    assert seen[-1] == (len(data), len(data))


def test_what_cannot_be_attached_is_refused_and_nothing_is_sent(folders: tuple[Path, Path]) -> None:
    async def scenario() -> None:
        async with two(folders) as (sender, receiver):
            for bad in (folders[0], folders[0] / "nowhere", 7, ("name", 7), ("name", "text")):
                with pytest.raises(meshagent.UsageError):
                    await sender.send(receiver.agent, "look", attach=[bad])  # type: ignore[list-item]
            assert sender.status()["outbox"] == {"queued": 0, "sent": 0}

    asyncio.run(scenario())


def test_what_a_file_is_is_told_by_its_contents_once_it_is_here(
    folders: tuple[Path, Path],
) -> None:
    async def scenario() -> None:
        async with two(folders) as (sender, receiver):
            room = sender._mailbox
            honest = room.blob_transfers.describe

            async def lie(sha256: bytes) -> Stored:
                return replace(await honest(sha256), mime="image/png", width=5, height=5)

            room.blob_transfers.describe = lie  # type: ignore[method-assign]
            attach = [("cat.png", b"words"), ("large.png", b"words " * 300 * KIB)]
            await sender.send(receiver.agent, "look", attach=attach)
            small, large = (await first(receiver)).attachments
            assert (small.mime, small.width) == ("text/plain", None)
            assert (large.mime, large.width, large.path) == ("image/png", 5, None)
            await large.fetch()
            assert (large.mime, large.width) == ("text/plain", None)

    asyncio.run(scenario())
