"""A full or failing disk: a clear state, nothing accepted that is not kept, and it goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from end_to_end.delivery.full_disk import LONG, SCENARIOS

pytestmark = [pytest.mark.process, pytest.mark.namespaces]

TESTS = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(each, marks=[pytest.mark.long] * (each in LONG)) for each in SCENARIOS],
)
def test_a_full_or_failing_disk_is_a_state_and_not_a_loss(scenario: str) -> None:
    ran = subprocess.run(
        ["unshare", "-m", sys.executable, "-m", "end_to_end.delivery.full_disk", scenario],
        cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr[-6000:]
