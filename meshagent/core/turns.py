"""Turns: what an engine answers with, and the one rule that orders what comes of it.

An engine says itself what rests on what. `free` effects rest on nothing that is not durable yet:
probes and their answers, gossip, chunks, messages that are on the disk already. `rows` must become
durable. `after` effects rest on those rows and on all rows before them: an acknowledgement, a
delivery, the first sending of a message. Rows that `may_wait` are notes: a crash that loses them
loses only what the other side will say again, so they go along with the next commit.

The queue decides when, `in_order` in which order, and nothing else does: the driver and the
simulator both run them. They never touch a disk or a clock. Invariants: rows are committed in the
order of their turns; an `after` effect is given out only when every row of its own turn and of all
earlier turns is durable; when a commit fails, nothing that rests on it or was decided after it is
ever given out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from meshagent.core.effects import CloseLink, Dial, Durable, Effect, Transmit
from meshagent.core.model.peers import AgentId
from meshagent.core.model.rows import Row

__all__ = ["NOTHING", "Turn", "TurnQueue", "in_order", "join_turns"]

_ON_LINKS = frozenset({Transmit, Dial, CloseLink})


class Turn(NamedTuple):
    """One answer of an engine."""

    free: Sequence[Effect] = ()
    rows: Sequence[Row] = ()
    after: Sequence[Effect] = ()
    may_wait: bool = False
    """The rows are notes: nothing that anybody waits for rests on them."""


NOTHING = Turn()


def join_turns(turns: Iterable[Turn]) -> Turn:
    """All of them as one. Its rows may wait only if nothing in it is in a hurry."""
    told = [turn for turn in turns if turn.free or turn.rows or turn.after]
    if len(told) <= 1:
        return told[0] if told else NOTHING
    return Turn(
        [effect for turn in told for effect in turn.free],
        [row for turn in told for row in turn.rows],
        [effect for turn in told for effect in turn.after],
        all(turn.may_wait for turn in told if turn.rows or turn.after),
    )


def in_order(effects: Iterable[Effect]) -> list[Effect]:
    """As they are performed: what is on links, then what may leave now, then all others.

    Messages that became durable together leave together: one word for each stream is enough.
    """
    on_links: list[Effect] = []
    durable: dict[tuple[AgentId, bytes], Effect] = {}
    rest: list[Effect] = []
    for effect in effects:
        if type(effect) in _ON_LINKS:
            on_links.append(effect)
        elif type(effect) is Durable:
            durable[effect.peer, effect.epoch] = effect
        else:
            rest.append(effect)
    return [*on_links, *durable.values(), *rest]


@dataclass(slots=True)
class _PendingCommit:
    """Rows that become durable together, and what rests on them."""

    rows: list[Row] = field(default_factory=list)
    after: list[Effect] = field(default_factory=list)
    is_due: bool = False


class TurnQueue:
    """Which effects may be performed, and which rows are committed next."""

    def __init__(self) -> None:
        self._next = _PendingCommit()
        self._under_way: _PendingCommit | None = None

    @property
    def is_committing(self) -> bool:
        """Whether a commit is under way."""
        return self._under_way is not None

    @property
    def has_notes(self) -> bool:
        """Whether rows wait that nobody is in a hurry for: call `hurry` before long."""
        return bool(self._next.rows) and not self._next.is_due

    @property
    def is_idle(self) -> bool:
        """Whether everything that was decided is durable."""
        return self._under_way is None and not self._next.rows

    def add(self, turn: Turn) -> Sequence[Effect]:
        """Take a turn; what of it may be performed now."""
        free, rows, after, may_wait = turn
        if rows:
            self._next.rows += rows
            self._next.after += after
            self._next.is_due |= not may_wait
        elif after:
            if self._next.rows:
                self._next.after += after
                self._next.is_due = True
            elif self._under_way is not None:
                self._under_way.after += after
            else:
                return [*free, *after] if free else after
        return free

    def hurry(self) -> None:
        """Commit what waits, notes too."""
        self._next.is_due = bool(self._next.rows)

    def next_commit(self) -> list[Row] | None:
        """The rows to make durable now, in their order; None while there is nothing to do.

        Then call `committed` or `failed`, once.
        """
        if self._under_way is not None or not self._next.is_due:
            return None
        self._under_way, self._next = self._next, _PendingCommit()
        return self._under_way.rows

    def committed(self) -> list[Effect]:
        """The rows are durable; what rested on them may be performed."""
        assert self._under_way is not None, "no commit is under way"
        done, self._under_way = self._under_way, None
        return done.after

    def failed(self) -> list[Effect]:
        """The rows are not durable. What rested on them, and on later ones, will never happen."""
        lost = [*(self._under_way.after if self._under_way else ()), *self._next.after]
        self._under_way, self._next = None, _PendingCommit()
        return lost
