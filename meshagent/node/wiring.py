"""The one module that puts the default adapters together into a running node.

Everything a `join` needs, from the command line or embedded, goes through `open_node`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import logging
import logging.handlers
import os
import platform
import shutil
import socket
import stat
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from meshagent._version import __version__
from meshagent.core.model.addressing import KnownAgent
from meshagent.core.model.attachments import AttachmentLimits
from meshagent.core.model.identity import MeshSecret
from meshagent.core.model.peers import AgentId, Candidate, veil
from meshagent.core.model.records import HOST_CHARACTERS_MAX
from meshagent.core.ports import Announcement, Discovery
from meshagent.errors import MeshError, StorageError, UsageError
from meshagent.node.agents import LockedAgent, check_words, take_agent
from meshagent.node.blobs import BlobTransfers
from meshagent.node.control_socket import ControlServer
from meshagent.node.daily_backups import keep_snapshots
from meshagent.node.driver import Driver
from meshagent.node.mailbox import Mailbox
from meshagent.node.profile import Profile
from meshagent.node.spool import FolderSpool
from meshagent.session import open_blobs, runtime_folder
from meshagent.storage.folders.agents import AgentFolder, list_agents
from meshagent.storage.folders.files import mapped_errors
from meshagent.storage.folders.mesh_folder import MeshFolder
from meshagent.storage.folders.settings import DISCOVERY_CHOICES, Settings

__all__ = ["JoinOptions", "RunningNode", "check_options", "open_node"]

IDLE_CHECK_S = 5.0
LOG_BYTES_MAX = 1024 * 1024
LOG_FILES_MAX = 3
PORT_FIRST = 21000  # below Linux's ephemeral range, so an agent's own port is usually free
PORTS = 11000


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """What a caller of join may say; empty means what mesh.toml or the default says."""

    role: str
    name: str | None = None
    capabilities: tuple[str, ...] = ()
    discovery: str | None = None
    listen: str | None = None
    peers: tuple[str, ...] = ()
    agent: str | None = None


@dataclass(slots=True)
class RunningNode:
    """A node that has joined."""

    driver: Driver
    mailbox: Mailbox
    agent: LockedAgent
    mesh: MeshFolder
    warnings: list[str]
    log: logging.Logger
    control: ControlServer

    def end_when_idle(self, after_s: float) -> None:
        """End the node once no session has been there for so long and nothing waits to be sent."""
        self.driver.spawn(self._watch_idle(after_s))

    async def _watch_idle(self, after_s: float) -> None:
        while self.control.idle_s() < after_s or await self.mailbox.waits():  # noqa: ASYNC110
            await asyncio.sleep(min(IDLE_CHECK_S, after_s))
        self.driver.end()


def check_options(options: JoinOptions) -> None:
    """What can be known to fail before a mesh or an agent is made for it; raises UsageError."""
    from meshagent.core.model.network_addresses import parse_address

    check_words(options.role, options.name, options.capabilities)
    if options.discovery is not None:
        _sources(options.discovery)
    for peer in options.peers:
        parse_address(peer)
    if options.listen is not None:
        _check_free(*_where_to_listen(options.listen))


@asynccontextmanager
async def open_node(mesh: MeshFolder, options: JoinOptions) -> AsyncIterator[RunningNode]:
    """Join: everything is checked before anything is made, and undone when it fails."""
    check_options(options)
    settings = mesh.read_settings()
    secret = MeshSecret(mesh.read_secret())
    host, ports = _where_to_listen(_first(options.listen, settings.listen))
    _check_free(host, ports)
    sources = _sources(_first(options.discovery, settings.discovery))
    agent = take_agent(mesh, options.role, options.name, options.capabilities, options.agent)
    joined = False
    try:
        lost = _lost_database(agent.folder)
        with _open_log(agent) as log:
            if lost:
                log.warning(lost)
            peers = (*settings.peers, *options.peers)
            driver, mailbox = _assemble(mesh, agent, secret, settings, host, sources, peers, log)
            control = ControlServer(
                driver, mailbox, _control_path(agent), log, agent.folder.log_file
            )
            await control.start()
            try:
                await driver.start(host, ports or (_own_port(agent), 0))
                driver.spawn(keep_snapshots(driver, agent.folder.path / "backups"))
                joined = True
                warnings = [*mesh.warnings, *agent.folder.warnings, *([lost] if lost else [])]
                yield RunningNode(driver, mailbox, agent, mesh, warnings, log, control)
            finally:
                await driver.stop()
                await control.close()
    finally:
        if not (joined or agent.resumed):
            agent.forget()
        agent.lock.release()


def _assemble(
    mesh: MeshFolder,
    agent: LockedAgent,
    secret: MeshSecret,
    settings: Settings,
    host: str,
    sources: frozenset[str],
    peers: Sequence[str],
    log: logging.Logger,
) -> tuple[Driver, Mailbox]:
    from meshagent.storage.mail.sqlite_store import SqliteStore
    from meshagent.transports.spool import Spool
    from meshagent.transports.zmq.transport import ZmqTransport

    identity = agent.identity
    transport = ZmqTransport(*secret.door(), identity.curve_public, identity.curve_secret)
    profile = Profile(
        identity, secret, settings.name, agent.info.role, agent.info.capabilities,
        platform.node()[:HOST_CHARACTERS_MAX] or "unknown", __version__,
    )  # fmt: skip
    discoveries = _discoveries(mesh, agent, host, sources, peers, _control_path(agent))
    store = SqliteStore(agent.folder.database, identity.agent)
    spool = FolderSpool(
        Spool(mesh.spool, identity.agent), store, identity, secret.mesh_id,
        lambda peer: (mesh.agents / peer).is_dir(),
    )  # fmt: skip
    blobs = open_blobs(mesh, settings)
    blob_transfers = BlobTransfers(
        blobs, agent.folder.path / "blobs", lambda peer: (mesh.agents / peer).is_dir()
    )
    limits = AttachmentLimits(
        settings.attachments_eager, settings.attachments_each,
        settings.attachments_count, settings.attachments_types,
    )  # fmt: skip
    driver = Driver(
        profile,
        transport,
        store,
        discoveries,
        log,
        spool,
        blob_transfers,
        limits,
        free_bytes=partial(_free_bytes, agent.folder.path),
    )
    return driver, Mailbox(driver, store, blob_transfers, lambda: _known(mesh, driver))


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _known(mesh: MeshFolder, driver: Driver) -> list[KnownAgent]:
    """Who can be addressed: everyone met, and the agents of this folder, met or not."""
    met = {
        each.agent: KnownAgent(each.agent, each.role, each.state.value)
        for each in driver.mesh.peers()
    }
    for folder in list_agents(mesh):
        if folder.agent not in met and folder.agent != driver.agent:
            with contextlib.suppress(MeshError):
                met[folder.agent] = KnownAgent(folder.agent, folder.read().role, "")
    me = driver.mesh.me
    return [*met.values(), KnownAgent(me.agent, me.role, "alive")]


def _discoveries(
    mesh: MeshFolder,
    agent: LockedAgent,
    host: str,
    sources: frozenset[str],
    peers: Sequence[str],
    socket: Path,
) -> list[Discovery]:
    from meshagent.discovery.file import FileDiscovery
    from meshagent.discovery.static import StaticDiscovery

    extra = {"control": str(socket), "name": agent.info.name, "role": agent.info.role}
    registry: Discovery = FileDiscovery(mesh.registry, extra)
    if "file" not in sources:
        registry = _Unheard(registry)  # sessions still find the node by its file
    found: list[Discovery] = [registry]
    if peers:
        found.append(StaticDiscovery(peers))
    if "mdns" in sources:
        from meshagent.discovery.mdns.source import MdnsDiscovery

        found.append(_Veiled(MdnsDiscovery([host] if host else None)))
    return found


class _Veiled:
    """A source that everyone on the network can read: it says which key, not which name."""

    def __init__(self, inner: Discovery) -> None:
        self.name, self.ignored = inner.name, inner.ignored
        self._inner = inner

    async def start(self, me: Announcement, found: Callable[[Candidate], None]) -> None:
        def unveil(candidate: Candidate) -> None:
            # Who that is, it says itself when it is dialled; our own key means a copy of us.
            copy = candidate.agent == veil(AgentId(me.agent))
            found(replace(candidate, agent=me.agent if copy else ""))

        await self._inner.start(replace(me, agent=veil(AgentId(me.agent))), unveil)

    async def update(self, me: Announcement) -> None:
        await self._inner.update(replace(me, agent=veil(AgentId(me.agent))))

    def health(self) -> str:
        return self._inner.health()

    async def close(self) -> None:
        await self._inner.close()


class _Unheard:
    """A source that announces and whose candidates nobody hears."""

    def __init__(self, inner: Discovery) -> None:
        self.name, self.ignored = inner.name, inner.ignored
        self._inner = inner

    async def start(self, me: Announcement, found: Callable[[Candidate], None]) -> None:
        await self._inner.start(me, lambda _: None)

    async def update(self, me: Announcement) -> None:
        await self._inner.update(me)

    def health(self) -> str:
        return self._inner.health()

    async def close(self) -> None:
        await self._inner.close()


def _sources(choice: str) -> frozenset[str]:
    if choice not in DISCOVERY_CHOICES:
        raise UsageError(
            f"{choice!r} is not a way of discovery.",
            hint=f"Choose one of {', '.join(DISCOVERY_CHOICES)}.",
        )
    return {
        "auto": frozenset({"file", "mdns"}),
        "mdns": frozenset({"mdns"}),
        "file": frozenset({"file"}),
        "none": frozenset(),
    }[choice]


def _where_to_listen(text: str) -> tuple[str, tuple[int, ...] | None]:
    """Host ("" for all interfaces), and the port when one is asked for."""
    from meshagent.core.model.network_addresses import parse_address

    if text in ("", "*", "0.0.0.0", "::"):  # noqa: S104 - the person asked for all interfaces
        return "", None
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(text.strip("[]"))), None
    if text.endswith(":0"):  # any free port: as when none is given
        return _where_to_listen(text.removesuffix(":0"))
    if text.startswith((":", "*:")):
        text = "0.0.0.0:" + text.rpartition(":")[2]
    if ":" not in text:
        return text, None
    host, port = parse_address(text)
    return ("" if host == "0.0.0.0" else host), (port,)  # noqa: S104


def _check_free(host: str, ports: tuple[int, ...] | None) -> None:
    """Bind for an instant: the transport binds only when the agent has been made and opened."""
    port = ports[0] if ports else 0
    with contextlib.suppress(ValueError):  # a name: the transport resolves it
        version = ipaddress.ip_address(host or "0.0.0.0").version  # noqa: S104
        with socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise _cant_listen(error, host, port) from None


def _cant_listen(error: OSError, host: str, port: int) -> MeshError:
    """In the transport's words, which would say the same later."""
    import zmq

    from meshagent.core.model.network_addresses import format_address
    from meshagent.transports.zmq.sockets import mesh_error

    where = format_address(host or "*", port) if port else host
    return mesh_error(zmq.ZMQError(error.errno), where)


def _own_port(agent: LockedAgent) -> int:
    """Each agent tries the same port at every start, so that `--peer host:port` keeps working."""
    digest = hashlib.sha256(b"port" + agent.identity.key).digest()
    return PORT_FIRST + int.from_bytes(digest[:4], "big") % PORTS


def _control_path(agent: LockedAgent) -> Path:
    """In a folder that only this user can enter; checked, since /tmp is everybody's."""
    folder = runtime_folder()
    with mapped_errors(folder, "create"):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    private = stat.S_ISDIR(status.st_mode) and not stat.S_IMODE(status.st_mode) & 0o077
    if not private or status.st_uid != os.getuid():
        raise StorageError(
            f"{folder} is not a private folder of yours, so no session could trust it.",
            hint="Remove it, or set XDG_RUNTIME_DIR to a folder of your own.",
        )
    name = hashlib.sha256(os.fsencode(agent.folder.path.resolve())).hexdigest()[:24]
    return folder / f"{name}.sock"


def _lost_database(folder: AgentFolder) -> str:
    """What to tell when an agent that has run before has no database; empty when all is well."""
    from meshagent.storage.mail.backup import unfinished_restores

    with contextlib.suppress(OSError):
        is_there = folder.database.exists() or unfinished_restores(folder.database)
        if folder.log_file.stat().st_size > 0 and not is_there:
            return (
                f"{folder.database} is gone, so {folder.agent} begins with an empty one: it no "
                "longer knows what came and what waited to be sent; its peers take its new mail "
                f"for new. An older copy may be in {folder.path / 'backups'}: meshagent restore"
            )
    return ""


class _LogFile(logging.handlers.RotatingFileHandler):
    """A disk that takes no more lines is told of in `status`; a traceback for each helps nobody."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


@contextlib.contextmanager
def _open_log(agent: LockedAgent) -> Iterator[logging.Logger]:
    """A logger of this node's own: several nodes in one process do not mix."""
    with mapped_errors(agent.folder.log_file, "write"):
        handler = _LogFile(
            agent.folder.log_file, maxBytes=LOG_BYTES_MAX, backupCount=LOG_FILES_MAX - 1
        )
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    formatter.default_msec_format = "%s.%03d"
    handler.setFormatter(formatter)
    log = logging.Logger(f"meshagent.{agent.info.agent}", logging.INFO)
    log.addHandler(handler)
    try:
        yield log
    finally:
        handler.close()


def _first(option: str | None, setting: str) -> str:
    return setting if option is None else option
