"""What kind of file it is, by its first bytes alone: names and senders' claims are not believed.

Decides the MIME type that a person is shown and a setting may refuse. Never unpacks or runs
anything. Invariant: any bytes whatever give one well-formed type; what can't be told is text/plain
when it reads as text, else application/octet-stream.
"""

from __future__ import annotations

import codecs
import json
import re

from meshagent.storage.blobs.image_sizes import NO_PICTURE, dimensions

__all__ = ["HEAD_BYTES", "TEXT", "UNKNOWN", "mime_type"]

HEAD_BYTES = 256 * 1024  # a JPEG's size may stand behind some 100 KiB of camera data
LIBRARY_BYTES = 16 * 1024  # all signatures of the library lie before, but for those of disk images
TEXT = "text/plain"
UNKNOWN = "application/octet-stream"

_WELL_FORMED = re.compile(r"[a-z0-9][a-z0-9.+-]{0,62}/[a-z0-9][a-z0-9.+-]{0,62}")
# A log may ring and use colours; the other controls are in no text.
_NOT_IN_TEXT = bytes(sorted(set(range(32)) - {7, 8, 9, 10, 12, 13, 27}))

# Those that people attach every day, and the types that the library names oddly or not at all.
_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"%PDF-", "application/pdf"),
    (b"\x1f\x8b\x08", "application/gzip"),
    (b"\x7fELF", "application/x-elf"),
    (b"SQLite format 3\0", "application/vnd.sqlite3"),
    (b"\x28\xb5\x2f\xfd", "application/zstd"),
    (b"\xfd7zXZ\0", "application/x-xz"),
)
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
# A zip that has this list of contents, and a file in this folder, is a document.
_OFFICE_LIST = b"[Content_Types].xml"
_OFFICE = {
    b"word/": "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
    b"xl/": "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
    b"ppt/": "application/vnd.openxmlformats-officedocument.presentationml.presentation",
}
# What the library may say of something that reads as text, and how sure it must be: the letters
# that begin many binary formats begin many sentences too.
_TEXT_TYPES = re.compile(r"text/.+|image/svg\+xml|application/([a-z.-]+\+)?xml")
_TEXT_CONFIDENCE = 0.5
_BINARY_CONFIDENCE = 0.3


def mime_type(head: bytes, *, whole: bool = False) -> str:
    """The type of a file that begins so; `whole` says that this is all of it."""
    for signature, kind in _SIGNATURES:
        if head.startswith(signature):
            return kind
    if head.startswith(_ZIP):
        return _zip_type(head)
    if _reads_as_text(head, whole):
        return _text_type(head, whole)
    if head.startswith(b"BM"):
        return "image/bmp" if dimensions(head) != NO_PICTURE else UNKNOWN
    return _library_type(head, _BINARY_CONFIDENCE) or UNKNOWN


def _zip_type(head: bytes) -> str:
    if _OFFICE_LIST in head:
        for folder, kind in _OFFICE.items():
            if folder in head:
                return kind
    return "application/zip"


def _reads_as_text(head: bytes, whole: bool) -> bool:
    try:
        # The head may end in the middle of a character; the whole may not.
        codecs.getincrementaldecoder("utf-8")().decode(head, final=whole)
    except UnicodeDecodeError:
        return False
    return len(head.translate(None, _NOT_IN_TEXT)) == len(head)


def _text_type(head: bytes, whole: bool) -> str:
    if whole and head.lstrip()[:1] in (b"{", b"[") and _is_json(head):
        return "application/json"
    kind = _library_type(head, _TEXT_CONFIDENCE)
    return kind if _TEXT_TYPES.fullmatch(kind) else TEXT


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


def _library_type(head: bytes, confidence: float) -> str:
    """What puremagic is sure enough of; empty when it does not know."""
    import puremagic  # a tenth of a second, which a program that attaches nothing never pays

    try:
        found = puremagic.magic_string(head[:LIBRARY_BYTES])
    except Exception:  # it parses what a stranger sent: whatever it trips over, it does not know
        return ""
    for each in found:
        kind = str(each.mime_type).lower()
        if each.confidence >= confidence and _WELL_FORMED.fullmatch(kind):
            return kind
    return ""
