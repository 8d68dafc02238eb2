"""Sets of characters as sorted, disjoint, non-adjacent ranges of code points."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from typing import TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]

LAST = 0x10FFFF
ANY: Ranges = ((0, LAST),)
DIGIT: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACES = ((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A))
SPACE: Ranges = (*_SPACES, (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF))
_LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
#: Halves of UTF-16 pairs, which do not occur in UTF-8.
SURROGATES: Ranges = ((0xD800, 0xDFFF),)


def ranges(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """`pairs` (first and last code point) in ascending order, with overlapping and adjacent pairs joined."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return tuple(joined)


def of(text: str) -> Ranges:
    """The characters of `text`."""
    return ranges((ord(c), ord(c)) for c in text)


def complement(chars: Ranges) -> Ranges:
    """All characters but `chars`."""
    gaps: list[tuple[int, int]] = []
    begin = 0
    for low, high in chars:
        if low > begin:
            gaps.append((begin, low - 1))
        begin = high + 1
    if begin <= LAST:
        gaps.append((begin, LAST))
    return tuple(gaps)


def common(a: Ranges, b: Ranges) -> Ranges:
    """The characters that are in both sets."""
    return complement(ranges((*complement(a), *complement(b))))


def contains(chars: Ranges, point: int) -> bool:
    return any(low <= point <= high for low, high in chars)


DOT: Ranges = complement(_LINE_ENDS)
#: Characters that UTF-8 can encode.
ENCODABLE: Ranges = complement(SURROGATES)


@lru_cache(maxsize=32)
def category(name: str) -> Ranges | None:
    r"""The characters of ``\p{name}`` for a general category, by its short or long name; None for other properties."""
    short = _CATEGORIES.get(name.removeprefix("General_Category=").removeprefix("gc="), name)
    if short not in _CATEGORIES.values():
        return None
    return ranges((p, p) for p in range(LAST + 1) if unicodedata.category(chr(p)).startswith(short))


_CATEGORIES = {
    "Letter": "L", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Titlecase_Letter": "Lt", "Modifier_Letter": "Lm",
    "Other_Letter": "Lo", "Mark": "M", "Number": "N", "Decimal_Number": "Nd", "digit": "Nd", "Letter_Number": "Nl",
    "Other_Number": "No", "Punctuation": "P", "punct": "P", "Symbol": "S", "Math_Symbol": "Sm", "Currency_Symbol": "Sc",
    "Separator": "Z", "Space_Separator": "Zs",
}  # fmt: skip
