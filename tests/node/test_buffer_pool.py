"""Memory that is used again: never while somebody may still look at it."""

from __future__ import annotations

from meshagent.node.buffer_pool import KEPT_MAX, BufferPool


def test_a_block_is_given_out_again_only_when_every_view_of_it_is_gone() -> None:
    blocks = BufferPool(8)
    whole = blocks.take()
    whole[:] = b"original"
    part = whole[2:4]
    del whole
    other = blocks.take()
    other[:] = b"another!"
    assert bytes(part) == b"ig"
    del part
    assert bytes(blocks.take()) == b"original", "what nobody looks at is used again"
    assert bytes(other) == b"another!"


def test_a_block_keeps_its_size_however_often_it_is_used() -> None:
    blocks = BufferPool(8)
    assert [len(blocks.take()) for _ in range(100)] == [8] * 100


def test_what_is_kept_is_bounded() -> None:
    blocks = BufferPool(4)
    taken = [blocks.take() for _ in range(3 * KEPT_MAX)]
    for block in taken:
        block[:] = b"used"
    taken.clear()
    del block
    again = [bytes(each) for each in [blocks.take() for _ in range(3 * KEPT_MAX)]]
    assert again.count(b"used") == KEPT_MAX
