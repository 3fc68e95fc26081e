"""Verdicts on the network: where we listen, which interfaces are up, multicast, who answers.

Pure: judges what `probes` found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshagent.core.model.network_addresses import ip_literal, is_loopback
from meshagent.diagnosis.finding import Finding, few, note, ok, problem
from meshagent.diagnosis.probes import Device, DialAnswer, Surroundings
from meshagent.transports.limits import DIALLED_DESCRIPTORS, descriptors_for_links

__all__ = [
    "check_descriptors",
    "check_interfaces",
    "check_listen",
    "check_multicast",
    "check_port",
    "check_surroundings",
    "host_of",
    "hosts_in_question",
]

LINKS_MIN = 50  # the largest mesh that we promise for
VPN_PREFIXES = ("ipsec", "nordlynx", "ppp", "proton", "tailscale", "tap", "tun", "utun", "wg", "zt")
_NOWHERE = "Bring an interface up, or choose an address with --listen."
_LISTEN_WIDER = (
    "For other machines, join without --listen, MESHAGENT_LISTEN and 'listen' in mesh.toml."
)
_FIREWALL = "A firewall may drop what comes in: allow the command's connections on this network."


def host_of(listen: str) -> str:
    """The host that a listen setting names; empty for all interfaces."""
    text = listen.strip()
    if (host := ip_literal(text.strip("[]"))) is not None:
        return _unless_wildcard(host)
    return _unless_wildcard(text.rpartition(":")[0].strip("[]") if ":" in text else text)


def _unless_wildcard(host: str) -> str:
    return "" if host in ("", "*", "0.0.0.0", "::") else host  # noqa: S104 - compared, not bound


def hosts_in_question(
    asked: str, advertised: Sequence[str], setting: str, devices: Sequence[Device]
) -> list[str]:
    """The addresses on which others should find us: what is asked for, told, set, or there."""
    if host := host_of(asked):
        return [host]
    if advertised:
        return list(dict.fromkeys(host_of(address) for address in advertised))
    if host := host_of(setting):
        return [host]
    lan = (address for device in devices if device.up for address in device.addresses)
    return [address for address in lan if not is_loopback(address)]


def is_local_only(hosts: Sequence[str]) -> bool:
    """Whether nobody but this machine is meant to reach us."""
    return bool(hosts) and all(is_loopback(host) or host == "localhost" for host in hosts)


def check_listen(nodes: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Who can reach the nodes at the addresses that they tell others; "" is a node to come."""
    findings, local = [], []
    for agent, addresses in nodes.items():
        who = f"{agent} listens" if agent else "A node started here would listen"
        if not addresses:
            findings.append(
                problem("listen", f"{who} at no address that others could dial.", _NOWHERE)
            )
        elif is_local_only([host_of(address) for address in addresses]):
            local.append(f"{who} on {few(list(addresses))}")
        else:
            findings.append(ok("listen", f"{who} on {few(list(addresses))}"))
    if local:
        text = f"{few(local)}: only this machine can reach {'it' if len(local) == 1 else 'them'}."
        findings.append(note("listen", text, _LISTEN_WIDER))
    return findings


def check_interfaces(devices: Sequence[Device], wanted: Sequence[str]) -> list[Finding]:
    """Whether the addresses in question belong to interfaces that are up."""
    up = [device for device in devices if device.up and device.addresses]
    findings = []
    if not any(is_loopback(address) for device in up for address in device.addresses):
        findings.append(
            problem(
                "interfaces",
                "The loopback interface is down: agents on this machine can't reach each other.",
                "Bring it up: ip link set lo up",
            )
        )
    for host in wanted:
        if ip_literal(host) is not None and not any(host in device.addresses for device in up):
            findings.append(_missing(devices, host))
    lan = [each.name for each in up if not all(map(is_loopback, each.addresses))]
    if not lan:
        findings.append(
            note(
                "interfaces",
                "No interface to other machines is up: they are out of reach.",
                "Connect to a network; agents on this machine do without.",
            )
        )
    elif not findings:
        findings.append(ok("interfaces", f"up: {few([each.name for each in up])}", detail=True))
    return findings


def _missing(devices: Sequence[Device], host: str) -> Finding:
    down = next((device.name for device in devices if host in device.addresses), "")
    if down:
        return problem(
            "interfaces",
            f"{down}, which has {host}, is down.",
            f"Bring it up: ip link set {down} up",
        )
    down_names = [device.name for device in devices if not device.up]
    also = f" ({few(down_names)}: down)" if down_names else ""
    return problem(
        "interfaces",
        f"No interface that is up has the address {host}{also}.",
        "Connect that network, or listen elsewhere: --listen, MESHAGENT_LISTEN, listen in "
        "mesh.toml.",
    )


def check_multicast(host: str, trouble: str) -> Finding:
    """Whether mDNS can work on an interface, as far as one machine can tell."""
    if trouble:
        return problem(
            "multicast",
            f"Multicast does not work on {host}: {trouble}.",
            "Agents of this project still meet through its folder; reach others with --peer "
            "host:port.",
        )
    if is_loopback(host):
        return ok("multicast", f"works on {host}", detail=True)
    return ok("multicast", f"works on {host}, up to this machine's edge")


def check_port(agent: str, address: str, answer: DialAnswer | None) -> Finding:
    """Whether a node's own door opens at an address that it tells others."""
    if answer in (DialAnswer.OURS, DialAnswer.OPEN):
        return ok("port", f"{agent} takes connections at {address}", detail=True)
    why = {
        DialAnswer.REFUSED: "the connection is refused",
        DialAnswer.DROPPED: "nothing comes back",
        DialAnswer.UNREACHABLE: "there is no way to it",
        DialAnswer.UNKNOWN: "the name is not known",
        DialAnswer.SILENT: "it takes the connection and says nothing",
        DialAnswer.FOREIGN: "its door does not open with mesh.key",
        DialAnswer.OTHER: "another program answers",
        None: "there was no answer in time",
    }[answer]
    hint = {
        DialAnswer.FOREIGN: "The node joined with another key than mesh.key holds now: join again.",
        DialAnswer.SILENT: "The node may be overloaded; see its node.log.",
    }.get(answer or DialAnswer.UNKNOWN, _FIREWALL)
    return problem("port", f"{agent} can't be reached at its own address {address}: {why}.", hint)


def check_descriptors(who: str, limit: int | None) -> Finding | None:
    """Whether a process may open enough files for a full mesh."""
    if limit is None:
        return None
    links = descriptors_for_links(limit) // DIALLED_DESCRIPTORS
    if links < LINKS_MIN:
        return note(
            "descriptors",
            f"{who} may have {limit} files open: room for about {links} peers.",
            "Raise it before the next join: ulimit -n 4096",
        )
    return ok("descriptors", f"{who} may have {limit} files open", detail=True)


def check_surroundings(
    machine: Surroundings, devices: Sequence[Device], local_only: bool
) -> list[Finding]:
    """What WSL, a container, a VPN or macOS does to those who look for others."""
    if local_only:
        return []
    findings = []
    if machine.wsl:
        findings.append(
            note(
                "surroundings",
                "This is WSL: in its default network, other machines and Windows can't reach in "
                "and multicast does not pass.",
                "Set networkingMode=mirrored in .wslconfig, or dial out from here with --peer.",
            )
        )
    if machine.container:
        findings.append(
            note(
                "surroundings",
                f"This is a container ({machine.container}): multicast does not pass its bridge, "
                "and others reach in only at published ports.",
                "Run it with --network host, or dial out from here with --peer host:port.",
            )
        )
    vpn = [each.name for each in devices if _is_vpn(each)]
    if vpn:
        findings.append(
            note(
                "surroundings",
                f"A VPN is up ({few(vpn)}): it may take the traffic for the local network, and "
                "carries no multicast.",
                "Allow local network access in the VPN, or reach peers with --peer host:port.",
            )
        )
    if machine.macos:
        findings.append(
            note(
                "surroundings",
                "macOS asks before a program may use the local network; denied, peers on other "
                "machines stay invisible without an error.",
                "System Settings > Privacy & Security > Local Network: allow your terminal.",
            )
        )
    return findings


def _is_vpn(device: Device) -> bool:
    # macOS keeps idle utun devices with nothing but a link-local IPv6 address.
    usable = any(not address.lower().startswith("fe80") for address in device.addresses)
    return device.up and usable and device.name.startswith(VPN_PREFIXES)
