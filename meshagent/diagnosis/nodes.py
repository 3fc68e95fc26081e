"""Verdicts on the nodes of this machine: do they answer, whom did they turn away, what ails them.

Pure: judges what the nodes said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshagent.diagnosis.finding import Finding, few, note, ok, problem, span
from meshagent.diagnosis.probes import NodeAnswer

__all__ = [
    "NodeReport",
    "check_node",
    "check_refusals",
    "check_sources",
    "check_versions",
]


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A node that runs on this machine, and its answer."""

    agent: str
    pid: int
    answer: NodeAnswer
    stopped: bool = False

    @property
    def answers(self) -> bool:
        return not self.answer.trouble

    @property
    def addresses(self) -> list[str]:
        """Where it says that others may dial it."""
        return [str(each) for each in self.answer.status.get("addresses", ())]

    def peer(self, agent: str) -> Mapping[str, Any] | None:
        """How it sees another agent."""
        return next((each for each in self.answer.peers if each.get("agent") == agent), None)


def check_node(node: NodeReport) -> Finding:
    """Whether sessions can use this node."""
    who = f"The node of {node.agent} (pid {node.pid})"
    if node.stopped:
        return problem(
            "nodes",
            f"{who} hangs: its process is stopped (by Ctrl-Z or SIGSTOP), so its peers lose it.",
            f"Let it go on: kill -CONT {node.pid}   (or end it: kill -9 {node.pid})",
        )
    if node.answer.hangs:
        return problem(
            "nodes",
            f"{who} hangs: {node.answer.trouble}.",
            f"See its node.log; end it with 'kill {node.pid}' (then 'kill -9') and join again.",
        )
    if node.answer.trouble:
        return problem(
            "nodes",
            f"{who} runs, and no session can attach to it: {node.answer.trouble}.",
            f"End it with 'kill {node.pid}' and join again.",
        )
    up = span(float(node.answer.status.get("uptime_s", 0)))
    return ok("nodes", f"{node.agent} answers (pid {node.pid}, up {up})")


def check_versions(mine: str, nodes: Sequence[NodeReport]) -> list[Finding]:
    """Where this command, the nodes here and their peers differ."""
    findings = []
    for node in nodes:
        version = node.answer.status.get("version")
        if version and version != mine:
            findings.append(
                note(
                    "version",
                    f"The node of {node.agent} runs version {version}; this command is {mine}.",
                    f"Start it anew: meshagent leave --as {node.agent}, then join again.",
                )
            )
    others: dict[str, list[str]] = {}
    for node in nodes:
        for peer in node.answer.peers:
            version, agent = str(peer.get("version", "")), str(peer.get("agent", ""))
            if version and version != mine and agent not in others.setdefault(version, []):
                others[version].append(agent)
    for version, agents in sorted(others.items()):
        findings.append(
            note(
                "version",
                f"{few(agents)} {_has(agents)} version {version}; this command is {mine}.",
                "They still talk where their protocol versions overlap; update the older one.",
            )
        )
    return findings or [ok("version", f"{mine} everywhere", detail=True)]


def _has(agents: Sequence[str]) -> str:
    return "has" if len(agents) == 1 else "have"


def check_sources(node: NodeReport) -> list[Finding]:
    """How each way of discovery does, and the store, by the node's own word."""
    health: Mapping[str, str] = node.answer.status.get("health", {})
    findings = []
    for name, word in health.items():
        if word != "ok":
            what, hint = _SOURCES.get(name, (f"its source {name!r} fails", ""))
            findings.append(problem("discovery", f"{node.agent}: {what}: {word}.", hint))
    well = [name for name, word in health.items() if word == "ok" and name != "store"]
    if well:
        findings.append(ok("discovery", f"{node.agent} looks by {few(well)}", detail=True))
    return findings


_SOURCES = {
    "file": (
        "its registry file, by which sessions and local agents find it, fails",
        "Check the owner and the free space of the mesh folder.",
    ),
    "mdns": (
        "the local network can't be searched",
        "Agents of this project still meet through its folder; reach others with --peer host:port.",
    ),
    "static": ("a peer given by address can't be used", "Check --peer and peers in mesh.toml."),
    "store": (
        "its database can't be written, so nothing new is remembered",
        "Free some space, or check the disk; it goes on by itself when that is done.",
    ),
}


def check_refusals(node: NodeReport) -> list[Finding]:
    """Whom the node turned away, in sentences."""
    findings = []
    for reason, count in node.answer.status.get("refused", {}).items():
        times = "once" if count == 1 else f"{count} times"
        make, words, hint = _REFUSALS.get(reason, (note, _OTHERWISE, ""))
        text = words.format(agent=node.agent, times=times, reason=reason)
        findings.append(make("refused", text, hint))
    return findings


_OTHERWISE = "{agent} turned somebody away {times}: {reason}."
_KEEP_OUT = "Members are not affected."
_FORGERY = "{agent} was told {times} what its author had not signed, and did not believe it."
_NOISE = "A member sent {agent} bytes that break the protocol, {times}."
_LOOK = "A faulty or hostile program has this mesh's secret; its address is in node.log."
_MOVED = "{agent} met another agent than expected at an address, {times}."
_CHUNKS = "A member sent {agent} parts of attachments that it had not asked for so, {times}."
_ASKS = "A member asked {agent} for attachments in a way that breaks the protocol, {times}."
_RESOLVES = "It resolves itself: that address is the other agent's now."

# Reasons as the transport, the links and the membership count them.
_REFUSALS: dict[str, tuple[Callable[[str, str, str], Finding], str, str]] = {
    "absurd ask": (problem, _ASKS, _LOOK),
    "absurd credit": (problem, _ASKS, _LOOK),
    "another size for the same blob": (
        note,
        "{agent} was offered the same attachment with different sizes, {times}.",
        "It takes whichever turns out to be true.",
    ),
    "attachments beyond the limits": (
        note,
        "{agent} refused messages whose attachments are beyond its limits, {times}.",
        "The limits are in mesh.toml: attachments_each, attachments_count, attachments_types.",
    ),
    "attachments that can't be had": (
        note,
        "{agent} gave up messages whose attachments could not be had, {times}.",
        "Their senders know, and why; the reason is in their outbox and log.",
    ),
    "blob not granted": (
        problem,
        "{agent} was asked {times} for an attachment by an agent that it was not sent to.",
        _LOOK,
    ),
    "chunk beyond the credit": (problem, _CHUNKS, _LOOK),
    "chunk of a wrong length": (problem, _CHUNKS, _LOOK),
    "chunk out of order": (problem, _CHUNKS, _LOOK),
    "chunk that came too late": (note, _CHUNKS, "It was late, after another source was chosen."),
    "chunk that was never asked for": (problem, _CHUNKS, _LOOK),
    "clone": (
        problem,
        "A second node with the key of an agent of this mesh met {agent} {times}: a copied folder.",
        "Run only one of the copies; join the other with --name, as an agent of its own.",
    ),
    "credit for no pull": (note, _ASKS, "It spoke of a transfer that had just ended."),
    "denied": (note, "{agent} kept out {times} an agent that it had just turned away.", _KEEP_OUT),
    "end of no pull": (note, _CHUNKS, "It spoke of a transfer that had just ended."),
    "error": (problem, "{agent} failed {times} to judge a caller.", "A bug of ours: see node.log."),
    "forged": (problem, _FORGERY, _LOOK),
    "forged update": (problem, _FORGERY, _LOOK),
    "forgotten": (note, "{agent} got late words on a link that it had closed, {times}.", _KEEP_OUT),
    "impostor": (
        problem,
        "Somebody with this mesh's secret claimed another agent's id {times}, and {agent} refused.",
        _LOOK,
    ),
    "limit": (
        problem,
        "{agent} had no room for another link {times}.",
        "Raise its file limit before the join (ulimit -n 4096), or run fewer agents.",
    ),
    "mail of a lost database": (
        problem,
        "{agent} once had mail that its database does not hold, {times}: it was deleted, or is an "
        "older copy. The senders know it as delivered and don't send it again.",
        "All that is new arrives. A later copy may be in its folder 'backups': meshagent restore",
    ),
    "malformed": (problem, _NOISE, _LOOK),
    "malformed message": (problem, _NOISE, _LOOK),
    "malformed update": (problem, _NOISE, _LOOK),
    "mechanism": (note, "A program that is not meshagent knocked at {agent} {times}.", _KEEP_OUT),
    "members full": (
        problem,
        "{agent} knows as many agents as it can, and left out newcomers {times}.",
        "Remove agents that are gone for good, or use several meshes.",
    ),
    "numbers from another day": (
        note,
        "A peer of {agent} has what it never sent, {times}: its database is an older copy.",
        "It numbered what waits anew, and nothing is lost; 'meshagent restore' does this at once.",
    ),
    "not me": (note, _MOVED, _RESOLVES),
    "not them": (note, _MOVED, _RESOLVES),
    "outsider": (
        note,
        "Somebody without this mesh's secret knocked at {agent} {times}: another mesh, a wrong "
        "invite, or a program that scans ports.",
        "If a peer is missing, give it a new invite from here: meshagent invite",
    ),
    "oversize": (problem, "{agent} was sent frames beyond the limit {times}.", _LOOK),
    "parts": (problem, "{agent} was sent frames beyond the limit {times}.", _LOOK),
    "protocol": (problem, _NOISE, _LOOK),
    "pull number used twice": (problem, _ASKS, _LOOK),
    "replay": (problem, "{agent} was shown an old answer again {times}.", _LOOK),
    "routing id": (problem, _NOISE, _LOOK),
    "source": (
        note,
        "One address knocked at {agent} so often that it had to wait, {times}.",
        "A program that dials in a loop? Its address is in node.log.",
    ),
    "stalled": (
        note,
        "A peer promised {agent} an attachment and sent nothing for a while, {times}.",
        "It goes on by itself, from another peer that has it if there is one.",
    ),
    "too many pulls at once": (
        note,
        "A peer asked {agent} for more attachments at once than it serves, {times}.",
        "They come one after the other.",
    ),
    "unknown accuser": (
        note,
        "{agent} was told {times} that a peer is away, by an agent that it does not know yet.",
        _KEEP_OUT,
    ),
    "version": (
        problem,
        "A peer of an incompatible version tried to join {agent} {times}.",
        "Update the older of the two: meshagent --version tells which.",
    ),
}
