"""What an agent says that it is doing. Never decides whether it is alive."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Presence"]


class Presence(StrEnum):
    """What an agent says of itself. A newer one may say more: that is carried as plain text."""

    IDLE = "idle"
    WORKING = "working"
    BLOCKED = "blocked"
    AWAY = "away"
