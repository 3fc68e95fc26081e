"""The knobs of downloads, each with its trade-off."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DownloadConfig"]


@dataclass(frozen=True, slots=True)
class DownloadConfig:
    """How much is downloaded at once, and how long a source may take."""

    active_max: int = 8
    """Downloads at once. More would only share the same window."""
    large_active_max: int = 6
    """Of those, large ones, so that small ones always find a slot."""
    per_sender_max: int = 7
    """Of those, on behalf of one sender, so that the others' find a slot."""
    small_chunks: int = 8
    """A blob of at most this many chunks is small: it takes a moment."""
    wanted_max: int = 100_000
    """Downloads in all; beyond it `want` raises LimitReached."""
    window_max: int = 16
    """Chunks under way for all downloads: 8 MiB, what a busy machine moves during a round trip.

    At least `active_max`, or some downloads would have no share."""
    window_per_download_max: int = 12
    """The same for one download; the rest lets another begin at once."""
    window_first: int = 2
    """The same for a download that begins; it grows with each chunk that is written. Two peers
    that find each other again often both dial, and chunks on the link that is dropped are sent
    twice."""
    stall_s: float = 30.0
    """A source that has credit and is silent for this long is replaced by another."""
    pause_s: float = 1.0
    """The first pause after busy, a stall or a full disk; it doubles."""
    longest_pause_s: float = 30.0
    """The longest of those pauses."""
    source_check_s: float = 300.0
    """The longest pause before checking again whether another agent here has the blob."""
    open_delay_s: float = 0.1
    """After the disk refused, the next partial file is opened no sooner. Without it 100,000
    downloads would all be tried at once."""
