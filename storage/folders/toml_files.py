"""The two small TOML files, read strictly and written by hand.

Decides how a mistake in them is explained: the file, the field or line, and the fix. Never
guesses a value. Invariant: what `toml_string` writes, tomllib reads back unchanged.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

from meshagent.errors import ConfigError
from meshagent.storage.folders.files import read_bounded

__all__ = ["LIST_ITEMS_MAX", "parse_table", "read_text", "toml_string", "toml_strings"]

TOML_FILE_BYTES_MAX = 64 * 1024  # a thousand peers fit; a file larger than this is not ours
LIST_ITEMS_MAX = 64
STRING_CHARACTERS_MAX = 255

_KINDS: dict[type, str] = {
    str: 'text, such as "…"',
    int: "a whole number",
    tuple: 'a list of texts, such as ["…", "…"]',
}


def read_text(path: Path) -> str:
    """A small text file; a ConfigError when it is not UTF-8."""
    try:
        return read_bounded(path, TOML_FILE_BYTES_MAX).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text (byte {error.start}).",
            hint="Save it as UTF-8 in your editor.",
            path=str(path),
        ) from None


def parse_table(text: str, path: Path, fields: Mapping[str, type]) -> dict[str, object]:
    """The fields that the text sets: `str`, or a tuple of them where `fields` says tuple."""
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not valid TOML: {error or 'it is nested too deeply'}.",
            hint="Correct that line; the comments in the file show how each setting is written.",
            path=str(path),
        ) from None
    return {key: _checked(key, value, path, fields) for key, value in table.items()}


def _checked(key: str, value: object, path: Path, fields: Mapping[str, type]) -> object:
    if key not in fields:
        raise ConfigError(
            f"{path} has an unknown setting {key!r}.",
            hint=_did_you_mean(key, fields),
            path=str(path),
            field=key,
        )
    kind = fields[key]
    if kind is str and isinstance(value, str):
        return _bounded(key, value, path)
    if kind is int and type(value) is int:
        return value
    if kind is tuple and isinstance(value, list) and all(isinstance(item, str) for item in value):
        if len(value) > LIST_ITEMS_MAX:
            raise ConfigError(
                f"{path}: {key} lists {len(value)} items.",
                hint=f"At most {LIST_ITEMS_MAX} are possible.",
                path=str(path),
                field=key,
            )
        return tuple(_bounded(key, item, path) for item in value)
    raise ConfigError(
        f"{path}: {key} has a value of the wrong type ({type(value).__name__}).",
        hint=f"Write {key} as {_KINDS[kind]}.",
        path=str(path),
        field=key,
    )


def _bounded(key: str, text: str, path: Path) -> str:
    if len(text) <= STRING_CHARACTERS_MAX:
        return text
    raise ConfigError(
        f"{path}: {key} holds a text of {len(text)} characters.",
        hint=f"At most {STRING_CHARACTERS_MAX} are possible.",
        path=str(path),
        field=key,
    )


def _did_you_mean(word: str, known: Mapping[str, type]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Known settings: {', '.join(known)}."


def toml_string(text: str) -> str:
    """`text` as a TOML basic string, quotes included."""
    # JSON's escapes are TOML's, except that TOML also wants DEL escaped. A lone surrogate (from a
    # folder name that is not UTF-8) has no place in either.
    clean = text.encode("utf-8", "replace").decode("utf-8")
    return json.dumps(clean, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_strings(texts: tuple[str, ...]) -> str:
    """A TOML array of strings, on one line."""
    return f"[{', '.join(toml_string(text) for text in texts)}]"
