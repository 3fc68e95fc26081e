"""The knobs of delivery. Holds numbers, decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DeliveryConfig"]


@dataclass(frozen=True, slots=True)
class DeliveryConfig:
    """Times in seconds, bounds in messages."""

    answer_s: float = 3.0
    """What has no answer by then is sent again; shorter repeats what a slow disk still does."""
    longest_pause_s: float = 60.0
    """The cap of the pauses between repetitions; any contact ends a pause."""
    busy_s: float = 1.0
    """The first pause after a full inbox said so."""
    unread_max: int = 250_000
    """Messages in the inbox that nobody has dealt with; beyond it senders are told to wait."""
    pending_max: int = 1_000_000
    """Messages in the outbox that have not ended; beyond it `send` refuses."""
