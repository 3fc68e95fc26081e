"""Finding agents on the local network by multicast DNS. Decides nothing about who they are.

Invariant: nothing waits for mDNS. `start` opens the sockets and returns; announcing, resolving,
retrying and following the interfaces go on behind it, and end with `close`. What comes in may be
hostile: it can cost bounded memory and a count in `ignored`, never an exception.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from meshagent.core.model.network_addresses import is_loopback
from meshagent.core.model.peers import Candidate
from meshagent.core.ports import Announcement
from meshagent.discovery.interfaces import (
    Interface,
    device_of,
    lan_interfaces,
    present,
)
from meshagent.discovery.mdns.records import (
    SERVICE_TYPE,
    instance_name,
    publishable,
    read_candidate,
    txt_of,
)

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, ServiceStateChange, Zeroconf
    from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

__all__ = ["MdnsDiscovery"]

CANDIDATES_MAX = 1024  # remembered, so that each is reported once; a mesh has tens
RESOLUTIONS_MAX = 32  # at the same time; each may send a few queries
WAITING_MAX = 256  # names whose records have not come by themselves, waiting for a resolution
NAME_CHARACTERS_MAX = 255  # of a DNS name
RESOLVE_TIMEOUT_MS = 1500.0
RESCAN_INTERVAL_S = 5.0
RESCAN_SETTLE_TIMES = 2  # an IPv6 address can't be bound until the kernel has checked it
RETRY_FIRST_S = 1.0
RETRY_MAX_S = 60.0
CLOSE_TIMEOUT_S = 0.45  # three goodbyes take 0.25 s

_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - recognised, not bound
_IP_MULTICAST_ALL = 49  # linux/in.h; Python's socket module does not name it


class MdnsDiscovery:
    """Announces `_meshagent._tcp.local.` and reports who else does.

    `interfaces` are IP addresses of this machine to stay on; None, or a wildcard among them, means
    every interface but loopback, followed as they come and go.
    """

    name = "mdns"

    def __init__(self, interfaces: Sequence[str] | None = None) -> None:
        self.ignored: Counter[str] = Counter()
        """How many records were not reported, by reason."""
        everywhere = interfaces is None or any(one in _WILDCARDS for one in interfaces)
        self._given = None if everywhere else tuple(interfaces or ())
        self._loopback = bool(self._given) and all(map(is_loopback, self._given or ()))
        self._me: Announcement | None = None
        self._own_name = ""
        self._found: Callable[[Candidate], None] | None = None
        self._problem = "not started"
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._published: ServiceInfo | None = None
        self._known: dict[str, Candidate] = {}
        self._waiting: dict[str, AsyncServiceInfo] = {}
        self._resolving: set[str] = set()
        self._resolvers: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._publisher: asyncio.Task[None] | None = None

    async def start(self, me: Announcement, found: Callable[[Candidate], None]) -> None:
        """Begin to browse and to announce. A machine without multicast is no error: see health."""
        assert self._found is None, "started once"
        self._me, self._found = me, found
        self._own_name = f"{instance_name(me)}.{SERVICE_TYPE}"
        self._open(self._wanted())
        self._task = asyncio.create_task(self._run(), name="mdns-keeper")

    async def update(self, me: Announcement) -> None:
        """Announce the new addresses, in the background."""
        self._me = me
        if self._zeroconf is not None:
            self._publish_soon()

    def health(self) -> str:
        """`ok`, or why others can't find us or we can't find them."""
        if self._problem:
            return self._problem
        if len(self._known) >= CANDIDATES_MAX:
            return f"{CANDIDATES_MAX} agents announce themselves here; newcomers are ignored"
        return "ok"

    async def close(self) -> None:
        """Say goodbye, and leave no task and no socket."""
        self._found = None
        tasks = [task for task in (self._task, self._publisher, *self._resolvers) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._task = self._publisher = None
        self._problem = "closed"
        await self._shut()

    # ---- the sockets -------------------------------------------------------------------------

    def _wanted(self) -> tuple[Interface, ...]:
        return lan_interfaces() if self._given is None else present(self._given)

    def _no_interface(self) -> str:
        if self._given is None:
            return "no network interface is up"
        return f"this machine has no interface with {' or '.join(self._given)}"

    def _open(self, wanted: tuple[Interface, ...]) -> None:
        """Open the sockets and browse; on failure leave the reason in `_problem`."""
        from zeroconf.asyncio import AsyncZeroconf

        self._problem = self._no_interface()
        ipv4_only = tuple(one for one in wanted if isinstance(one, str) and ":" not in one)
        for choice in dict.fromkeys((wanted, ipv4_only)):
            if not choice:
                continue
            try:
                self._zeroconf = AsyncZeroconf(interfaces=list(choice))
            except (OSError, RuntimeError, ValueError) as error:
                self._problem = f"multicast is not available: {error}"
                continue
            self._problem = ""
            if self._given is not None:
                _confine(self._zeroconf, self._given)
            self._browse(self._zeroconf)
            return

    def _browse(self, zeroconf: AsyncZeroconf) -> None:
        from zeroconf import DNSQuestionType
        from zeroconf.asyncio import AsyncServiceBrowser

        # Multicast questions: the unicast answer to a QU question reaches only one of the
        # processes that share port 5353, and several nodes on one machine are our usual case.
        self._browser = AsyncServiceBrowser(
            zeroconf.zeroconf,
            SERVICE_TYPE,
            handlers=[self._noticed],
            question_type=DNSQuestionType.QM,
        )

    async def _run(self) -> None:
        """Retry until the sockets are open; then follow the interfaces."""
        delay_s = RETRY_FIRST_S
        while not await self._is_started():
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, RETRY_MAX_S)
            self._open(self._wanted())
        self._publish_soon()
        if self._given is None:
            await self._follow_interfaces()

    async def _is_started(self) -> bool:
        if self._zeroconf is None:
            return False
        from zeroconf import Error

        try:
            await self._zeroconf.zeroconf.async_wait_for_start()
        except (Error, OSError) as error:
            reason = f"multicast could not be started: {error or type(error).__name__}"
        else:
            if self._zeroconf.zeroconf.engine.senders:
                return True
            reason = "no interface accepts multicast"
        await self._shut()
        self._problem = reason
        return False

    async def _follow_interfaces(self) -> None:
        last = self._wanted()
        settle = RESCAN_SETTLE_TIMES
        while True:
            await asyncio.sleep(RESCAN_INTERVAL_S)
            now = self._wanted()
            if now != last:
                last, settle = now, RESCAN_SETTLE_TIMES + 1
            self._problem = self._problem if now else self._no_interface()
            if settle and now:
                settle -= 1
                await self._move_to(now)

    async def _move_to(self, interfaces: tuple[Interface, ...]) -> None:
        assert self._zeroconf is not None
        try:
            await self._zeroconf.async_update_interfaces(interfaces=list(interfaces))
        except (OSError, RuntimeError, ValueError) as error:
            self._problem = f"multicast is not available: {error}"
        else:
            self._problem = ""

    async def _shut(self) -> None:
        zeroconf, self._zeroconf, self._published = self._zeroconf, None, None
        browser, self._browser = self._browser, None
        self._known.clear()
        if zeroconf is None:
            return
        from zeroconf import Error

        if browser is not None:
            await browser.async_cancel()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await zeroconf.async_close()
        except (Error, OSError, TimeoutError):
            zeroconf.zeroconf.close()
        except asyncio.CancelledError:
            zeroconf.zeroconf.close()
            raise

    # ---- announcing --------------------------------------------------------------------------

    def _publish_soon(self) -> None:
        if self._publisher is not None:
            self._publisher.cancel()
        self._publisher = asyncio.create_task(self._publish(), name="mdns-publisher")

    async def _publish(self) -> None:
        """Announce what `_me` says now, withdrawing what it no longer says."""
        from zeroconf import Error

        assert self._zeroconf is not None
        before, info = self._published, self._service_info()
        try:
            if info is None:
                if before is not None:
                    self._published = None
                    await (await self._zeroconf.async_unregister_service(before))
                return
            self._published = info
            if before is None:
                # The name holds the key's fingerprint and the run, so it is known to be ours
                # alone and the probing (1.2 s) is to be skipped: RFC 6762, 8.1.
                sent = await self._zeroconf.async_register_service(
                    info, cooperating_responders=True
                )
            else:
                sent = await self._zeroconf.async_update_service(info)
            await sent
        except (Error, OSError) as error:
            self._problem = f"the announcement failed: {error or type(error).__name__}"

    def _service_info(self) -> ServiceInfo | None:
        from zeroconf import ServiceInfo

        assert self._me is not None
        hosts, port = publishable(self._me.addresses, self._loopback)
        if not hosts:
            return None
        return ServiceInfo(
            SERVICE_TYPE,
            self._own_name,
            port=port,
            properties=txt_of(self._me),
            server=f"{instance_name(self._me)}.local.",
            parsed_addresses=hosts,
        )

    # ---- listening ---------------------------------------------------------------------------

    def _noticed(
        self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        """zeroconf's callback: a service of our type came, changed or went."""
        from zeroconf import Error, ServiceStateChange
        from zeroconf.asyncio import AsyncServiceInfo

        if state_change is ServiceStateChange.Removed:
            self._known.pop(name, None)
            return
        if self._found is None or name.lower() == self._own_name.lower():
            return
        if len(name) > NAME_CHARACTERS_MAX:
            self.ignored["name"] += 1
            return
        try:
            info = AsyncServiceInfo(service_type, name)
        except (Error, ValueError):
            self.ignored["name"] += 1
            return
        if info.load_from_cache(zeroconf):
            self._consider(name, info)
        else:
            self._resolve_soon(name, info)

    def _consider(self, name: str, info: AsyncServiceInfo) -> None:
        """Report a resolved service, if it is one of our mesh and news."""
        from zeroconf import IPVersion

        if self._found is None or self._me is None:
            return
        ips: list[Any] = list(info.ip_addresses_by_version(IPVersion.All))
        verdict = read_candidate(info.text, info.port, ips, self._me.mesh_tag, self._loopback)
        if isinstance(verdict, str):
            self.ignored[verdict] += 1
        elif name not in self._known and len(self._known) >= CANDIDATES_MAX:
            self.ignored["full"] += 1
        elif self._known.get(name) != verdict:
            self._known[name] = verdict
            self._found(verdict)

    def _resolve_soon(self, name: str, info: AsyncServiceInfo) -> None:
        """Ask for records that did not come with the announcement; they may never come."""
        if name in self._waiting or name in self._resolving:
            return
        if len(self._waiting) >= WAITING_MAX:
            self.ignored["busy"] += 1  # its records still count if they come by themselves
            return
        self._waiting[name] = info
        if len(self._resolvers) < RESOLUTIONS_MAX:
            resolver = asyncio.create_task(self._resolve(), name="mdns-resolver")
            self._resolvers.add(resolver)
            resolver.add_done_callback(self._resolvers.discard)

    async def _resolve(self) -> None:
        from zeroconf import Error

        while self._waiting and self._zeroconf is not None:
            name = next(iter(self._waiting))
            info = self._waiting.pop(name)
            self._resolving.add(name)
            try:
                answered = await info.async_request(self._zeroconf.zeroconf, RESOLVE_TIMEOUT_MS)
            except (Error, OSError, ValueError):
                answered = False
            finally:
                self._resolving.discard(name)
            if answered:
                self._consider(name, info)
            else:
                self.ignored["silent"] += 1


def _confine(zeroconf: AsyncZeroconf, addresses: Sequence[str]) -> None:
    """Keep the listening socket to the given interfaces, as far as the platform can.

    zeroconf binds it to the wildcard address. There Linux also delivers groups that any other
    process joined on any interface, and the answers to such questions would leave by it.
    """
    listener = getattr(zeroconf.zeroconf.engine, "_listen_socket", None)
    if listener is None or not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError):
        listener.setsockopt(socket.IPPROTO_IP, _IP_MULTICAST_ALL, 0)
    device = device_of(addresses)
    if device is not None:
        with contextlib.suppress(OSError):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
