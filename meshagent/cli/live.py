"""What `join` shows: a calm live view for a person, plain lines in a pipe, JSON for a program."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import deque
from datetime import datetime
from typing import Any

import click

from meshagent.cli.mail import attachment_text, plain
from meshagent.cli.options import Common
from meshagent.cli.output import (
    PEER_COLUMNS,
    STATE_COLOURS,
    fit,
    peer_cells,
    print_json,
    sort_peers,
)
from meshagent.node.changes import Event, Subscription
from meshagent.node.damage_watch import damage_text
from meshagent.node.views import damage_view
from meshagent.node.wiring import RunningNode

__all__ = ["choose_view"]

HISTORY_LINES_MAX = 8
FRAME_LINES = 6  # who I am, the table's header, "Ctrl-C leaves", and the blank lines between
REFRESH_S = 5.0  # "3 s ago" need not be truer than that; a change is shown at once


def choose_view(node: RunningNode, common: Common, ready_fd: int | None) -> LineView:
    """The view that fits who is looking."""
    if common.json or ready_fd is not None:
        return JsonView(node, ready_fd)
    if (
        sys.stdout.isatty()
        and os.environ.get("TERM", "") not in ("", "dumb")
        and not (common.quiet or common.verbose)
    ):
        return LiveView(node)
    return LineView(node)


class LineView:
    """One line per event: for pipes, logs and simple terminals."""

    def __init__(self, node: RunningNode) -> None:
        self.driver = node.driver
        self.node = node
        self.shown: dict[str, str] = {}

    async def run(self, events: Subscription) -> None:
        """Show who we are and who is here, then what happens, until cancelled."""
        self.joined()
        self.snapshot()
        async for event in events:
            self.event(event)

    def snapshot(self) -> None:
        """What there is to be shown before anything happens."""
        for peer in self.driver.views.peers():
            self.peer(peer)
        for damage in tuple(self.driver.damage.found):
            self.damage(damage_view(damage))

    async def mail(self, after: int) -> None:
        """Show each message beyond this position as it comes."""
        async for message in self.node.mailbox.follow(after):
            self.message(message)
        await self.driver.wait()  # the node has ended, and may say why

    def message(self, message: dict[str, Any]) -> None:
        """A message came."""
        words = [plain(message["text"]).partition("\n")[0]]
        words += map(attachment_text, message["attachments"])
        self.say(f"{message['from']}: {'  '.join(filter(None, words))}")

    def event(self, event: Event) -> None:
        """Show one event."""
        if event.kind == "peer":
            self.peer(event.data)
        elif event.kind == "lagged":
            for peer in self.driver.views.peers():
                self.peer(peer)
        elif event.kind == "damage":
            self.damage(event.data)
        elif event.kind == "clone" and not event.data["stop"]:
            self.say(f"A copy of this agent tried to join ({event.data['where']}); it was refused.")

    def joined(self) -> None:
        """Who we are."""
        profile = self.driver.profile
        click.echo(
            f"joined as {self.driver.agent} (role {profile.role}) in mesh {profile.mesh_name!r} "
            f"at {', '.join(self.driver.addresses)}"
        )

    def peer(self, peer: dict[str, Any]) -> None:
        """A peer appeared or changed; nothing is said twice."""
        line = describe_change(self.shown.get(peer["agent"]), peer)
        self.shown[peer["agent"]] = f"{peer['state']} {peer['presence']} {peer['status']}"
        if line:
            self.say(line)

    def damage(self, damage: dict[str, str]) -> None:
        """Something was damaged on disk."""
        self.say(f"Damage: {damage_text(damage)}. Run: meshagent doctor")

    def say(self, line: str) -> None:
        """A line of what just happened."""
        click.echo(line)

    def close(self) -> None:
        """The node is about to leave."""


class JsonView(LineView):
    """One JSON object per line (DESIGN 13)."""

    def __init__(self, node: RunningNode, ready_fd: int | None) -> None:
        super().__init__(node)
        self._ready_fd = ready_fd

    def joined(self) -> None:
        joined = {
            "event": "joined",
            "agent": self.driver.agent,
            "addresses": list(self.driver.addresses),
            "role": self.driver.profile.role,
            "mesh": self.driver.profile.mesh_name,
            "pid": os.getpid(),
        }
        if self._ready_fd is not None:
            with contextlib.suppress(BrokenPipeError):  # who started us has gone; we have not
                os.write(self._ready_fd, json.dumps(joined).encode() + b"\n")
            os.close(self._ready_fd)
            # The starter stops reading our errors now; from here on the log has them.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        print_json(joined)

    def peer(self, peer: dict[str, Any]) -> None:
        print_json({"event": "peer", **peer})

    def damage(self, damage: dict[str, str]) -> None:
        print_json({"event": "damage", **damage})

    def message(self, message: dict[str, Any]) -> None:
        print_json({"event": "message", **message})

    def say(self, line: str) -> None:
        print_json({"event": "notice", "text": line})


class LiveView(LineView):
    """Who I am, who is here, what just happened; redrawn in place."""

    def __init__(self, node: RunningNode) -> None:
        super().__init__(node)
        from rich.console import Console
        from rich.live import Live

        self._history: deque[str] = deque(maxlen=HISTORY_LINES_MAX)
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=False)

    async def run(self, events: Subscription) -> None:
        self._live.start()
        self.joined()
        ticker = asyncio.create_task(self._tick())
        try:
            self.snapshot()
            self._draw()
            async for event in events:
                self.event(event)
                self._draw()
        finally:
            ticker.cancel()

    def joined(self) -> None:
        self.say("joined" + (" again" if self.node.agent.resumed else ""))

    def say(self, line: str) -> None:
        self._history.append(f"{datetime.now():%H:%M:%S}  {line}")

    def close(self) -> None:
        self._draw(ended=True)
        self._live.stop()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            self._draw()

    def _draw(self, ended: bool = False) -> None:
        from rich.text import Text

        width = self._console.width
        text = Text(no_wrap=True, overflow="ellipsis")
        profile = self.driver.profile
        text.append(f"{self.driver.agent}", style="bold")
        text.append(f"  {profile.role} in {profile.mesh_name}", style="dim")
        text.append(f"  {self.driver.addresses[0] if self.driver.addresses else ''}\n", style="dim")
        text.append("\n")
        if not ended:
            self._draw_peers(text, width)
        for line in list(self._history)[-self._history_room() :]:
            text.append(f"{line}\n", style="dim")
        if not ended:
            text.append("\nCtrl-C leaves", style="dim")
        self._live.update(text, refresh=True)

    def _history_room(self) -> int:
        """What just happened is the last thing drawn: a low terminal must not cut it off."""
        return max(1, min(HISTORY_LINES_MAX, (self._console.height - FRAME_LINES) // 2))

    def _draw_peers(self, text: Any, width: int) -> None:
        peers = sort_peers([p for p in self.driver.views.peers() if p["state"] != "left"])
        room = max(1, self._console.height - FRAME_LINES - self._history_room() - 1)
        if not peers:
            text.append("nobody else is here yet", style="italic")
            text.append("   (another terminal: meshagent join --role backend)\n\n", style="dim")
            return
        header = [each.upper() for each in PEER_COLUMNS]
        rows = fit([header, *map(peer_cells, peers[:room])], width, keep=(0, 2))
        for number, cells in enumerate(rows):
            for cell in cells:
                state = STATE_COLOURS.get(cell.strip(), "").replace("bright_black", "dim")
                text.append(cell, style="dim" if number == 0 else state)
                text.append("  ")
            text.append("\n")
        if len(peers) > room:
            text.append(f"… and {len(peers) - room} more: meshagent peers\n", style="dim")
        text.append("\n")


def describe_change(before: str | None, peer: dict[str, Any]) -> str:
    """What to tell a person about this change; empty when there is nothing new."""
    now = f"{peer['state']} {peer['presence']} {peer['status']}"
    who = f"{peer['agent']} ({peer['role']})"
    if before == now or (before is None and peer["state"] in ("gone", "left")):
        return ""  # it was never here for us
    if before is None or before.split()[0] != peer["state"]:
        words = {
            "alive": "is here" if before is None else "is back",
            "suspect": "does not answer; asking others",
            "gone": "is gone",
            "left": "left",
        }
        return f"{who} {words[peer['state']]}"
    doing = f"{peer['presence']}: {peer['status']}" if peer["status"] else peer["presence"]
    return f"{who} is {doing}"
