"""The whole examination: asks in an order in which each answer tells what to ask next.

Invariant: it ends within a few seconds whatever hangs, and leaves every file as it was. The one
exception is asked for: to read all attachments again takes its time, and sets damaged ones aside.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from meshagent._version import __version__
from meshagent.core.model.identity import MeshSecret
from meshagent.core.model.network_addresses import is_address
from meshagent.diagnosis import damage, files, folder, network, nodes, peers, probes
from meshagent.diagnosis.finding import Finding, State, few, note, ok, problem
from meshagent.discovery.registry import RegistryEntry
from meshagent.errors import MeshError
from meshagent.session import Session, open_blobs, runtime_folder
from meshagent.storage.blobs.garbage import DAMAGED
from meshagent.storage.blobs.importing import Progress
from meshagent.storage.blobs.verification import audit, held_in
from meshagent.storage.folders.agents import AgentFolder, list_agents
from meshagent.storage.folders.mesh_folder import KEY_KIND, MeshFolder
from meshagent.storage.folders.mounts import mounted_filesystem
from meshagent.storage.folders.settings import Settings

__all__ = ["examine"]

KNOCK_S = probes.RESOLVE_S + probes.DOOR_S + probes.CONNECT_S + 0.5
OWN_ADDRESSES_MAX = 8
MULTICAST_HOSTS_MAX = 8
MESSAGES_LOOKED_AT = 10_000  # the newest of each agent; an older one's damaged file goes unnamed


@dataclass(slots=True)
class Examination:
    """What has been learned so far."""

    start: Path
    environ: Mapping[str, str]
    chosen: Path | None
    listen: str | None
    peer: str | None
    speaker: str
    watch_files: Progress | None = None
    findings: list[Finding] = field(default_factory=list)
    mesh: MeshFolder | None = None
    settings: Settings = field(default_factory=lambda: Settings(name="mesh"))
    secret: MeshSecret | None = None
    agents: tuple[str, ...] = ()
    resting: list[AgentFolder] = field(default_factory=list)
    """Agents whose files are whole, and that do not run."""
    entries: list[RegistryEntry] = field(default_factory=list)
    reports: list[nodes.NodeReport] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)


def examine(
    start: Path,
    environ: Mapping[str, str],
    chosen: Path | None = None,
    listen: str | None = None,
    peer: str | None = None,
    speaker: str | None = None,
    watch_files: Progress | None = None,
) -> list[Finding]:
    """Everything there is to say, problems last.

    `peer` is explained in particular; `speaker` is the agent whose view of the others counts.
    With `watch_files`, all attachments are read again, and it hears how many bytes have been.
    """
    speaker = speaker or environ.get("MESHAGENT_AGENT", "")
    known = Examination(start, environ, chosen, listen, peer, speaker, watch_files)
    for check in (_mesh, _registry, _agents, _nodes, _mail, _network, _peers, _machine, _files):
        known.findings += _guarded(check, known)
    order = list(State)
    return sorted(known.findings, key=lambda finding: order.index(finding.state))


def _guarded(
    check: Callable[[Examination], Iterable[Finding]], known: Examination
) -> list[Finding]:
    """A check that fails is a finding too: the others still have something to say."""
    findings: list[Finding] = []
    try:
        findings.extend(check(known))
    except (MeshError, OSError) as error:
        hint = error.hint if isinstance(error, MeshError) else ""
        words = error.message if isinstance(error, MeshError) else str(error)
        name = check.__name__.strip("_")
        findings.append(problem(name, f"This could not be looked at: {words}", hint))
    return findings


# -- on disk --------------------------------------------------------------------------------------


def _mesh(known: Examination) -> Iterable[Finding]:
    mesh, finding = folder.check_place(known.start, known.chosen, known.environ)
    yield finding
    if mesh is None:
        return
    known.mesh = mesh
    key = folder.look_at_key(mesh.key_file, KEY_KIND)
    yield folder.check_key(key)
    if key.key is not None:
        known.secret = MeshSecret(key.key)
    settings = folder.check_settings(mesh)
    yield settings
    if settings.state is State.OK:
        known.settings = mesh.read_settings()
    writable = os.access(mesh.path, os.W_OK)
    yield folder.check_room(mesh, folder.free_bytes(mesh.path), writable)
    foreign = folder.check_filesystem(mesh.path, mounted_filesystem(mesh.path))
    if foreign is not None:
        yield foreign


def _registry(known: Examination) -> Iterable[Finding]:
    if known.mesh is None:
        return
    now = time.time()
    tag = known.secret.tag if known.secret else ""
    odd = False
    for path, entry in folder.read_registry_files(known.mesh.registry):
        finding = folder.check_registry_entry(path, entry, tag, now)
        if finding is not None:
            odd = True
            yield finding
        if isinstance(entry, RegistryEntry):
            known.entries.append(entry)
    if not odd:
        listed = few([entry.agent for entry in known.entries]) or "no node"
        yield ok("registry", f"lists {listed}", detail=True)


def _agents(known: Examination) -> Iterable[Finding]:
    if known.mesh is None:
        return
    listed = frozenset(entry.agent for entry in known.entries if entry.is_running())
    folders = list_agents(known.mesh)
    facts = [folder.look_at_agent(each, listed) for each in folders]
    known.agents = tuple(each.agent for each in facts if not each.trouble)
    known.resting = [one for one, each in zip(folders, facts, strict=True) if each.pid is None]
    for each in facts:
        yield folder.check_agent(each)
    running = sum(each.pid is not None for each in facts)
    yield ok("agents", f"{len(facts)} in this folder, {running} running")


# -- nodes ----------------------------------------------------------------------------------------


def _nodes(known: Examination) -> Iterable[Finding]:
    known.reports = _ask_nodes(known.entries)
    for report in known.reports:
        yield nodes.check_node(report)
    answering = _answering(known)
    yield from nodes.check_versions(__version__, answering)
    for report in answering:
        yield from nodes.check_sources(report)
        yield from nodes.check_refusals(report)
    if known.mesh is not None and not known.reports:
        yield note(
            "nodes",
            "No node of this mesh runs on this machine.",
            "Start one: meshagent join --role tester",
        )


def _ask_nodes(entries: Iterable[RegistryEntry]) -> list[nodes.NodeReport]:
    running = [
        entry
        for entry in entries
        if entry.is_local() and entry.is_running() and entry.extra.get("control")
    ]
    controls = [str(entry.extra["control"]) for entry in running]
    answers = probes.in_parallel(probes.ask_node, controls, probes.NODE_ANSWER_S + 0.5)
    silent = probes.NodeAnswer({}, (), "there was no answer in time", hangs=True)
    return [
        nodes.NodeReport(entry.agent, entry.pid, answer or silent, probes.is_stopped(entry.pid))
        for entry, answer in zip(running, answers, strict=True)
    ]


def _answering(known: Examination) -> list[nodes.NodeReport]:
    return [report for report in known.reports if report.answers]


# -- mail -----------------------------------------------------------------------------------------


def _mail(known: Examination) -> Iterable[Finding]:
    """What the disk has done to messages, of agents that run and of those that don't."""
    for report in _answering(known):
        yield from damage.check_damage(report.agent, report.answer.status.get("damage", ()))
    yield from damage.check_resting(known.resting)


# -- the network ----------------------------------------------------------------------------------


def _network(known: Examination) -> Iterable[Finding]:
    found = probes.devices()
    answering = _answering(known)
    advertised = [address for report in answering for address in report.addresses]
    known.hosts = network.hosts_in_question(
        known.listen or "", advertised, known.settings.listen, found
    )
    told = {report.agent: report.addresses for report in answering}
    yield from network.check_listen(told or {"": known.hosts})
    yield from network.check_interfaces(found, known.hosts)
    yield from _multicast(known)
    yield from _ports(known, answering)
    local_only = network.is_local_only(known.hosts)
    yield from network.check_surroundings(probes.surroundings(), found, local_only)


def _multicast(known: Examination) -> Iterable[Finding]:
    if known.settings.discovery not in ("auto", "mdns"):
        yield note(
            "multicast",
            f"mDNS is off: mesh.toml says discovery = {known.settings.discovery!r}.",
            "Agents on other machines are then found by --peer and by what peers tell.",
        )
        return
    ipv4 = [host for host in known.hosts if _is_ipv4(host)][:MULTICAST_HOSTS_MAX]
    for host in ipv4:
        yield network.check_multicast(host, probes.multicast_trouble(host))


def _is_ipv4(host: str) -> bool:
    return ":" not in host and host.replace(".", "").isdigit()


def _ports(known: Examination, answering: list[nodes.NodeReport]) -> Iterable[Finding]:
    if known.secret is None:
        return  # our own nodes would count us as strangers
    own = [
        (report.agent, address)
        for report in answering
        for address in report.addresses[:OWN_ADDRESSES_MAX]
        if is_address(address)
    ]
    answers = _knock(known, [address for _, address in own])
    for agent, address in own:
        yield network.check_port(agent, address, answers[address])


def _knock(known: Examination, addresses: list[str]) -> dict[str, probes.DialAnswer | None]:
    door = known.secret.door() if known.secret else None
    answers = probes.in_parallel(lambda address: probes.knock(address, door), addresses, KNOCK_S)
    return dict(zip(addresses, answers, strict=True))


# -- peers ----------------------------------------------------------------------------------------


def _peers(known: Examination) -> Iterable[Finding]:
    answering = _answering(known)
    if known.speaker:
        answering = [each for each in answering if peers.answers_to(each.agent, known.speaker)]
        if known.mesh is not None and not answering:
            yield peers.no_speaker(known.speaker)
    everyone = peers.peers_of(answering)
    here = peers.LocalKnowledge(
        {report.agent: report for report in known.reports}, known.agents, time.time()
    )
    if known.peer is not None:
        yield from _asked_for(known, everyone, here)
        return
    if answering:
        yield peers.check_company(answering, everyone)
    yield from peers.check_each_other(answering)
    absent = [each for each in everyone if each.state in ("suspect", "gone")]
    answers = _knock(known, peers.addresses_to_try(absent, here))
    for each in absent[: peers.PEERS_EXPLAINED_MAX]:
        yield peers.check_peer(each, answers, here)
    rest = [each.agent for each in absent[peers.PEERS_EXPLAINED_MAX :]]
    if rest:
        yield note("peers", f"{few(rest)} are gone too.", "Ask for one: meshagent doctor AGENT")
    given = list(known.settings.peers[: peers.ADDRESSES_OF_PEER_MAX])
    for address, answer in _knock(known, [each for each in given if is_address(each)]).items():
        yield peers.check_address(address, answer, "peers in mesh.toml")


def _asked_for(
    known: Examination, everyone: list[peers.PeerFacts], here: peers.LocalKnowledge
) -> Iterable[Finding]:
    wanted = str(known.peer)
    if is_address(wanted):
        yield peers.check_address(wanted, _knock(known, [wanted])[wanted])
        return
    matching = peers.find_peers(wanted, everyone)
    answers = _knock(known, peers.addresses_to_try(matching, here))
    for each in matching:
        finding = peers.check_peer(each, answers, here)
        # What is merely worth a note in the round is the problem of who asks for this peer.
        missing = each.state in ("suspect", "gone")
        yield replace(finding, state=State.PROBLEM) if missing else finding
    if not matching:
        yield peers.unknown_peer(wanted, here, bool(_answering(known)))


# -- the machine ----------------------------------------------------------------------------------


def _machine(known: Examination) -> Iterable[Finding]:
    now = time.time()
    beats = [(entry.agent, entry.heartbeat) for entry in known.entries]
    yield folder.check_clock(now, beats, datetime.now(UTC).year)
    limits = [(f"The node of {each.agent}", each.pid) for each in known.reports]
    for who, pid in limits or [("A node started here", 0)]:
        finding = network.check_descriptors(who, probes.descriptor_limit(pid))
        if finding is not None:
            yield finding
    sockets = runtime_folder()
    try:
        status = sockets.lstat()
    except OSError:
        status = None
    yield folder.check_runtime_folder(sockets, status, os.getuid())


# -- attachments ----------------------------------------------------------------------------------


def _files(known: Examination) -> Iterable[Finding]:
    if known.watch_files is None or known.mesh is None:
        return
    blobs = open_blobs(known.mesh, known.settings)
    found = audit(blobs, known.watch_files)
    yield from files.check_store(found)
    missing = [*found.damaged, *found.lost]
    if not missing:
        return
    holders = [each.path / "blobs" for each in list_agents(known.mesh)]
    needed_by = {
        each: [holder.parent.name for holder in held_in(holders, each)] for each in missing
    }
    named = _named(known)
    yield from files.check_damaged(found.damaged, named, needed_by, blobs.root / DAMAGED)
    yield from files.check_lost(found.lost, named, needed_by)


def _named(known: Examination) -> dict[str, list[files.Naming]]:
    """What the messages of the agents that run here say of files, by SHA-256."""
    answering = {report.agent for report in _answering(known)}
    named: dict[str, list[files.Naming]] = {}
    for entry in [each for each in known.entries if each.agent in answering]:
        try:
            with Session(entry) as session:
                messages = session.ask("log", limit=MESSAGES_LOOKED_AT)
        except MeshError:  # it ended meanwhile: its files go unnamed
            continue
        for sha256, found in files.namings(entry.agent, messages).items():
            named.setdefault(sha256, []).extend(found)
    return named
