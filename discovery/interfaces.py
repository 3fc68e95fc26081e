"""Which network interfaces this machine has now. Never opens a socket or sends a packet.

Invariant: loopback is never among the interfaces of the local network.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshagent.core.model.network_addresses import is_loopback

__all__ = ["Interface", "device_of", "lan_interfaces", "present"]

INTERFACES_MAX = 20  # of each family: Linux lets a socket join 20 groups (igmp_max_memberships)

Interface = str | int
"""An IPv4 address, or the index of an interface that has IPv6: what zeroconf takes."""


def lan_interfaces() -> tuple[Interface, ...]:
    """Every interface on which peers may be: IPv4 addresses first, then IPv6 indexes."""
    import ifaddr

    ipv4: set[str] = set()
    ipv6: set[int] = set()
    for adapter in ifaddr.get_adapters():
        for ip in adapter.ips:
            if isinstance(ip.ip, str):
                if not is_loopback(ip.ip):
                    ipv4.add(ip.ip)
            elif adapter.index is not None and not is_loopback(ip.ip[0]):
                ipv6.add(adapter.index)
    return (*sorted(ipv4)[:INTERFACES_MAX], *sorted(ipv6)[:INTERFACES_MAX])


def present(addresses: Sequence[str]) -> tuple[str, ...]:
    """Those of `addresses` that this machine has now. All of 127/8 counts as loopback's."""
    import ifaddr

    ours = {
        ip.ip if isinstance(ip.ip, str) else ip.ip[0]
        for adapter in ifaddr.get_adapters()
        for ip in adapter.ips
    }
    return tuple(address for address in addresses if address in ours or is_loopback(address))


def device_of(addresses: Sequence[str]) -> str | None:
    """The one device that has all these addresses; None when there are several, or none."""
    import ifaddr

    wanted = set(addresses)
    devices = {
        adapter.name
        for adapter in ifaddr.get_adapters()
        for ip in adapter.ips
        if (ip.ip if isinstance(ip.ip, str) else ip.ip[0]) in wanted
    }
    return devices.pop() if len(devices) == 1 else None
