"""Zyre's Python port: a node that says when it is open, when it has met another, when it is alone.

    python -P -m meshagent.bench.contestants.pyre INTERFACE

Broadcasts beacons, so it runs only on the interface of a network namespace made for it.
"""

from __future__ import annotations

import sys

from meshagent.bench.children import say

__all__: list[str] = []


def _run(interface: str) -> None:
    import pyre

    node = pyre.Pyre("bench")
    node.set_interface(interface)
    node.start()
    say("open")
    words = {b"ENTER": "met", b"EXIT": "alone"}
    while True:
        kind = node.recv()[0]
        if kind in words:
            say(words[kind])


if __name__ == "__main__":
    _run(sys.argv[1])
