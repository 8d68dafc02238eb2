"""Writing trees as Rust's ``regex``, llguidance and outlines_core read them; Python's ``re``, too, but for :class:`Class`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from . import characters
from .characters import Ranges
from .tree import Anchor, Cat, Chars, Class, Look, Or, Pattern, Repeat, Verbatim

#: A slash or an end of a line, behind a backslash or not, and all other escapes, lest the end of one be taken for a beginning.
_SLASHED = re.compile(r"\\?[/\n]|\\.")
_SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~")
_MARKS = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}
_NOT_NEWLINE = characters.complement(((0x0A, 0x0A),))
_NO_CHARACTER = r"[^\x00-\U0010FFFF]"
#: A class that can stand in brackets beside others without brackets of its own.
_BRACKETED = re.compile(r"\[(?!\^)(.*)\]", re.DOTALL)


def write(pattern: Pattern, anchors: bool = True) -> str:
    """The text of `pattern`; without its anchors unless they are asked for. Trees may be of any depth."""
    text: list[str] = []
    todo: list[Pattern | str] = [pattern]
    while todo:
        match todo.pop():
            case str() as written:
                text.append(written)
            case Chars(((low, high),)) if low == high:
                shown = low < 0x80 or chr(low).isprintable()
                text.append(_quoted(chr(low)) if shown else code_point(low))
            case Chars(ranges):
                text.append(charset(ranges))
            case Class(written) | Verbatim(written):
                text.append(written)
            case Cat(parts):
                for part in reversed(parts):
                    todo += _enclosed(part) if isinstance(part, Or) else [part]
            case Or(parts):
                for part in reversed(parts[1:]):
                    todo += [part, "|"]
                todo.append(parts[0])
            case Repeat(part, low, high):
                todo.append(times("", low, high))
                todo += [part] if isinstance(part, Chars | Class) else _enclosed(part)
            case Anchor(end):
                text.append(("$" if end else "^") if anchors else "")
            case Look(part, positive):
                todo += [")", part, "(?=" if positive else "(?!"]
    return "".join(text)


def unit(pattern: Pattern) -> str:
    """The text of `pattern` as one unit, which can be repeated."""
    return write(Repeat(pattern, 1, 1))


def _enclosed(part: Pattern) -> list[Pattern | str]:
    return [")", part, "(?:"]


def quoted(text: str) -> str:
    """The pattern of exactly `text`; what can be shown is left as it is."""
    return "".join(map(_quoted, text))


def slashed(pattern: str) -> str:
    """A pattern between slashes, for grammars in Lark's notation: slashes and ends of lines within it are escaped."""
    return f"/{_SLASHED.sub(_escaped, pattern)}/"


def _escaped(match: re.Match[str]) -> str:
    character = match[0][-1]
    return "\\" + {"\n": "n"}.get(character, character)


def _quoted(character: str) -> str:
    if character < " " or character == "\x7f":
        return f"\\x{ord(character):02x}"
    return "\\" + character if character in _SPECIAL else character


def code_point(point: int) -> str:
    """The pattern of one character, in ASCII; inside of a class, too."""
    if 0x20 <= point < 0x7F:
        return _quoted(chr(point))
    return f"\\x{point:02X}" if point < 0x80 else f"\\u{point:04X}" if point < 0x10000 else f"\\U{point:08X}"


def charset(chars: Ranges) -> str:
    """The pattern of one character of `chars`. Surrogates are left out, which no text has; nothing matches if none are left."""
    if len(chars) == 1 and chars[0][0] == chars[0][1]:
        return code_point(chars[0][0])
    if chars == _NOT_NEWLINE:
        return "."
    others = characters.complement(characters.ranges([*chars, *characters.SURROGATES]))
    if len(others) < len(chars):
        return f"[^{_spans(others)}]" if others else r"[\x00-\U0010FFFF]"
    encodable = characters.common(chars, characters.ENCODABLE)
    return f"[{_spans(encodable)}]" if encodable else _NO_CHARACTER


def joined_class(chars: Ranges, classes: Sequence[str], negated: bool) -> str:
    """The class of one character of `chars` or of a class among `classes`, or, if negated, of none of them."""
    members = "".join(bracketed[1] if (bracketed := _BRACKETED.fullmatch(text)) else text for text in classes)
    return f"[{'^' if negated else ''}{members}{_spans(characters.common(chars, characters.ENCODABLE))}]"


def _spans(chars: Ranges) -> str:
    text = ""
    for low, high in chars:
        hyphen = "-" if high > low + 1 else ""
        text += code_point(low) + (hyphen + code_point(high) if high > low else "")
    return text


def times(text: str, low: int, high: int | None) -> str:
    """`text`, one unit, from `low` to `high` times."""
    count = f"{{{low}}}" if low == high else f"{{{low},{'' if high is None else high}}}"
    return text + _MARKS.get((low, high), count)
