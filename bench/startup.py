"""How long does a start take: import, help, join, and a whole `send` from the command line?

Floor: a bare interpreter, in the same rounds. `send` goes to a node that runs already, and the
recipient runs beside it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from meshagent.bench.answers import Answer, Headline
from meshagent.bench.harness import Setting, interleave, ratio_of, spread_of
from meshagent.bench.nodes import MESHAGENT, NodeProcesses

__all__ = ["measure"]

AMOUNTS = {"tiny": 1, "quick": 5, "full": 21}
BARE, SEND = "floor: bare interpreter", "send from the command line"
SEND_S_BAR = 0.35
KEYS = {
    "import meshagent": "import",
    "meshagent --help": "help",
    SEND: "send",
    "join until joined": "join",
}


def measure(setting: Setting) -> Answer:
    """Seconds and ratios for each way of starting."""
    answer = Answer()
    with NodeProcesses(setting.folder) as nodes:
        project = nodes.init("startup")
        taken = interleave(_cases(nodes, project), AMOUNTS[setting.extent], warm_up=1)
    answer.cases = {name: {"s": spread_of(values)} for name, values in taken.items()}
    answer.headlines = [
        Headline("startup.send_s", spread_of(taken[SEND]), "lower", unit="s", bar=SEND_S_BAR),
        *(
            Headline(f"startup.{key}_to_bare", ratio_of(taken[name], taken[BARE]), "lower")
            for name, key in KEYS.items()
        ),
    ]
    return answer


def _cases(nodes: NodeProcesses, project: Path) -> dict[str, Callable[[], float]]:
    def run(*words: str) -> Callable[[], float]:
        def timed() -> float:
            begin = time.perf_counter()
            subprocess.run(words, check=True, capture_output=True, cwd=project, env=nodes.environ())
            return time.perf_counter() - begin

        return timed

    def join() -> float:
        node = nodes.join(project, "starter", "--discovery", "file")
        nodes.end(node)
        return node.joined_after_s

    sender, recipient = (
        nodes.join(project, role, "--discovery", "file") for role in ("sender", "recipient")
    )
    nodes.until(lambda: sender.sees(recipient), 30, "the sender sees the recipient")
    send = ("send", recipient.agent, "hello", "--as", sender.agent, "--strict")
    return {
        BARE: run(sys.executable, "-P", "-c", "pass"),
        "import meshagent": run(sys.executable, "-P", "-c", "import meshagent"),
        "meshagent --help": run(*MESHAGENT, "--help"),
        SEND: run(*MESHAGENT, *send),
        "join until joined": join,
    }
