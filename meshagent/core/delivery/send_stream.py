"""What waits for one peer, and what of it is on the wire. Never decides whether it arrived.

A stream is every message from us to one peer in one epoch, numbered 1, 2, 3 … without a gap. A
message that was cancelled or has expired keeps its number and travels as nothing, so the peer can
always tell "not yet" from "never", and whether it had come before. Messages wait on disk; only a
window of them is in memory, and only while the peer has a link.

    settled ≤ floor-1 │ floor … sent: on the wire, no word yet │ … loaded: in memory │ … disk
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, islice, takewhile
from operator import attrgetter

from meshagent.core.model.message_states import WITHDRAWN, MessageState
from meshagent.core.model.rows import OutEntry, OutRow
from meshagent.core.wire.frames import MAIL_ITEMS_MAX, Mail

__all__ = ["Item", "LinkPhase", "Reading", "SendStream"]

WINDOW_ITEMS_MAX = 32_768  # in memory per linked peer: many at once need not wait for a disk
WINDOW_BYTES_MAX = 8 * 1024 * 1024  # eight of the largest messages
FRAME_BYTES_MAX = 256 * 1024  # a batch; one larger message travels alone
GAP_PAUSE_S = 0.2  # a round trip: every frame behind a lost one is answered with the same gap
ITEM_BYTES = 64  # of a message beside its body, in memory and on the wire


class LinkPhase(Enum):
    """Whether messages may leave."""

    AWAY = "away"
    GREETING = "greeting"
    """Linked, and asked how much it has: until it answers, nobody knows what our numbers mean."""
    READY = "ready"


class Reading(Enum):
    """The read from disk that is under way: at most one, whatever happens to the link."""

    NOTHING = "nothing"
    WINDOW = "window"
    PROOF = "proof"
    """Of the one message that an answer names, to see whether the answer can be believed."""
    OUTDATED = "outdated"
    """It began under other numbers: what it brings is not for this stream."""


LINK_CHANGES = {
    "connected": dict.fromkeys(LinkPhase, LinkPhase.GREETING),
    "answered": {LinkPhase.GREETING: LinkPhase.READY, LinkPhase.READY: LinkPhase.READY},
    "disconnected": dict.fromkeys(LinkPhase, LinkPhase.AWAY),
}
READ_CHANGES = {
    "read on": {Reading.NOTHING: Reading.WINDOW},
    "prove": {Reading.NOTHING: Reading.PROOF},
    "disconnected": {Reading.PROOF: Reading.WINDOW},
    "renumbered": {Reading.WINDOW: Reading.OUTDATED, Reading.PROOF: Reading.OUTDATED},
    "arrived": dict.fromkeys(Reading, Reading.NOTHING),
}
"""What happens to a phase. A change that is not named for a read leaves it as it is."""


Item = OutRow | OutEntry
"""A message of a stream: as it was accepted, or as it was read from disk."""
# Of many items with no line of Python for each.
_body, _ident, _expires, _blobs = map(attrgetter, ("body", "id", "expires_ms", "blobs"))


@dataclass(slots=True)
class SendStream:
    """The messages to one peer."""

    epoch: bytes
    next_seq: int = 1
    floor: int = 1
    items: deque[Item] = field(default_factory=deque)
    loaded_bytes: int = 0
    states: dict[int, MessageState] = field(default_factory=dict)
    """How those in memory stand that are more than queued: withdrawn, or further than that."""
    special: set[int] = field(default_factory=set)
    """Those in memory of which an answer that covers them does not say all there is to say: they
    may expire, or have attachments."""
    sent: int = 0
    ever_sent: int = 0
    """Up to here all were on the wire once, if only on a link that is gone."""
    durable: int = 0
    withheld: set[int] = field(default_factory=set)
    """Those that were taken back, and the disk does not know it yet: they and all behind wait, or a
    crash would make the recipient know of it and not us."""
    link: LinkPhase = LinkPhase.AWAY
    reading: Reading = Reading.NOTHING
    busy_until: float = 0.0
    answer_due: float | None = None
    failures: int = 0
    rewound_at: float = float("-inf")
    gap_at: int = -1
    """The number after which something was missing when we last went back."""
    gap_due: float | None = None
    """When to go back there once more, unless more was answered by then."""
    first_sent: list[str] = field(default_factory=list)
    """Ids that went on the wire for the first time and were not reported yet."""

    noted: int = 0
    """Settled up to here on disk too: only that may be told, since a crash forgets the rest."""

    def __post_init__(self) -> None:
        self.noted = self.floor - 1
        self.sent = self.ever_sent = self.floor - 1
        self.durable = self.next_seq - 1

    @classmethod
    def renumbered(cls, old: SendStream, epoch: bytes) -> SendStream:
        """All that waits in another stream, under new numbers. Nothing of it is durable yet."""
        linked = old.link is not LinkPhase.AWAY
        new = cls(epoch, old.waiting + 1, link=LinkPhase.READY if linked else LinkPhase.AWAY)
        new.durable = 0
        new.reading = READ_CHANGES["renumbered"].get(old.reading, old.reading)
        return new

    @property
    def is_linked(self) -> bool:
        """Whether the peer is here."""
        return self.link is not LinkPhase.AWAY

    @property
    def due(self) -> float | None:
        """When something has to be done if nothing is heard."""
        if not self.busy_until and self.gap_due is None:  # most often
            return self.answer_due
        times = (self.answer_due, self.busy_until or None, self.gap_due)
        return min([each for each in times if each is not None], default=None)

    @property
    def loaded(self) -> int:
        """The highest number in memory."""
        return self.floor - 1 + len(self.items)

    @property
    def told_floor(self) -> int:
        """What the recipient may take as settled for good."""
        return min(self.floor, self.noted + 1)

    @property
    def waiting(self) -> int:
        """How many have not been settled."""
        return self.next_seq - self.floor

    @property
    def on_wire(self) -> bool:
        """Whether something was sent that has no answer yet."""
        return self.sent >= self.floor

    def add(self, rows: Sequence[OutRow]) -> None:
        """New messages, by their numbers: kept in memory while they are next in line, with room."""
        self.next_seq += len(rows)
        if not self.is_linked or self.loaded + 1 != rows[0].seq:
            return
        rows = rows[: WINDOW_ITEMS_MAX - len(self.items)]
        size = _size(rows)
        if self.loaded_bytes + size > WINDOW_BYTES_MAX:  # the last may be longer than room is
            before = accumulate(_sizes(rows), initial=self.loaded_bytes)
            rows = rows[: sum(1 for _ in takewhile(WINDOW_BYTES_MAX.__gt__, before))]
            size = _size(rows)
        self.items += rows
        self.loaded_bytes += size
        if any(map(_expires, rows)) or any(map(_blobs, rows)):
            self.special.update([row.seq for row in rows if row.expires_ms or row.blobs])

    def wants_more(self) -> bool:
        """Whether the next ones should be read from disk."""
        return (
            self.is_linked
            and self.reading is Reading.NOTHING
            and self.floor + len(self.items) <= self.durable
            and len(self.items) < WINDOW_ITEMS_MAX // 4
            and self._has_room()
        )

    def take_loaded(
        self, entries: Sequence[OutEntry], withdrawn: Mapping[str, MessageState]
    ) -> Sequence[OutEntry]:
        """What was read from disk, in order, if it is for us; what we have is passed over.

        `withdrawn`: what the disk may not have known yet, by id.
        """
        usable = self.is_linked and self.reading in (Reading.WINDOW, Reading.PROOF)
        self.change_read("arrived")
        if not usable:
            return ()
        for entry in entries:
            if entry.seq == self.loaded + 1 and self._has_room():
                self.items.append(entry)
                self.loaded_bytes += ITEM_BYTES + len(entry.body)
                if entry.expires_ms or entry.attached:
                    self.special.add(entry.seq)
                state = MessageState(entry.state)
                if state not in WITHDRAWN:
                    state = withdrawn.get(entry.id, state)
                if state is not MessageState.QUEUED:
                    self.states[entry.seq] = state
        return entries

    def withdrawn(self, seq: int) -> MessageState | None:
        """How the message with this number was taken back, if it was."""
        state = self.states.get(seq)
        return state if state in WITHDRAWN else None

    @property
    def may_leave(self) -> int:
        """Up to this number all are durable here, as they are."""
        return min(self.durable, min(self.withheld) - 1) if self.withheld else self.durable

    @property
    def has_next(self) -> bool:
        """Whether something in memory may leave: only what is durable here does."""
        return self.sent < self.may_leave and self.sent + 1 < self.floor + len(self.items)

    def next_frame(self) -> Mail:
        """The next batch for the wire, when `has_next`."""
        first = self.sent + 1
        last = min(self.loaded, self.may_leave, self.sent + MAIL_ITEMS_MAX)
        items = list(islice(self.items, first - self.floor, last + 1 - self.floor))
        if self.loaded_bytes > FRAME_BYTES_MAX:
            sizes = accumulate(_sizes(items))
            fitting = sum(1 for size in takewhile(FRAME_BYTES_MAX.__ge__, sizes))
            del items[max(1, fitting) :]
        self.sent += len(items)
        if self.sent > self.ever_sent:
            fresh = items[max(0, self.ever_sent + 1 - first) :]
            if self.states:
                fresh = [item for item in fresh if item.seq not in self.states]
            self.first_sent += map(_ident, fresh)
            self.ever_sent = self.sent
        bodies: list[bytes | None] = list(map(_body, items))
        if self.states:
            for seq, state in self.states.items():
                if first <= seq <= self.sent and state in WITHDRAWN:
                    bodies[seq - first] = None
        return tuple.__new__(Mail, (self.epoch, self.told_floor, first, tuple(bodies)))

    def settle(self, upto: int) -> list[Item]:
        """All up to this number are settled; those that were in memory. Then `forget_settled`."""
        settled = list(islice(self.items, max(0, upto + 1 - self.floor)))
        if len(settled) == len(self.items):
            self.items.clear()
        else:
            for _ in settled:
                self.items.popleft()
        self.loaded_bytes -= _size(settled)
        self.floor = max(self.floor, upto + 1)
        self.sent = max(self.sent, upto)
        if self.floor - 1 > self.gap_at:
            self.gap_due = None
        return settled

    def forget_settled(self) -> None:
        """What was noted of them."""
        if self.states:
            self.states = {seq: each for seq, each in self.states.items() if seq >= self.floor}
        if self.special:
            self.special = {seq for seq in self.special if seq >= self.floor}

    def withdraw(self, seq: int, ident: str, state: MessageState) -> bool:
        """Its number travels as nothing from now on; False when that was so before."""
        item = self.find(seq)
        if item is None or item.id != ident:  # whoever read its number may have read an old one
            item = next((each for each in self.items if each.id == ident), None)
        if item is None:
            return True
        if self.withdrawn(item.seq):
            return False
        self.states[item.seq] = state
        return True

    def rewind(self, after: int) -> None:
        """What was sent beyond `after` did not arrive: send it again."""
        self.sent = max(self.floor - 1, min(self.sent, after))

    def missing_after(self, upto: int, now: float) -> None:
        """The peer has all up to `upto`, and got what comes later: go back, once for each gap.

        A gap that it names again may be old news, or the frame was lost once more: that shows
        when the answer to what we sent again does not come.
        """
        if upto < self.floor - 1:
            return
        if upto == self.gap_at and now < self.rewound_at + GAP_PAUSE_S:
            self.gap_due = self.rewound_at + GAP_PAUSE_S
        else:
            self.go_back(upto, now)

    def go_back(self, upto: int, now: float) -> None:
        """Send all beyond `upto` again."""
        self.gap_at, self.gap_due, self.rewound_at = upto, None, now
        self.rewind(upto)

    def change_read(self, change: str) -> None:
        """A read from disk begins, ends, or is overtaken by something else."""
        self.reading = READ_CHANGES[change].get(self.reading, self.reading)

    def connected(self) -> None:
        """A new link: what was on another one may be lost with it."""
        self.link = LINK_CHANGES["connected"][self.link]
        self.rewind(0)
        self.failures = 0
        self.forget_times()

    def answered(self) -> None:
        """The peer has said how much it has, so messages may leave."""
        if self.link is LinkPhase.GREETING:
            self.answer_due = None
        self.link = LINK_CHANGES["answered"].get(self.link, self.link)

    def disconnected(self) -> None:
        """The peer is away: memory is for those who are here."""
        self.link = LINK_CHANGES["disconnected"][self.link]
        self.change_read("disconnected")
        self.items.clear()
        self.states.clear()
        self.special.clear()
        self.loaded_bytes = 0
        self.sent = self.floor - 1
        self.forget_times()

    def forget_times(self) -> None:
        """Nothing is waited for."""
        self.answer_due = self.gap_due = None
        self.busy_until, self.gap_at = 0.0, -1

    def find(self, seq: int) -> Item | None:
        """The item with this number, when it is in memory."""
        at = seq - self.floor
        return self.items[at] if 0 <= at < len(self.items) else None

    def _has_room(self) -> bool:
        return len(self.items) < WINDOW_ITEMS_MAX and self.loaded_bytes < WINDOW_BYTES_MAX


def _sizes(items: Sequence[Item]) -> list[int]:
    return [ITEM_BYTES + len(item.body) for item in items]


def _size(items: Sequence[Item]) -> int:
    return ITEM_BYTES * len(items) + sum(map(len, map(_body, items)))
