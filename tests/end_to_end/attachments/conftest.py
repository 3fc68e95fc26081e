"""A mesh of real processes in two folders for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from end_to_end.attachments.courier import Courier


@pytest.fixture
def courier() -> Iterator[Courier]:
    courier = Courier()
    try:
        yield courier
    finally:
        courier.close()
