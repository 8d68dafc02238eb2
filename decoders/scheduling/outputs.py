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

    Every line holds ``index`` (the prompt's number), ``input`` (the prompt's mark, a short hash), ``options`` (the settings that decide
    the text), and ``text`` or ``error``. Files of earlier versions have no options. A prompt that failed may have a second line further
    down: only the second line is valid, and it replaces the first line when the file is closed after a run without an exception. The
    file is not changed before the first :meth:`write`, which also drops an incomplete last line.

    Attributes:
        path: the file.
        done: the mark of every completed prompt, by number.
        failed: mark and error of every prompt that failed and was not completed since, by number.
        options: the different ``options`` of the completed prompts, as JSON.

    Raises:
        SettingsError: the file has lines that are not completions, cannot be written, or is written by another process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[int, str] = {}
        self.failed: dict[int, tuple[str, str]] = {}
        self.options: set[str] = set()
        # Byte offsets by the prompt's number. `_places`: all lines of prompts that failed. `_valid`: the valid line of every prompt.
        self._places: dict[int, list[int]] = {}
        self._valid: dict[int, int] = {}
        self._whole = 0  # bytes of complete lines
        self._cut = self._open = False  # whether an incomplete line follows; whether the last line lacks its end
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
        if self._file.read(1) not in (b"", b"{"):  # reads one byte: a wrong file's first line may be gigabytes long
            raise SettingsError(f"{self.path} holds no completions: {_ELSE}")
        self._file.seek(0)
        # Reads through the locked descriptor, since closing another descriptor of the file would release some kinds of locks.
        reader = io.BufferedReader(self._file)
        for number, line in enumerate(reader, 1):
            ended = line.endswith(b"\n")
            item = _ours(line)
            if item is None:
                if ended or not _is_cut(line, self._whole > 0):
                    raise SettingsError(f"{self.path}, line {number} is not a completion: {_ELSE}")
                self._cut = True
                break
            self._note(item, self._whole)
            self._whole += len(line)
            self._open = not ended
        reader.detach()

    def _note(self, item: dict[str, Any], place: int) -> None:
        number, failed = item["index"], "error" in item
        if failed or number in self._places:
            self._places.setdefault(number, []).append(place)
        if not failed:
            self.failed.pop(number, None)
            self.done[number] = item["input"]
            if isinstance(options := item.get("options"), dict):
                self.options.add(json.dumps(options))
            self._valid[number] = place
        elif number not in self.done:
            self.failed[number] = item["input"], str(item["error"])
            self._valid[number] = place

    def check(self, line: InputLine) -> bool:
        """Whether the prompt in `line` is already completed. False for a prompt that failed, whose text may have changed since then.

        Raises:
            SettingsError: the completed prompt with this number is another prompt.
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
        if "error" in item and self.failed.get(item["index"]) == (item["input"], item["error"]):
            return  # the prompt failed again with the same error
        try:
            content = json.dumps(item, ensure_ascii=False).encode() + b"\n"
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can only write escaped
            content = json.dumps(item).encode() + b"\n"
        place = self._whole + self._open
        left = memoryview(b"\n" + content if self._open else content)
        try:
            if self._cut:
                self._file.truncate(self._whole)
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            with suppress(OSError):
                self._file.truncate(self._whole)
            raise
        self._whole, self._cut, self._open = place + len(content), False, False
        self._note(item, place)

    def _merge(self) -> None:
        """Writes a new file with one line per prompt, and replaces the old file by it. Does nothing if each prompt has one line.

        Raises:
            OSError: the new file cannot be written; the old file is unchanged.
        """
        several = {number: places for number, places in self._places.items() if len(places) > 1}
        if not several:
            return
        instead = {places[0]: self._valid[number] for number, places in several.items()}
        dropped = {place for places in several.values() for place in places[1:]}
        draft = self._target.with_name(f".{self._target.name}.merging")
        draft.unlink(missing_ok=True)  # left by a killed run
        try:
            with (
                draft.open("x+b", buffering=0) as raw,  # does not follow a link that somebody has put there
                self._target.open("rb") as lines,
                self._target.open("rb") as other,
            ):
                locked(raw)  # keeps other processes from the new file until it is complete
                file = io.BufferedWriter(raw)
                place = 0
                for line in lines:
                    if place == self._whole:
                        break  # the last line is incomplete
                    if place in instead:
                        other.seek(instead[place])
                        file.write(other.readline().rstrip(b"\n") + b"\n")
                    elif place not in dropped:
                        file.write(line.rstrip(b"\n") + b"\n")
                    place += len(line)
                file.flush()
                os.fsync(raw.fileno())
                shutil.copymode(self._target, draft)
                if sys.platform == "win32":  # Windows moves no open files
                    raw.close()
                    lines.close()
                    other.close()
                    self._file.close()
                os.replace(draft, self._target)
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    def __enter__(self) -> OutputLines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self._merge()
        except OSError as problem:
            raise SettingsError(
                f"{self.path} cannot be written anew ({problem.strerror}): all completions are in it, but prompts that had failed have "
                "their old lines, too. Run the same command again"
            ) from problem
        finally:
            self._end()

    def _end(self) -> None:
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
        raise SettingsError(f"{name} is not a regular file, so no run could continue it: name another --output")
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
