"""Which link is used for an agent: both ends come to the same answer."""

from __future__ import annotations

import pytest
from core.made import in_order

from meshagent.core.links.link_table import Link, LinkState, LinkTable
from meshagent.core.model.peers import AgentId, LinkId

SMALL, LARGE = (each.agent for each in in_order("ada", "bob"))


def opened(table: LinkTable, agent: AgentId, number: int, dialled: bool) -> Link:
    link = Link(LinkId(number), dialled, LinkState.AWAITING_HELLO, 0.0, agent=agent)
    table.add(link)
    table.set_open(link, 1.0)
    return link


@pytest.mark.parametrize("numbers", [(1, 2), (2, 1)])
def test_both_ends_prefer_the_link_that_the_smaller_id_dialled(numbers: tuple[int, int]) -> None:
    ours, theirs = numbers
    small, large = LinkTable(SMALL), LinkTable(LARGE)
    opened(small, LARGE, ours, dialled=True)
    opened(small, LARGE, theirs, dialled=False)
    opened(large, SMALL, ours, dialled=False)
    opened(large, SMALL, theirs, dialled=True)
    for table, agent in ((small, LARGE), (large, SMALL)):
        best = table.best(agent)
        assert best is not None
        assert best.link == ours


def test_a_link_serves_an_agent_only_while_it_is_open() -> None:
    table = LinkTable(SMALL)
    link = Link(LinkId(1), False, LinkState.AWAITING_HELLO, 0.0, agent=LARGE)
    table.add(link)
    assert (table.best(LARGE), table.unproven()) == (None, [link])
    table.set_open(link, 1.0)
    assert (table.best(LARGE), table.unproven()) == (link, [])
    table.remove(link)
    assert (table.best(LARGE), table.agents(), len(table)) == (None, [], 0)


def test_the_next_best_link_takes_over() -> None:
    table = LinkTable(SMALL)
    best = opened(table, LARGE, 1, dialled=True)
    spare = opened(table, LARGE, 2, dialled=False)
    table.remove(best)
    assert table.open_links(LARGE) == [spare]
