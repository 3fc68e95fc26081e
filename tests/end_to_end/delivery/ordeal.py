"""Two agents that write to each other while both are killed -9 at random moments, and the account.

A message counts as accepted when its id was answered. Whoever is killed between a request and its
answer leaves one message of unknown fate: it may arrive or not, once at most and in its place.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from dataclasses import dataclass, field
from functools import partial

from end_to_end.delivery.post import Post
from end_to_end.processes.harness import Node, wait_until

from meshagent.errors import MeshError
from meshagent.session import Session, running_agents

__all__ = ["Account", "Ordeal"]

PAUSE_S = (0.0, 0.8)  # a node is killed so long after it was started: some while they start
RETRY_S = 0.02


@dataclass
class Account:
    """What one agent sent, by its answers."""

    accepted: dict[str, int] = field(default_factory=dict)
    unknown: set[int] = field(default_factory=set)
    asked: int = 0

    def faults(self, inbox: list[dict[str, str]]) -> list[str]:
        """What is wrong with the other's inbox; nothing is wanted."""
        ids = [each["id"] for each in inbox]
        numbers = [int(each["text"]) for each in inbox]
        faults = [f"{each} was accepted and is not there" for each in set(self.accepted) - set(ids)]
        faults += [f"{each} is there twice" for each in set(ids) if ids.count(each) > 1]
        if numbers != sorted(set(numbers)):
            faults.append("the order is broken")
        known = set(self.accepted.values()) | self.unknown
        faults += [f"nobody sent {each}" for each in set(numbers) - known]
        return faults


class Ordeal:
    """`count` messages each way (or one way) while `kills` nodes die."""

    def __init__(self, post: Post, seed: int, count: int, kills: int) -> None:
        self.post, self.count, self.kills = post, count, kills
        self.rng = random.Random(seed)
        self.killed = 0
        self._broken: list[str] = []
        self._nodes: dict[str, Node] = {}
        self._ended = threading.Event()

    def start(self, role: str, mutant: str = "") -> str:
        """A node of this role; `mutant` is code that spoils it first."""
        node = self.post.join(role) if not mutant else self.post.join_changed(role, mutant)
        agent = str(node.joined.event["agent"])
        self._nodes[agent] = node
        return agent

    def run(self, ways: list[tuple[str, str]], victims: dict[str, str], mutant: str = "") -> None:
        """`ways` are (from, to); `victims` maps agents that may be killed to their roles."""
        self.accounts = {way: Account() for way in ways}
        threads = [threading.Thread(target=self._write, args=way) for way in ways]
        for thread in threads:
            thread.start()
        try:
            while self.killed < self.kills or any(thread.is_alive() for thread in threads):
                if self.killed < self.kills:
                    self._kill_one(victims, mutant)
                else:
                    time.sleep(RETRY_S)
        finally:
            self._ended.set()
            for thread in threads:
                thread.join()
        assert not self._broken, self._broken

    def settle(self, within: float) -> None:
        """Until nothing waits on either side."""
        for writer, _ in self.accounts:
            wait_until(partial(self._is_done, writer), f"{writer} to send", within)

    def faults(self) -> list[str]:
        found = []
        for (writer, reader), account in self.accounts.items():
            inbox = [each for each in self.post.inbox(reader) if each["from"] == writer]
            found += account.faults(inbox)
        return found

    def _is_done(self, agent: str) -> bool:
        try:
            counts: dict[str, int] = self.post.ask(agent, "status")["outbox"]
        except (MeshError, AssertionError):
            return False
        return sum(counts.values()) == 0

    def _kill_one(self, victims: dict[str, str], mutant: str) -> None:
        agent = self.rng.choice(sorted(victims))
        node = self._nodes[agent]
        time.sleep(self.rng.uniform(*PAUSE_S))
        node.signal(signal.SIGKILL)
        node.wait()
        self.killed += 1
        role = victims[agent]
        again = self.post.join(role) if not mutant else self.post.join_changed(role, mutant)
        if self.killed >= self.kills or self.rng.random() < 0.7:  # else it may die while it starts
            assert again.agent == agent
        self._nodes[agent] = again

    def _write(self, writer: str, reader: str) -> None:
        account = self.accounts[writer, reader]
        try:
            while len(account.accepted) < self.count and not self._ended.is_set():
                try:
                    self._write_some(writer, reader, account)
                except MeshError:
                    time.sleep(RETRY_S)
        except BaseException as error:
            self._broken.append(repr(error))

    def _write_some(self, writer: str, reader: str, account: Account) -> None:
        """Until the connection breaks."""
        running = running_agents(self.post.folder.registry)
        entry = next((each for each in running if each.agent == writer), None)
        if entry is None:
            time.sleep(RETRY_S)
            return
        with Session(entry) as session:
            while len(account.accepted) < self.count and not self._ended.is_set():
                number = account.asked
                account.asked += 1
                account.unknown.add(number)
                (receipt,) = session.ask("send", to=reader, text=str(number))
                account.unknown.discard(number)
                account.accepted[receipt["id"]] = number
