"""What sessions do with messages: send, inbox, read, done, outbox, cancel, log.

Decides whom a name means and what a session is shown. Every change is durable before it returns.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from meshagent.core.model.addressing import Known, resolve
from meshagent.core.model.attachments import Attachment, grant_words
from meshagent.core.model.file_names import display_name
from meshagent.core.model.message_states import MessageState
from meshagent.core.model.messages import RECEIPT_KIND, Message, parse_body
from meshagent.core.model.peers import AgentId, is_agent_id
from meshagent.core.model.rows import InEntry, InState, LogEntry, OutEntry
from meshagent.core.ports import Store
from meshagent.errors import MeshError, NoSuchPeer, RemoteProtocolError, UsageError
from meshagent.node.blobs import BlobTransfers
from meshagent.node.driver import Driver
from meshagent.node.file_types import FileTypes
from meshagent.node.inbox import PAGE_ROWS, follow_inbox
from meshagent.node.received import Receipt, ReceivedMessage
from meshagent.node.submitting import DEFAULT_KIND, Submissions
from meshagent.node.views import iso

__all__ = ["Mailbox"]

LIST_MAX = 1000  # shown at once unless more is asked for
_TAKEN_BACK = frozenset({MessageState.QUEUED})


class Mailbox:
    """The messages of one agent."""

    def __init__(
        self,
        driver: Driver,
        store: Store,
        blob_transfers: BlobTransfers,
        known: Callable[[], Sequence[Known]],
    ) -> None:
        self._driver, self._store, self._known = driver, store, known
        self.blob_transfers, self.file_types = blob_transfers, FileTypes(blob_transfers.describe)
        self.submissions = Submissions(driver, self._grant)

    # -- sending ------------------------------------------------------------------------------

    def recipients(self, to: str) -> list[AgentId]:
        """Whom `to` means now."""
        if is_agent_id(to):
            return [AgentId(to)]  # no need to look at who is known, which takes the disk
        return resolve(to, self._known(), self._driver.agent)

    def knows(self, agent: str) -> bool:
        """Whether it was ever met, or lives in this folder."""
        return any(each.agent == agent for each in self._known())

    async def send(
        self,
        recipients: Sequence[AgentId],
        texts: Sequence[str],
        *,
        kind: str = DEFAULT_KIND,
        attach: Sequence[tuple[str, str]] = (),
        **fields: Any,
    ) -> list[Receipt]:
        """Accept each text for each recipient; all are durable when this returns.

        `attach` are names, and the SHA-256 in hex of what stands in the blob store already. The
        fields are those of `Submissions.hand_in`.
        """
        self.submissions.check(recipients, kind)  # before anything is kept for it
        attached = [await self._enclose(*each) for each in attach]
        kept = self.submissions.hand_in(recipients, texts, kind=kind, attached=attached, **fields)
        return list(await kept)

    async def _enclose(self, name: str, sha256: str) -> Attachment:
        """A blob of the store as a message names it; from now on this agent keeps it."""
        try:
            digest = bytes.fromhex(sha256)
        except ValueError:
            raise UsageError(f"{sha256!r} is not a SHA-256.") from None
        await self.blob_transfers.keep(digest)
        found = await self.blob_transfers.describe(digest)
        shown = display_name(name)
        return Attachment(shown, found.size, found.mime, digest, found.width, found.height)

    def _grant(self, attachment: Attachment, peer: AgentId) -> Attachment:
        profile, me = self._driver.profile, self._driver.agent
        words = grant_words(profile.secret.mesh_id, me, peer, attachment.sha256)
        return attachment._replace(grant=profile.identity.sign(words))

    async def receipt(self, ident: str) -> dict[str, Any]:
        """How far a message of ours has come."""
        entry = await self._one_out(ident)
        return _receipt(entry)

    async def outbox(self, limit: int = LIST_MAX, ended: bool = False) -> list[dict[str, Any]]:
        """What waits, oldest first."""
        await self._driver.committed()
        looked_at = limit
        while True:
            rows = await self._store.outbox(looked_at, ended=ended)
            views = [view for row in rows if (view := self._out_view(row)) is not None]
            if len(views) >= limit or len(rows) < looked_at:
                return views[:limit]
            looked_at *= 4  # the receipts between them are nobody's to see, and take no place

    async def waits(self) -> bool:
        """Whether anything has not ended yet."""
        await self._driver.committed()
        return bool(await self._store.outbox(1))

    async def cancel(self, ident: str) -> dict[str, Any]:
        """Take back a message that has not left yet."""
        entry = await self._one_out(ident)
        state = self._state_of(entry)
        if state not in _TAKEN_BACK or entry.settled:
            raise UsageError(
                f"The message {entry.id} is {state} and can't be taken back.",
                hint="See how far it has come: meshagent outbox --all",
            )
        await self._driver.housekeeping.withdraw([entry], MessageState.CANCELLED)
        after = await self._one_out(entry.id)
        if MessageState(after.state) is not MessageState.CANCELLED:
            raise UsageError(f"The message {after.id} is {after.state}: it had left already.")
        return _receipt(after)

    # -- receiving ----------------------------------------------------------------------------

    async def inbox(
        self, limit: int = LIST_MAX, unread: bool = False, upto: int | None = None
    ) -> list[dict[str, Any]]:
        """The newest messages that came (up to a position), oldest of them first.

        With `unread`, only those that nobody has seen yet.
        """
        await self._driver.committed()
        found: list[dict[str, Any]] = []  # newest first
        while (left := limit - len(found)) > 0:
            rows = await self._store.recent(min(left, PAGE_ROWS), upto=upto, unseen=unread)
            if not rows:
                break
            found += [self._in_view(row) for row in reversed(rows)]
            upto = rows[0].position - 1
        held = [self._in_view(row) for row in await self._store.receiving()]
        return await self.file_types.correct_all([*found[::-1], *held][-limit:])

    async def newest(self) -> int:
        """The position of the newest message that came."""
        return await self._store.newest()

    async def follow(self, after: int) -> AsyncIterator[dict[str, Any]]:
        """Every message beyond a position, then each as it comes, until the node ends."""
        async with aclosing(follow_inbox(self._store, self._driver.changes, after)) as pages:
            async for page in pages:
                for view in await self.file_types.correct_all(map(self._in_view, page)):
                    yield view

    async def unread(self) -> AsyncIterator[ReceivedMessage]:
        """Every message that is neither done nor parked, then each as it comes."""
        changes = self._driver.changes
        async with aclosing(follow_inbox(self._store, changes, unread=True)) as pages:
            async for page in pages:
                for entry in page:
                    message = ReceivedMessage(entry, self)
                    for each in message.attachments:
                        await each.look()
                    yield message

    async def read(self, ident: str) -> dict[str, Any]:
        """One message; its sender learns that it was seen."""
        entry = await self.one_in(ident)
        if entry.state == "unread":
            await self.mark(entry, "seen")
        return await self.file_types.correct(self._in_view(await self.one_in(entry.id)))

    async def done(self, ident: str) -> dict[str, Any]:
        """The message was acted upon; its sender learns that."""
        entry = await self.one_in(ident)
        if entry.state != "done":
            await self.mark(entry, "done")
        return await self.file_types.correct(self._in_view(await self.one_in(entry.id)))

    async def mark(self, entry: InEntry, state: str, failures: int = 0) -> None:
        """Note what became of a message, and tell its sender, in one commit."""
        if entry.state == "receiving":
            raise UsageError(
                f"The attachments of {entry.id} are still on their way.",
                hint="See how far they have come: meshagent inbox",
            )
        now_ms = time.time_ns() // 1_000_000
        row = InState(entry.sender, entry.id, state, failures, now_ms)
        freed = 1 if state in ("done", "parked") and entry.state not in ("done", "parked") else 0
        if state in ("seen", "done"):
            news = {"id": entry.id, "state": state}
            await self.submissions.tell(AgentId(entry.sender), news, row)
        else:
            await self._driver.keep([row])
        self._driver.housekeeping.inbox_shrank(freed)

    async def log(
        self, limit: int = LIST_MAX, search: str = "", peer: str = "", kind: str = ""
    ) -> list[dict[str, Any]]:
        """The audit trail, oldest first."""
        agent = self.recipients(peer)[0] if peer else ""
        await self._driver.committed()
        rows = await self._store.log(
            limit, search=search, peer=agent, kind=kind, without=RECEIPT_KIND
        )
        return await self.file_types.correct_all(self._log_view(row) for row in rows)

    # -- attachments --------------------------------------------------------------------------

    async def message(self, ident: str) -> dict[str, Any]:
        """One message that came, as it is; nobody is told."""
        return await self.file_types.correct(self._in_view(await self.one_in(ident)))

    async def fetch(self, ident: str) -> dict[str, Any]:
        """Get every attachment of a message that is not here yet; returns when all are."""
        entry = await self.one_in(ident)
        for each in parse_body(entry.body).attachments:
            await self.blob_transfers.fetch(AgentId(entry.sender), each)
        return await self.file_types.correct(self._in_view(await self.one_in(entry.id)))

    def attachment_view(self, attachment: Attachment) -> dict[str, Any]:
        """An attachment in JSON form; `received` counts the bytes that are here.

        What it is, is its sender's claim: see `file_types`.
        """
        sha256, size = attachment.sha256, attachment.size
        progress, trouble = self._driver.mesh.transfer.progress(sha256), ""
        if progress is not None and progress[1] != size:
            progress = None  # somebody else's claim about that hash
        try:
            here = progress is None and self.blob_transfers.blobs.holds(sha256, size)
        except MeshError as error:  # a broken store must not hide the messages
            here, trouble = False, error.message
        received, _, waits_for = progress or (size if here else 0, size, trouble)
        return {
            "name": attachment.name,
            "size": size,
            "mime": attachment.mime,
            "sha256": sha256.hex(),
            "state": "ready" if here else "receiving" if progress else "remote",
            "path": str(self.blob_transfers.blobs.path(sha256)) if here else None,
            "received": received,
            "reason": waits_for or None,
            "width": attachment.width or None,
            "height": attachment.height or None,
        }

    # -- copies -------------------------------------------------------------------------------

    async def backup(self, path: str) -> dict[str, Any]:
        """A copy of this agent's messages, while the node runs."""
        await self._driver.recovery.backup(path)
        return {"agent": self._driver.agent, "file": path}

    async def restore(self, path: str) -> dict[str, Any]:
        """Go on from a copy, under a new epoch."""
        await self._driver.recovery.restore(path)
        return {"agent": self._driver.agent, "file": path}

    # -- finding ------------------------------------------------------------------------------

    async def one_in(self, ident: str) -> InEntry:
        """The message that came with this id, or a unique beginning of it."""
        entry: InEntry = _only(await self._store.incoming(ident), ident, "inbox")
        return entry

    async def _one_out(self, ident: str) -> OutEntry:
        await self._driver.committed()
        entry: OutEntry = _only(await self._store.outgoing(ident), ident, "outbox")
        return entry

    # -- views --------------------------------------------------------------------------------

    def _in_view(self, entry: InEntry) -> dict[str, Any]:
        view = self._message_view(entry.body, entry.sender, self._driver.agent)
        return view | {"received_at": iso(entry.received_ms / 1000), "state": entry.state}

    def _out_view(self, entry: OutEntry) -> dict[str, Any] | None:
        view = self._message_view(entry.body, self._driver.agent, entry.peer)
        if view["kind"] == RECEIPT_KIND:
            return None
        state = self._state_of(entry).value
        return view | {"received_at": None, "state": state, "reason": entry.reason}

    def _state_of(self, entry: OutEntry) -> MessageState:
        """What is on the wire is known to the engine only."""
        state = MessageState(entry.state)
        delivery = self._driver.mesh.delivery
        on_wire = delivery is not None and delivery.sending.is_on_wire(
            AgentId(entry.peer), entry.seq
        )
        return MessageState.SENT if on_wire and state is MessageState.QUEUED else state

    def _log_view(self, entry: LogEntry) -> dict[str, Any]:
        ends = (entry.peer, self._driver.agent)
        view = self._message_view(entry.body, *(ends if entry.direction == "in" else ends[::-1]))
        received = iso(entry.at_ms / 1000) if entry.direction == "in" else None
        return view | {"received_at": received, "state": entry.state, "reason": entry.reason}

    def _message_view(self, body: bytes, sender: str, to: str) -> dict[str, Any]:
        try:
            message = parse_body(body)
        except RemoteProtocolError:
            message = Message("?", "damaged", "(this message can't be read)", 0)
        return {
            "id": message.id,
            "from": sender,
            "to": to,
            "kind": message.kind,
            "text": message.text,
            "data": message.data,
            "thread": message.thread or message.id,
            "reply_to": message.reply_to or None,
            "attachments": [self.attachment_view(each) for each in message.attachments],
            "sent_at": iso(message.created_ms / 1000),
        }


def _receipt(entry: OutEntry) -> dict[str, Any]:
    return {"id": entry.id, "to": entry.peer, "state": entry.state, "reason": entry.reason}


def _only(found: Sequence[Any], ident: str, where: str) -> Any:
    if len(found) == 1:
        return found[0]
    exact = [each for each in found if each.id == ident]
    if exact:
        return exact[0]
    if found:
        ids = ", ".join(each.id for each in found)
        raise UsageError(f"{ident!r} may be any of {ids}.", hint="Give more of the id.")
    raise NoSuchPeer(
        f"There is no message {ident!r} in the {where}.", hint=f"See: meshagent {where}"
    )
