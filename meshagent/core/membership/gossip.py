"""What to pass on, and how often. Answers one question: which updates go into the next frame?

Invariant: at most one update waits per topic (a subject's record, or one accuser's word on a
subject), so the queue is bounded by the members it speaks of.
"""

from __future__ import annotations

from meshagent.core.wire.frames import UPDATES_MAX

__all__ = ["GossipQueue"]

UPDATES_PER_FRAME_MAX = 64  # keeps a gossip frame near 16 KiB
assert UPDATES_PER_FRAME_MAX <= UPDATES_MAX


class GossipQueue:
    """Updates waiting to be passed on, least often sent first, and of these the newest."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[int, bytes]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, topic: str, data: bytes) -> None:
        """Pass this on, instead of whatever older word waits on the same topic."""
        self._waiting.pop(topic, None)
        self._waiting[topic] = (0, data)

    def drop(self, prefix: str) -> None:
        """Older words on these topics are no longer true."""
        for topic in [each for each in self._waiting if each.startswith(prefix)]:
            del self._waiting[topic]

    def take(self, transmits_max: int, room: int = UPDATES_PER_FRAME_MAX) -> tuple[bytes, ...]:
        """The updates for one frame; each is taken `transmits_max` times in all, then forgotten."""
        if not self._waiting:
            return ()
        topics = list(self._waiting)
        if len(topics) > room:
            counts = [self._waiting[topic][0] for topic in topics]
            places = sorted(range(len(topics)), key=lambda place: (counts[place], -place))
            # In the order in which we learned them: a record before what rests on it.
            topics = [topics[place] for place in sorted(places[:room])]
        taken = []
        for topic in topics:
            count, data = self._waiting[topic]
            taken.append(data)
            if count + 1 >= transmits_max:
                del self._waiting[topic]
            else:
                self._waiting[topic] = (count + 1, data)
        return tuple(taken)
