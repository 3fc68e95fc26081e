"""For all tests of discovery."""

from __future__ import annotations

import pytest

from meshagent.discovery import folder_watch


@pytest.fixture(autouse=True)
def _quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow step saves idle CPU, which no test measures; each close would wait for it."""
    monkeypatch.setattr(folder_watch, "STEP_MS", 30)
