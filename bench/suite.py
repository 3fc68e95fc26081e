"""Asks the questions one after the other, each in a folder of its own, and collects the report.

Prints nothing. Invariant: a question that fails says so in the report and stops no other; after
`ask` its folder is gone.
"""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshagent.bench.answers import Answer
from meshagent.bench.harness import Extent, Setting, machine_facts
from meshagent.errors import UsageError

__all__ = ["ask", "ask_all"]


def ask_all(
    questions: Sequence[str],
    extent: Extent,
    disk: Path,
    compare: frozenset[str],
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """The report: one document with stable keys."""
    report: dict[str, Any] = {"machine": machine_facts(disk), "extent": extent, "questions": {}}
    for question in questions:
        tell(question)
        report["questions"][question] = ask(question, extent, disk, compare)
    return report


def ask(question: str, extent: Extent, disk: Path, compare: frozenset[str]) -> dict[str, Any]:
    """One question's part of the report."""
    measure: Callable[[Setting], Answer]
    measure = importlib.import_module(f"meshagent.bench.{question}").measure
    began, failed, answer = time.monotonic(), None, Answer()
    try:
        folder = tempfile.TemporaryDirectory(
            prefix=".meshagent-bench-", dir=disk, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise UsageError(
            f"Nothing can be written in {disk}: {error.strerror}.",
            hint="Name a folder on the disk to measure: meshagent bench --dir DIR",
        ) from error
    with folder as path:
        try:
            answer = measure(Setting(extent, Path(path), compare))
        except Exception as error:  # whatever it is, the other questions can still be asked
            failed = f"{type(error).__name__}: {error}"
    seconds = round(time.monotonic() - began, 1)
    return {"seconds": seconds, "failed": failed, **answer.as_json()}
