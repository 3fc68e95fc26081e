"""The probes that wait for an answer: our own, and those that we make for others.

Never sends anything. Invariant: a probe ends once, by the answer of its target or of a helper that
was asked, or because its time is up.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshagent.core.model.peers import AgentId

__all__ = ["RELAYS_MAX", "Probe", "Probes", "Relay"]

RELAYS_MAX = 256  # probes made for others at once; beyond it a requester gets no answer


@dataclass(slots=True)
class Probe:
    """A Ping to `target` that has no answer yet."""

    seq: int
    target: AgentId
    started: float
    ask_helpers_at: float
    fail_at: float
    helpers: tuple[AgentId, ...] | None = None
    """The members asked to probe for us; None until they are asked."""
    nacks: int = 0


@dataclass(slots=True)
class Relay:
    """A probe made for `requester`, who asked with `their_seq`."""

    requester: AgentId
    target: AgentId
    their_seq: int
    nack_at: float


class Probes:
    """Every probe under way, by the number in its Ping."""

    def __init__(self) -> None:
        self._seq = 0
        self._probes: dict[int, Probe] = {}
        self._relays: dict[int, Relay] = {}

    @property
    def relay_count(self) -> int:
        """How many probes are under way for others."""
        return len(self._relays)

    def __len__(self) -> int:
        return len(self._probes)

    def start(self, target: AgentId, now: float, ask_helpers_at: float, fail_at: float) -> int:
        """Probe `target`; the number for its Ping."""
        self._seq += 1
        self._probes[self._seq] = Probe(self._seq, target, now, ask_helpers_at, fail_at)
        return self._seq

    def start_relay(self, relay: Relay) -> int | None:
        """Probe for somebody else; the number for the Ping, or None when too many are under way."""
        if len(self._relays) >= RELAYS_MAX:
            return None
        self._seq += 1
        self._relays[self._seq] = relay
        return self._seq

    def answered(self, seq: int, peer: AgentId) -> Probe | Relay | None:
        """What an Ack from `peer` ends; None when `peer` can't answer for it."""
        relay = self._relays.get(seq)
        if relay is not None and relay.target == peer:
            return self._relays.pop(seq)
        probe = self._probes.get(seq)
        if probe is not None and (peer == probe.target or peer in (probe.helpers or ())):
            return self._probes.pop(seq)
        return None

    def nacked(self, seq: int) -> None:
        """A helper is well and got no answer either."""
        if seq in self._probes:
            self._probes[seq].nacks += 1

    def late(self, now: float) -> list[Probe]:
        """Probes without an answer in time."""
        return [each for each in self._probes.values() if now >= each.ask_helpers_at]

    def end(self, probe: Probe) -> None:
        """It is decided, or needs no answer any more."""
        del self._probes[probe.seq]

    def end_all(self) -> None:
        """Give up our own probes."""
        self._probes.clear()

    def expired_relays(self, now: float) -> list[Relay]:
        """Probes for others whose target did not answer; they end."""
        expired = [seq for seq, relay in self._relays.items() if now >= relay.nack_at]
        return [self._relays.pop(seq) for seq in expired]

    def deadlines(self) -> list[float]:
        """When each of them is due."""
        own = [
            each.ask_helpers_at if each.helpers is None else each.fail_at
            for each in self._probes.values()
        ]
        return own + [each.nack_at for each in self._relays.values()]
