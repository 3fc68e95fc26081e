"""The type of a file is what its bytes say."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import tarfile
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshagent.storage.blobs.mime_types import TEXT, UNKNOWN, mime_type

WORD = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"


def zipped(*names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, "content")
    return file.getvalue()


def tarred() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("x"))
    return file.getvalue()


FILES = {
    "png": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "image/png"),
    "jpeg": (b"\xff\xd8\xff\xe0\0\x10JFIF\0", "image/jpeg"),
    "gif": (b"GIF89a\1\0\1\0", "image/gif"),
    "webp": (b"RIFF\x20\0\0\0WEBPVP8 " + bytes(20), "image/webp"),
    "bmp": (b"BM" + bytes(12) + b"\x28\0\0\0\1\0\0\0\1\0\0\0" + bytes(20), "image/bmp"),
    "pdf": (b"%PDF-1.7\n% all of it is text\n", "application/pdf"),
    "zip": (zipped("a.txt", "word/x.txt"), "application/zip"),
    "empty zip": (zipped(), "application/zip"),
    "word": (zipped("[Content_Types].xml", "word/document.xml"), WORD),
    "gzip": (gzip.compress(b"x"), "application/gzip"),
    "tar": (tarred(), "application/x-tar"),
    "core dump": (b"\x7fELF\2\1\1\0" + bytes(8) + b"\4\0\x3e\0", "application/x-elf"),
    "sqlite": (b"SQLite format 3\0" + bytes(90), "application/vnd.sqlite3"),
    "mp4": (b"\0\0\0\x20ftypisom\0\0\2\0", "video/mp4"),
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg"></svg>', "image/svg+xml"),
    "html": (b"<!DOCTYPE html><html></html>", "text/html"),
    "json": (json.dumps({"a": [1, 2]}).encode(), "application/json"),
    "broken json": (b'{"a": 1', TEXT),
    "deep json": (b"[" * 200_000, TEXT),
    "text": (b"hello world\n", TEXT),
    "text like a bitmap": (b"BMW is a car\n", TEXT),
    "text like a program": (b"MZ is how it begins\n", TEXT),
    "accents": ("Grüße, 世界\n".encode(), TEXT),
    "coloured log": (b"\x1b[31merror\x1b[0m\r\n", TEXT),
    "empty": (b"", TEXT),
    "a zero": (b"\0", UNKNOWN),
    "latin-1": ("Grüße".encode("latin-1"), UNKNOWN),
    "half a character": ("é".encode()[:1], UNKNOWN),
    "noise": (bytes(range(255, 0, -1)) * 40, UNKNOWN),
}


@pytest.mark.parametrize("name", FILES)
def test_the_bytes_say_what_it_is(name: str) -> None:
    data, kind = FILES[name]
    assert mime_type(data, whole=True) == kind


def test_a_head_may_end_in_the_middle_of_a_character() -> None:
    assert mime_type("é".encode() * 10 + b"\xc3") == TEXT
    assert mime_type("é".encode() * 10 + b"\xc3", whole=True) == UNKNOWN


@given(st.sampled_from([data[:50] for data, _ in FILES.values()]), st.binary(max_size=200))
def test_any_bytes_have_one_well_formed_type(start: bytes, noise: bytes) -> None:
    kind = mime_type(start + noise)
    assert kind.count("/") == 1
    assert kind.isprintable()
    assert kind == kind.strip().lower()
    assert len(kind) < 127


def test_a_library_that_stumbles_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import puremagic

    def stumble(data: bytes) -> None:
        raise IndexError(data)

    monkeypatch.setattr(puremagic, "magic_string", stumble)
    assert mime_type(b"\0\1\2\xff") == UNKNOWN
    assert mime_type(b"words") == TEXT


def test_the_library_is_not_loaded_by_those_who_attach_nothing() -> None:
    code = "import sys, meshagent.storage.blobs.store; sys.exit('puremagic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd="/", check=False).returncode == 0
