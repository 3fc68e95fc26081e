"""What does a mesh cost as it grows?

Real nodes on loopback, in a temporary mesh. For each size: start-up until all see all, then, after
settling, the processor time, the memory and the frames of nodes that have nothing to do. Linux
only: the figures are the kernel's. Beside them the membership protocol alone, simulated, in meshes
that no machine could run: with --full up to 10,000 nodes, as far as there is memory for them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from meshagent.bench.answers import Answer, Headline
from meshagent.bench.children import Child
from meshagent.bench.harness import Setting, Spread, spread_of
from meshagent.bench.nodes import NodeProcess, NodeProcesses
from meshagent.bench.simulated import bytes_needed, case_of, is_known_whole

__all__ = ["measure"]

START_TIMEOUT_S = 120.0
IDLE_PERCENT_BAR = 15.0  # of one core, for all nodes of the mesh of 25 together
BAR_NODES = 25
MIB = 1024 * 1024
GIB = 1024 * MIB
SIMULATE_TIMEOUT_S = 1800.0  # 10,000 nodes take some five minutes, on a busy machine more


@dataclass(frozen=True, slots=True)
class ScaleAmount:
    """How much is measured.

    A window of 20 s is the shortest over which a node's half percent of a core is told from noise;
    after 10 s the gossip of the start has died down. A quick look settles for less.
    """

    nodes: tuple[int, ...]
    settle_s: float
    window_s: float
    simulated: tuple[int, ...] = ()


AMOUNTS = {
    "tiny": ScaleAmount((2,), 0.0, 0.5, (10,)),
    "quick": ScaleAmount((2, 25), 3.0, 5.0, (100,)),
    "full": ScaleAmount((2, 10, 25, 50), 10.0, 20.0, (100, 1_000, 4_096, 10_000)),
}


def measure(setting: Setting) -> Answer:
    """The figures for every size."""
    answer, amount = Answer(), AMOUNTS[setting.extent]
    if sys.platform == "linux":
        for size in amount.nodes:
            figures = _measure_size(setting.folder, size, amount)
            answer.cases[f"{size} nodes"] = figures
            if size == BAR_NODES:
                used = figures["idle_cpu_percent_in_all"]
                bar = IDLE_PERCENT_BAR
                answer.headlines.append(
                    Headline(f"scale.{size}_idle_cpu", used, "lower", unit="% of a core", bar=bar)
                )
    else:
        answer.leave_out("real nodes", "the figures are read from Linux's /proc")
    for size in amount.simulated:
        _simulate(answer, setting.folder, size)
    return answer


def _measure_size(folder: Path, size: int, amount: ScaleAmount) -> dict[str, Spread]:
    with NodeProcesses(folder) as nodes:
        members, times = _start(nodes, size)
        time.sleep(amount.settle_s)
        idle = _idle(members, amount.window_s)
        memory = [member.memory() for member in members]
    sizes = {
        f"{kind}_mib": spread_of([each[kind] / MIB for each in memory])
        for kind in ("rss", "pss", "uss")
    }
    return times | idle | sizes


def _start(nodes: NodeProcesses, size: int) -> tuple[list[NodeProcess], dict[str, Spread]]:
    project = nodes.init("scale")
    members = [
        nodes.start(project, "worker", "--name", f"w{number}", "--discovery", "file")
        for number in range(size)
    ]
    nodes.until(lambda: all(each.joined for each in members), START_TIMEOUT_S, "all have joined")
    last_joined = max(each.started + each.joined_after_s for each in members)
    pairs = size * (size - 1)
    nodes.until(lambda: _alive(members) == pairs, START_TIMEOUT_S, "all see all")
    converged = max(0.0, _last_event(members) - last_joined)
    return members, {
        "first_start_to_last_joined_s": spread_of([last_joined - members[0].started]),
        "last_joined_to_all_see_all_s": spread_of([converged]),
        "cpu_until_all_see_all_s": spread_of([each.cpu_s() for each in members]),
    }


def _alive(members: list[NodeProcess]) -> int:
    return sum(peer["state"] == "alive" for each in members for peer in each.view.values())


def _last_event(members: list[NodeProcess]) -> float:
    return max(each.events[-1][0] for each in members)


def _idle(members: list[NodeProcess], window_s: float) -> dict[str, Spread]:
    begin, cpu, sent = time.monotonic(), [each.cpu_s() for each in members], _segments(members)
    time.sleep(window_s)
    passed = time.monotonic() - begin
    used = [
        100 * (each.cpu_s() - before) / passed for each, before in zip(members, cpu, strict=True)
    ]
    figures = {
        "idle_cpu_percent_of_a_core": spread_of(used),
        "idle_cpu_percent_in_all": spread_of([sum(used)]),
    }
    now = _segments(members)
    # Less than before: a link of two that met was closed, and took its count along.
    if sent is not None and now is not None and now >= sent:
        frames = (now - sent) / passed / len(members)
        figures["idle_frames_per_s_per_node"] = spread_of([frames])
    return figures


def _segments(members: list[NodeProcess]) -> int | None:
    """TCP segments with data that these nodes sent; None when `ss` is not there to say."""
    if shutil.which("ss") is None:
        return None
    listed = subprocess.run(
        ["ss", "-tinpOH", "state", "established"], capture_output=True, text=True, check=True
    ).stdout
    pids = {str(member.pid) for member in members}
    total = 0
    for line in listed.splitlines():
        owner, sent = re.search(r"pid=(\d+)", line), re.search(r"data_segs_out:(\d+)", line)
        if owner and sent and owner[1] in pids:
            total += int(sent[1])
    return total


def _simulate(answer: Answer, folder: Path, size: int) -> None:
    needed, available = bytes_needed(size), _available_bytes()
    if needed > available:
        answer.leave_out(
            case_of(size),
            f"it takes {needed / GIB:.1f} GiB of memory, and {available / GIB:.1f} are free",
        )
        return
    module = "meshagent.bench.simulated"
    with Child(module, str(size), notes=folder / "simulated.txt") as child:
        figures = child.answer(SIMULATE_TIMEOUT_S)
    answer.cases[case_of(size)] = {name: spread_of([each]) for name, each in figures.items()}
    if not is_known_whole(size):
        answer.leave_out(
            f"until all know, {size} nodes",
            "a node keeps no more than 4,096 members, and can't check the word of an accuser that "
            "it does not keep",
        )


def _available_bytes() -> int:
    """Memory that nobody would miss, as the kernel sees it; half of all where it does not say."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
