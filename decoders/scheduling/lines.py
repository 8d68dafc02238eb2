"""Reads prompts from files with one JSON object or one plain prompt per line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..errors import SettingsError, shortened

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
PLAIN_SUFFIX = ".txt"


@dataclass(frozen=True)
class InputLine:
    """A nonempty line of a file of prompts.

    Attributes:
        path: the file.
        number: number of the line among the nonempty lines, from 0.
        line: number of the line among all lines, from 1.
        text: the line without its end; bytes that are not UTF-8 appear as lone surrogates.
    """

    path: Path
    number: int
    line: int
    text: str

    @property
    def mark(self) -> str:
        """A short hash of the line's text."""
        return hashlib.sha256(self.text.encode(errors="surrogateescape")).hexdigest()[:12]

    @property
    def place(self) -> str:
        """File and line, for messages."""
        return f"{self.path}, line {self.line}"


def is_json(path: Path) -> bool:
    """Whether the lines of a file are JSON, by its suffix. Raises SettingsError for an unknown suffix."""
    suffix = path.suffix.lower()
    if suffix not in (*JSON_SUFFIXES, PLAIN_SUFFIX):
        raise SettingsError(
            f"{path}: the name of a file of prompts ends in {' or '.join(JSON_SUFFIXES)} (JSON lines) or in {PLAIN_SUFFIX} "
            "(plain lines)"
        )
    return suffix != PLAIN_SUFFIX


def check_file(path: Path) -> None:
    """Raises SettingsError unless `path` has a known suffix and is a regular file, since only regular files can be read twice."""
    if path.exists() and not path.is_file():
        raise SettingsError(
            f"{path} is not a regular file: prompts are read twice, and a resumed run reads them again. Write them to a file first"
        )
    is_json(path)


def input_lines(path: Path) -> Iterator[InputLine]:
    """Yields the nonempty lines of a file; a byte order mark is removed.

    Raises:
        SettingsError: the file cannot be read, its suffix is unknown, or its first line does not have the suffix's format.
    """
    whole = "" if is_json(path) else "\r\n"  # blanks belong to a plain prompt, but not to JSON
    try:
        with path.open("rb") as file:
            number = 0
            for line, content in enumerate(file, 1):
                text = content.decode("utf-8-sig" if line == 1 else "utf-8", errors="surrogateescape")
                if not text.strip():
                    continue
                item = InputLine(path, number, line, text.rstrip(whole) if whole else text.strip())
                if not number:
                    _check_first(item)
                yield item
                number += 1
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error


def _check_first(line: InputLine) -> None:
    text = _text(line)
    if is_json(line.path) and not isinstance(_loaded(line, text), dict | str):
        raise SettingsError(
            f"{line.place}: the first line, {shortened(text)!r}, is not a prompt: each line has to be an object like "
            '{"prompt": "…"}, or a string. Prompts in plain lines go into a .txt file'
        )


def parsed(line: InputLine) -> dict[str, Any]:
    """A line as a dict with ``prompt`` or ``messages``, and arguments of ``generate``. In a .txt file the line is the prompt.

    Raises:
        SettingsError: the line has another form, or more than one of ``prompt``, ``text`` (a synonym) and ``messages``.
    """
    text = _text(line)
    if not is_json(line.path):
        return {"prompt": text}
    item = _loaded(line, text)
    item = {"prompt": item} if isinstance(item, str) else item
    if not isinstance(item, dict) or not {"prompt", "text", "messages"} & item.keys():
        raise SettingsError(
            f'{line.place}: write {{"prompt": "…"}} or {{"messages": […]}}, where arguments of generate may be added'
        )
    if len(several := [name for name in ("prompt", "text", "messages") if name in item]) > 1:
        raise SettingsError(f"{line.place}: {' and '.join(several)} are given, and each is a prompt: give one of them")
    if "text" in item:
        item["prompt"] = item.pop("text")
    if isinstance(prompt := item.get("prompt"), str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise SettingsError(f"{line.place}: the prompt holds half of a surrogate pair: {error.reason}") from error
    return item


def _text(line: InputLine) -> str:
    try:
        return line.text.encode(errors="surrogateescape").decode()
    except UnicodeDecodeError as error:
        raise SettingsError(f"{line.place}: not UTF-8 text: {error.reason} at byte {error.start}") from error


def _loaded(line: InputLine, text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_json)
    except RecursionError as error:
        raise SettingsError(f"{line.place}: nested too deeply") from error
    except ValueError as error:
        raise SettingsError(f"{line.place}: not valid JSON: {error}") from error


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number of JSON")
