"""The arguments of function calls: writing them in a call format's notation, and reading them as JSON while they are generated."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from ..common.pieces import unfinished
from .schemas.kinds import KINDS, Kinds, kind_of
from .schemas.raw_text import Notation, Parameters, Quoted


@dataclass
class Progress:
    """How far the arguments of a call in a growing text have been read.

    Attributes:
        place: index after the part that has been read, where the next read begins.
        json: the part that has been read, converted to JSON.
        depth: number of open objects and lists.
    """

    place: int
    json: str = ""
    depth: int = 0


class Arguments(NamedTuple):
    """The arguments of a call in a text.

    Attributes:
        json: the arguments so far, as JSON.
        end: index after the arguments; None if they are not complete.
        valid: whether complete arguments are valid JSON.
    """

    json: str
    end: int | None = None
    valid: bool = True


def written(arguments: str, notation: Notation | None) -> str:
    """`arguments`, a JSON object, converted to `notation` (None: unchanged)."""
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
    """Reads the arguments of a call in a growing text.

    Args:
        progress: how far earlier reads came, updated by this read. At first ``progress.place`` is where the arguments begin.
        kinds: the types of the parameters; None: any types.
        closing: the marker that ends a call.
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
    """The value at `begin` as JSON; the index after its end marker (None: no marker yet); False if the complete value is invalid."""
    # A JSON string may contain the end marker, so the end marker of an object or list is searched for after the value.
    inside = text[begin : begin + 1] in ("[", "{") and not types.isdisjoint(("array", "object"))
    search_from = _object_end(text, begin) if inside else begin
    place = text.find(notation.mark, search_from) if search_from is not None else -1
    complete = place >= 0
    value = text[begin : place if complete else len(text) - unfinished(text[begin:], [notation.mark])]
    if notation.closing.startswith("\n") and (value.endswith("\n") or not complete):
        value = value.removesuffix("\n")
    after = place + len(notation.mark) if complete else None
    if types != {"string"}:
        if "string" not in types:
            return value.rstrip(), after, not complete or is_json(value)
        if not complete:  # whether the value is a string or JSON shows only at its end
            return "", None, True
        # A value with white space around it is a string, because values of other types are written without white space.
        if value == value.strip() and is_json(value) and kind_of(_loaded(value)) in types - {"string"}:
            return value, after, True
    shown = json.dumps(value, ensure_ascii=False)
    return shown if complete else shown[:-1], after, True


@lru_cache
def _parameter(notation: Parameters) -> re.Pattern[str]:
    """A regular expression for the text in front of a value. It includes at most one newline; more newlines belong to the value."""
    between = f"(?:{loose(notation.between)})?" if notation.between.strip() else ""
    middle = loose(notation.middle.rstrip("\n")) + "\n?" * notation.middle.endswith("\n")
    return re.compile(rf"\s*{between}{loose(notation.opening)}(.+?){middle}", re.DOTALL)


_NAMES = re.compile(rf"{Quoted.name}(?=:)")
_SIGN, _NO_SIGNS = re.compile(r"[{}\[\],:]"), re.compile(r"[^{}\[\],:]*")


def _read_quoted(text: str, progress: Progress, quote: str) -> Arguments:
    """Reads an object in :class:`Quoted` notation: names are unquoted, and a string stands between two `quote` marks."""
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
        else:  # a name, a number or a word that no punctuation follows may still grow
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
    """The index after the JSON object at `begin`; None if the object is not complete."""
    depth = 0
    for part in _PARTS.finditer(text, begin):
        depth += (part[0] in "{[") - (part[0] in "}]")
        if not depth:
            return part.end()
    return None


def _loaded(text: str) -> Any:
    """The value of a JSON text, with all integers as floats; None if `text` is not JSON."""
    try:
        return json.loads(text, parse_int=float)
    except (ValueError, RecursionError):
        return None


def is_json(text: str) -> bool:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"JSON has no {constant}")

    try:  # JSON allows numbers of any size
        json.loads(text, parse_constant=refuse, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return True


def loose(text: str) -> str:
    """A regular expression for `text` that lets white space vary: any amount, or none, may stand where `text` has white space, after
    ``{`` and ``:``, and between ``,`` and a quote.
    """
    return r"\s*".join(map(re.escape, re.split(r"\s+|(?<=[{:,])(?=\")|(?<=\{)|(?<=:)", text)))
