"""Chunks under way are limited and shared."""

from __future__ import annotations

from meshagent.core.model.peers import AgentId
from meshagent.core.transfer.chunks import CHUNK_BYTES
from meshagent.core.transfer.credit_window import CreditWindow
from meshagent.core.transfer.download import Download, DownloadState
from meshagent.core.transfer.download_config import DownloadConfig

CONFIG = DownloadConfig(window_max=16, window_per_download_max=12, window_first=2)


def receiving(name: int, chunks: int = 100, window: int = 99) -> Download:
    """A download that asks a source already and may hold as much as its share."""
    download = Download(bytes([name]) * 32, chunks * CHUNK_BYTES, name)
    download.state, download.number, download.window = DownloadState.RECEIVING, name, window
    download.source = AgentId("bob")
    return download


def fill(window: CreditWindow, active: list[Download]) -> list[int]:
    for download, chunks in window.shares(active):
        window.grant(download, chunks)
    return [each.held for each in active]


def test_one_download_leaves_room_for_another_and_two_share() -> None:
    window, first, second = CreditWindow(CONFIG), receiving(1), receiving(2)
    assert fill(window, [first]) == [12]
    assert fill(window, [first, second]) == [12, 4]
    assert window.used == 16


def test_a_download_that_begins_gets_little() -> None:
    window, download = CreditWindow(CONFIG), receiving(1)
    download.number = 0
    assert fill(window, [download]) == [CONFIG.window_first]


def test_no_more_than_the_blob_has_is_granted() -> None:
    assert fill(CreditWindow(CONFIG), [receiving(1, chunks=3)]) == [3]


def test_only_who_receives_gets_a_share() -> None:
    closing = receiving(1)
    closing.state = DownloadState.CLOSING
    assert fill(CreditWindow(CONFIG), [closing, receiving(2)]) == [0, 12]


def test_credit_comes_back_when_a_chunk_is_written_and_not_when_it_arrives() -> None:
    window, download = CreditWindow(CONFIG), receiving(1)
    fill(window, [download])
    download.arrived = 5
    assert window.used == 12
    window.written(download)
    assert window.used == download.held == 11
    window.take_back(download)
    assert window.used == download.held == 4, "those that arrived and are not written"
    window.release(download)
    assert window.used == download.held == 0
