"""How many durable messages a second, end to end?

One pair with 500 coroutines that each wait for their own message to be delivered; the bulk way;
and eight senders to one. Floor: SQLite rows in batches of 100, synchronous=FULL.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from meshagent.bench.agent import features
from meshagent.bench.answers import Answer, Headline
from meshagent.bench.contestants import takes_part
from meshagent.bench.floors import rows_per_second
from meshagent.bench.harness import Setting, interleave, ratio_of, spread_of
from meshagent.bench.pair import MeshPair

if TYPE_CHECKING:
    from meshagent.bench.contestants.nats import JetStream

__all__ = ["measure"]

COROUTINES = 500
SIZES = (200, 4096)
TO_NATS_DEFAULT_BAR = 5.0
TO_NATS_ALWAYS_BAR = 10.0
MANY_TO_ONE_BY_ONE_BAR = 1.5
OURS, MANY, FLOOR = "meshagent", "meshagent send_many", "floor: SQLite rows"
NATS = {"nats default": False, "nats sync always": True}
LONG, LONG_ROUNDS = "200 B long", 3
Rounds = dict[str, Callable[[], float]]


@dataclass(frozen=True, slots=True)
class ThroughputAmount:
    """How much is measured: messages of a round, ours and those of slower contestants.

    Ours are so many more that both last about as long: what comes first in a round is the slowest,
    on caches that somebody else has used since.
    """

    rounds: int
    ours: int
    theirs: int
    senders: int = 8
    long: int = 0

    def of(self, size: int) -> int:
        """Messages of ours of so many bytes."""
        return self.ours if size == SIZES[0] else self.ours // 10

    def of_nats(self, name: str) -> int:
        """Messages of theirs: with a sync for each, half as many last long enough."""
        return self.theirs // 2 if NATS[name] else self.theirs


AMOUNTS = {
    "tiny": ThroughputAmount(1, 24, 24, senders=2),
    "quick": ThroughputAmount(3, 20_000, 4_000),
    "full": ThroughputAmount(7, 30_000, 6_000, long=150_000),
}
"""All rounds of a case go into one inbox that nobody reads: together less than it may hold."""


def measure(setting: Setting) -> Answer:
    """Messages per second of each contestant, by size and number of senders, and the ratios."""
    amount, answer = AMOUNTS[setting.extent], Answer()
    with_nats = takes_part("nats", setting, answer)
    if "send_many" not in features():
        answer.leave_out(MANY, "not in this version")
    with ExitStack() as stack:
        cases = _pair_cases(setting, stack, amount, with_nats)
        taken = interleave(cases, amount.rounds, 1, setting.folder)
    with ExitStack() as stack:
        cases = _many_sender_cases(setting, stack, amount, with_nats)
        taken |= interleave(cases, amount.rounds, 1, setting.folder)
    if amount.long:
        taken |= interleave(_long_cases(setting, amount.long), LONG_ROUNDS, 1, setting.folder)
    answer.cases = {name: {"per_s": spread_of(values)} for name, values in taken.items()}
    answer.headlines = _headlines(taken, amount.senders)
    return answer


def _headlines(taken: dict[str, list[float]], senders: int) -> list[Headline]:
    found = []
    bars = {
        (OURS, "nats default"): TO_NATS_DEFAULT_BAR,
        (OURS, "nats default told"): TO_NATS_DEFAULT_BAR,
        (OURS, "nats default in one process"): TO_NATS_DEFAULT_BAR,
        (OURS, "nats sync always"): TO_NATS_ALWAYS_BAR,
        (OURS, "nats sync always told"): TO_NATS_ALWAYS_BAR,
        (OURS, "nats sync always in one process"): TO_NATS_ALWAYS_BAR,
        (MANY, OURS): MANY_TO_ONE_BY_ONE_BAR,
    }
    for what in (*(f"{size} B" for size in SIZES), LONG, f"{senders} senders"):
        for above, below in ((OURS, FLOOR), *bars):
            over, under = taken.get(f"{above}, {what}"), taken.get(f"{below}, {what}")
            if over is None or under is None:
                continue
            bar = bars.get((above, below)) if what == f"{SIZES[0]} B" else None
            to = {FLOOR: "floor", OURS: "one_by_one"}.get(below, below.replace(" ", "_"))
            name = ("many_" if above == MANY else "") + what.replace(" ", "").lower()
            ratio = ratio_of(over, under)
            found.append(Headline(f"throughput.{name}_to_{to}", ratio, "higher", bar=bar))
    return found


def _pair_cases(
    setting: Setting, stack: ExitStack, amount: ThroughputAmount, with_nats: bool
) -> Rounds:
    cases: Rounds = {}
    for size in SIZES:
        ours = amount.of(size)
        pair = stack.enter_context(MeshPair(setting.folder / f"mesh-{size}"))
        burst = partial(pair.ask, "burst", count=ours, size=size, coroutines=COROUTINES)
        cases[f"{OURS}, {size} B"] = _rate(ours, _settling(pair, burst))
        if "send_many" in features():
            pair = stack.enter_context(MeshPair(setting.folder / f"many-{size}"))
            many = partial(pair.ask, "many", count=ours, size=size)
            cases[f"{MANY}, {size} B"] = _rate(ours, _settling(pair, many))
        cases[f"{FLOOR}, {size} B"] = partial(rows_per_second, setting.folder, ours, size)
    for name in NATS if with_nats else ():
        server, theirs = _jetstream(setting, stack, name, 1), amount.of_nats(name)
        for size in SIZES:
            work = (theirs, size, COROUTINES)
            cases[f"{name}, {size} B"] = _rate(theirs, partial(server.seconds, *work))
        told = partial(server.seconds, theirs, SIZES[0], COROUTINES, told=True)
        cases[f"{name} told, {SIZES[0]} B"] = _rate(theirs, told)
        alone = partial(server.seconds_in_one_process, theirs, SIZES[0], COROUTINES)
        cases[f"{name} in one process, {SIZES[0]} B"] = _rate(theirs, alone)
    return cases


def _many_sender_cases(
    setting: Setting, stack: ExitStack, amount: ThroughputAmount, with_nats: bool
) -> Rounds:
    """Several senders to one recipient, each with its share of the coroutines and the messages."""
    mesh = stack.enter_context(MeshPair(setting.folder / "senders", amount.senders))
    each, coroutines = amount.ours // amount.senders, COROUTINES // amount.senders

    def ours() -> float:
        began = time.monotonic()
        mesh.ask_all("burst", count=each, size=SIZES[0], coroutines=coroutines)
        return time.monotonic() - began

    what = f"{amount.senders} senders"
    cases = {
        f"{OURS}, {what}": _rate(each * amount.senders, _settling(mesh, ours)),
        f"{FLOOR}, {what}": lambda: rows_per_second(setting.folder, amount.ours, SIZES[0]),
    }
    for name in NATS if with_nats else ():
        theirs = amount.of_nats(name) // amount.senders * amount.senders
        server = _jetstream(setting, stack, name, amount.senders)
        work = (theirs, SIZES[0], coroutines)
        cases[f"{name}, {what}"] = _rate(theirs, partial(server.seconds, *work))
    return cases


def _long_cases(setting: Setting, count: int) -> Rounds:
    """More than a journal holds: what a burst leaves for later has to be done here. An inbox has
    room for one of them."""
    rounds = itertools.count()

    def burst() -> float:
        with MeshPair(setting.folder / f"long-{next(rounds)}") as pair:
            return float(pair.ask("burst", count=count, size=SIZES[0], coroutines=COROUTINES))

    return {
        f"{OURS}, {LONG}": _rate(count, burst),
        f"{FLOOR}, {LONG}": lambda: rows_per_second(setting.folder, count, SIZES[0]),
    }


def _settling(pair: MeshPair, seconds: Callable[[], float]) -> Callable[[], float]:
    """Beside the time that is taken: what is left to do must not burden whoever is next."""

    def settled() -> float:
        taken = seconds()
        pair.settle()
        return taken

    return settled


def _rate(count: int, seconds: Callable[[], float]) -> Callable[[], float]:
    return lambda: count / seconds()


def _jetstream(setting: Setting, stack: ExitStack, name: str, publishers: int) -> JetStream:
    from meshagent.bench.contestants.nats import JetStream

    folder = setting.folder / f"{name.replace(' ', '-')}-{publishers}"
    server = JetStream(folder, sync_always=NATS[name], publishers=publishers)
    return stack.enter_context(closing(server))
