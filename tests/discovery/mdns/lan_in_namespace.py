"""Run inside a fresh network namespace by test_mdns: all interfaces, one after the other.

Prints a word for each promise kept. Refuses to run where there is an interface already.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess

from discovery.seen import Seen, eventually, fresh_tag

from meshagent.core.ports import Announcement
from meshagent.discovery.mdns import source as mdns
from meshagent.discovery.mdns.source import MdnsDiscovery

TAG = fresh_tag()
QUESTION = b"\0\0\0\0\0\1\0\0\0\0\0\0\x0a_meshagent\x04_tcp\x05local\0\0\x0c\x80\x01"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def plug(name: str, address: str) -> None:
    ip("link", "add", name, "type", "veth", "peer", "name", f"{name}-far")
    ip("address", "add", f"{address}/24", "dev", name)
    ip("link", "set", f"{name}-far", "up")
    ip("link", "set", name, "up")


def at(name: str, *addresses: str) -> Announcement:
    return Announcement(f"{name}-{name[0] * 8}", TAG, name, addresses)


async def main() -> None:
    mdns.RESCAN_INTERVAL_S = mdns.RETRY_FIRST_S = 0.1
    alice, bob = MdnsDiscovery(None), MdnsDiscovery(None)
    alice_saw, bob_saw = Seen(), Seen()
    first, moved = at("alice", "10.77.0.1:5001"), at("alice", "10.78.0.1:5001")

    await alice.start(first, alice_saw)
    assert alice.health() == "no network interface is up"
    print("unplugged")

    plug("net0", "10.77.0.1")
    await bob.start(at("bob", "10.77.0.1:5002"), bob_saw)
    await bob_saw.until_has(first)
    await alice_saw.until_has(at("bob", "10.77.0.1:5002"))
    assert alice.health() == "ok"
    print("found")

    plug("net1", "10.78.0.1")
    ip("link", "delete", "net0")
    await alice.update(moved)
    await bob_saw.until_has(moved)
    engine = bob._zeroconf.zeroconf.engine  # type: ignore[union-attr]
    await eventually(lambda: any(it.sock_name[0] == "10.78.0.1" for it in engine.senders))
    print("followed")
    await alice.close()
    await bob.close()

    await stays_on_loopback()
    print("confined")


async def stays_on_loopback() -> None:
    """Another program has joined the group on net1, and a question comes in there."""
    ip("link", "set", "lo", "up")
    joined = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    membership = socket.inet_aton("224.0.0.251") + socket.inet_aton("10.78.0.1")
    joined.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
    asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    asking.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("10.78.0.1"))
    asking.bind(("10.78.0.1", 0))
    asking.setblocking(False)

    carol, saw = MdnsDiscovery(["127.0.0.1"]), Seen()
    await carol.start(at("carol", "127.0.0.1:5003"), Seen())
    dave = MdnsDiscovery(["127.0.0.1"])
    await dave.start(at("dave", "127.0.0.1:5004"), saw)
    await saw.until_has(at("carol", "127.0.0.1:5003"))
    asking.sendto(QUESTION, ("224.0.0.251", 5353))
    try:
        answer = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(asking, 9000), 1)
    except TimeoutError:
        answer = b""
    assert not answer, answer
    await carol.close()
    await dave.close()
    joined.close()
    asking.close()


if __name__ == "__main__":
    assert [name for _, name in socket.if_nameindex()] == ["lo"], "only in a namespace of its own"
    asyncio.run(main())
