"""What a check has to say. Never prints."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Finding", "State", "few", "note", "ok", "problem", "span"]

NAMES_SHOWN_MAX = 5  # a sentence with more names than that is not read


class State(StrEnum):
    """How much a finding matters, least first."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One verdict: a sentence, and the next step where there is one.

    A `detail` goes without saying, and is told to those who ask for more.
    """

    check: str
    state: State
    text: str
    hint: str = ""
    detail: bool = False

    def view(self) -> dict[str, str]:
        """In JSON form; keys are stable."""
        words = {"check": self.check, "state": self.state.value, "text": self.text}
        # A path may hold bytes that are no text; JSON can't.
        return {
            key: value.encode("utf-8", "replace").decode()
            for key, value in {**words, "hint": self.hint}.items()
        }


def ok(check: str, text: str, *, detail: bool = False) -> Finding:
    """Nothing is wrong here."""
    return Finding(check, State.OK, text, "", detail)


def note(check: str, text: str, hint: str = "") -> Finding:
    """May explain what somebody wonders about; may also be as intended."""
    return Finding(check, State.NOTE, text, hint)


def problem(check: str, text: str, hint: str = "") -> Finding:
    """Keeps somebody from being seen."""
    return Finding(check, State.PROBLEM, text, hint)


def few(names: list[str]) -> str:
    """Names in a row; only so many that a person still reads them."""
    rest = len(names) - NAMES_SHOWN_MAX
    return ", ".join(names[:NAMES_SHOWN_MAX]) + (f" and {rest} more" if rest > 0 else "")


def span(seconds: float) -> str:
    """A length of time, for people."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"
