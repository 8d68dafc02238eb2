"""Prompts and completions in files of one JSON object per line, written so that a run that was killed goes on where it stood."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import SettingsError


def input_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file that are not empty, numbered from 0.

    Raises:
        SettingsError: it cannot be read.
    """
    try:
        with path.open(encoding="utf-8") as file:
            number = 0
            for line in file:
                if line.strip():
                    yield number, line.strip()
                    number += 1
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error


def parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    """What a line asks for: an object with ``prompt``, ``text`` or ``messages``, and arguments; in a .txt file, a prompt.

    Raises:
        SettingsError: neither.
    """
    if path.suffix not in (".jsonl", ".json", ".ndjson"):
        return {"prompt": line}
    try:
        item = json.loads(line)
    except ValueError as error:
        raise SettingsError(f"{path}, prompt {number + 1}: no JSON: {error}") from error
    item = {"prompt": item} if isinstance(item, str) else item
    if not isinstance(item, dict) or not {"prompt", "text", "messages"} & item.keys():
        raise SettingsError(
            f'{path}, prompt {number + 1}: write {{"prompt": "…"}} or {{"messages": […]}}, with arguments of generate beside it'
        )
    if "prompt" not in item and "text" in item:
        item["prompt"] = item.pop("text")
    return item


def mark(line: str) -> str:
    """Tells one prompt from another, in few characters."""
    return hashlib.sha256(line.encode()).hexdigest()[:12]


class OutputLines:
    """A file of completions that grows line by line. What is in it already is not written again.

    Every line holds ``index`` and ``input``, the number and the mark of the prompt. A line that was cut off is written anew.

    Attributes:
        done: mark of every prompt that the file holds, by number.

    Raises:
        SettingsError: the file holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[int, str] = {}
        whole = 0
        if path.exists():
            with path.open("rb") as file:
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # killed while it was written
                    self._note(line)
                    whole += len(line)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._file.truncate(whole)

    def _note(self, line: bytes) -> None:
        try:
            item = json.loads(line)
            self.done[int(item["index"])] = str(item["input"])
        except (ValueError, KeyError, TypeError) as error:
            raise SettingsError(
                f"{self.path} holds a line that is no completion ({error!r}): name another --output, or move it away"
            ) from error

    def check(self, number: int, line: str) -> bool:
        """Whether the prompt is done already.

        Raises:
            SettingsError: another prompt with this number is.
        """
        if number not in self.done:
            return False
        if self.done[number] != mark(line):
            raise SettingsError(
                f"{self.path} was written from another input (prompt {number + 1} differs): name another --output, or move it away"
            )
        return True

    def write(self, item: dict[str, Any]) -> None:
        """Appends a line; once this returns, a kill of the process does not lose it."""
        self._file.write(json.dumps(item, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def __enter__(self) -> OutputLines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
