"""A member of a later release, which says more than a real node of this one can know."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from core import newer_node
from end_to_end.intruders.attacker import Attacker
from end_to_end.intruders.conftest import Attacked
from end_to_end.intruders.offers import Foe

from meshagent.bench.nodes import NodeProcess
from meshagent.core.model.messages import parse_body
from meshagent.core.model.records import Record
from meshagent.core.wire.codec import encode
from meshagent.core.wire.frames import Gossip, Mail

pytestmark = pytest.mark.process


@pytest.fixture
def newer(attacked: Attacked) -> Iterator[Foe]:
    """A newer node, welcomed by the real one; it has sent all that it need not know."""
    member = Attacker(attacked.secret, "newer")
    record = member.record(role="newer").statement
    assert isinstance(record, Record)
    who, mesh_id = member.identity, attacked.secret.mesh_id
    with member.dial(attacked.address) as wire:
        hello = newer_node.hello_of(record, who, mesh_id)
        wire.dealer.send_multipart(newer_node.with_more_fields(hello))
        assert wire.welcome().version == 1
        wire.dealer.send_multipart(newer_node.optional_frame())
        wire.dealer.send_multipart(encode(Gossip(newer_node.unknown_updates(who, mesh_id))))
        yield Foe(member, wire)


def test_a_newer_node_is_shown_and_talked_to(attacked: Attacked, newer: Foe) -> None:
    agent = newer.identity.agent

    def is_shown_by(node: NodeProcess) -> bool:
        return bool(node.view.get(agent, {}).get("presence") == newer_node.PRESENCE)

    attacked.nodes.until(lambda: is_shown_by(attacked.node), 5, "the node to show it")
    attacked.nodes.until(lambda: is_shown_by(attacked.friend), 5, "the friend to hear of it")
    printed = attacked.nodes.command(
        "peers", "--as", attacked.node.agent, cwd=attacked.node.mesh.parent
    )
    assert newer_node.PRESENCE in printed

    ident = os.urandom(6).hex()
    assert newer.post(newer_node.message_body(ident, "which branch?")).upto == 1
    message = attacked.nodes.ask(attacked.node, "message", ident=ident)
    assert (message["from"], message["kind"]) == (agent, newer_node.KIND)
    assert message["data"]["choices"] == ["main", "next"]

    attacked.nodes.ask(attacked.node, "send", to=agent, text="main, please")
    mail = newer.until(lambda frame: isinstance(frame, Mail) and bool(frame.items))
    assert isinstance(mail, Mail)
    assert [parse_body(item).text for item in mail.items if item] == ["main, please"]
    assert attacked.refused() == attacked.before


def test_a_vital_frame_that_came_later_is_refused_with_the_reason(
    attacked: Attacked, newer: Foe
) -> None:
    newer.wire.dealer.send_multipart(newer_node.required_frame())
    assert newer.wire.refusal() == "protocol"
    attacked.until_refused(1, "protocol")
