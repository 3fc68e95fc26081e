"""How large a picture is, from its first bytes: PNG, GIF, JPEG, WebP, BMP.

Never decodes a pixel, and nothing is believed that does not look like a picture. Invariant: any
bytes whatever give two numbers; (0, 0) means that it is no picture, or that its head does not say.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

__all__ = ["NO_PICTURE", "SIDE_MAX", "Dimensions", "dimensions"]

Dimensions = tuple[int, int]
NO_PICTURE: Dimensions = (0, 0)
SIDE_MAX = 2**24  # WebP's own bound and far beyond any screenshot: more is a lie

_JPEG_ALONE = frozenset((0x01, *range(0xD0, 0xD8)))  # markers that no length follows
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # those that state the size
_JPEG_ENDS = frozenset((0xD9, 0xDA))  # the pixels begin, or the picture is over


def dimensions(head: bytes) -> Dimensions:
    """Width and height in pixels."""
    for signature, measure in _MEASURES:
        if head.startswith(signature):
            try:
                width, height = measure(head)
            except (struct.error, IndexError):  # the head ends before the figures
                return NO_PICTURE
            if 0 < width <= SIDE_MAX and 0 < height <= SIDE_MAX:
                return width, height
    return NO_PICTURE


def _png(head: bytes) -> Dimensions:
    length, kind, width, height = struct.unpack_from(">I4sII", head, 8)
    return (width, height) if (length, kind) == (13, b"IHDR") else NO_PICTURE


def _gif(head: bytes) -> Dimensions:
    width, height = struct.unpack_from("<HH", head, 6)
    return width, height


def _jpeg(head: bytes) -> Dimensions:
    """Segment by segment up to the frame; a thumbnail inside a segment is thereby passed over."""
    at = 2
    while head[at] == 0xFF:
        marker = head[at + 1]
        if marker == 0xFF:  # padding
            at += 1
        elif marker in _JPEG_ALONE:
            at += 2
        elif marker in _JPEG_ENDS:
            break
        elif marker in _JPEG_FRAMES:
            height, width = struct.unpack_from(">HH", head, at + 5)
            return width, height
        else:
            (length,) = struct.unpack_from(">H", head, at + 2)
            if length < 2:
                break
            at += 2 + length
    return NO_PICTURE


def _webp(head: bytes) -> Dimensions:
    kind = head[8:16]
    if kind == b"WEBPVP8X":
        return 1 + _little24(head, 24), 1 + _little24(head, 27)
    if kind == b"WEBPVP8L" and head[20] == 0x2F:
        (bits,) = struct.unpack_from("<I", head, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"WEBPVP8 " and head[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", head, 26)
        return width & 0x3FFF, height & 0x3FFF
    return NO_PICTURE


def _little24(head: bytes, at: int) -> int:
    low, high = struct.unpack_from("<HB", head, at)
    return int(low | high << 16)


def _bmp(head: bytes) -> Dimensions:
    (header_bytes,) = struct.unpack_from("<I", head, 14)
    if header_bytes == 12:
        width, height = struct.unpack_from("<HH", head, 18)
        return width, height
    if header_bytes in (40, 52, 56, 64, 108, 124):
        width, height = struct.unpack_from("<ii", head, 18)
        return width, abs(height)  # negative: the rows run from the top
    return NO_PICTURE


_MEASURES: tuple[tuple[bytes, Callable[[bytes], Dimensions]], ...] = (
    (b"\x89PNG\r\n\x1a\n", _png),
    (b"GIF87a", _gif),
    (b"GIF89a", _gif),
    (b"\xff\xd8\xff", _jpeg),
    (b"RIFF", _webp),
    (b"BM", _bmp),
)
