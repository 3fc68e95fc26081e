"""One flipped bit is found wherever it is; nothing else is taken for one."""

from __future__ import annotations

import random
from zlib import crc32

from meshagent.storage.log.bit_flips import BYTES_MAX, without_flip

DATA = bytes(range(1, 40))


def test_each_flipped_bit_of_the_bytes_is_put_right() -> None:
    for bit in range(8 * len(DATA)):
        flipped = bytearray(DATA)
        flipped[bit // 8] ^= 1 << bit % 8
        assert without_flip(bytes(flipped), crc32(DATA)) == DATA


def test_a_flipped_bit_of_the_sum_leaves_the_bytes_as_they_are() -> None:
    for bit in range(32):
        assert without_flip(DATA, crc32(DATA) ^ 1 << bit) == DATA


def test_what_is_right_or_cut_off_or_too_long_has_no_flip() -> None:
    assert without_flip(DATA, crc32(DATA)) is None
    assert without_flip(b"", 0) is None
    for cut in range(len(DATA) - 1):
        assert without_flip(DATA[:cut] + bytes(len(DATA) - cut), crc32(DATA)) is None
    long = bytes(BYTES_MAX + 1)
    assert without_flip(b"\1" + long[1:], crc32(long)) is None


def test_bytes_that_are_altogether_others_have_no_flip() -> None:
    rng = random.Random(7)
    for _ in range(1_000):
        assert without_flip(rng.randbytes(500), rng.getrandbits(32)) is None
