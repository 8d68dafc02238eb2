"""Grammars in files: ``.json`` holds a JSON schema, ``.regex`` an expression, ``.lark`` a grammar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import GrammarError
from . import library

#: No specification that is written out ends so.
_SUFFIXES = (".lark", ".gbnf", ".json", ".regex")


def content(file: Path) -> str:
    """What stands in `file`, without a byte order mark.

    Raises:
        GrammarError: it cannot be read.
    """
    if file.exists() and not file.is_file():  # to open a pipe is to wait for its writer
        raise GrammarError(f"{file} cannot be read: it is no regular file", "path")
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise GrammarError(f"{file} cannot be read: {error}", "path") from error


def schema(file: Path) -> Any:
    """The JSON in `file`.

    Raises:
        GrammarError: it cannot be read, or is no JSON.
    """
    try:
        return json.loads(content(file))
    except (ValueError, RecursionError) as error:
        if isinstance(error, GrammarError):
            raise
        raise GrammarError(f"{file} is not JSON: {error}", "path") from error


def pattern(file: Path) -> str:
    """The expression in `file`, written as those of the library are.

    Raises:
        GrammarError: it cannot be read.
    """
    return library.joined(content(file))


def named(text: str) -> Path | None:
    """The file that `text` names rather than being a specification itself: one that exists, or by its suffix."""
    if "\n" in text:
        return None
    if text.endswith(_SUFFIXES):
        return Path(text)
    try:
        return Path(text) if Path(text).is_file() else None
    except (OSError, ValueError):  # too long for a name, or with a null
        return None
