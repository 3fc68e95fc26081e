"""Which addresses are ours, and what a host name stands for. Never opens a connection.

Invariant: `resolve` returns IP literals only, so no text from a stranger reaches the endpoint
syntax of libzmq.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable

from meshagent.core.model.network_addresses import ip_literal

__all__ = ["interface_addresses", "is_wildcard", "resolve"]


def is_wildcard(listen: str) -> bool:
    """Whether `listen` stands for all interfaces."""
    return listen in ("", "*")


async def resolve(host: str, port: int) -> list[str]:
    """The IP literals that `host` stands for, without blocking; empty when nobody knows it."""
    if (known := ip_literal(host)) is not None:
        return [known]
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    hosts = [ip_literal(str(sockaddr[0])) for *_, sockaddr in found]
    return list(dict.fromkeys(host for host in hosts if host is not None))


def interface_addresses(*, ipv6: bool, most: int) -> list[str]:
    """Addresses of this machine's interfaces: those others can reach first, 127.0.0.1 last."""
    import ifaddr  # only a node that listens on all interfaces needs it

    found = (ip.ip for adapter in ifaddr.get_adapters() for ip in adapter.ips)
    hosts = [host if isinstance(host, str) else host[0] for host in found]
    return [*_reachable(hosts, ipv6=ipv6)[: most - 1], "127.0.0.1"]


def _reachable(hosts: Iterable[str], *, ipv6: bool) -> list[str]:
    """Those that another machine could dial; IPv4 first, since it works in more networks."""
    usable = {}
    for host in hosts:
        ip = ipaddress.ip_address(host.partition("%")[0])
        # A link-local address means nothing without the name of the other side's interface.
        skipped = ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified
        if not skipped and (ipv6 or ip.version == 4):
            usable[str(ip)] = ip.version
    return sorted(usable, key=lambda host: usable[host])
