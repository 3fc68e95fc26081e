"""Which blob is pulled next, from whom, and how far ahead. Never writes a chunk or hashes one.

Wanted blobs stand in line; a few are active: the eldest, then the smallest. An active one opens
its partial, which says how much is there already, and asks one source for the rest, in order. The
window is credit: a chunk uses it from the moment it may be sent until it is written, so a slow
disk slows its sources, and all pulls together never have more than `window_max` chunks on links
and in memory. Each active pull has an equal share of it.

When a source stalls, leaves, is busy or lacks the blob, another goes on at the next chunk. Wrong
contents show only at the end: a single contributor is never asked for that blob again; after
several, everything is pulled anew from one source at a time, until it shows whose fault it was.

Invariants: at most one unanswered OpenPartial or FinishBlob for a blob, none together with an
unanswered WriteChunk, and ClosePartial only when nothing is unanswered; a blob is reported ready
only after `finished` or `present`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from meshagent.core.effects import (
    BlobFailed,
    BlobProgress,
    BlobReady,
    ClosePartial,
    Effect,
    FinishBlob,
    OpenPartial,
    Send,
    WriteChunk,
)
from meshagent.core.membership.lifeguard import backoff_s
from meshagent.core.model.file_names import one_line
from meshagent.core.model.peers import AgentId
from meshagent.core.transfer.chunks import (
    BLOB_BYTES_MAX,
    FULL_LINK_S,
    bytes_in,
    chunk_count,
    chunk_length,
)
from meshagent.core.transfer.download_queue import (
    ABSENT,
    NOT_ALLOWED,
    WRONG,
    Line,
    Lines,
    Offer,
    Source,
    Stage,
    Want,
)
from meshagent.core.wire.frames import (
    BlobAsk,
    BlobChunk,
    BlobEnd,
    BlobMore,
    BlobStop,
    Frame,
)
from meshagent.errors import LimitReached

__all__ = ["DownloadConfig", "Downloads"]

UNSENT_MAX = 1024  # frames that wait for full links; one that is lost costs a stall
FIRST_PULL_BITS = 48  # numbers begin anywhere: those of an earlier run are not met again
NOBODY_HERE = "Nobody who has it is here."


@dataclass(frozen=True, slots=True)
class DownloadConfig:
    """The knobs of pulling."""

    active_max: int = 8
    """Blobs pulled at once; more would only share the same window."""
    large_active_max: int = 6
    """Of those, large ones, so that small ones always find a place."""
    per_sender_max: int = 7
    """Of those, on behalf of one sender: a crowd of its blobs leaves room for the others'."""
    small_chunks: int = 8
    """Up to here a blob counts as small: it is gone in a moment."""
    wanted_max: int = 100_000
    """Blobs wanted in all; beyond it `want` refuses."""
    window_max: int = 16
    """Chunks under way for all pulls: 8 MiB, what a busy machine moves while credit is on its way.

    At least `active_max`, or some would have no share."""
    window_per_pull_max: int = 12
    """The same for one pull; the rest lets a newcomer begin at once."""
    window_first: int = 2
    """The same for a pull that begins; it grows with each chunk that is written. Two who find each
    other again often both dial, and what is on the link that is dropped is moved twice."""
    stall_s: float = 30.0
    """A source that owes chunks and is silent for so long is left for another."""
    pause_s: float = 1.0
    """The first pause after busy, a stall or a full disk; it doubles."""
    longest_pause_s: float = 30.0
    """The cap of those pauses."""
    probe_s: float = 300.0
    """The cap of the pauses between looks whether another agent here has got the blob."""
    open_pace_s: float = 0.1
    """After a disk said no, the next blob is opened no sooner: 100,000 wait without a storm."""


class Downloads:
    """Every blob that this agent wants."""

    def __init__(
        self, rng: random.Random, refused: Counter[str], config: DownloadConfig | None = None
    ) -> None:
        self._rng, self._refused = rng, refused
        self._config = config or DownloadConfig()
        self._wants: dict[bytes, Want] = {}
        self._active: dict[bytes, Want] = {}
        self._large = self._held = self._orders = 0
        self._by_source: dict[AgentId, dict[bytes, None]] = {}
        self._linked: set[AgentId] = set()
        self._now = 0.0
        self._first_pull = self._pull = rng.getrandbits(FIRST_PULL_BITS)
        self._pulls: dict[int, Want] = {}
        self._small_ones, self._large_ones, self._by_age = Lines(), Lines(), Lines()
        self._by_time = Line()
        self._stalling: dict[AgentId, tuple[int, float]] = {}
        self._open_not_before = 0.0
        self._unsent: dict[int, tuple[AgentId, type[Frame]]] = {}
        self._resend_at: float | None = None

    # -- from above ---------------------------------------------------------------------------

    def want(
        self,
        sha256: bytes,
        size: int,
        sources: Sequence[AgentId],
        granter: AgentId,
        grant: bytes,
        now: float,
    ) -> list[Effect]:
        """Get this blob; wanting it again adds sources and grants."""
        if not 0 <= size <= BLOB_BYTES_MAX:
            raise LimitReached(f"A blob of {size} bytes is beyond the limit of {BLOB_BYTES_MAX}.")
        offer = Offer(size, tuple(sources), granter, grant)
        known = self._wants.get(sha256)
        if known is None:
            if len(self._wants) >= self._config.wanted_max:
                raise LimitReached(f"{len(self._wants)} attachments are being waited for already.")
            self._orders += 1
            known = self._wants[sha256] = Want(sha256, size, chunk_count(size), self._orders)
            self._merge(known, offer)
            self._set_ready(known)
        elif known.dropped and known.stage in (Stage.OPENING, Stage.FINISHING, Stage.CLOSING):
            known.dropped = known.discard = False
            known.rivals = [offer] if size != known.size else []
            if size == known.size:
                self._merge(known, offer)
        elif size != known.size:
            self._refused["another size for the same blob"] += 1
            known.add_rival(offer)
        else:
            self._merge(known, offer)
            if known.stage is Stage.PAUSED and known.for_source:
                self._set_ready(known)
        return self._go_on(now)

    def unwant(self, sha256: bytes, now: float) -> list[Effect]:
        """Nobody wants it any more."""
        want = self._wants.get(sha256)
        if want is None or want.dropped:
            return []
        if want.stage in (Stage.READY, Stage.PAUSED):
            self._forget(want)
            return []
        want.dropped = True
        effects: list[Effect] = []
        if want.stage in (Stage.PULLING, Stage.CLOSING):
            effects = self._close(want, discard=True)
        return effects + self._go_on(now)

    def progress(self, sha256: bytes) -> tuple[int, int, str] | None:
        """Bytes written, size, and what it waits for, if anything; None when it is not wanted."""
        want = self._wants.get(sha256)
        if want is None or want.dropped:
            return None
        return self._received(want), want.size, want.reason

    # -- the engine contract ------------------------------------------------------------------

    def receive(self, frame: Frame, peer: AgentId, now: float) -> list[Effect]:
        """What sources say."""
        match frame:
            case BlobChunk():
                return self._chunk(frame, peer, now)
            case BlobEnd():
                return self._ended(frame, peer, now)
        return []

    def on_timer(self, now: float) -> list[Effect]:
        """Leave those who stall, and try again what had to wait."""
        effects = self._resend() if self._resend_at is not None and now >= self._resend_at else []
        for want in list(self._active.values()):
            if self._owes(want) and now >= want.heard_at + self._config.stall_s:
                self._refused["stalled"] += 1
                self._stalled(want.source, now)
                self._blame(want.sources[want.source], "It does not go on.", now)
                effects += self._stop(want)
        for want in self._by_time.due(now):
            self._set_ready(want)
        return effects + self._go_on(now)

    def deadline(self) -> float | None:
        """When on_timer is wanted next."""
        if not self._wants and self._resend_at is None:
            return None  # asked after every turn, and mostly nothing is on its way
        times = [
            each.heard_at + self._config.stall_s
            for each in self._active.values()
            if self._owes(each)
        ]
        paused = self._by_time.first()
        if paused is not None:
            times.append(paused[0])
        if self._resend_at is not None:
            times.append(self._resend_at)
        if len(self._active) < self._config.active_max:
            if self._next_ready() is not None:
                times.append(self._open_not_before)
            times += [until for _, until in self._stalling.values() if until > self._now]
        return min(times, default=None)

    def connected(self, peer: AgentId, now: float) -> list[Effect]:
        """A source is here, with a new link: what was on another is lost."""
        effects = self.disconnected(peer, now)
        self._linked.add(peer)
        self._stalling.pop(peer, None)
        for sha256 in self._by_source.get(peer, ()):
            want = self._wants[sha256]
            source = want.sources[peer]
            source.paused_until, source.failures = 0.0, 0
            if source.verdict == ABSENT:
                source.verdict = ""
            want.failures = 0
            if want.stage is Stage.PAUSED and want.for_source:
                self._set_ready(want)
        return effects + self._go_on(now)

    def disconnected(self, peer: AgentId, now: float) -> list[Effect]:
        """Its link is gone, with what was on it."""
        self._linked.discard(peer)
        self._stalling.pop(peer, None)
        for pull in [each for each, (to, _) in self._unsent.items() if to == peer]:
            del self._unsent[pull]
        for want in self._active.values():
            if want.pull and want.source == peer:
                self._take_back(want)
        return self._go_on(now)

    def not_sent(self, peer: AgentId, frame: Frame, now: float) -> None:
        """The link is full: say it again in a moment, as it will be true then."""
        if not isinstance(frame, BlobAsk | BlobMore | BlobStop):
            return
        before = self._unsent.get(frame.pull)
        if before is not None and before[1] is BlobAsk:
            if isinstance(frame, BlobStop):
                del self._unsent[frame.pull]  # it never heard of that pull
            return
        if len(self._unsent) < UNSENT_MAX:
            self._unsent[frame.pull] = (peer, type(frame))
            if self._resend_at is None:
                self._resend_at = now + FULL_LINK_S

    # -- what the driver answers --------------------------------------------------------------

    def opened(self, sha256: bytes, received_chunks: int, now: float) -> list[Effect]:
        """The partial is open and holds the first `received_chunks` chunks."""
        want = self._wants[sha256]
        assert want.stage is Stage.OPENING, want.stage
        received = min(received_chunks, want.chunks)
        want.foreign = want.foreign or received > want.written
        want.written = want.arrived = want.upto = received
        want.stage, want.reason = Stage.PULLING, ""
        if want.dropped:
            return self._close(want, discard=True) + self._go_on(now)
        return self._tell(want) + self._finish(want) + self._go_on(now)

    def present(self, sha256: bytes, now: float) -> list[Effect]:
        """Another agent of this machine got it: nothing to do."""
        return self._succeed(self._wants[sha256], now)

    def held_up(self, sha256: bytes, reason: str, now: float) -> list[Effect]:
        """The disk is full, or another process pulls it: again after a pause."""
        want = self._wants[sha256]
        if want.stage is Stage.PULLING or want.stage is Stage.CLOSING:
            want.writes -= 1
        if want.stage is not Stage.CLOSING:
            want.failures += 1
            want.for_source, want.reason = False, reason
            want.pause_until = now + self._pause_s(want.failures, self._config.longest_pause_s)
            self._open_not_before = now + self._config.open_pace_s
        if want.stage is Stage.OPENING:
            return self._leave(want) + self._go_on(now)
        return self._close(want, discard=want.dropped) + self._go_on(now)

    def impossible(self, sha256: bytes, why: str, now: float) -> list[Effect]:
        """There can be no room for it here, or it is not what may be kept here."""
        want = self._wants[sha256]
        want.failed = why
        return self._leave(want) + self._go_on(now)

    def wrote(self, sha256: bytes, index: int, now: float) -> list[Effect]:
        """A chunk is written: its credit is free again."""
        want = self._wants[sha256]
        want.writes -= 1
        if index == want.written:  # while closing, an earlier one may have failed
            want.written += 1
            want.pace += 1
            self._held -= 1
        if want.stage is Stage.CLOSING:
            return self._close(want, discard=want.discard) + self._go_on(now)
        want.failures = 0
        effects = self._tell(want)
        if want.written == want.chunks:
            return effects + self._finish(want)
        return effects + self._share_out(now)

    def finished(self, sha256: bytes, now: float) -> list[Effect]:
        """It is whole, verified and in place."""
        return self._succeed(self._wants[sha256], now)

    def wrong(self, sha256: bytes, now: float) -> list[Effect]:
        """All of it came, and it is another file."""
        want = self._wants[sha256]
        if len(want.contributors) == 1 and not want.foreign:
            (liar,) = want.contributors
            want.sources[liar].verdict = want.sources[liar].reason = WRONG
            self._refused[WRONG] += 1
        elif want.contributors or want.foreign:
            want.alone = True
        else:
            want.failed = "No file of that size has this hash."
        return self._close(want, discard=True) + self._go_on(now)

    # -- chunks -------------------------------------------------------------------------------

    def _chunk(self, frame: BlobChunk, peer: AgentId, now: float) -> list[Effect]:
        want = self._pulls.get(frame.pull)
        if want is None or want.source != peer:
            return self._stray(frame.pull, peer, want)
        index = frame.index
        if index >= want.upto:
            self._refused["chunk beyond the credit"] += 1
            return []
        if index != want.arrived:
            self._refused["chunk out of order"] += 1
            return []
        source = want.sources[peer]
        if len(frame.data) != chunk_length(want.size, index):
            self._refused["chunk of a wrong length"] += 1
            source.verdict = source.reason = WRONG
            return self._stop(want) + self._go_on(now)
        source.answered, source.failures = True, 0
        self._stalling.pop(peer, None)
        want.contributors.add(peer)
        want.arrived += 1
        want.writes += 1
        want.heard_at = now
        effects: list[Effect] = [WriteChunk(want.sha256, index, frame.data)]
        if want.arrived == want.chunks:
            effects += self._stop(want)
        return effects

    def _stray(self, pull: int, peer: AgentId, want: Want | None) -> list[Effect]:
        if want is not None or not self._first_pull < pull <= self._pull:
            self._refused["chunk that was never asked for"] += 1
            return []
        self._refused["chunk that came too late"] += 1
        return [Send(peer, BlobStop(pull))]

    def _ended(self, frame: BlobEnd, peer: AgentId, now: float) -> list[Effect]:
        want = self._pulls.get(frame.pull)
        if want is None or want.source != peer:
            self._refused["end of no pull"] += 1
            return []
        source, reason = want.sources[peer], one_line(frame.reason)
        if frame.why == NOT_ALLOWED:
            source.refused_grants.add(want.asked_as)
            if set(want.grants) <= source.refused_grants:
                source.verdict, source.reason = NOT_ALLOWED, reason
        elif frame.why == ABSENT:
            source.verdict, source.reason = ABSENT, reason
        else:
            self._blame(source, reason, now)
        self._take_back(want)
        return self._go_on(now)

    def _share_out(self, now: float) -> list[Effect]:
        """Give the free part of the window to those who hold less than an equal share."""
        config = self._config
        hungry = [
            each
            for each in self._active.values()
            if each.stage is Stage.PULLING and each.arrived < each.chunks
        ]
        if not hungry:
            return []
        share = max(1, min(config.window_per_pull_max, config.window_max // len(hungry)))
        effects: list[Effect] = []
        for want in hungry:
            mine = min(share, want.pace if want.pull else config.window_first)
            step = max(1, mine // 3)  # one BlobMore for a few chunks: each is a turn on both sides
            free = min(config.window_max - self._held, mine - want.held, want.chunks - want.upto)
            if self._owes(want) and free < step and free < want.chunks - want.upto:
                continue
            if free > 0:
                effects += self._more(want, free, now) if want.pull else self._ask(want, free, now)
        return effects

    def _more(self, want: Want, chunks: int, now: float) -> list[Effect]:
        if want.upto == want.arrived:
            want.heard_at = now  # it owed nothing until now
        self._credit(want, chunks)
        return [Send(want.source, BlobMore(want.pull, want.upto))]

    def _ask(self, want: Want, chunks: int, now: float) -> list[Effect]:
        source = want.choose(self._linked, now)
        if source is None:
            return self._wait_for_source(want, now)
        if want.alone and want.contributors - {source}:
            want.pause_until = 0.0
            return self._close(want, discard=True)
        self._pull += 1
        want.pull, want.source, want.heard_at = self._pull, source, now
        want.pace = self._config.window_first
        want.asked_as = want.granter_for(source)
        self._pulls[want.pull] = want
        self._credit(want, chunks)
        return [Send(source, self._ask_frame(want))]

    def _ask_frame(self, want: Want) -> BlobAsk:
        granter, grant = want.asked_as, want.grants[want.asked_as]
        return BlobAsk(want.pull, want.sha256, want.size, granter, grant, want.arrived, want.upto)

    def _credit(self, want: Want, chunks: int) -> None:
        want.upto += chunks
        self._held += chunks

    def _take_back(self, want: Want) -> None:
        """The pull is over: what it may still send is not waited for."""
        del self._pulls[want.pull]
        want.pull = 0
        self._held -= want.upto - want.arrived
        want.upto = want.arrived

    def _stop(self, want: Want) -> list[Effect]:
        if not want.pull:
            return []
        pull, source = want.pull, want.source
        self._take_back(want)
        return [Send(source, BlobStop(pull))]

    def _resend(self) -> list[Effect]:
        unsent, self._unsent, self._resend_at = self._unsent, {}, None
        effects: list[Effect] = []
        for pull, (peer, kind) in unsent.items():
            want = self._pulls.get(pull)
            if kind is BlobStop:
                effects.append(Send(peer, BlobStop(pull)))
            elif want is not None and kind is BlobAsk:
                effects.append(Send(peer, self._ask_frame(want)))
            elif want is not None:
                effects.append(Send(peer, BlobMore(pull, want.upto)))
        return effects

    # -- sources ------------------------------------------------------------------------------

    def _merge(self, want: Want, offer: Offer) -> None:
        for peer in want.merge(offer):
            self._by_source.setdefault(peer, {})[want.sha256] = None

    def _blame(self, source: Source, reason: str, now: float) -> None:
        source.failures += 1
        source.reason = reason
        source.paused_until = now + self._pause_s(source.failures, self._config.longest_pause_s)

    def _wait_for_source(self, want: Want, now: float) -> list[Effect]:
        """Nobody can be asked now: make room for others, or give up when nobody ever can."""
        if want.is_hopeless(self._linked):
            want.failed = f"Nobody gives it: {want.verdicts()}."
            return self._close(want, discard=True)
        want.for_source = True
        want.failures += 1
        want.pause_until = now + self._pause_s(want.failures, self._config.probe_s)
        want.reason = NOBODY_HERE
        soonest = want.soonest(self._linked)
        if soonest is not None:
            want.pause_until, want.reason = soonest.paused_until, soonest.reason or NOBODY_HERE
        # Space that is reserved and holds nothing is given back: promises are cheap to make.
        return self._close(want, discard=not want.arrived)

    # -- places among the active --------------------------------------------------------------

    def _go_on(self, now: float) -> list[Effect]:
        """Fill the places, then the window."""
        self._now = now
        effects = self._share_out(now)
        while len(self._active) < self._config.active_max and now >= self._open_not_before:
            want = self._next_ready()
            if want is None:
                break
            want.is_eldest = not self._has_eldest()
            want.ticket += 1
            want.stage = Stage.OPENING
            self._active[want.sha256] = want
            self._large += want.chunks > self._config.small_chunks
            effects.append(OpenPartial(want.sha256, want.size))
        return effects

    def _next_ready(self) -> Want | None:
        """The eldest if no active one is there for its age, else the smallest there is room for."""
        if self._by_age.first(()) is None:
            return None  # asked after every turn, and mostly all are active
        full = self._senders_with_enough()
        if not self._has_eldest():
            return self._by_age.first(full)
        first = self._small_ones.first(full)
        if first is None and self._large < self._config.large_active_max:
            return self._large_ones.first(full)
        return first

    def _senders_with_enough(self) -> set[AgentId]:
        """Nobody has all places; who is away has one, and who lets us wait one now and then."""
        active = Counter(each.on_behalf_of for each in self._active.values())
        full = {
            each
            for each, count in active.items()
            if count >= (self._config.per_sender_max if each in self._linked else 1)
        }
        return full | {
            each for each, (_, until) in self._stalling.items() if active[each] or until > self._now
        }

    def _stalled(self, peer: AgentId, now: float) -> None:
        failures, until = self._stalling.get(peer, (0, 0.0))
        if now >= until:  # those that stall together count as one
            pause_s = self._pause_s(failures + 1, self._config.longest_pause_s)
            self._stalling[peer] = (failures + 1, now + pause_s)

    def _has_eldest(self) -> bool:
        return any(each.is_eldest for each in self._active.values())

    def _set_ready(self, want: Want) -> None:
        want.stage = Stage.READY
        want.ticket += 1
        is_small = want.chunks <= self._config.small_chunks
        (self._small_ones if is_small else self._large_ones).add(want.remaining, want)
        self._by_age.add(want.order, want)

    def _close(self, want: Want, discard: bool) -> list[Effect]:
        """Give up the place, once everything that was to be written is answered."""
        effects = self._stop(want)
        want.stage, want.discard = Stage.CLOSING, discard or want.discard
        if want.writes:
            return effects
        effects.append(ClosePartial(want.sha256, want.discard))
        self._held -= want.held
        if want.discard:
            want.written = 0
            want.contributors.clear()
            want.foreign, want.told = False, -1
        want.arrived = want.upto = want.written
        want.discard = False
        return effects + self._leave(want)

    def _leave(self, want: Want) -> list[Effect]:
        """Back to the line, to a pause, or away."""
        self._vacate(want)
        if want.dropped:
            self._forget(want)
        elif want.failed:
            return self._fail(want)
        elif want.pause_until:
            want.stage = Stage.PAUSED
            want.ticket += 1
            self._by_time.add(want.pause_until, want)
            want.pause_until = 0.0
        else:
            self._set_ready(want)
        return []

    def _vacate(self, want: Want) -> None:
        if self._active.pop(want.sha256, None) is not None:
            self._large -= want.chunks > self._config.small_chunks
            want.is_eldest = False

    def _finish(self, want: Want) -> list[Effect]:
        if want.written < want.chunks:
            return []
        want.stage = Stage.FINISHING
        return [FinishBlob(want.sha256)]

    def _succeed(self, want: Want, now: float) -> list[Effect]:
        self._vacate(want)
        self._forget(want)
        ready: list[Effect] = (
            [] if want.dropped else [BlobReady(want.sha256, frozenset(want.contributors))]
        )
        return ready + self._go_on(now)

    def _fail(self, want: Want) -> list[Effect]:
        """It can't be had, unless another message is right about its size."""
        self._forget(want)
        if not want.rivals:
            return [BlobFailed(want.sha256, want.failed)]
        size = want.rivals[0].size
        other = Want(want.sha256, size, chunk_count(size), want.order, ticket=want.ticket)
        self._wants[want.sha256] = other
        for offer in want.rivals:
            if offer.size == size:
                self._merge(other, offer)
            else:
                other.rivals.append(offer)
        self._set_ready(other)
        return []

    def _forget(self, want: Want) -> None:
        want.ticket += 1
        del self._wants[want.sha256]
        for peer in want.sources:
            mine = self._by_source[peer]
            del mine[want.sha256]
            if not mine:
                del self._by_source[peer]

    # -- small things -------------------------------------------------------------------------

    def _owes(self, want: Want) -> bool:
        return bool(want.pull) and want.upto > want.arrived

    def _received(self, want: Want) -> int:
        return bytes_in(want.written, want.size)

    def _tell(self, want: Want) -> list[Effect]:
        percent = want.written * 100 // want.chunks if want.chunks else 100
        if percent == want.told:
            return []
        want.told = percent
        return [BlobProgress(want.sha256, self._received(want), want.size)]

    def _pause_s(self, failures: int, longest_s: float) -> float:
        return backoff_s(failures - 1, self._config.pause_s, longest_s, self._rng)
