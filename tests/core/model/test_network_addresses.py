"""Addresses as people and files write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshagent.core.model.network_addresses import format_address, is_address, parse_address
from meshagent.errors import UsageError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:4711", "127.0.0.1", 4711),
        ("build-box:1", "build-box", 1),
        ("build_box.lan.:65535", "build_box.lan.", 65535),
        ("[::1]:4711", "::1", 4711),
        ("[fe80::1%eth0]:4711", "fe80::1%eth0", 4711),
    ],
)
def test_what_is_written_is_read_back(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)
    assert format_address(host, port) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "box",
        "[::1]",
        "::1",
        ":4711",
        "box:",
        "box:0",
        "box:65536",
        "box:-1",
        "box:4711\n",
        "box:٤٧",
        "box:1e3",
        "box name:4711",
        "tcp://box:4711",
        "-box:4711",
        "box..lan:4711",
        "256.0.0.1:4711",
        "10.1:4711",
        "1:4711",
        "::1:4711:x",
        "[::1:4711",
        "[::1]4711",
        "[box]:4711",
        "[::1%a b]:4711",
        "a" * 64 + ":4711",
        "a." * 200 + ":4711",
    ],
)
def test_a_bad_address_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_address(text)
    assert "host:port" in refusal.value.hint
    assert not is_address(text)


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    if is_address(text):
        host, port = parse_address(text)
        assert parse_address(format_address(host, port)) == (host, port)
