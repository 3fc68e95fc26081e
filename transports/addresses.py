"""How an address is written, and which ones are ours. Never opens a connection.

Invariant: what `parse_address` and `resolve` return holds an IP literal and a port only, so that
nothing a stranger announces can reach libzmq's endpoint syntax.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable

__all__ = [
    "format_address",
    "interface_addresses",
    "is_wildcard",
    "literal",
    "parse_address",
    "resolve",
]

HOST_CHARACTERS_MAX = 253  # the longest name DNS can hold


def is_wildcard(listen: str) -> bool:
    """Whether `listen` stands for all interfaces."""
    return listen in ("", "*")


def format_address(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(address: str) -> tuple[str, int] | None:
    """Host and port of `host:port` or `[v6]:port`; None when it is not written like one."""
    host, colon, digits = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        return None
    if not colon or not 0 < len(host) <= HOST_CHARACTERS_MAX:
        return None
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 5):
        return None
    port = int(digits)
    return (host, port) if 0 < port < 65536 else None


def literal(host: str) -> str | None:
    """`host` if it is an IP address, in its usual writing; None when it is a name."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None


async def resolve(host: str, port: int) -> list[str]:
    """The IP literals that `host` stands for, without blocking; empty when nobody knows it."""
    if (known := literal(host)) is not None:
        return [known]
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    hosts = [literal(str(sockaddr[0])) for *_, sockaddr in found]
    return list(dict.fromkeys(host for host in hosts if host is not None))


def interface_addresses(*, ipv6: bool, most: int) -> list[str]:
    """Addresses of this machine's interfaces: others' reach first, 127.0.0.1 last."""
    import ifaddr  # only a node that listens on all interfaces needs it

    found = (ip.ip for adapter in ifaddr.get_adapters() for ip in adapter.ips)
    hosts = [host if isinstance(host, str) else host[0] for host in found]
    return [*_reachable(hosts, ipv6=ipv6)[: most - 1], "127.0.0.1"]


def _reachable(hosts: Iterable[str], *, ipv6: bool) -> list[str]:
    """Those another machine could dial as written; IPv4 first, since fewer networks break it."""
    usable = {}
    for host in hosts:
        ip = ipaddress.ip_address(host.partition("%")[0])
        # A link-local address means nothing without the name of the other side's interface.
        skipped = ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified
        if not skipped and (ipv6 or ip.version == 4):
            usable[str(ip)] = ip.version
    return sorted(usable, key=lambda host: usable[host])
