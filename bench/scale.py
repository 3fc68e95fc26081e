"""What a mesh costs as it grows: real nodes on loopback, in a temporary mesh.

    python -m meshagent.bench.scale --nodes 2,10,25,50 [--window 20] [--json]

For each size: start-up until all see all, then, after settling, the processor time, the memory
and the frames of a node that has nothing to do. Linux only: the figures are the kernel's.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from typing import Any

from meshagent.bench.harness import machine_facts, spread_of
from meshagent.bench.nodes import NodeProcess, NodeProcesses

__all__ = ["main", "measure"]

SIZES = "2,10,25,50"
WINDOW_S = 20.0  # the shortest over which a node's half percent of a core is told from noise
SETTLE_S = 10.0  # gossip of the start has died down, every probe order has been used
START_TIMEOUT_S = 120.0
MIB = 1024 * 1024


def measure(sizes: list[int], window_s: float) -> dict[str, Any]:
    """The figures for every size."""
    facts = machine_facts()
    return {"machine": facts, "scale": [_measure_size(size, window_s) for size in sizes]}


def _measure_size(size: int, window_s: float) -> dict[str, Any]:
    with NodeProcesses() as nodes:
        members, times = _start(nodes, size)
        time.sleep(SETTLE_S)
        idle = _idle(members, window_s)
        memory = [member.memory() for member in members]
    return {
        "nodes": size,
        **times,
        **idle,
        **{
            f"{kind}_mib": spread_of([each[kind] / MIB for each in memory]).as_json()
            for kind in ("rss", "pss", "uss")
        },
    }


def _start(nodes: NodeProcesses, size: int) -> tuple[list[NodeProcess], dict[str, Any]]:
    project = nodes.init("scale")
    members = [
        nodes.start(project, "worker", "--name", f"w{number}", "--discovery", "file")
        for number in range(size)
    ]
    nodes.until(lambda: all(each.joined for each in members), START_TIMEOUT_S, "all have joined")
    last_joined = max(each.started + each.joined_after_s for each in members)
    cpu_joined = [each.cpu_s() for each in members]
    pairs = size * (size - 1)
    nodes.until(lambda: _alive(members) == pairs, START_TIMEOUT_S, "all see all")
    return members, {
        "first_start_to_last_joined_s": last_joined - members[0].started,
        "last_joined_to_all_see_all_s": max(0.0, _last_event(members) - last_joined),
        "cpu_until_joined_s": spread_of(cpu_joined).as_json(),
        "cpu_until_all_see_all_s": spread_of([each.cpu_s() for each in members]).as_json(),
    }


def _alive(members: list[NodeProcess]) -> int:
    return sum(peer["state"] == "alive" for each in members for peer in each.view.values())


def _last_event(members: list[NodeProcess]) -> float:
    return max(each.events[-1][0] for each in members)


def _idle(members: list[NodeProcess], window_s: float) -> dict[str, Any]:
    begin, cpu, sent = time.monotonic(), [each.cpu_s() for each in members], _segments(members)
    events = sum(len(each.events) for each in members)
    time.sleep(window_s)
    passed = time.monotonic() - begin
    used = [
        100 * (each.cpu_s() - before) / passed for each, before in zip(members, cpu, strict=True)
    ]
    now = _segments(members)
    frames = None if sent is None or now is None else (now - sent) / passed / len(members)
    return {
        "idle_window_s": passed,
        "idle_cpu_percent_of_a_core": spread_of(used).as_json(),
        "idle_frames_per_s_per_node": frames,
        "idle_peer_events": sum(len(each.events) for each in members) - events,
    }


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


def _print(report: dict[str, Any]) -> None:
    print(
        f"{'nodes':>5}{'all joined':>12}{'all see all':>13}{'idle CPU':>10}{'frames/s':>10}"
        f"{'RSS':>7}{'PSS':>7}{'USS':>7}"
    )
    for row in report["scale"]:
        frames = row["idle_frames_per_s_per_node"]
        print(
            f"{row['nodes']:>5}{row['first_start_to_last_joined_s']:>10.2f} s"
            f"{row['last_joined_to_all_see_all_s']:>11.2f} s"
            f"{row['idle_cpu_percent_of_a_core']['median']:>8.3f} %"
            f"{'-' if frames is None else format(frames, '.1f'):>10}"
            f"{row['rss_mib']['median']:>7.1f}{row['pss_mib']['median']:>7.1f}"
            f"{row['uss_mib']['median']:>7.1f}"
        )


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m meshagent.bench.scale")
    parser.add_argument("--nodes", default=SIZES, help="sizes, with commas between them")
    parser.add_argument("--window", type=float, default=WINDOW_S, help="seconds of idleness")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if not sys.platform.startswith("linux"):
        parser.error("the figures are read from Linux's /proc")
    sizes = [int(size) for size in options.nodes.split(",")]
    report = measure(sizes, max(options.window, WINDOW_S))
    if options.json:
        print(json.dumps(report))
    else:
        _print(report)


if __name__ == "__main__":
    main()
