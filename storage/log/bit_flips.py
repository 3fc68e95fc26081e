"""Whether all that is wrong with some bytes is one flipped bit: a decay that no crash looks like.

Pure. A CRC is linear: what a flipped bit does to it depends on the bit's place alone, and can be
followed back from the end. Invariant: bytes that fit their sum are never said to have a flip.
"""

from __future__ import annotations

from zlib import crc32

__all__ = ["without_flip"]

BYTES_MAX = 1024 * 1024  # a tenth of a second; of what is longer nobody knows
_POLYNOMIAL = 0xEDB88320  # of CRC-32, reflected


def _register_after(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_AFTER = [_register_after(byte) for byte in range(256)]
_BEFORE = {after >> 24: byte for byte, after in enumerate(_AFTER)}
"""Which byte went in, by the highest byte of what came out."""
_OF_BIT = {_AFTER[1 << bit]: 1 << bit for bit in range(8)}


def without_flip(data: bytes, checksum: int) -> bytes | None:
    """These bytes with the one bit put right that keeps them from their CRC-32 (themselves when
    that bit is in the sum); None when there is no such bit, or nothing is wrong."""
    wrong = crc32(data) ^ checksum
    if not wrong or len(data) > BYTES_MAX:
        return None
    if wrong.bit_count() == 1:
        return data
    for at in range(len(data) - 1, -1, -1):
        if flipped := _OF_BIT.get(wrong):
            return data[:at] + bytes([data[at] ^ flipped]) + data[at + 1 :]
        byte = _BEFORE[wrong >> 24]
        wrong = (wrong ^ _AFTER[byte]) << 8 & 0xFFFFFFFF | byte
    return None
