"""Runs the core's turns: hands rows to the disk, and performs effects. The only place that does.

Decides nothing about what waits for the disk: the turns say it, and their queue (core/turns.py)
orders it. Invariant: whoever handed something in hears exactly once that it is kept, or why not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from meshagent.core.effects import (
    Accepted,
    CloseLink,
    Dial,
    Effect,
    Transmit,
)
from meshagent.core.mesh import Mesh
from meshagent.core.model.rows import NewEpoch
from meshagent.core.ports import Store, Transport
from meshagent.core.turns import Turn, TurnQueue, in_order
from meshagent.core.wire.codec import encode
from meshagent.errors import MeshError, StorageError

__all__ = ["TurnRunner", "Waiter"]

NOTE_S = 0.05  # rows that may wait are written after so long if no commit took them along
_SEE_OUTBOX = "See what waits: meshagent outbox"
OLDER_COPY = (
    "a peer has messages that this database never sent: it is an older copy; "
    "what waits was numbered anew, and nothing is lost"
)
Waiter = tuple[asyncio.Future[Any], Any]
"""Who waits until something is durable, and what comes of it then."""


class TurnRunner:
    """The turns of one node, one after the other."""

    def __init__(
        self,
        store: Store,
        transport: Transport,
        log: logging.Logger,
        engine: Callable[[], Mesh | None],
        do: Callable[[Effect], None],
        failed: Callable[[MeshError], None],
    ) -> None:
        """`do` performs every effect that is neither a frame nor a link nor an answer; `failed`
        hears that the disk did not take what it was given."""
        self.turns = TurnQueue()
        self._store, self._transport, self._log = store, transport, log
        self._engine, self._do, self._failed = engine, do, failed
        self._notes: asyncio.TimerHandle | None = None
        self._commits = 0
        """Counts commits and interruptions, so that a commit that was given up is not mistaken."""
        self._is_handing_over = False

    def perform(self, turn: Turn) -> None:
        """Do what of a turn may be done now; the rest follows when the disk has its rows."""
        try:
            effects = self.turns.add(turn)
            if effects:
                self._apply(effects)
            if turn.rows or turn.after:
                if turn.rows and type(turn.rows[0]) is NewEpoch:
                    self._log.warning(OLDER_COPY)
                self._commit()
        except (KeyboardInterrupt, SystemExit):
            self.interrupted()
            raise

    def _commit(self) -> None:
        """Hand the next rows to the disk, if they are due and nothing is there already."""
        if self._is_handing_over:
            return  # the loop below goes on with it
        self._is_handing_over = True
        try:
            while (rows := self.turns.next_commit()) is not None:
                self._commits += 1
                # Which may call back before it returns.
                self._store.begin(rows, partial(self._committed, self._commits))
        finally:
            self._is_handing_over = False
        if self.turns.has_notes and self._notes is None:
            self._notes = asyncio.get_running_loop().call_later(NOTE_S, self._commit_notes)

    def _commit_notes(self) -> None:
        self._notes = None
        self.turns.hurry()
        self._commit()

    def _committed(self, number: int, error: MeshError | None) -> None:
        if number != self._commits or not self.turns.is_committing:
            return  # it was given up meanwhile
        if error is not None:
            self._log.error("not kept: %s", error)
            answer(self.turns.failed(), error)
            self._failed(error)
            return
        effects = self.turns.committed()
        if self._engine() is None:
            answer(effects, None)  # the node ends, and nothing more comes of it
            return
        try:
            # All that rests on this commit comes before anything that rests on the next.
            before, self._is_handing_over = self._is_handing_over, True
            try:
                self._apply(effects)
            finally:
                self._is_handing_over = before
            self._commit()
        except (KeyboardInterrupt, SystemExit):
            answer(effects, StorageError("This was interrupted: it is kept.", hint=_SEE_OUTBOX))
            self.interrupted()
            raise

    def interrupted(self) -> None:
        """A signal ended a turn in the middle: what the engine has decided may be neither kept nor
        sent. Delivery begins again from the disk, which has all that was accepted."""
        error = StorageError("This was interrupted: it may have been kept.", hint=_SEE_OUTBOX)
        self._commits += 1
        answer(self.turns.failed(), error)
        self._failed(StorageError("The node was interrupted.", hint="Try again in a moment."))

    def close(self, error: MeshError) -> None:
        """Nothing is performed any more; who still waits hears why."""
        if self._notes is not None:
            self._notes.cancel()
        answer(self.turns.failed(), error)

    # -- effects ------------------------------------------------------------------------------

    def _apply(self, effects: Sequence[Effect]) -> None:
        """Perform these, in the order that core/turns.py says."""
        for effect in in_order(effects):
            if isinstance(effect, Transmit | Dial | CloseLink):
                self._on_link(effect)
            elif type(effect) is Accepted:
                answer([effect], None)
            else:
                self._do(effect)

    def _on_link(self, effect: Transmit | Dial | CloseLink) -> None:
        mesh = self._engine()
        match effect:
            case Transmit(link, frame):
                if not self._transport.send(link, encode(frame)) and mesh is not None:
                    mesh.not_sent(link, frame, asyncio.get_running_loop().time())
            case Dial(attempt, address) if mesh is not None:
                mesh.dialled(attempt, self._transport.dial(address))
            case CloseLink(link):
                self._transport.close_link(link)


def answer(effects: Iterable[Effect], error: MeshError | None) -> None:
    """Whoever handed something in hears that it is kept, or why not."""
    for effect in effects:
        if type(effect) is Accepted:
            for each, result in effect.who:
                if not each.done():
                    if error is None:
                        each.set_result(result)
                    else:
                        each.set_exception(error)
