"""A receiver's full disk: it says why, texts still flow, and the file comes when there is room."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from end_to_end.attachments.full_disk import SCENARIOS

pytestmark = [pytest.mark.process, pytest.mark.namespaces]

TESTS = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_disk_that_is_full_holds_up_one_file_and_nothing_else(scenario: str) -> None:
    ran = subprocess.run(
        ["unshare", "-m", sys.executable, "-m", "end_to_end.attachments.full_disk", scenario],
        cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr[-6000:]
