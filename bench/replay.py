"""What a backlog costs: messages for an absent peer, then its return; next to live delivery.

    python -m meshagent.bench.replay [--messages 100000] [--json]

One sender in this process, one recipient as a process of its own, over loopback with CURVE, both
synced. Live and replayed messages are the same, so the ratio of their rates is the figure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

from meshagent.bench.harness import machine_facts
from meshagent.bench.nodes import NodeProcesses

__all__ = ["main", "measure"]

MESSAGES = 100_000
TEXT = "x" * 200
SENDERS = 500  # coroutines that each wait for their own message to be safe
SAMPLE = 1000
DRAIN_TIMEOUT_S = 600.0


def measure(messages: int) -> dict[str, Any]:
    """Live rate, latency of `send` at both ends of a growing backlog, memory, and the drain."""
    with NodeProcesses() as nodes:
        project = nodes.init("replay")
        figures = asyncio.run(_measure(nodes, project, messages))
    return {"machine": machine_facts(), "replay": figures}


async def _measure(nodes: NodeProcesses, project: Path, messages: int) -> dict[str, Any]:
    import meshagent

    async with meshagent.join(
        role="sender", dir=project, listen="127.0.0.1", discovery="file"
    ) as sender:
        recipient = await asyncio.to_thread(nodes.join, project, "recipient", "--discovery", "file")
        live_s, _ = await _send(sender, recipient.agent, messages // 5)
        live_s += await _drained(sender)
        await asyncio.to_thread(nodes.end, recipient)
        before = _rss_mib()
        _, latencies = await _send(sender, recipient.agent, messages)
        grown = _rss_mib() - before
        again = await asyncio.to_thread(nodes.join, project, "recipient", "--discovery", "file")
        drain_s = await _drained(sender)
        assert again.agent == recipient.agent
    return {
        "messages": messages,
        "live_per_s": round(messages // 5 / live_s),
        "replay_per_s": round(messages / drain_s),
        "replay_to_live": round(messages / drain_s / (messages // 5 / live_s), 2),
        "send_ms_first": round(1000 * statistics.median(latencies[:SAMPLE]), 3),
        "send_ms_last": round(1000 * statistics.median(latencies[-SAMPLE:]), 3),
        "sender_rss_grown_mib": round(grown, 1),
    }


async def _send(sender: Any, to: str, messages: int) -> tuple[float, list[float]]:
    """How long until all were safe here, and each one's latency in the order they ended."""
    latencies: list[float] = []
    left = iter(range(messages))

    async def one_after_the_other() -> None:
        for _ in left:
            started = time.perf_counter()
            await sender.send(to, TEXT)
            latencies.append(time.perf_counter() - started)

    started = time.perf_counter()
    await asyncio.gather(*(one_after_the_other() for _ in range(SENDERS)))
    return time.perf_counter() - started, latencies


async def _drained(sender: Any) -> float:
    """How long until nothing waits any more."""
    started = time.perf_counter()
    async with asyncio.timeout(DRAIN_TIMEOUT_S):
        while sum(sender.status()["outbox"].values()):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
    return time.perf_counter() - started


def _rss_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=MESSAGES)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    figures = measure(given.messages)
    if given.json:
        print(json.dumps(figures))
        return
    for name, value in figures["replay"].items():
        print(f"{name:<22}{value}")


if __name__ == "__main__":
    main()
