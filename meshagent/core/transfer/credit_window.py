"""How many chunks may be under way, and which download gets the next ones. Never sends credit.

A chunk uses the window from the moment when its source may send it until it is written, so a slow
disk slows the sources. Invariant: `used` is the sum of what all downloads hold, and never more
than `window_max`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshagent.core.transfer.download import Download, DownloadState
from meshagent.core.transfer.download_config import DownloadConfig

__all__ = ["CreditWindow"]


class CreditWindow:
    """The chunks under way for all downloads."""

    def __init__(self, config: DownloadConfig) -> None:
        self.used = 0
        self._config = config

    def shares(self, active: Iterable[Download]) -> Iterator[tuple[Download, int]]:
        """Downloads that hold less than an equal share, each with the chunks it may get now."""
        config = self._config
        hungry = [
            each
            for each in active
            if each.state is DownloadState.RECEIVING and each.arrived < each.chunks
        ]
        if not hungry:
            return
        share = max(1, min(config.window_per_download_max, config.window_max // len(hungry)))
        for download in hungry:
            mine = min(share, download.window if download.number else config.window_first)
            step = max(1, mine // 3)  # one BlobMore for a few chunks: each costs both sides a turn
            rest = download.chunks - download.upto
            free = min(config.window_max - self.used, mine - download.held, rest)
            if download.is_owed() and free < step and free < rest:
                continue
            if free > 0:
                yield download, free

    def grant(self, download: Download, chunks: int) -> None:
        """The source may send so many more."""
        download.upto += chunks
        self.used += chunks

    def take_back(self, download: Download) -> None:
        """The source is not asked any more: what it has not sent is free again."""
        self.used -= download.upto - download.arrived
        download.upto = download.arrived

    def written(self, download: Download) -> None:
        """The next chunk is written: its credit is free, and the download may hold one more."""
        download.written += 1
        download.window += 1
        self.used -= 1

    def release(self, download: Download) -> None:
        """Nothing of it is under way any more."""
        self.used -= download.held
        download.arrived = download.upto = download.written
