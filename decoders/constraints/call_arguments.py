"""Arguments of functions: written in the notation of a format, and read back as JSON while they grow."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from .schemas.kinds import KINDS, Kinds, kind_of
from .schemas.raw_text import Notation, Parameters, Quoted


@dataclass
class Progress:
    """How far the arguments of a call in a growing text are read: what is in front of it stays as it is.

    Attributes:
        place: behind what is read.
        json: of what is read.
        depth: of objects and lists that are open.
    """

    place: int
    json: str = ""
    depth: int = 0


class Arguments(NamedTuple):
    """Arguments in a text.

    Attributes:
        json: as far as they are read.
        end: the place behind them; None if they are not complete.
        valid: whether complete ones are JSON.
    """

    json: str
    end: int | None = None
    valid: bool = True


def written(arguments: str, notation: Notation | None) -> str:
    """`arguments`, an object in JSON, in `notation`."""
    if notation is None:
        return arguments
    value = json.loads(arguments)
    if isinstance(notation, Quoted):
        return _quoted(value, notation.quote)
    each = (f"{notation.opening}{key}{notation.middle}{_plain(one)}{notation.closing}" for key, one in value.items())
    return notation.between.join(each)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _quoted(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_quoted(one, quote)}" for key, one in value.items()) + "}"
    return f"[{','.join(_quoted(one, quote) for one in value)}]" if isinstance(value, list) else _plain(value)


def read(text: str, progress: Progress, notation: Notation | None, kinds: Kinds | None, closing: str) -> Arguments:
    """The arguments at a place of a text that grows.

    Args:
        progress: of earlier reads, moved on by this one; at first, the place.
        kinds: the types of parameters.
        closing: what ends a call.
    """
    if isinstance(notation, Parameters):
        return _read_parameters(text, progress, notation, kinds, closing)
    if notation is not None:
        return _read_quoted(text, progress, notation.quote)
    begin = progress.place
    end = _object_end(text, begin)
    return Arguments(text[begin:end], end, end is None or is_json(text[begin:end]))


def _read_parameters(
    text: str, progress: Progress, notation: Parameters, kinds: Kinds | None, closing: str
) -> Arguments:
    head, end_of_call = _parameter(notation), re.compile(rf"\s*{loose(closing)}")
    while True:
        comma = ", " if progress.json else "{"
        if (end := end_of_call.match(text, progress.place)) is not None:
            return Arguments((progress.json or "{") + "}", end.end())
        found = head.match(text, progress.place)
        if found is None:
            return Arguments(progress.json or "{")
        types = kinds[found[1]] if kinds is not None else KINDS
        value, after, valid = _read_value(text, found.end(), notation, types)
        if not value and after is None:
            return Arguments(progress.json or "{")
        arguments = f"{progress.json}{comma}{json.dumps(found[1], ensure_ascii=False)}: {value}"
        if after is None or not valid:
            return Arguments(arguments, after, valid)
        progress.place, progress.json = after, arguments


def _read_value(text: str, begin: int, notation: Parameters, types: frozenset[str]) -> tuple[str, int | None, bool]:
    """A value in JSON, the place behind what ends it, and whether it is one of `types`."""
    # JSON may have the mark in a string.
    inside = text[begin : begin + 1] in ("[", "{") and not types.isdisjoint(("array", "object"))
    behind = _object_end(text, begin) if inside else begin
    place = text.find(notation.mark, behind) if behind is not None else -1
    complete = place >= 0
    value = text[begin : place if complete else len(text) - unfinished(text[begin:], [notation.mark])]
    if notation.closing.startswith("\n") and (value.endswith("\n") or not complete):
        value = value.removesuffix("\n")
    after = place + len(notation.mark) if complete else None
    if types != {"string"}:
        if "string" not in types:
            return value.rstrip(), after, not complete or is_json(value)
        if not complete:  # it may become either
            return "", None, True
        # White space around it makes it a string: written ones of other types have none.
        if value == value.strip() and is_json(value) and kind_of(_loaded(value)) in types - {"string"}:
            return value, after, True
    shown = json.dumps(value, ensure_ascii=False)
    return shown if complete else shown[:-1], after, True


@lru_cache
def _parameter(notation: Parameters) -> re.Pattern[str]:
    """What stands in front of a value. A value that begins with a new line keeps it."""
    between = f"(?:{loose(notation.between)})?" if notation.between.strip() else ""
    middle = loose(notation.middle.rstrip("\n")) + "\n?" * notation.middle.endswith("\n")
    return re.compile(rf"\s*{between}{loose(notation.opening)}(.+?){middle}", re.DOTALL)


_NAMES = re.compile(rf"{Quoted.name}(?=:)")
_SIGN, _NO_SIGNS = re.compile(r"[{}\[\],:]"), re.compile(r"[^{}\[\],:]*")


def _read_quoted(text: str, progress: Progress, quote: str) -> Arguments:
    """An object of which names stand as they are and strings between two of `quote`, in JSON."""
    parts, place, depth, shown, whole = [progress.json], progress.place, progress.depth, "", False
    while place < len(text) and not whole:
        if text.startswith(quote, place):
            start = place + len(quote)
            end = text.find(quote, start)
            if end < 0:
                shown = text[start : len(text) - unfinished(text[start:], [quote])]
                shown = json.dumps(shown, ensure_ascii=False)[:-1]
                break
            parts.append(json.dumps(text[start:end], ensure_ascii=False))
            place = end + len(quote)
        elif name := _NAMES.match(text, place):
            parts.append(f"{json.dumps(name[0], ensure_ascii=False)}: ")
            place = name.end() + 1
        elif _SIGN.match(text, place):
            depth += (text[place] in "{[") - (text[place] in "}]")
            parts.append({",": ", ", ":": ": "}.get(text[place], text[place]))
            place += 1
            whole = not depth
        else:  # a name, a number or a word goes to the next sign; until then it may become another
            word = _NO_SIGNS.match(text, place)
            assert word is not None
            if word.end() == len(text):
                break
            parts.append(word[0])
            place = word.end()
    arguments = "".join(parts)
    if whole:
        return Arguments(arguments, place, is_json(arguments))
    progress.place, progress.json, progress.depth = place, arguments, depth
    return Arguments(arguments + shown)


_PARTS = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}\[\]]', re.DOTALL)


def _object_end(text: str, begin: int) -> int | None:
    """The place behind the JSON object at `begin`; None if it is not complete."""
    depth = 0
    for part in _PARTS.finditer(text, begin):
        depth += (part[0] in "{[") - (part[0] in "}]")
        if not depth:
            return part.end()
    return None


def _loaded(text: str) -> Any:
    """The value of JSON; numbers of any size are floats."""
    try:
        return json.loads(text, parse_int=float)
    except (ValueError, RecursionError):
        return None


def is_json(text: str) -> bool:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"JSON has no {constant}")

    try:  # numbers of any size are JSON
        json.loads(text, parse_constant=refuse, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return True


def loose(text: str) -> str:
    """An expression of `text` with any white space in the place of its own."""
    return r"\s*".join(map(re.escape, re.split(r"\s+|(?<=[{:,])(?=\")|(?<=\{)|(?<=:)", text)))


def unfinished(text: str, markers: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the beginning of one of `markers`."""
    longest = min(max(map(len, markers), default=1) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if any(m.startswith(text[-n:]) for m in markers)), 0)
