"""Verdicts on peers: why one is not seen, and where one that was asked for is.

Pure: judges what the nodes said and who answered at the peers' addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from meshagent.diagnosis.finding import Finding, State, few, note, ok, problem, span
from meshagent.diagnosis.nodes import NodeReport
from meshagent.diagnosis.probes import DialAnswer

__all__ = [
    "LocalKnowledge",
    "PeerFacts",
    "addresses_to_try",
    "answers_to",
    "check_address",
    "check_company",
    "check_each_other",
    "check_peer",
    "find_peers",
    "no_speaker",
    "peers_of",
    "unknown_peer",
]

ADDRESSES_TRIED_MAX = 32  # all at once, a second each
ADDRESSES_OF_PEER_MAX = 4
PEERS_EXPLAINED_MAX = 8  # the rest is counted: nobody reads more
SETTLING_S = 5.0  # after a start, others may not have been met yet
_ORDER = ("alive", "suspect", "gone", "left")
_NAME_ENDS = -9  # an id is its name, a dash and 8 characters


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """A peer as the nodes here see it together: the best that any of them knows."""

    agent: str
    state: str
    addresses: tuple[str, ...]
    host: str
    last_heard: str | None
    seen_by: str


@dataclass(frozen=True, slots=True)
class LocalKnowledge:
    """What this machine knows of agents, beside what its nodes say."""

    nodes: Mapping[str, NodeReport] = field(default_factory=dict)
    agents: tuple[str, ...] = ()
    """In the mesh folder, running or not."""
    now: float = 0.0


def peers_of(nodes: Sequence[NodeReport]) -> list[PeerFacts]:
    """Every peer once, in the best state in which any node here has it."""
    best: dict[str, PeerFacts] = {}
    for node in nodes:
        for view in node.answer.peers:
            facts = _facts(view, node.agent)
            before = best.get(facts.agent)
            if before is None or _rank(facts.state) < _rank(before.state):
                best[facts.agent] = facts
    return [best[agent] for agent in sorted(best)]


def _facts(view: Mapping[str, Any], seen_by: str) -> PeerFacts:
    return PeerFacts(
        str(view.get("agent", "")), str(view.get("state", "")),
        tuple(map(str, view.get("addresses", ()))), str(view.get("host", "")),
        view.get("last_heard"), seen_by,
    )  # fmt: skip


def _rank(state: str) -> int:
    return _ORDER.index(state) if state in _ORDER else len(_ORDER)


def addresses_to_try(peers: Sequence[PeerFacts], known: LocalKnowledge) -> list[str]:
    """Where to knock: only addresses of peers that are not seen, and not too many."""
    wanted = [
        address
        for peer in peers
        if peer.state in ("suspect", "gone") and not _hangs_here(peer, known)
        for address in peer.addresses[:ADDRESSES_OF_PEER_MAX]
    ]
    return list(dict.fromkeys(wanted))[:ADDRESSES_TRIED_MAX]


def _hangs_here(peer: PeerFacts, known: LocalKnowledge) -> bool:
    return peer.agent in known.nodes and not known.nodes[peer.agent].answers


def check_company(nodes: Sequence[NodeReport], peers: Sequence[PeerFacts]) -> Finding:
    """Who is here, in one line."""
    alive = [peer.agent for peer in peers if peer.state == "alive"]
    if alive:
        return ok("peers", f"seen: {few(alive)}")
    if any(peer.state in ("suspect", "gone") for peer in peers):
        return note("peers", f"{few([node.agent for node in nodes])} sees nobody now.")
    return note(
        "peers",
        f"{few([node.agent for node in nodes])} sees nobody else yet.",
        "Here: meshagent join --role backend   On another machine: meshagent invite",
    )


def check_each_other(nodes: Sequence[NodeReport]) -> list[Finding]:
    """Nodes of one folder on one machine that do not see each other."""
    findings = []
    for node in nodes:
        blind_to = [
            other.agent
            for other in nodes
            if other is not node
            and (node.peer(other.agent) or {}).get("state") != "alive"
            and min(_uptime(node), _uptime(other)) > SETTLING_S
        ]
        if blind_to:
            findings.append(
                problem(
                    "peers",
                    f"{node.agent} does not see {few(blind_to)}, though both run here.",
                    f"If one was started with --discovery none, start it anew; see the node.log of "
                    f"{node.agent} otherwise.",
                )
            )
    return findings[:PEERS_EXPLAINED_MAX]


def _uptime(node: NodeReport) -> float:
    return float(node.answer.status.get("uptime_s", 0))


def check_peer(
    peer: PeerFacts, answers: Mapping[str, DialAnswer | None], known: LocalKnowledge
) -> Finding:
    """Why this peer is, or is not, seen."""
    heard = f", last heard {_ago(peer, known.now)}" if peer.last_heard else ""
    if peer.state == "alive":
        return ok("peers", f"{peer.agent} is seen by {peer.seen_by}{heard}")
    if peer.state == "left":
        return note(
            "peers",
            f"{peer.agent} left on purpose{heard}.",
            "Its person can join again: nothing stands in the way here.",
        )
    doing = "is gone" if peer.state == "gone" else "does not answer right now"
    state, why, hint = _why(peer, answers, known)
    return Finding("peers", state, f"{peer.agent} {doing}{heard}: {why}.", hint)


def _why(
    peer: PeerFacts, answers: Mapping[str, DialAnswer | None], known: LocalKnowledge
) -> tuple[State, str, str]:
    node = known.nodes.get(peer.agent)
    if node is not None and not node.answers:
        return State.PROBLEM, f"its node here (pid {node.pid}) hangs", f"See above; kill {node.pid}"
    if node is None and peer.agent in known.agents:
        start = f"Start it: meshagent join --as {peer.agent}"
        return State.NOTE, "its node is not running on this machine", start
    if not peer.addresses:
        return State.PROBLEM, "no address of it is known", "Let it join again, or use --peer."
    tried = [(each, answers[each]) for each in peer.addresses if each in answers]
    if not tried:
        return State.NOTE, "too many are gone to try them all", f"meshagent doctor {peer.agent}"
    # The most telling of its answers: one that speaks before one that is merely absent.
    address, answer = min(tried, key=lambda pair: _MOST_INFORMATIVE_FIRST.index(pair[1]))
    state, words, hint = _AT_ADDRESS[answer]
    return state, words.format(address=address), hint.format(host=peer.host or "its machine")


_MOST_INFORMATIVE_FIRST = (
    DialAnswer.OURS,
    DialAnswer.OPEN,
    DialAnswer.FOREIGN,
    DialAnswer.OTHER,
    DialAnswer.SILENT,
    DialAnswer.REFUSED,
    DialAnswer.DROPPED,
    DialAnswer.UNREACHABLE,
    DialAnswer.UNKNOWN,
    None,
)

_WHO_IS_OFF = (
    "Is {host} on, awake and on this network? Or let it dial us: --peer there, one way is enough."
)
_AT_ADDRESS: dict[DialAnswer | None, tuple[State, str, str]] = {
    DialAnswer.OURS: (
        State.NOTE,
        "a node of this mesh answers at {address}, and the two are not linked now",
        "Give it a minute; if it stays so, another agent may have that address: meshagent peers.",
    ),
    DialAnswer.OPEN: (
        State.NOTE,
        "something answers at {address}",
        "Repair mesh.key to tell more.",
    ),
    DialAnswer.FOREIGN: (
        State.PROBLEM,
        "what answers at {address} is of another mesh: it does not know our secret",
        "If it should be of this one, invite it again: meshagent invite",
    ),
    DialAnswer.OTHER: (
        State.PROBLEM,
        "another program answers at {address}, not a mesh node",
        "The peer has moved to another port: let it join again, or use --peer.",
    ),
    DialAnswer.SILENT: (
        State.PROBLEM,
        "{address} takes the connection and says nothing: its node hangs, or it is no mesh node",
        "Look at that process on {host}.",
    ),
    DialAnswer.REFUSED: (
        State.NOTE,
        "the connection to {address} is refused: the machine is there, and no node listens",
        "Start its node again on {host}.",
    ),
    DialAnswer.DROPPED: (
        State.PROBLEM,
        "nothing comes back from {address}: the machine is off or asleep, or a firewall drops us",
        _WHO_IS_OFF,
    ),
    DialAnswer.UNREACHABLE: (State.PROBLEM, "there is no way to {address} from here", _WHO_IS_OFF),
    DialAnswer.UNKNOWN: (
        State.PROBLEM,
        "the name in {address} is not known",
        "Check its spelling.",
    ),
    None: (State.PROBLEM, "there was no answer from {address} in time", _WHO_IS_OFF),
}


def check_address(address: str, answer: DialAnswer | None, source: str = "") -> Finding:
    """Who answers at an address that a person gave, or mesh.toml."""
    what = f"{address}{f' ({source})' if source else ''}"
    if answer is DialAnswer.OURS:
        return ok("peers", f"{what}: a node of this mesh answers there")
    _, words, hint = _AT_ADDRESS[answer]
    text = words.format(address=what)
    return problem("peers", f"{text[0].upper()}{text[1:]}.", hint.format(host="its machine"))


# -- the one that was asked for -------------------------------------------------------------------


def find_peers(wanted: str, peers: Sequence[PeerFacts]) -> list[PeerFacts]:
    """Who answers to that word: an id, a name, or the beginning of an id."""
    exact = [each for each in peers if each.agent == wanted]
    alike = [each for each in peers if answers_to(each.agent, wanted)]
    return (exact or alike)[:PEERS_EXPLAINED_MAX]


def answers_to(agent: str, wanted: str) -> bool:
    """Whether `wanted` is this agent's id, its name, or the beginning of its id."""
    return agent[:_NAME_ENDS] == wanted or agent.startswith(wanted)


def no_speaker(speaker: str) -> Finding:
    """The agent that commands are to speak as is not here."""
    return problem(
        "peers",
        f"No running agent here answers to {speaker!r}, as which commands are to speak.",
        f"Start it (meshagent join --as {speaker}), or correct --as and MESHAGENT_AGENT.",
    )


def unknown_peer(wanted: str, known: LocalKnowledge, nodes_answer: bool) -> Finding:
    """Why nobody here knows the one that was asked for."""
    for agent in sorted({*known.nodes, *known.agents}):
        if not answers_to(agent, wanted):
            continue
        node = known.nodes.get(agent)
        if node is None:
            start = f"Start it: meshagent join --as {agent}"
            return problem("peers", f"{agent} lives in this folder and does not run.", start)
        if node.answers:
            return ok("peers", f"{agent} runs on this machine, in this folder")
        return problem("peers", f"{agent} runs on this machine and hangs.", "See above.")
    if not nodes_answer:
        return problem(
            "peers",
            f"Nobody here can know {wanted!r}: no node of this mesh runs on this machine.",
            "Start one: meshagent join --role tester",
        )
    return problem(
        "peers",
        f"No node here has ever heard of {wanted!r}.",
        "Does it run, in this mesh? Invite it (meshagent invite), or say where it is: "
        "meshagent doctor host:port",
    )


def _ago(peer: PeerFacts, now: float) -> str:
    try:
        age_s = now - datetime.fromisoformat(str(peer.last_heard)).timestamp()
    except ValueError:
        return "at a time that is not one"
    return f"{span(age_s)} ago" if age_s >= 2 else "just now"
