"""Zenoh's scouting: a peer that says when it is open, when it has met another, when it is alone.

    python -P -m meshagent.bench.contestants.zenoh INTERFACE ADDRESS

Scouts by multicast, so it runs only on the interface of a network namespace made for it.
"""

from __future__ import annotations

import json
import sys
import time

from meshagent.bench.children import say

__all__: list[str] = []

POLL_S = 0.002


def _run(interface: str, address: str) -> None:
    import zenoh

    config = zenoh.Config()
    config.insert_json5("scouting/multicast/interface", json.dumps(interface))
    config.insert_json5("listen/endpoints", json.dumps([f"tcp/{address}:0"]))
    with zenoh.open(config) as session:
        say("open")
        while True:
            for word, wanted in (("met", True), ("alone", False)):
                while bool(list(session.info.peers_zid())) is not wanted:
                    time.sleep(POLL_S)
                say(word)


if __name__ == "__main__":
    _run(*sys.argv[1:])
