"""Messages from Python: receipts to await, an inbox to iterate, handlers, and no thread left."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import meshagent
from meshagent.storage.folders.mesh_folder import MeshFolder

pytestmark = pytest.mark.process

PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def project(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with a mesh; the current folder is in it."""
    root = Path(tempfile.mkdtemp(prefix="ma-", dir="/tmp"))  # a socket's path must stay short
    project = root / "project"
    for folder in (project, root / "run", root / "home"):
        folder.mkdir(mode=0o700)
    MeshFolder(project / ".meshagent").create("project")
    for name, value in (("HOME", "home"), ("XDG_DATA_HOME", "data"), ("XDG_RUNTIME_DIR", "run")):
        monkeypatch.setenv(name, str(root / value))
    monkeypatch.setenv("MESHAGENT_LISTEN", "127.0.0.1")
    monkeypatch.delenv("MESHAGENT_DIR", raising=False)
    monkeypatch.delenv("MESHAGENT_AGENT", raising=False)
    monkeypatch.chdir(project)
    yield project
    shutil.rmtree(root)


def run(body: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await body

    asyncio.run(bounded())


@asynccontextmanager
async def two() -> AsyncIterator[tuple[meshagent.Node, meshagent.Node]]:
    async with (
        meshagent.join("tester", discovery="file") as tester,
        meshagent.join("backend", discovery="file") as backend,
    ):
        async for event in tester.events():
            if event.kind == "peer" and event.data["agent"] == backend.agent:
                break
        yield tester, backend


async def first(node: meshagent.Node, count: int) -> list[meshagent.ReceivedMessage]:
    letters: list[meshagent.ReceivedMessage] = []
    inbox = node.inbox()
    async for letter in inbox:
        letters.append(letter)
        if len(letters) == count:
            break
    await inbox.aclose()  # type: ignore[attr-defined]
    return letters


def test_a_receipt_is_watched_from_queued_to_done() -> None:
    async def body() -> None:
        async with two() as (tester, backend):
            receipt = await tester.send("backend", "login returns 500", data={"status": 500})
            assert receipt.state in ("queued", "sent")  # the peer is here: it may have left
            watched = asyncio.create_task(collect(receipt))
            assert await receipt.delivered(timeout=5) is receipt
            (letter,) = await first(backend, 1)
            assert (letter.sender, letter.text) == (tester.agent, "login returns 500")
            assert letter.data == {"status": 500}
            await letter.seen()
            await receipt.reached("seen", timeout=5)
            await letter.done()
            await receipt.reached("done", timeout=5)
            states = await watched
            assert states[0] == "queued"
            assert [each for each in states if each != "sent"] == [
                "queued", "delivered", "seen", "done",
            ]  # fmt: skip

    async def collect(receipt: meshagent.Receipt) -> list[str]:
        return [str(state) async for state in receipt.watch()]

    run(body())


def test_a_receipt_passes_through_sent() -> None:
    async def body() -> None:
        async with two() as (tester, _):
            states = []
            receipt = await tester.send("backend", "x")
            async for state in receipt.watch():
                states.append(str(state))
                if state == "delivered":
                    break
            assert states == ["queued", "sent", "delivered"]

    run(body())


def test_a_message_expires_in_time_though_it_was_sent_while_the_node_tidied() -> None:
    async def body() -> None:
        async with meshagent.join("tester", discovery="file") as tester:
            driver, sent = tester._driver, []
            next_expiry = driver.store.next_expiry

            async def slow() -> int | None:
                found = await next_expiry()
                if not sent:
                    sent.append(await tester.send("backend-k3f9a2qd", "soon stale", ttl=0.1))
                return found

            driver.store.next_expiry = slow  # type: ignore[method-assign]
            driver.housekeeping.look_at_expiries()
            async with asyncio.timeout(5):
                while not sent:  # noqa: ASYNC110 - it is the node's own task that sends
                    await asyncio.sleep(0.01)
                await sent[0].settled()
            assert sent[0].state == "expired"

    run(body())


def test_a_delivery_that_takes_too_long_raises_and_the_message_stays(project: Path) -> None:
    async def body() -> None:
        async with meshagent.join("tester", discovery="file") as tester:
            receipt = await tester.send("backend-k3f9a2qd", "anybody?")
            with pytest.raises(meshagent.DeliveryTimeout, match="stays queued"):
                await receipt.delivered(timeout=0.2)
            assert receipt.state == "queued"
            assert tester.status()["outbox"]["queued"] == 1
        async with meshagent.join("tester", discovery="file") as tester:
            assert tester.status()["outbox"]["queued"] == 1

    run(body())


def test_a_receipt_that_ended_otherwise_raises() -> None:
    async def body() -> None:
        async with meshagent.join("tester", discovery="file") as tester:
            receipt = await tester.send("backend-k3f9a2qd", "quick", ttl=0.2)
            with pytest.raises(meshagent.MeshError, match="was expired"):
                await receipt.delivered(timeout=5)
            with pytest.raises(meshagent.LimitReached):
                await tester.send("backend-k3f9a2qd", "x" * 1_100_000)
            with pytest.raises(meshagent.UsageError):
                await tester.send("backend-k3f9a2qd", "x", data=object())
            with pytest.raises(meshagent.NoSuchPeer):
                await tester.send("nobody", "x")

    run(body())


def test_what_is_not_done_is_handed_out_again_after_a_restart() -> None:
    async def body() -> None:
        async with two() as (tester, backend):
            for word in ("one", "two", "three"):
                await (await tester.send("backend", word)).delivered(timeout=5)
            one, two_, _ = await first(backend, 3)
            await two_.done()
            await one.seen()
        async with meshagent.join("backend", discovery="file") as backend:
            again = await first(backend, 2)
            assert [each.text for each in again] == ["one", "three"]
            for letter in again:
                await letter.done()
        async with meshagent.join("backend", discovery="file") as backend:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await first(backend, 1)

    run(body())


def test_a_reply_is_in_the_thread_of_what_it_answers() -> None:
    async def body() -> None:
        async with two() as (tester, backend):
            receipt = await tester.send("backend", "is it fixed?")
            (letter,) = await first(backend, 1)
            await (await letter.reply("yes")).delivered(timeout=5)
            (answer,) = await first(tester, 1)
            assert (answer.text, answer.reply_to, answer.thread) == ("yes", receipt.id, receipt.id)

    run(body())


def test_a_handler_that_always_fails_parks_one_message_and_the_rest_go_on() -> None:
    async def body() -> None:
        async with two() as (tester, backend):
            receipts = [await tester.send("backend", word) for word in ("good", "poison", "fine")]
            tried: list[str] = []

            async def handler(letter: meshagent.ReceivedMessage) -> None:
                tried.append(letter.text)
                if letter.text == "poison":
                    raise RuntimeError("it makes me ill")

            handling = asyncio.create_task(backend.on_message(handler, failures_max=3))
            await receipts[2].reached("done", timeout=10)
            await receipts[0].reached("done", timeout=10)
            handling.cancel()
            assert tried == ["good", "poison", "poison", "poison", "fine"]
            assert receipts[1].state == "delivered"
        async with meshagent.join("backend", discovery="file") as backend:
            assert backend.status()["inbox"]["unread"] == 0
            ran = await asyncio.create_subprocess_exec(
                "/bin/sh", "-c", 'exec "$0" -P -m meshagent inbox --json', _python(),
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            out, _ = await ran.communicate()
            assert b'"state": "parked"' in out

    run(body())


def test_a_failure_survives_a_restart() -> None:
    async def body() -> None:
        async def fails(letter: meshagent.ReceivedMessage) -> None:
            failed.set()
            raise RuntimeError("not today")

        failed = asyncio.Event()
        async with two() as (tester, backend):
            await (await tester.send("backend", "poison")).delivered(timeout=5)
            handling = asyncio.create_task(backend.on_message(fails, failures_max=100))
            await failed.wait()
            failed.clear()
            await failed.wait()  # it is tried again only when the first failure is durable
            handling.cancel()
        async with meshagent.join("backend", discovery="file") as backend:
            assert (await first(backend, 1))[0].failures >= 1

    run(body())


def test_two_iterators_both_get_everything() -> None:
    async def body() -> None:
        async with two() as (tester, backend):
            readers = [asyncio.create_task(first(backend, 30)) for _ in range(2)]
            for number in range(30):
                await tester.send("backend", f"{number}")
            for reader in readers:
                assert [int(each.text) for each in await reader] == list(range(30))

    run(body())


def test_an_inbox_ends_with_its_node() -> None:
    async def body() -> None:
        async with meshagent.join("tester", discovery="file") as node:
            reading = asyncio.create_task(collect(node))
            await asyncio.sleep(0.1)
        assert await reading == []

    async def collect(node: meshagent.Node) -> list[meshagent.ReceivedMessage]:
        return [each async for each in node.inbox()]

    run(body())


def test_a_send_that_is_cancelled_or_overtaken_by_the_end_leaves_nothing_behind() -> None:
    async def body() -> None:
        async with meshagent.join("tester", discovery="file") as node:
            sends = [asyncio.create_task(node.send("x-k3f9a2qd", f"{n}")) for n in range(50)]
            await asyncio.sleep(0)
            sends[0].cancel()
        ended = await asyncio.gather(*sends, return_exceptions=True)
        accepted = [each for each in ended if isinstance(each, meshagent.Receipt)]
        async with meshagent.join("tester", discovery="file") as node:
            assert node.status()["outbox"]["queued"] >= len(accepted)

    run(body())


def test_of_a_crowd_that_sends_at_once_only_the_bad_message_fails() -> None:
    async def body() -> None:
        async with meshagent.join("tester", discovery="none") as node:
            sends = [node.send("x-k3f9a2qd", f"{n}") for n in range(300)]
            sends.insert(200, node.send("x-k3f9a2qd", "x" * 2_000_000))
            sends.insert(100, node.send("x-k3f9a2qd", "when?", ttl="soon"))  # type: ignore[arg-type]
            ended = await asyncio.gather(*sends, return_exceptions=True)
            bad = [type(each) for each in ended if not isinstance(each, meshagent.Receipt)]
            assert bad == [ValueError, meshagent.LimitReached]
            kept = await node.outbox()
            assert [int(each["text"]) for each in kept] == list(range(300))
            assert [each["id"] for each in kept] == [
                each.id for each in ended if isinstance(each, meshagent.Receipt)
            ]

    run(body())


def test_of_what_one_call_sends_all_is_kept_or_nothing() -> None:
    async def body() -> None:
        async with meshagent.join("tester", discovery="none") as node:
            with pytest.raises(meshagent.LimitReached):
                await node.send_many("x-k3f9a2qd", ["one", "x" * 2_000_000, "three"])
            assert await node.outbox() == []
            sent = await node.send_many("x-k3f9a2qd", ["one", "two", "three"])
            kept = await node.outbox()
            assert [(each["id"], each["text"]) for each in kept] == [
                (receipt.id, text)
                for receipt, text in zip(sent, ("one", "two", "three"), strict=True)
            ]

    run(body())


def test_a_send_that_was_given_up_before_it_was_taken_in_is_not_sent() -> None:
    async def body() -> None:
        async with meshagent.join("tester", discovery="none") as node:
            sends = [asyncio.create_task(node.send("x-k3f9a2qd", f"{n}")) for n in range(3)]
            await asyncio.sleep(0)  # each has handed in its message
            sends[1].cancel()
            await asyncio.gather(*sends, return_exceptions=True)
            assert [each["text"] for each in await node.outbox()] == ["0", "2"]

    run(body())


def test_a_send_that_means_several_agents_is_sent_to_none() -> None:
    async def script() -> None:
        async with (
            meshagent.join("tester", discovery="none") as tester,
            meshagent.join("backend", name="one", discovery="none", peers=tester.addresses),
            meshagent.join("backend", name="two", discovery="none", peers=tester.addresses),
        ):
            async for _ in tester.events():
                if len(tester.peers) == 2:
                    break
            with pytest.raises(meshagent.UsageError, match="means 2 agents"):
                await tester.send("@backend", "hello")
            assert sum(tester.status()["outbox"].values()) == 0
            assert len(await tester.send_all("@backend", "hello")) == 2

    asyncio.run(script())


def test_the_synchronous_facade_talks_and_leaves_no_thread() -> None:
    before = threading.active_count()
    with (
        meshagent.join_sync("tester", discovery="file") as tester,
        meshagent.join_sync("backend", discovery="file") as backend,
    ):
        receipt = tester.send(backend.agent, "hello")
        assert receipt.delivered(timeout=10).state == "delivered"
        for letter in backend.inbox(timeout=5):
            assert (letter.text, letter.sender) == ("hello", tester.agent)
            letter.reply("hello yourself").delivered(timeout=10)
            letter.done()
            break
        assert [each.text for each in tester.inbox(timeout=0.2)] == ["hello yourself"]
        tester.send(backend.agent, "see", attach=[("log.txt", b"500")]).delivered(timeout=10)
        (letter,) = backend.inbox(timeout=0.2)
        (log,) = letter.attachments
        assert (log.name, log.read(), log.fetch()) == ("log.txt", b"500", log.path)
        with pytest.raises(meshagent.DeliveryTimeout):
            tester.send("nobody-k3f9a2qd", "x").delivered(timeout=0.1)
    assert threading.active_count() == before


def _python() -> str:
    import sys

    return sys.executable


def test_the_outbox_shows_what_waits_cancel_takes_it_back_and_the_log_keeps_it() -> None:
    absent = "nobody-k3f9a2qd"

    async def body() -> None:
        async with two() as (tester, backend):
            kept = await tester.send(absent, "the first for later")
            dropped = await tester.send(absent, "the second for later")
            await (await tester.send("backend", "now")).delivered(timeout=5)
            waiting = await tester.outbox()
            assert [each["id"] for each in waiting] == [kept.id, dropped.id]
            assert (await tester.cancel(dropped.id))["state"] == "cancelled"
            assert dropped.state == "cancelled"
            assert [each["id"] for each in await tester.outbox()] == [kept.id]
            assert len(await tester.outbox(ended=True)) == 3
            texts = [each["text"] for each in await tester.log(search="later")]
            assert texts == ["the first for later", "the second for later"]
            assert [each["text"] for each in await backend.log(peer="tester")] == ["now"]
            with pytest.raises(meshagent.MeshError):
                await tester.cancel("nosuchid")

    run(body())


def test_a_program_that_was_away_gets_every_message_without_another_one_coming() -> None:
    many = 500  # more than two pages of the inbox

    async def body() -> None:
        async with two() as (tester, backend):
            name = backend.agent
            receipts = await tester.send_many(name, [f"message {n}" for n in range(many)])
            await receipts[-1].delivered(PATIENCE_S)
            read = [each.text async for each in _first(backend.inbox(), many)]
            assert read == [f"message {n}" for n in range(many)]

            handled: list[str] = []
            all_handled = asyncio.Event()

            async def handle(letter: meshagent.ReceivedMessage) -> None:
                handled.append(letter.text)
                if len(handled) == many:
                    all_handled.set()

            handler = asyncio.create_task(backend.on_message(handle))
            await all_handled.wait()
            handler.cancel()
            assert handled == read

    run(body())


async def _first(
    letters: AsyncIterator[meshagent.ReceivedMessage], many: int
) -> AsyncIterator[Any]:
    for _ in range(many):
        yield await anext(letters)


def test_history_that_is_too_old_goes_however_much_of_it_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshagent.node.housekeeping.RETAIN_MS", 0)
    monkeypatch.setattr("meshagent.node.housekeeping.LOOK_S", 2.0)
    monkeypatch.setattr("meshagent.storage.mail.retention.RETAIN_ROWS_MAX", 20)

    async def body() -> None:
        async with two() as (tester, backend):
            receipts = await tester.send_many(backend.agent, ["old news"] * 500)
            await receipts[-1].delivered(PATIENCE_S)
            while await tester.log():  # noqa: ASYNC110 - nobody says that it was dropped
                await asyncio.sleep(0.05)

    run(body())
