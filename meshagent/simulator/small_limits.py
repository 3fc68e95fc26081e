"""Limits so small that a few messages and bytes fill every buffer, in simulations only.

With the limits that ship, reading from disk and many chunks would be rare in a short run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from meshagent.core.delivery import receiving, send_stream, sending
from meshagent.core.transfer import chunks

__all__ = ["SMALL_CHUNK_BYTES", "small_chunks", "small_windows"]

SMALL_CHUNK_BYTES = 4


@contextmanager
def _changed(*changes: tuple[ModuleType, str, int]) -> Iterator[None]:
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, old in before:
            setattr(module, name, old)


@contextmanager
def small_chunks() -> Iterator[None]:
    """Everyone cuts blobs into chunks of a few bytes."""
    with _changed((chunks, "CHUNK_BYTES", SMALL_CHUNK_BYTES)):
        yield


@contextmanager
def small_windows(small: bool = True) -> Iterator[None]:
    """A few messages fill every buffer, so that reading from disk is the rule."""
    changes = (
        (send_stream, "WINDOW_ITEMS_MAX", 8),
        (send_stream, "MAIL_ITEMS_MAX", 3),
        (sending, "LOAD_ITEMS_MAX", 5),
        (receiving, "MAIL_ITEMS_MAX", 4),
    )
    with _changed(*(changes if small else ())):
        yield
