"""Which blobs are wanted, and which of them a peer may have. Never changes a download's state.

Invariant: a peer is listed for a blob exactly while the blob is wanted and names it as a source.
"""

from __future__ import annotations

from meshagent.core.model.peers import AgentId
from meshagent.core.transfer.download import BlobOffer, Download
from meshagent.errors import LimitReached

__all__ = ["DownloadTable"]


class DownloadTable:
    """Every download, by hash and by source."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._orders = 0
        self._downloads: dict[bytes, Download] = {}
        self._by_source: dict[AgentId, dict[bytes, None]] = {}

    def __len__(self) -> int:
        return len(self._downloads)

    def __getitem__(self, sha256: bytes) -> Download:
        return self._downloads[sha256]

    def get(self, sha256: bytes) -> Download | None:
        """The download of this blob."""
        return self._downloads.get(sha256)

    def with_source(self, peer: AgentId) -> list[Download]:
        """The downloads that this peer may have."""
        return [self._downloads[each] for each in self._by_source.get(peer, ())]

    def add(self, sha256: bytes, offer: BlobOffer) -> Download:
        """A blob that was not wanted before."""
        if len(self._downloads) >= self._limit:
            raise LimitReached(f"{len(self._downloads)} attachments are being waited for already.")
        self._orders += 1
        download = self._downloads[sha256] = Download(sha256, offer.size, self._orders)
        self.merge(download, offer)
        return download

    def replace(self, failed: Download) -> Download | None:
        """Try the blob with another size that a message names, if there is one."""
        self.remove(failed)
        if not failed.rivals:
            return None
        size = failed.rivals[0].size
        other = Download(failed.sha256, size, failed.order, ticket=failed.ticket)
        self._downloads[failed.sha256] = other
        for offer in failed.rivals:
            if offer.size == size:
                self.merge(other, offer)
            else:
                other.rivals.append(offer)
        return other

    def merge(self, download: Download, offer: BlobOffer) -> None:
        """Add the sources and the grant of another message."""
        for peer in download.merge(offer):
            self._by_source.setdefault(peer, {})[download.sha256] = None

    def remove(self, download: Download) -> None:
        """It is not wanted any more."""
        del self._downloads[download.sha256]
        for peer in download.sources:
            mine = self._by_source[peer]
            del mine[download.sha256]
            if not mine:
                del self._by_source[peer]
