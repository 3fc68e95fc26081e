"""How many seeds, and what a failing one prints."""

from __future__ import annotations

import pytest

SEEDS, SEEDS_LONG = 100, 4000
GROUPS = 10  # tests that the seeds are spread over; a failure names its seed and transcript


@pytest.fixture
def long(request: pytest.FixtureRequest) -> bool:
    """Whether everything is to be tried, however long it takes."""
    return bool(request.config.getoption("--long"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`seeds` is a share of all seeds: hundreds, or thousands with --long."""
    if "seeds" in metafunc.fixturenames:
        count = SEEDS_LONG if metafunc.config.getoption("--long") else SEEDS
        size = count // GROUPS
        groups = [range(start, start + size) for start in range(0, count, size)]
        names = [f"seeds-{group.start}-to-{group.stop - 1}" for group in groups]
        metafunc.parametrize("seeds", groups, ids=names)
