"""Peers that a person names."""

from __future__ import annotations

import pytest

from meshagent.discovery.static import StaticDiscovery
from meshagent.errors import UsageError


def test_a_bad_static_peer_is_refused_before_anything_starts() -> None:
    with pytest.raises(UsageError):
        StaticDiscovery(["box:4711", "box"])


def test_a_static_peer_named_twice_is_one() -> None:
    assert StaticDiscovery(["box:4711", "box:4711"]).peers == ("box:4711",)
