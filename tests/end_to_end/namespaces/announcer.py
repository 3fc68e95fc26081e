"""Run on a machine of a test network: announces agents that are not there, by hand.

Arguments: the mesh tag, this machine's address. One record points at a port where nobody listens,
one at a port that accepts and says nothing. Prints a word when both are announced.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys

from zeroconf import ServiceInfo
from zeroconf.asyncio import AsyncZeroconf

SERVICE_TYPE = "_meshagent._tcp.local."
CLOSED_PORT = 4711


def record(agent: str, tag: str, address: str, port: int) -> ServiceInfo:
    return ServiceInfo(
        SERVICE_TYPE,
        f"{agent}-aaaa.{SERVICE_TYPE}",
        port=port,
        properties={"v": "1", "mesh": tag, "id": agent},
        server=f"{agent}.local.",
        parsed_addresses=[address],
    )


async def main(tag: str, address: str) -> None:
    silent = socket.create_server((address, 0))
    with silent:
        zeroconf = AsyncZeroconf(interfaces=[address])
        for agent, port in (
            ("closed-aaaaaaaa", CLOSED_PORT),
            ("silent-bbbbbbbb", silent.getsockname()[1]),
        ):
            await (
                await zeroconf.async_register_service(
                    record(agent, tag, address, port), cooperating_responders=True
                )
            )
        print("announced", flush=True)
        accepted = []
        with contextlib.suppress(asyncio.CancelledError):
            silent.setblocking(False)
            while True:
                accepted.append(await asyncio.get_running_loop().sock_accept(silent))
                print("dialled", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
