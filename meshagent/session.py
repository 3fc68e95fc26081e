"""A local client of a running node, for commands. Standard library only, so that it starts fast.

Decides which mesh and which agent a command is about. Never touches the database or the network.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshagent.discovery.registry import RegistryEntry, read_registry
from meshagent.errors import (
    AmbiguousPeer,
    LimitReached,
    MeshError,
    NoSuchPeer,
    NotRunning,
    UsageError,
)
from meshagent.storage.folders.mesh_folder import MeshFolder, find_mesh, personal_mesh

if TYPE_CHECKING:
    from meshagent.storage.blobs.store import BlobStore
    from meshagent.storage.folders.settings import Settings

__all__ = [
    "Session",
    "attach",
    "choose_agent",
    "open_blobs",
    "open_mesh",
    "running_agents",
    "runtime_folder",
    "session_or_start",
]

OWN_ROLE = "user"
OWN_IDLE_S = 300  # the person's own agent ends when nobody needs it for so long
REQUEST_BYTES_MAX = 8 * 1024 * 1024  # 1 MiB of a message takes up to six times that as JSON
ANSWER_TIMEOUT_S = 10.0  # a node answers in milliseconds; one that is stopped never does
COPY_TIMEOUT_S = 600.0  # a gigabyte is copied a step at a time, between the commits of a busy node
_TIMEOUTS_S: dict[str, float | None] = {
    "backup": COPY_TIMEOUT_S,
    "restore": COPY_TIMEOUT_S,
    "fetch": None,  # it takes as long as it takes, and a person sees how far it has come
}
CONNECT_RETRY_S = 0.01  # while more wait to be accepted than the node's socket holds


class Session:
    """A connection to one node."""

    def __init__(self, entry: RegistryEntry) -> None:
        self.agent, self._entry = entry.agent, entry
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._connect(str(entry.extra.get("control", "")))
        except OSError as error:
            self._socket.close()
            raise NotRunning(
                f"The node of {entry.agent} (pid {entry.pid}) does not answer: {error}.",
                hint="If it hangs, end it with 'kill' and join again.",
            ) from None
        self._reader = self._socket.makefile("rb")

    def _connect(self, path: str) -> None:
        """A socket with a timeout does not wait while the node's queue is full: EAGAIN, at once."""
        self._socket.settimeout(ANSWER_TIMEOUT_S)
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            try:
                self._socket.connect(path)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError("too many others wait for it") from None
            time.sleep(CONNECT_RETRY_S)

    def another(self) -> Session:
        """A second connection to the same node."""
        return Session(self._entry)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()
        self._socket.close()

    def ask(self, verb: str, **arguments: object) -> Any:
        """The node's answer; an error that the node reports is raised here."""
        line = _request_line(verb, arguments)
        wait_s = arguments.get("wait_s", 0.0)
        assert isinstance(wait_s, float | int)
        timeout_s = _TIMEOUTS_S.get(verb, ANSWER_TIMEOUT_S)
        self._socket.settimeout(None if timeout_s is None else timeout_s + wait_s)
        try:
            with contextlib.suppress(BrokenPipeError):  # it may have said why before it hung up
                self._socket.sendall(line)
            answer_line = self._reader.readline()
            if not answer_line:
                raise self._silent("it closed the connection", verb)
            answer = json.loads(answer_line)
        except (OSError, ValueError) as error:
            raise self._silent(error, verb) from None
        if "error" in answer:
            raise _raised_there(answer["error"])
        return answer["result"]

    def follow(self, verb: str, **arguments: object) -> Iterator[Any]:
        """A list as it is now, then every new entry, until the node ends."""
        yield from self._stream(verb, **arguments, follow=True)

    def watch(self) -> Iterator[dict[str, Any]]:
        """The snapshot, then every action, until the node ends."""
        yield from self._stream("subscribe", channel="mesh-peers:/")

    def _stream(self, verb: str, **arguments: object) -> Iterator[Any]:
        yield self.ask(verb, **arguments)
        self._socket.settimeout(None)
        try:
            for line in map(json.loads, self._reader):
                if "error" in line:
                    raise _raised_there(line["error"])
                yield line["action"]
        except (OSError, ValueError) as error:  # it was killed, perhaps in the middle of a line
            raise self._silent(error) from None

    def _silent(self, why: object, verb: str = "") -> NotRunning:
        return NotRunning(
            f"The node of {self.agent} gave no answer: {why}.",
            hint="The message may have been accepted: join again and see 'meshagent outbox' "
            "before you send it again."
            if verb == "send"
            else "See its node.log, or end it and join again.",
        )


def _request_line(verb: str, arguments: Mapping[str, object]) -> bytes:
    request = json.dumps({"id": 1, "do": verb, **arguments}, ensure_ascii=False)
    try:
        line = request.encode() + b"\n"
    except UnicodeEncodeError:
        raise UsageError("The text is not Unicode and can't be sent.") from None
    if len(line) > REQUEST_BYTES_MAX:
        raise LimitReached(
            f"The text is far too long: {len(line)} bytes.",
            hint="Send it as an attachment instead.",
        )
    return line


def open_mesh(
    dir_option: str | os.PathLike[str] | None, *, make_personal: bool = False
) -> MeshFolder:
    """The mesh that a command is about; outside any project the personal one.

    Only a join makes the personal mesh: a question about it changes nothing on the disk.
    """
    chosen = Path(dir_option) if dir_option is not None else None
    found = find_mesh(Path.cwd(), chosen, os.environ)
    mesh = MeshFolder(found or personal_mesh(os.environ))
    if not mesh.exists:
        if found is not None:
            raise UsageError(
                f"There is no mesh in {mesh.path}.",
                hint=f"Make one: meshagent init {mesh.path.parent}",
            )
        if make_personal:
            mesh.create("personal")
    return mesh


def open_blobs(mesh: MeshFolder, settings: Settings | None = None) -> BlobStore:
    """The store of a mesh's attachments on this machine; any process may use it."""
    from meshagent.storage.blobs.store import BlobStore

    return BlobStore(mesh.blobs, settings.attachments_quota if settings else mesh.read_quota())


def running_agents(registry: Path) -> list[RegistryEntry]:
    """The nodes of this mesh that run on this machine and can be attached to."""
    return [
        entry
        for entry in read_registry(registry)
        if entry.is_local() and entry.is_running() and entry.extra.get("control")
    ]


def attach(
    registry: Path, wanted: str | None, environ: Mapping[str, str], *, any_will_do: bool = False
) -> Session:
    """A session with the node that a command speaks to: `--as`, MESHAGENT_AGENT, the only one."""
    wanted = wanted or environ.get("MESHAGENT_AGENT")
    running = running_agents(registry)
    if any_will_do and not wanted:
        for entry in running[:-1]:  # where a pid was reused, its file tells of a node long gone
            with contextlib.suppress(NotRunning):
                return Session(entry)
        running = running[-1:]
    return Session(choose_agent(registry, running, wanted, any_will_do))


def session_or_start(mesh: MeshFolder, wanted: str | None, starting: Callable[[], None]) -> Session:
    """A session to send from: the agent that is meant, the only one here, or the person's own.

    The person's own agent is started in the background when it does not run; once, however many
    ask at the same moment. `starting` is called before, since that takes a while.
    """
    wanted = wanted or os.environ.get("MESHAGENT_AGENT")
    running = running_agents(mesh.registry)
    if wanted or len(running) == 1:
        return Session(choose_agent(mesh.registry, running, wanted, any_will_do=False))
    own = _own_agent(running)
    if own is None:
        starting()
        own = _start_own(mesh)
    return Session(own)


def _own_agent(running: list[RegistryEntry]) -> RegistryEntry | None:
    return next((each for each in running if each.extra.get("role") == OWN_ROLE), None)


def _start_own(mesh: MeshFolder) -> RegistryEntry:
    import fcntl

    from meshagent.background import start_in_background
    from meshagent.storage.folders.files import mapped_errors

    gate = mesh.path / "start.lock"
    with mapped_errors(gate, "lock"):
        descriptor = os.open(gate, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        own = _own_agent(running_agents(mesh.registry))
        if own is None:
            start_in_background(mesh.path, ["--role", OWN_ROLE, "--until-idle", str(OWN_IDLE_S)])
            own = _own_agent(running_agents(mesh.registry))
    finally:
        os.close(descriptor)
    if own is None:
        raise NotRunning(
            "Your own agent started and ended again.", hint="See: meshagent join --role user"
        )
    return own


def choose_agent(
    registry: Path, running: list[RegistryEntry], wanted: str | None, any_will_do: bool
) -> RegistryEntry:
    """The one that is meant: by id, unique prefix or name; without a word, the only one."""
    if wanted:
        matching = [each for each in running if each.agent == wanted] or [
            each for each in running if _is_called(each.agent, wanted)
        ]
        if not matching:
            raise NoSuchPeer(
                f"No running agent here answers to {wanted!r}.",
                hint=_who_runs(registry, running, wanted),
            )
    else:
        matching = running
    if not matching:
        raise NotRunning(
            "No agent of this mesh is running on this machine.",
            hint=f"Start one: {_how_to_start(registry)}",
        )
    if not wanted and (own := _own_agent(matching)) is not None:
        return own
    if len(matching) > 1 and not any_will_do:
        ids = ", ".join(each.agent for each in matching)
        raise AmbiguousPeer(
            f"{len(matching)} agents run here: {ids}.",
            hint=f"Say which one: --as {matching[0].agent}",
        )
    return matching[0]


def _is_called(agent: str, wanted: str) -> bool:
    return wanted == agent[:-9] or agent.startswith(wanted)


def _who_runs(registry: Path, running: list[RegistryEntry], wanted: str) -> str:
    stopped = [agent for agent in _agents_of(registry) if _is_called(agent, wanted)]
    if stopped:
        return f"It does not run; start it: meshagent join --as {stopped[0]}"
    if not running:
        return f"None is running; start one: {_how_to_start(registry)}"
    return f"Running here: {', '.join(each.agent for each in running)}."


def _how_to_start(registry: Path) -> str:
    """One that was here before goes on with its messages; else a new one."""
    named = [each for each in _agents_of(registry) if not each.startswith(f"{OWN_ROLE}-")]
    return f"meshagent join --as {named[0]}" if named else "meshagent join --role tester"


def _agents_of(registry: Path) -> list[str]:
    from meshagent.storage.folders.agents import list_agents
    from meshagent.storage.folders.mesh_folder import MeshFolder

    try:
        return [each.agent for each in list_agents(MeshFolder(registry.parent))]
    except MeshError:
        return []


def _raised_there(words: dict[str, Any]) -> MeshError:
    error = MeshError(str(words.get("message")), hint=str(words.get("hint", "")))
    error.exit_code = int(words.get("exit_code", 1))
    return error


def runtime_folder() -> Path:
    """A private folder for sockets with a short path: the kernel allows about 100 characters."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if base and len(base) < 40 and os.access(base, os.W_OK):
        return Path(base) / "meshagent"
    return Path(f"/tmp/meshagent-{os.getuid()}")  # noqa: S108 - owner and mode are checked below
