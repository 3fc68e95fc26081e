"""Which texts a person's words find: what SQLite's full-text search does, said in plain Python.

Never reads a message. Invariant: all words must be there; only the last may be unfinished.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

__all__ = ["SEARCH_WORDS_MAX", "matches"]

SEARCH_WORDS_MAX = 32  # more words than this are not looked for


def matches(text: str, search: str) -> bool:
    """Whether each word is in the text; one with a hyphen is a phrase of its parts."""
    words = [_tokens(word) for word in search.split()[:SEARCH_WORDS_MAX]]
    phrases = [word for word in words if word]
    if not phrases:
        return False
    tokens = _tokens(text)
    return all(_has(tokens, phrase, phrase is phrases[-1]) for phrase in phrases)


def _tokens(text: str) -> list[str]:
    """As FTS5's unicode61: runs of letters and digits, without case and diacritics."""
    plain = unicodedata.normalize("NFKD", text)
    bare = "".join(each for each in plain if not unicodedata.combining(each))
    return re.findall(r"[^\W_]+", bare.lower())


def _has(tokens: Sequence[str], phrase: Sequence[str], unfinished: bool) -> bool:
    *first, last = phrase
    for at in range(len(tokens) - len(phrase) + 1):
        end = tokens[at + len(first)]
        whole = end.startswith(last) if unfinished else end == last
        if whole and list(tokens[at : at + len(first)]) == first:
            return True
    return False
