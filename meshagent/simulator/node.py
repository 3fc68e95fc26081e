"""A simulated node as a person uses it: send, read, cancel, keep house, find files in the spool.

Decides nothing about the protocol: each of these ends in a turn that driver.py runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from meshagent.core.effects import Accepted
from meshagent.core.model.body_summary import summarize
from meshagent.core.model.message_states import WAITING, WITHDRAWN, MessageState
from meshagent.core.model.messages import RECEIPT_KIND, Message, MessageIds, Outgoing
from meshagent.core.model.peers import AgentId
from meshagent.core.model.rows import InState, OutEntry, Row
from meshagent.core.wire.frames import MAIL_ITEMS_MAX, Mail
from meshagent.errors import LimitReached, StorageError
from meshagent.simulator.blobs import Machine
from meshagent.simulator.driver import Asked, SimDriver
from meshagent.simulator.identities import SimIdentity

if TYPE_CHECKING:
    from meshagent.simulator.mesh import SimMesh

__all__ = ["SimNode"]

LISTED_MAX = 1_000_000


class SimNode(SimDriver):
    """One agent, and the person or program behind it."""

    def __init__(self, mesh: SimMesh, name: str, identity: SimIdentity, machine: Machine) -> None:
        super().__init__(mesh, name, identity, machine)
        self._ids = MessageIds(self.world.rng)
        self._dealing: set[tuple[int, AgentId, str]] = set()

    # -- what a person does -------------------------------------------------------------------

    def send(
        self, to: AgentId, *texts: str, ttl_s: float = 0.0, kind: str = "text",
        files: Sequence[bytes] = (),
    ) -> list[str]:  # fmt: skip
        """Ask the engine to take messages together; their ids, or none when they were refused."""
        now_ms, many = self.now_ms(), len(texts)
        ids = self._ids.take(now_ms, many)
        attached = tuple(self.blobs.attach(each, to) for each in files)
        expires_ms = now_ms + int(ttl_s * 1000) if ttl_s else 0
        messages = [
            Message(ident, kind, text, now_ms, attachments=attached, expires_ms=expires_ms)
            for ident, text in zip(ids, texts, strict=True)
        ]
        return ids if self._accept(to, messages, (), partial(self._accepted, to, ids)) else []

    def _accept(
        self, to: AgentId, messages: Sequence[Message], rows: Sequence[Row],
        then: Callable[[bool], None],
    ) -> bool:  # fmt: skip
        """As node/driver.py: whether the engine took them; `then` hears whether they are kept."""
        if self.engine is None:
            return False
        columns = list(zip(*messages, strict=True))
        try:
            outgoing = Outgoing.of([to] * len(messages), columns)
            turn = self.engine.accept(outgoing, self.world.now, bool(rows))
        except (LimitReached, StorageError) as error:
            self.world.say(f"{self.name} does not accept: {error.message}")
            return False
        ids = [each.id for each in messages]
        after = [*turn.after, Accepted(Asked(then, ids))]
        self.perform(turn._replace(rows=[*rows, *turn.rows], after=after))
        return True

    def _accepted(self, to: AgentId, ids: Sequence[str], kept: bool) -> None:
        if kept:
            self.accepted[to] += ids
            self.world.say(f"{self.name} accepts {', '.join(ids)} for {to}")

    def deal_with(self, count: int) -> None:
        """Somebody reads messages of the inbox and is done with them; their senders hear it."""
        for entry in self.disk.mail.inbox(0, count, unread=True):
            sender, now_ms = AgentId(entry.sender), self.now_ms()
            if (self.life, sender, entry.id) in self._dealing:
                continue
            news = {"id": entry.id, "state": "done"}
            receipt = Message(self._ids.next(now_ms), RECEIPT_KIND, "", now_ms, news)
            row = InState(entry.sender, entry.id, "done", 0, now_ms)
            key = (self.life, sender, entry.id)
            self._dealing.add(key)
            if not self._accept(sender, [receipt], [row], partial(self._dealt_with, key)):
                self._dealing.discard(key)
                return

    def _dealt_with(self, key: tuple[int, AgentId, str], kept: bool) -> None:
        self._dealing.discard(key)
        if kept and self.engine is not None:
            now = self.world.now
            self.perform(self.engine.ask_delivery(lambda each: each.inbox_shrank(1), now))
            self.count_unread()

    def withdraw(self, to: AgentId, state: MessageState) -> None:
        """Cancel, or let expire, the last message that waits."""
        pending = self.disk.mail.pending(to, 1, LISTED_MAX)
        fresh = [
            each
            for each in pending
            if each.state in WAITING and summarize(each.body).kind != RECEIPT_KIND
        ]
        if fresh:
            self._withdraw(fresh[-1], state)

    def _withdraw(self, entry: OutEntry, state: MessageState) -> None:
        if self.engine is not None:
            self.world.say(f"{self.name} takes back {entry.id}: {state}")
            self.perform(self.engine.withdraw(entry, state, self.world.now))

    def keep_house(self) -> None:
        """Count what is unread, and look for messages whose time is up, as a node does."""
        self.count_unread()
        for entry in self.disk.mail.due(self.now_ms(), LISTED_MAX):
            self._withdraw(entry, MessageState.EXPIRED)
        if self.engine is not None:
            self.perform(self.engine.expire(self.world.now))

    def drop_for(self, peer: AgentId) -> Mail | None:
        """All that waits for a peer, as a file in the spool holds it."""
        entries = self.disk.mail.pending(peer, 1, MAIL_ITEMS_MAX)
        if not entries:
            return None
        bodies = tuple(None if each.state in WITHDRAWN else each.body for each in entries)
        return Mail(self.disk.mail.epoch, entries[0].seq, entries[0].seq, bodies)

    def take_drop(self, sender: AgentId, mail: Mail) -> None:
        """Find a file in the spool."""
        if self.engine is not None:
            self.perform(self.engine.take(sender, mail, self.world.now))
