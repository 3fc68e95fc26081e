"""Which download is first."""

from __future__ import annotations

from meshagent.core.model.peers import AgentId
from meshagent.core.transfer.download import BlobOffer, Download, DownloadState
from meshagent.core.transfer.download_queue import STALE_MIN, DownloadQueue, SenderQueues

BOB, CAROL = AgentId("bob"), AgentId("carol")


def download(order: int, sender: AgentId = BOB) -> Download:
    made = Download(bytes([order]) * 32, 1, order)
    made.merge(BlobOffer(1, (), sender, b""))
    return made


def test_the_smallest_key_is_first_and_the_older_of_two() -> None:
    queue, first, second = DownloadQueue(), download(1), download(2)
    queue.add(5.0, second)
    queue.add(5.0, first)
    assert queue.first() == (5.0, first)
    queue.add(4.0, second)
    assert queue.first() == (4.0, second)


def test_an_entry_is_void_once_the_state_has_changed() -> None:
    queue, it = DownloadQueue(), download(1)
    queue.add(1.0, it)
    it.enter(DownloadState.OPENING)
    assert queue.first() is None


def test_void_entries_do_not_pile_up() -> None:
    queue, it = DownloadQueue(), download(1)
    for _ in range(10_000):
        it.ticket += 1
        queue.add(1.0, it)
    assert len(queue._heap) <= 2 * STALE_MIN


def test_the_downloads_of_some_senders_can_be_passed_over() -> None:
    queues = SenderQueues()
    queues.add(1.0, download(1, BOB))
    queues.add(2.0, carols := download(2, CAROL))
    assert queues.first({BOB}) is carols
    assert queues.first({BOB, CAROL}) is None
