"""Writes completions to a file with one JSON object per line, so that a run that was killed can be continued."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import SettingsError, shortened
from .lines import InputLine

log = logging.getLogger("decoders.scheduling")

_MARK = re.compile("[0-9a-f]{12}")
#: The bytes of a line before the prompt's number, and between the number and the prompt's mark.
_FIRST, _SECOND = b'{"index": ', b', "input": "'
#: Errors that mean that another process holds the lock.
_TAKEN = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
_ELSE = "name another --output, or move it away"


class OutputLines:
    """A file of completions to which lines are appended; it is locked while it is open. Existing completions are not written again.

    Every line holds ``index`` and ``input`` (the prompt's number and mark, a short hash), ``options`` (the settings that decide its
    text), and ``text`` or ``error``. The file is not changed before the first :meth:`write`, which drops the lines of prompts that
    failed, and an incomplete last line.

    Attributes:
        path: the file.
        done: the mark of every completed prompt, by number.
        failed: the numbers of the prompts that failed and have no completion, when the file was opened.
        options: the different ``options`` of the completed prompts, as JSON.

    Raises:
        SettingsError: the file holds something else, cannot be written, or another process writes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[int, str] = {}
        self.failed: set[int] = set()
        self.options: set[str] = set()
        self._whole = 0  # size of the complete lines
        self._stale = False  # whether there are lines to drop, or the last line has no line end
        self._target = Path(os.path.realpath(path))  # if `path` is a link, its target is written, and the link stays
        try:
            self._file, self._new = _opened(self._target, path)
        except OSError as error:
            raise SettingsError(f"{path} cannot be written: {error.strerror}") from error
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise

    def _read(self) -> None:
        self._file.seek(0)
        if self._file.read(1) not in (b"", b"{"):  # one byte: another file's first line may be gigabytes long
            raise SettingsError(f"{self.path} holds no completions: {_ELSE}")
        self._file.seek(0)
        # Reads through the locked descriptor, since closing another descriptor of the file would release some kinds of locks.
        reader = io.BufferedReader(self._file)
        for number, line in enumerate(reader, 1):
            item = _ours(line)
            if item is None and (line.endswith(b"\n") or not _is_cut(line, self._whole > 0)):
                raise SettingsError(f"{self.path}, line {number} is no completion: {_ELSE}")
            self._stale |= not line.endswith(b"\n") or item is None or "error" in item
            self._whole += len(line) if item is not None else 0
            if item is not None and "error" in item:
                self.failed.add(item["index"])
            elif item is not None:
                self.done[item["index"]] = item["input"]
                if isinstance(options := item.get("options"), dict):
                    self.options.add(json.dumps(options))
        self.failed -= self.done.keys()
        reader.detach()

    def check(self, line: InputLine) -> bool:
        """Whether the prompt in `line` is already completed. A prompt that failed is not, and its text may have changed since.

        Raises:
            SettingsError: another prompt is completed under this number.
        """
        mark = self.done.get(line.number)
        if mark is not None and mark != line.mark:
            raise SettingsError(f"{self.path} was written from another input ({line.place} differs): {_ELSE}")
        return mark is not None

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raises SettingsError if earlier runs completed prompts with options other than `options`."""
        for earlier in map(json.loads, self.options):
            different = [name for name in {**earlier, **options} if options.get(name) != earlier.get(name)]
            if different:
                changes = ", ".join(
                    f"{name} {_shown(earlier.get(name))}, now {_shown(options.get(name))}" for name in different
                )
                raise SettingsError(
                    f"{self.path} was written with other options ({changes}): give the same options, {_ELSE}"
                )

    def check_count(self, count: int) -> None:
        """Raises SettingsError if the file has a line for a prompt whose number is `count` or more."""
        if max(self.done, default=-1) >= count or max(self.failed, default=-1) >= count:
            raise SettingsError(f"{self.path} was written from a longer input: {_ELSE}")

    def write(self, item: dict[str, Any]) -> None:
        """Appends a line. After this call returns, the line is not lost if the process is killed.

        Raises:
            OSError: the line cannot be written. Earlier lines stay.
        """
        if self._stale:
            self._renew()
        try:
            content = json.dumps(item, ensure_ascii=False).encode() + b"\n"
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can only write escaped
            content = json.dumps(item).encode() + b"\n"
        left = memoryview(content)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            with suppress(OSError):
                self._file.truncate(self._whole)
            raise
        self._whole += len(content)

    def _renew(self) -> None:
        """Replaces the file by one with the completed prompts' lines only.

        Raises:
            OSError: the new file cannot be written; the old file is unchanged.
        """
        draft = self._target.with_name(f".{self._target.name}.new")
        draft.unlink(missing_ok=True)  # left by a killed run
        try:
            with (
                draft.open("xb") as new,
                self._target.open("rb") as old,
            ):  # "x" follows no link that somebody has put there
                for line in old:
                    if (item := _ours(line)) is not None and "text" in item:
                        new.write(line.rstrip(b"\n") + b"\n")
                new.flush()
                os.fsync(new.fileno())
                self._whole = new.tell()
            shutil.copymode(self._target, draft)
            if sys.platform == "win32":  # Windows replaces no open files
                self._file.close()
            os.replace(draft, self._target)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        self._file.close()
        self._file, _ = _opened(self._target, self.path)
        self._stale = False

    def __enter__(self) -> OutputLines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Closes the file. Removes the file if this object created it and wrote no line."""
        try:
            if self._new and not self._whole:
                with suppress(OSError):
                    self._target.unlink()
        finally:
            self._file.close()


def _shown(value: Any) -> str:
    return "not given" if value is None else shortened(str(value))


def _opened(path: Path, name: Path) -> tuple[io.FileIO, bool]:
    """The file at `path`, locked, and whether it is new. name: the path in error messages."""
    if path.exists() and not path.is_file():
        raise SettingsError(f"{name} is no regular file, so that a run could not go on with it: name another --output")
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        new = not path.exists()
        file = path.open("a+b", buffering=0)
        if not locked(file):
            file.close()
            raise SettingsError(f"another process writes {name}: wait until it has ended, or name another --output")
        with suppress(OSError):  # another process may have put a new file in its place, or removed it
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file, new
        file.close()


def locked(file: io.FileIO) -> bool:
    """Locks `file` until it is closed or the process ends. Returns False if another process holds the lock.

    On a file system without locks the run continues with a warning.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(1 << 40)  # a byte far after the text, because locked bytes cannot be read on Windows
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            # lockf would release the lock as soon as any descriptor of the file is closed.
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        log.warning("%s cannot be locked (%s): let no second process write it", file.name, error.strerror)
    return True


def _ours(line: bytes) -> dict[str, Any] | None:
    """The parsed line if it is a complete line of :class:`OutputLines`, else None."""
    try:
        item = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(item, dict) or not {"text", "error"} & item.keys():
        return None
    number, mark = item.get("index"), item.get("input")
    right = type(number) is int and number >= 0 and isinstance(mark, str) and _MARK.fullmatch(mark)
    return item if right else None


def _is_cut(line: bytes, behind: bool) -> bool:
    """Whether a line without a line end is the beginning of a line of :class:`OutputLines`. behind: whether lines come before it."""
    if behind and (_FIRST.startswith(line) or not line.strip(b"\0")):
        return True  # a few bytes, or the null bytes that some file systems leave after a power cut
    rest = line.removeprefix(_FIRST).lstrip(b"0123456789")
    return line.startswith(_FIRST) and (rest.startswith(_SECOND) or _SECOND.startswith(rest))
