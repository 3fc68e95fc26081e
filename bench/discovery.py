"""How soon does a node that starts see its first peer, and how soon is a crash noticed?

By the registry's files and by mDNS, beside Zenoh's scouting and Zyre's beacons. All of it runs in
a network namespace made for it, from which nothing can leave; where none can be made, our own
nodes run on loopback and the others, which multicast or broadcast, are left out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from meshagent.bench.answers import Answer, Headline
from meshagent.bench.children import Child, say
from meshagent.bench.contestants import takes_part
from meshagent.bench.harness import Setting, interleave, ratio_of, spreads_of
from meshagent.bench.nodes import NodeProcesses

__all__ = ["measure", "why_no_namespace"]

AMOUNTS = {"tiny": 1, "quick": 2, "full": 7}
FIRST, CRASH = "start_to_first_peer_s", "crash_to_noticed_s"
FILE, MDNS, BARE = "meshagent, file", "meshagent, mdns", "floor: bare interpreter"
WAIT_S = 60.0
INTERFACE, ADDRESS = "bench0", "10.88.0.1"
SET_UP = (
    "set -e; ip link set lo up; "
    f"ip link add {INTERFACE} type veth peer name bench1; "
    f"ip address add {ADDRESS}/24 brd + dev {INTERFACE}; "
    f"ip link set {INTERFACE} up; ip link set bench1 up; "
    f'ip route add 224.0.0.0/4 dev {INTERFACE}; exec "$@"'
)
Figures = dict[str, float]


def measure(setting: Setting) -> Answer:
    """Seconds of each contestant, and the ratios."""
    answer = Answer()
    names = []
    blocked = why_no_namespace()
    for name in ("zenoh", "pyre"):
        if takes_part(name, setting, answer):
            if blocked:
                answer.leave_out(name, f"it multicasts, and {blocked}")
            else:
                names.append(name)
    if "pyre" in names and setting.extent != "full":
        answer.leave_out("pyre, crash", "it notices after 30 s by design; --full waits for it")
    if blocked:
        rounds = _rounds(setting, [])
    else:
        with Child(
            "meshagent.bench.discovery", setting.extent, str(setting.folder), ",".join(names),
            notes=setting.folder / "discovery.stderr", prefix=_unshare("sh", "-c", SET_UP, "sh"),
        ) as inside:  # fmt: skip
            rounds = inside.answer()  # all rounds are its first line, and take their time
    answer.cases = {name: spreads_of(taken) for name, taken in rounds.items()}
    answer.headlines = _headlines(rounds)
    return answer


def _headlines(rounds: dict[str, list[Figures]]) -> list[Headline]:
    first = {name: [each[FIRST] for each in taken] for name, taken in rounds.items()}
    found = [
        Headline(f"discovery.{key}_first_peer_to_bare", ratio_of(first[name], first[BARE]), "lower")
        for name, key in ((FILE, "file"), (MDNS, "mdns"))
    ]
    return found + [
        Headline(
            f"discovery.mdns_first_peer_to_{other}", ratio_of(first[MDNS], first[other]), "lower"
        )
        for other in ("zenoh", "pyre")
        if other in first
    ]


def why_no_namespace() -> str:
    """Why this user can't have a network of its own here; empty when it can."""
    for each in ("unshare", "ip"):
        if shutil.which(each) is None:
            return f"there is no {each!r} to make a network namespace with"
    words = _unshare("sh", "-c", SET_UP, "sh", "true")
    tried = subprocess.run(words, capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else f"no network namespace: {tried.stderr.strip()}"


def _unshare(*words: str) -> list[str]:
    """An ordinary user becomes root of a user namespace, and of nothing else."""
    return ["unshare", "-n" if os.geteuid() == 0 else "-rn", *words]


def _rounds(setting: Setting, others: list[str]) -> dict[str, list[Figures]]:
    cases: dict[str, Callable[[], Figures]] = {
        FILE: partial(_mesh, setting.folder, "file"),
        MDNS: partial(_mesh, setting.folder, "mdns"),
        BARE: _bare,
    }
    words = {"zenoh": (INTERFACE, ADDRESS), "pyre": (INTERFACE,)}
    for name in others:
        crash = name != "pyre" or setting.extent == "full"
        cases[name] = partial(_scouts, setting.folder, name, words[name], crash)
    return interleave(cases, AMOUNTS[setting.extent])


def _mesh(folder: Path, how: str) -> Figures:
    with NodeProcesses(folder) as nodes:
        project = nodes.init("discovery")
        resident = nodes.join(project, "resident", "--discovery", how)
        joiner = nodes.start(project, "joiner", "--discovery", how)
        nodes.until(lambda: joiner.sees(resident), WAIT_S, "the joiner sees the resident")
        first = joiner.when(resident, "alive") - joiner.started
        nodes.until(lambda: resident.sees(joiner), WAIT_S, "the resident sees the joiner")
        crashed = time.monotonic()
        joiner.kill()
        nodes.until(lambda: resident.sees(joiner, "gone"), WAIT_S, "the crash is noticed")
        return {FIRST: first, CRASH: resident.when(joiner, "gone") - crashed}


def _bare() -> Figures:
    began = time.monotonic()
    subprocess.run([sys.executable, "-P", "-c", "pass"], check=True)
    return {FIRST: time.monotonic() - began}


def _scouts(folder: Path, name: str, words: tuple[str, ...], crash: bool) -> Figures:
    module = f"meshagent.bench.contestants.{name}"
    with Child(module, *words, notes=folder / f"{name}.stderr") as resident:
        try:
            assert resident.wait_ready() == "open"
            joiner = Child(module, *words, notes=folder / f"{name}.stderr")
            try:
                assert joiner.wait_ready() == "open"
                assert joiner.answer(WAIT_S) == "met"
                figures = {FIRST: time.monotonic() - joiner.started}
                assert resident.answer(WAIT_S) == "met"
                crashed = time.monotonic()
            finally:
                joiner.kill()
                joiner.close()
            if crash:
                assert resident.answer(WAIT_S) == "alone"
                figures[CRASH] = time.monotonic() - crashed
            return figures
        finally:
            resident.kill()


def _inside(extent: str, folder: str, others: str) -> None:
    """In the namespace: measure, and tell the parent."""
    setting = Setting(extent, Path(folder), frozenset())  # type: ignore[arg-type]
    say(_rounds(setting, [name for name in others.split(",") if name]))


if __name__ == "__main__":
    _inside(*sys.argv[1:])
