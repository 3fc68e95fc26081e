"""How a `host:port` address is written and read. Never resolves a name or opens a socket.

Invariant: what `format_address` writes, `parse_address` reads back.
"""

from __future__ import annotations

import ipaddress
import re

from meshagent.errors import UsageError

__all__ = ["format_address", "is_address", "parse_address"]

ADDRESS_CHARACTERS_MAX = 300  # a DNS name has at most 253, a port 5; IPv6 with a zone is shorter
HOST_CHARACTERS_MAX = 253
PORT_MAX = 65535

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\Z")
_HINT = "Write it as host:port, 192.0.2.7:4711 or [2001:db8::7]:4711."


def parse_address(text: str, default_port: int | None = None) -> tuple[str, int]:
    """The host (without brackets) and the port; a UsageError says what is wrong."""
    if len(text) > ADDRESS_CHARACTERS_MAX:
        raise _refusal(f"{text[:40]}…", "it is too long")
    host, port_text = _split(text, default_port)
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


def _split(text: str, default_port: int | None) -> tuple[str, str]:
    fallback = "" if default_port is None else str(default_port)
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")) or ":" not in host:
            raise _refusal(text, "the brackets must hold an IPv6 address")
        return host, rest[1:] if rest else fallback
    if text.count(":") > 1:
        if fallback and _is_ipv6(text):
            return text, fallback
        raise _refusal(text, "an IPv6 address needs brackets before its port")
    host, colon, port_text = text.partition(":")
    return host, port_text if colon else fallback


def _port(text: str, port_text: str) -> int:
    if not port_text:
        raise _refusal(text, "the port is missing")
    digits = port_text.isascii() and port_text.isdigit() and len(port_text) <= len(str(PORT_MAX))
    if not digits or not 0 < int(port_text) <= PORT_MAX:
        raise _refusal(text, f"the port must be a number from 1 to {PORT_MAX}")
    return int(port_text)


def _check_host(text: str, host: str) -> None:
    if ":" in host:
        if not _is_ipv6(host):
            raise _refusal(text, "the brackets must hold an IPv6 address")
        return
    labels = host.removesuffix(".").split(".")
    if not host or len(host) > HOST_CHARACTERS_MAX or not all(map(_LABEL.match, labels)):
        raise _refusal(text, "the host is not a name or an IP address")
    # No top-level domain is a number: what ends in one was meant as an IPv4 address.
    if labels[-1].isdigit() and not _is_ipv4(host):
        raise _refusal(text, "the host is not a complete IPv4 address")


def _is_ipv4(host: str) -> bool:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def _is_ipv6(host: str) -> bool:
    _, percent, zone = host.partition("%")
    if percent and not _LABEL.match(zone):
        return False
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def _refusal(text: str, reason: str) -> UsageError:
    return UsageError(f"{text!r} is not an address: {reason}.", hint=_HINT, address=text)
