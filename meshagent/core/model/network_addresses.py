"""How a `host:port` address is written and read. Never resolves a name or opens a socket.

Invariants: what `format_address` writes, `parse_address` reads back; a parsed host is a host name
or an IP address and nothing else, so no text from a stranger reaches the endpoint syntax of libzmq.
"""

from __future__ import annotations

import ipaddress
import re

from meshagent.errors import UsageError

__all__ = [
    "PORT_MAX",
    "format_address",
    "ip_literal",
    "is_address",
    "is_loopback",
    "parse_address",
]

ADDRESS_CHARACTERS_MAX = 300  # a DNS name has at most 253, a port 5; IPv6 with a zone is shorter
HOST_CHARACTERS_MAX = 253
PORT_MAX = 65535

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\Z")
_HINT = "Write it as host:port, 192.0.2.7:4711 or [2001:db8::7]:4711."


def parse_address(text: str) -> tuple[str, int]:
    """The host (without brackets) and the port; a UsageError says what is wrong."""
    if len(text) > ADDRESS_CHARACTERS_MAX:
        raise _refusal(f"{text[:40]}…", "it is too long")
    host, port_text = _split(text)
    _check_host(text, host)
    return host, _port(text, port_text)


def format_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_address(text: str) -> bool:
    """Whether `text` is written like an address; says nothing about whether anyone answers."""
    try:
        parse_address(text)
    except UsageError:
        return False
    return True


def ip_literal(host: str) -> str | None:
    """`host` in its usual spelling if it is an IP address; None when it is a name."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether `host` is an IP address of the loopback interface."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _split(text: str) -> tuple[str, str]:
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")) or ":" not in host:
            raise _refusal(text, "the brackets must hold an IPv6 address")
        return host, rest[1:]
    if text.count(":") > 1:
        raise _refusal(text, "an IPv6 address needs brackets before its port")
    host, _, port_text = text.partition(":")
    return host, port_text


def _port(text: str, port_text: str) -> int:
    if not port_text:
        raise _refusal(text, "the port is missing")
    digits = port_text.isascii() and port_text.isdigit() and len(port_text) <= len(str(PORT_MAX))
    if not digits or not 0 < int(port_text) <= PORT_MAX:
        raise _refusal(text, f"the port must be a number from 1 to {PORT_MAX}")
    return int(port_text)


def _check_host(text: str, host: str) -> None:
    if ":" in host:
        _, percent, zone = host.partition("%")
        if ip_literal(host) is None or (percent and not _LABEL.match(zone)):
            raise _refusal(text, "the brackets must hold an IPv6 address")
        return
    labels = host.removesuffix(".").split(".")
    if not host or len(host) > HOST_CHARACTERS_MAX or not all(map(_LABEL.match, labels)):
        raise _refusal(text, "the host is not a name or an IP address")
    # No top-level domain is a number: what ends in one was meant as an IPv4 address.
    if labels[-1].isdigit() and ip_literal(host) is None:
        raise _refusal(text, "the host is not a complete IPv4 address")


def _refusal(text: str, reason: str) -> UsageError:
    return UsageError(f"{text!r} is not an address: {reason}.", hint=_HINT, address=text)
