"""A network of its own for a test: hosts and a switch, each a network namespace.

The machine's own namespace has no port in it, so nothing a test sends can leave. Invariant: after
`close` every namespace is gone, and with it every interface.
"""

from __future__ import annotations

import itertools
import os
import subprocess

COMMAND_TIMEOUT_S = 10.0
_numbers = itertools.count(1)


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


class Host:
    """A machine with one network card, plugged into the switch."""

    def __init__(self, lan: Lan, name: str, address: str) -> None:
        self.lan, self.name, self.address = lan, name, address
        self.namespace = f"{lan.prefix}-{name}"
        self.within = ("ip", "netns", "exec", self.namespace)
        """Put before a command, it runs on this machine."""

    def ip(self, *words: str) -> None:
        ip("-n", self.namespace, *words)

    def card(self, state: str) -> None:
        """`up` or `down`, as the machine itself would."""
        self.ip("link", "set", "dev", "eth0", state)

    def pull_cable(self) -> None:
        """Silently: neither side is told, packets just do not arrive."""
        self.lan.ip("link", "set", "dev", self.name, "nomaster")

    def plug_into(self, bridge: str) -> None:
        self.lan.ip("link", "set", "dev", self.name, "master", bridge)
        if self.lan.multicast_is_blocked:  # a port that is plugged in anew has forgotten it
            self.lan.block_multicast_to(self.name)

    def move_to(self, address: str) -> None:
        """A new address instead of the old one, as a DHCP server might give."""
        self.ip("address", "del", f"{self.address}/24", "dev", "eth0")
        self.ip("address", "add", f"{address}/24", "dev", "eth0")
        self.address = address


class Lan:
    """The switch, with two bridges so that the network can be split."""

    def __init__(self) -> None:
        self.prefix = f"ma{os.getpid()}x{next(_numbers)}"
        self.namespace = f"{self.prefix}-switch"
        self.hosts: list[Host] = []
        self.multicast_is_blocked = False

    def open(self) -> None:
        ip("netns", "add", self.namespace)
        for bridge in ("left", "right"):
            self.ip("link", "add", "name", bridge, "type", "bridge", "forward_delay", "0")
            self.ip("link", "set", "dev", bridge, "up")

    def ip(self, *words: str) -> None:
        ip("-n", self.namespace, *words)

    def host(self) -> Host:
        """A new machine, plugged in and up."""
        number = len(self.hosts) + 1
        host = Host(self, f"host{number}", f"10.55.0.{number}")
        self.hosts.append(host)
        ip("netns", "add", host.namespace)
        peer = ("peer", "name", host.name, "netns", self.namespace)
        host.ip("link", "add", "name", "eth0", "type", "veth", *peer)
        host.plug_into("left")
        self.ip("link", "set", "dev", host.name, "up")
        host.ip("link", "set", "dev", "lo", "up")
        host.ip("address", "add", f"{host.address}/24", "dev", "eth0")
        host.card("up")
        return host

    def block_multicast(self) -> None:
        """As many a wireless access point does: one machine's multicast reaches no other."""
        self.multicast_is_blocked = True
        for bridge in ("left", "right"):
            # What a bridge has snooped it forwards though it does not flood: IPv6's mDNS, say.
            self.ip("link", "set", "dev", bridge, "type", "bridge", "mcast_snooping", "0")
        for host in self.hosts:
            self.block_multicast_to(host.name)

    def block_multicast_to(self, port: str) -> None:
        self.ip("link", "set", "dev", port, "type", "bridge_slave", "mcast_flood", "off")

    def close(self) -> None:
        """Processes in a namespace must have ended before."""
        for namespace in [*(host.namespace for host in self.hosts), self.namespace]:
            subprocess.run(
                ["ip", "netns", "delete", namespace],
                capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False,
            )  # fmt: skip
