"""The size of a picture is read from its head, and nothing else is taken for one."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshagent.storage.blobs.image_sizes import NO_PICTURE, SIDE_MAX, dimensions


def png(width: int, height: int) -> bytes:
    return (
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height) + b"\x08\2\0\0\0"
    )


def segment(marker: int, body: bytes) -> bytes:
    return bytes((0xFF, marker)) + struct.pack(">H", len(body) + 2) + body


def frame(width: int, height: int, marker: int = 0xC0) -> bytes:
    return segment(marker, b"\x08" + struct.pack(">HH", height, width) + b"\3" + bytes(9))


def bmp(width: int, height: int) -> bytes:
    return b"BM" + bytes(12) + struct.pack("<Iii", 40, width, height) + bytes(28)


def webp(kind: bytes, body: bytes) -> bytes:
    return b"RIFF" + bytes(4) + b"WEBP" + kind + struct.pack("<I", len(body)) + body


THUMBNAIL = b"Exif\0\0" + b"\xff\xd8\xff\xe0" + frame(16, 16)
VP8L = b"\x2f" + struct.pack("<I", (640 - 1) | (480 - 1) << 14)
VP8X = bytes(4) + (3000 - 1).to_bytes(3, "little") + (70_000 - 1).to_bytes(3, "little")

PICTURES = {
    "png": (png(1920, 1080), (1920, 1080)),
    "gif": (b"GIF89a" + struct.pack("<HH", 320, 200), (320, 200)),
    "old gif": (b"GIF87a" + struct.pack("<HH", 1, 2), (1, 2)),
    "jpeg": (b"\xff\xd8" + segment(0xE0, b"JFIF\0") + frame(800, 600), (800, 600)),
    "progressive jpeg": (b"\xff\xd8" + segment(0xDB, bytes(65)) + frame(9, 7, 0xC2), (9, 7)),
    "camera jpeg": (b"\xff\xd8" + segment(0xE1, THUMBNAIL) + frame(4000, 3000), (4000, 3000)),
    "padded jpeg": (b"\xff\xd8\xff\xff\xff" + segment(0xE0, b"")[1:] + frame(5, 6), (5, 6)),
    "lossy webp": (
        webp(b"VP8 ", b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 640, 0x4000 | 480)),
        (640, 480),
    ),
    "lossless webp": (webp(b"VP8L", VP8L), (640, 480)),
    "extended webp": (webp(b"VP8X", VP8X), (3000, 70_000)),
    "bmp": (bmp(64, 48), (64, 48)),
    "bmp from the top": (bmp(64, -48), (64, 48)),
    "old bmp": (b"BM" + bytes(12) + struct.pack("<IHH", 12, 31, 41), (31, 41)),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_states_its_size(name: str) -> None:
    data, size = PICTURES[name]
    assert dimensions(data + b"pixels") == size


@pytest.mark.parametrize("name", PICTURES)
def test_a_head_that_ends_early_is_no_picture_and_no_crash(name: str) -> None:
    data, size = PICTURES[name]
    assert {dimensions(data[:end]) for end in range(len(data))} <= {NO_PICTURE, size}
    assert dimensions(data[:12]) in (NO_PICTURE, size)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x89PNG",
        png(0, 10),
        png(SIDE_MAX + 1, 10),
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IDAT", 5, 5),
        b"\xff\xd8" + segment(0xDA, b"") + frame(5, 5),
        b"\xff\xd8\xff\xe0\0\0" + frame(5, 5),
        b"BMW is a car, and so are others that are long enough",
        b"RIFF\0\0\0\0WAVEfmt " + bytes(40),
        bmp(-64, 48),
        b"hello",
    ],
)
def test_what_is_no_picture_has_no_size(data: bytes) -> None:
    assert dimensions(data) == NO_PICTURE


@given(st.sampled_from([data for data, _ in PICTURES.values()]), st.binary(max_size=80), st.data())
def test_hostile_bytes_never_crash(start: bytes, noise: bytes, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(start)))
    width, height = dimensions(start[:cut] + noise)
    assert 0 <= width <= SIDE_MAX
    assert 0 <= height <= SIDE_MAX
