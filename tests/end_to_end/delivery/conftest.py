"""A mesh of real processes for each test, and a second folder of the same mesh."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from end_to_end.delivery.post import Post


@pytest.fixture
def post() -> Iterator[Post]:
    post = Post()
    try:
        yield post
    finally:
        post.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Post]:
    """One mesh for all tests of a file; they look only at messages of their own."""
    post = Post()
    try:
        yield post
    finally:
        post.close()
