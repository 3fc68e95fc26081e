"""What our mDNS records say, and what we believe of others'. Pure: no socket, no zeroconf.

The TXT record holds the protocol version, the mesh tag and the agent id, and nothing else: it is
read by everyone on the network. Invariant: whatever bytes come in, the answer is a bounded
Candidate or one of the reasons below, never an exception.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
from collections import Counter
from collections.abc import Iterable, Sequence

from meshagent.core.model.network_addresses import PORT_MAX, format_address, parse_address
from meshagent.core.model.peers import Candidate, is_agent_id
from meshagent.core.ports import Announcement
from meshagent.errors import UsageError

__all__ = ["SERVICE_TYPE", "instance_name", "publishable", "read_candidate", "txt_of"]

SERVICE_TYPE = "_meshagent._tcp.local."
PROTOCOL_VERSION = "1"

ADDRESSES_MAX = 16  # a laptop with VPN, containers and both families has about ten
TXT_BYTES_MAX = 512  # ours takes about 100; room for fields that later versions add
RUN_SUFFIX_CHARACTERS = 4  # 20 bits: only copies of one agent must differ by it

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def instance_name(me: Announcement) -> str:
    """A DNS label that is this agent's and this run's alone.

    The suffix is a digest of the run, not its beginning: runs may be counters or times, whose
    first characters are all alike. A dot would split the label, and the id is in the TXT anyway.
    """
    digest = base64.b32encode(hashlib.sha256(me.run.encode()).digest()).decode().lower()
    return f"{me.agent.replace('.', '-')}-{digest[:RUN_SUFFIX_CHARACTERS]}"


def txt_of(me: Announcement) -> dict[str, str]:
    """All that the TXT record says."""
    return {"v": PROTOCOL_VERSION, "mesh": me.mesh_tag, "id": me.agent}


def publishable(addresses: Iterable[str], loopback: bool) -> tuple[list[str], int]:
    """The IP addresses to announce and their port; port 0 when there are none.

    A service record has one port, so addresses with another port than most are left out.
    """
    usable = [
        pair for pair in map(_ip_and_port, addresses) if pair and _is_usable(pair[0], loopback)
    ]
    if not usable:
        return [], 0
    port = Counter(port for _, port in usable).most_common(1)[0][0]
    return [str(ip) for ip, its_port in usable if its_port == port][:ADDRESSES_MAX], port


def read_candidate(
    text: bytes, port: int | None, ips: Sequence[IPAddress], mesh_tag: str, loopback: bool
) -> Candidate | str:
    """The candidate in a resolved service, or the reason to ignore it."""
    if len(text) > TXT_BYTES_MAX:
        return "txt"
    fields = _fields(text)
    if fields.get("mesh") != mesh_tag.encode():
        return "mesh"
    agent = fields.get("id", b"").decode("ascii", "replace")
    if not is_agent_id(agent):
        return "id"
    if port is None or not 0 < port <= PORT_MAX:
        return "port"
    hosts = [str(ip) for ip in ips if _is_usable(ip, loopback)][:ADDRESSES_MAX]
    if not hosts:
        return "addresses"
    return Candidate(agent, tuple(format_address(host, port) for host in hosts), "mdns")


def _fields(text: bytes) -> dict[str, bytes]:
    """The TXT's `key=value` strings; of equal keys the first counts (RFC 6763, 6.4)."""
    fields: dict[str, bytes] = {}
    at = 0
    while at < len(text):
        end = at + 1 + text[at]
        key, _, value = text[at + 1 : end].partition(b"=")
        fields.setdefault(key.decode("ascii", "replace").lower(), value)
        at = end
    return fields


def _ip_and_port(address: str) -> tuple[IPAddress, int] | None:
    try:
        host, port = parse_address(address)
        return ipaddress.ip_address(host), port
    except (UsageError, ValueError):
        return None


def _is_usable(ip: IPAddress, loopback: bool) -> bool:
    """Loopback counts only where discovery itself runs on loopback.

    An IPv6 link-local address means nothing without the interface it was heard on.
    """
    if ip.is_loopback:
        return loopback
    return not (ip.is_unspecified or ip.is_multicast or (ip.version == 6 and ip.is_link_local))
