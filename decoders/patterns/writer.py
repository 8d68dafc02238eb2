"""Sets of characters, texts and repetitions as Rust's ``regex``, llguidance and outlines_core read them; Python's ``re``, too."""

from __future__ import annotations

from . import characters
from .characters import Ranges

_SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~")
_MARKS = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}


def quoted(text: str) -> str:
    """The pattern of exactly `text`; what can be shown is left as it is."""
    return "".join(map(_quoted, text))


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
    """The pattern of one character of `chars`, which are some, and no surrogates."""
    if len(chars) == 1 and chars[0][0] == chars[0][1]:
        return code_point(chars[0][0])
    others = characters.complement(characters.ranges([*chars, *characters.SURROGATES]))
    return f"[^{_spans(others)}]" if len(others) < len(chars) else f"[{_spans(chars)}]"


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
