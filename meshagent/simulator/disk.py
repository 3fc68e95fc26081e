"""The disk of a simulated agent: its mailbox, and two things that only a check wants to know.

Decides nothing: `core/delivery/mailbox.py` says what a row means. Can be put back to an earlier
day, or replaced by an empty one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from meshagent.core.delivery.mailbox import MailboxModel
from meshagent.core.model.rows import InRow, NewEpoch, Row, singly

__all__ = ["Disk"]


@dataclass(slots=True)
class Disk:
    """What outlives a crash of one agent."""

    mail: MailboxModel
    came_under: dict[tuple[str, str], bytes] = field(default_factory=dict)
    """The epoch of its sender in which each message came."""
    renumbered: set[str] = field(default_factory=set)
    """The messages of ours that got a new number once."""

    def commit(self, rows: Sequence[Row]) -> None:
        """All of them, durably."""
        for row in singly(rows):
            if isinstance(row, InRow) and (row.sender, row.id) not in self.mail.came:
                self.came_under[row.sender, row.id] = row.epoch
            elif isinstance(row, NewEpoch):
                self.renumbered |= {entry.id for entry in self.mail.unsettled()}
            self.mail.write([row])

    def copy(self) -> Disk:
        """A backup."""
        return Disk(self.mail.copy(), dict(self.came_under), set(self.renumbered))
