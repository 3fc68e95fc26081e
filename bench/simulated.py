"""How soon is a crash known, and what does idling cost, in a mesh of this size? Simulated.

`python -m meshagent.bench.simulated SIZE` says its figures in one line and ends: a process of its
own, so that gigabytes of members go back to the machine before anything else is measured.
Invariant: every node is the real membership engine with its real limits. So in a mesh of more than
MEMBERS_MAX a node keeps that many, and who keeps the one that crashed is who can come to know.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from meshagent.bench.children import say
from meshagent.core.model.peers import AgentId
from meshagent.core.wire.frames import MEMBERS_MAX
from meshagent.simulator.swarm import Swarm
from meshagent.simulator.world import World

__all__ = ["bytes_needed", "case_of", "figures_of", "is_known_whole"]

IDLE_S = 10.0
KNOWN_WITHIN_S = 60.0
STEP_S = 0.05
PAIR_BYTES = 180  # what a node holds about another one takes 145 at 10,000 nodes


def is_known_whole(size: int) -> bool:
    """Whether each node of such a mesh keeps all others."""
    return size <= MEMBERS_MAX


def case_of(size: int) -> str:
    """What such a mesh is called in the answer."""
    if is_known_whole(size):
        return f"{size} nodes, simulated"
    return f"{size} nodes that keep {MEMBERS_MAX - 1} others each, simulated"


def bytes_needed(size: int) -> int:
    """The memory that it takes to simulate so many, with some to spare."""
    return size * min(size, MEMBERS_MAX) * PAIR_BYTES


def figures_of(size: int) -> dict[str, float]:
    """One crash in a swarm whose members know each other: virtual seconds, and frames."""
    began = time.perf_counter()
    swarm = Swarm(World(seed=size))
    dead, *_ = swarm.add(size, introduced=True)
    swarm.world.run(IDLE_S)
    frames = swarm.frames / IDLE_S / size
    swarm.crash([dead])
    keepers = swarm.believers(dead)
    assert keepers, "nobody keeps the one that crashes"
    known = {"crash_to_99_percent_know_virtual_s": _until_believed_by(swarm, dead, keepers // 100)}
    if is_known_whole(size):
        # Beyond that, some hear only from accusers that they do not keep and so can't check; they
        # go on believing until their own probe comes round, which is an hour.
        rest_s = _until_believed_by(swarm, dead, 0)
        known["crash_to_all_know_virtual_s"] = rest_s + known["crash_to_99_percent_know_virtual_s"]
    return {
        **known,
        "idle_frames_per_s_per_node": frames,
        "nodes_that_kept_the_crashed": keepers,
        "simulated_in_s": time.perf_counter() - began,
        **_memory(),
    }


def _until_believed_by(swarm: Swarm, dead: AgentId, believers_max: int) -> float:
    return swarm.world.run_until(
        lambda: swarm.believers(dead) <= believers_max, KNOWN_WITHIN_S, STEP_S
    )


def _memory() -> dict[str, float]:
    """The most that this process ever had, where the kernel says so."""
    # Not getrusage: what the process that started us had before counts there too.
    status = Path("/proc/self/status")
    if not status.exists():
        return {}
    (line,) = (each for each in status.read_text().splitlines() if each.startswith("VmHWM:"))
    return {"simulated_in_mib": int(line.split()[1]) / 1024}


if __name__ == "__main__":
    say(figures_of(int(sys.argv[1])))
