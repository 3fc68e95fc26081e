"""Two members who are attacked, and required to be undisturbed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from meshagent.bench.nodes import NodeProcess, NodeProcesses
from meshagent.core.model.identity import MeshSecret
from meshagent.storage.folders.mesh_folder import MeshFolder

Members = tuple[NodeProcesses, NodeProcess, NodeProcess]

GROWTH_BYTES_MAX = 30 * 1024 * 1024  # what any attack may add to the attacked node's memory
DESCRIPTORS_SLACK = 4  # a session of ours, or a log being rotated, while we count
SETTLE_S = 12.0  # half-open connections are closed after 5 s, admissions counted for 10 s


@dataclass
class Attacked:
    """A real node under attack, and another member that watches it."""

    nodes: NodeProcesses
    node: NodeProcess
    friend: NodeProcess
    secret: MeshSecret

    def __post_init__(self) -> None:
        self.since = time.monotonic()
        self.memory = self.node.memory()["rss"]
        self.descriptors = self.node.descriptors()
        self.before = self.refused()
        self.known = set(self.node.view)

    @property
    def address(self) -> str:
        return self.node.address

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def newcomers(self) -> set[str]:
        """Agents that the node came to know since the attack began."""
        return set(self.node.view) - self.known

    def refused(self) -> dict[str, int]:
        return dict(self.nodes.ask(self.node, "status")["refused"])

    def count(self, *reasons: str) -> int:
        """How many more were refused for these reasons than before the attack."""
        now = self.refused()
        return sum(now.get(why, 0) - self.before.get(why, 0) for why in reasons)

    def until(self, holds: Callable[[], bool], what: str, seconds: float = 8.0) -> None:
        """Wait for something that no event tells of."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"{what}: {self.refused()}"
            time.sleep(0.05)

    def until_refused(self, count: int, *reasons: str) -> None:
        self.until(lambda: self.count(*reasons) >= count, f"{count} refused as {reasons}")

    def assert_undisturbed(self) -> None:
        """The members saw each other alive all the time, and still hear each other."""
        word = f"after {time.monotonic()}"
        self.nodes.ask(self.node, "status", text=word)
        self.nodes.until(
            lambda: self.friend.view[self.node.agent]["status"] == word, 3, "word to the friend"
        )
        self.nodes.ask(self.friend, "status", text=word)
        self.nodes.until(
            lambda: self.node.view[self.friend.agent]["status"] == word, 3, "word from the friend"
        )
        assert set(self.node.states_of(self.friend, self.since)) == {"alive"}
        assert set(self.friend.states_of(self.node, self.since)) == {"alive"}

    def assert_bounded(self) -> None:
        """Memory within the stated figure, and every descriptor given back."""
        self.until(
            lambda: self.node.descriptors() <= self.descriptors + DESCRIPTORS_SLACK,
            "descriptors are given back", SETTLE_S,
        )  # fmt: skip
        growth = self.node.memory()["rss"] - self.memory
        assert growth < GROWTH_BYTES_MAX, f"grew by {growth >> 20} MiB"

    def printed_refused(self) -> dict[str, int]:
        """What `meshagent status --json` prints."""
        words = ("status", "--json", "--as", self.node.agent)
        return dict(json.loads(self.nodes.command(*words, cwd=self.node.mesh.parent))["refused"])


def two_members(nodes: NodeProcesses, discovery: str) -> tuple[NodeProcess, NodeProcess]:
    project = nodes.init("attacked")
    ways = ("--discovery", discovery)
    node = nodes.join(project, "secretrole", *ways)
    friend = nodes.join(project, "otherrole", *ways)
    nodes.until(lambda: node.sees(friend) and friend.sees(node), 10, "the members see each other")
    return node, friend


@pytest.fixture(scope="module")
def members(request: pytest.FixtureRequest) -> Iterator[Members]:
    """The same two for all tests of a module: one attack after the other, as in life."""
    with NodeProcesses() as nodes:
        yield nodes, *two_members(nodes, getattr(request.module, "DISCOVERY", "file"))


@pytest.fixture
def attacked(members: Members) -> Iterator[Attacked]:
    """Checks after the test what every attack has in common."""
    nodes, node, friend = members
    attacked = Attacked(nodes, node, friend, MeshSecret(MeshFolder(node.mesh).read_secret()))
    yield attacked
    attacked.assert_undisturbed()
    attacked.assert_bounded()
