"""Small languages and vocabularies for checks of grammar backends, with reference automata that share no code with backends.

A reference automaton maps a state and a byte to the next state. It is hand-written, or uses Python's UTF-8 decoder and interegular.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..constraints import Language, Vocabulary

#: Ranges of the first byte of UTF-8 characters of two, three and four bytes.
_LEADS = ((0xC2, 0xDF), (0xE0, 0xEF), (0xF0, 0xF4))
#: The state of all automata after a stop token.
STOPPED = "stopped"


class ToyAutomaton(ABC):
    """A reference automaton over bytes. A text can be completed from every state that :meth:`step` returns."""

    start: Hashable

    @abstractmethod
    def step(self, state: Any, byte: int) -> Hashable | None:
        """The state after `byte`; None if `byte` is illegal."""

    @abstractmethod
    def ends(self, state: Any) -> bool:
        """Whether the text may end in `state`."""


class ToyRegex(ToyAutomaton):
    """The automaton of a regular expression, which must mean the same in interegular and in Rust's ``regex``.

    A state is a pair: interegular's state, and the bytes of an incomplete character.
    """

    def __init__(self, pattern: str) -> None:
        import interegular

        self._fsm: Any = interegular.parse_pattern(pattern).to_fsm()
        self._symbols = [s for s in self._fsm.alphabet if isinstance(s, str)]
        self._begun: dict[bytes, list[str]] = {}
        self.start = (self._fsm.initial, b"")
        assert self._fsm.islive(self._fsm.initial), f"{pattern!r} matches nothing"

    def step(self, state: Any, byte: int) -> Hashable | None:
        at, begun = state
        begun += bytes([byte])
        try:
            after = self._after(at, begun.decode())
            return None if after is None else (after, b"")
        except UnicodeDecodeError:
            possible = any(self._after(at, character) is not None for character in self._characters(begun))
            return (at, begun) if possible else None

    def ends(self, state: Any) -> bool:
        at, begun = state
        return at in self._fsm.finals and not begun

    def _after(self, at: int, character: str) -> int | None:
        after: int | None = self._fsm.map.get(at, {}).get(self._fsm.alphabet[character])
        return after if after is not None and self._fsm.islive(after) else None

    def _characters(self, begun: bytes) -> list[str]:
        """Characters whose UTF-8 begins with the bytes `begun`: all that the pattern names, and one of the others, which are alike."""
        if begun not in self._begun:
            named = [s for s in self._symbols if s.encode().startswith(begun)]
            other = (chr(c) for c in _code_points(begun) if not 0xD800 <= c < 0xE000 and chr(c) not in named)
            self._begun[begun] = named + list(itertools.islice(other, 1))
        return self._begun[begun]


def _code_points(begun: bytes) -> range:
    """The code points whose UTF-8 begins with the bytes `begun`, including surrogates. Empty if there are none."""
    size = next((n for n, (low, high) in enumerate(_LEADS, start=2) if low <= begun[0] <= high), 0)
    if len(begun) >= size or any(byte & 0xC0 != 0x80 for byte in begun[1:]):
        return range(0)
    low = begun[0] & 0xFF >> size + 1
    for byte in begun[1:]:
        low = low << 6 | byte & 0x3F
    left = 6 * (size - len(begun))
    shortest = (0x80, 0x800, 0x10000)[size - 2]  # overlong encodings are invalid UTF-8
    return range(max(low << left, shortest), min((low + 1) << left, 0x110000))


class Nested(ToyAutomaton):
    """The automaton of nested lists of ``x``, such as ``[x,[x],[]]``. A state is the depth and the last character."""

    start = (0, "")

    def step(self, state: Any, byte: int) -> Hashable | None:
        (depth, last), character = state, chr(byte)
        begins = last in ("", ",", "[")
        if character == "[" and begins:
            return depth + 1, "["
        if character == "x" and begins:
            return depth, "x"
        if depth and character == "]" and last in ("[", "x", "]"):
            return depth - 1, "]"
        if depth and character == "," and last in ("x", "]"):
            return depth, ","
        return None

    def ends(self, state: Any) -> bool:
        depth, last = state
        return depth == 0 and last in ("x", "]")


@dataclass(frozen=True)
class Reference:
    """A language over a vocabulary, with its reference automaton.

    Attributes:
        language: the language in all its notations.
    """

    language: Language
    automaton: ToyAutomaton
    vocabulary: Vocabulary
    _memo: dict[Hashable, dict[int, Hashable]] = field(default_factory=dict, repr=False)
    _forced: dict[Hashable, bytes] = field(default_factory=dict, repr=False)
    _endings: dict[Hashable, bytes] = field(default_factory=dict, repr=False)
    _successors: dict[Hashable, list[Hashable | None]] = field(default_factory=dict, repr=False)

    def legal(self, state: Hashable) -> dict[int, Hashable]:
        """Maps the tokens that are legal in `state` to the states after them."""
        if state == STOPPED:
            return {}
        if state not in self._memo:
            successors: dict[int, Hashable] = {}
            if self.automaton.ends(state):
                successors = dict.fromkeys(self.vocabulary.stops, STOPPED)
            for text, tokens in self._spellings.items():
                after = self.after(state, text)
                if after is not None:
                    successors |= dict.fromkeys(tokens, after)
            self._memo[state] = successors
        return self._memo[state]

    def after(self, state: Hashable, text: bytes) -> Hashable | None:
        """The state after the bytes `text`; None if `text` is illegal."""
        for byte in text:
            after = self._steps(state)[byte]
            if after is None:
                return None
            state = after
        return state

    def ends(self, state: Hashable) -> bool:
        return state == STOPPED or self.automaton.ends(state)

    def forced(self, state: Hashable) -> bytes:
        """The bytes with which every continuation begins."""
        if state not in self._forced:
            self._forced[state] = b""
            if not self.ends(state):
                successors = [(byte, after) for byte, after in enumerate(self._steps(state)) if after is not None]
                if len(successors) == 1:
                    self._forced[state] = bytes([successors[0][0]]) + self.forced(successors[0][1])
        return self._forced[state]

    def ending(self, state: Any) -> bytes:
        """Bytes that complete the text. The search avoids characters of several bytes, because there are too many of them."""
        if state not in self._endings:
            self._endings[state] = self._search(state)
        return self._endings[state]

    def _steps(self, state: Any) -> list[Hashable | None]:
        """The states after all 256 bytes; None for illegal bytes."""
        if state not in self._successors:
            self._successors[state] = [self.automaton.step(state, byte) for byte in range(256)]
        return self._successors[state]

    def _search(self, state: Any) -> bytes:
        first = b""  # the rest of an incomplete character
        while rest := [b for b in range(0x80, 0xC0) if self._steps(state)[b] is not None]:
            first, state = first + bytes(rest[:1]), self._steps(state)[rest[0]]
        order = itertools.count()
        frontier: list[tuple[int, int, Any, bytes]] = [(0, next(order), state, first)]
        seen = {state}
        while frontier:
            cost, _, state, text = heapq.heappop(frontier)
            if self.ends(state):
                return text
            for byte, after in enumerate(self._steps(state)):
                if after is not None and after not in seen:
                    seen.add(after)
                    price = 99 if byte >= 0xC0 else 0 if byte >= 0x80 else 1
                    heapq.heappush(frontier, (cost + price, -next(order), after, text + bytes([byte])))
        raise AssertionError(f"{self.language.name}: no end can be reached from {state!r}")

    @cached_property
    def _spellings(self) -> dict[bytes, list[int]]:
        spellings: dict[bytes, list[int]] = {}
        for token, text in enumerate(self.vocabulary.tokens):
            if text is not None:
                spellings.setdefault(text, []).append(token)
        return spellings


#: Regular languages by name, in a notation that interegular, Rust's ``regex`` and llguidance share.
REGEXES = {
    "choice": "yes|no|maybe",
    "one text": "constant",
    "shorter alternative first": "1|12",
    "optional end": r"1(\.[0-9]+)?",
    "empty text too": "(ab|a)*",
    "counted": "[0-9]{3}-[0-9]{4}",
    "quoted": '"[^"]*"',
    "object": r'\{ ?"name": ?"[^"\\\x00-\x1f]{0,6}", ?"on": ?(true|false) ?\}',
    "long forced parts": r'\{"identifier": "[a-z]{1,3}", "kind": "constant", "of": (1|2)\}',
    "long characters": "(é|è|日本|😀x)+",
    "any character but one": "[^é]{1,4}",
    "any text": r"(.|\n)*",
    "control characters": "a\x03?b|\x03|\x00+",
}


def languages() -> dict[str, tuple[Language, ToyAutomaton]]:
    """All languages by name: regular languages, each as a regular expression and in Lark, and one recursive language in Lark."""
    by_name: dict[str, tuple[Language, ToyAutomaton]] = {}
    for name, regex in REGEXES.items():
        language = Language(name, regex=regex, lark=f"start: TEXT\nTEXT: /{regex}/\n")
        by_name[name] = language, ToyRegex(regex)
    nested = 'start: item\nitem: "x" | "[" "]" | "[" item ("," item)* "]"\n'
    by_name["nested"] = Language("nested", lark=nested), Nested()
    return by_name


#: Tokens of more than one byte, without blanks.
WORDS = """
ye yes no may maybe con constant stant st ab aba aa abab 12 1. .5 00 000 3- -4 123 ice é è éé 日 日本 本 😀 😀x
{" "} ": name name" "on e} ", true} false kind const x, ], [[ ]] [x x]
"""


def byte_vocabulary() -> Vocabulary:
    """A vocabulary with one token per byte, in shuffled order, two stop tokens, and unused ids."""
    tokens: list[bytes | None] = [None] * 301
    for byte in range(256):
        tokens[byte * 5 % 256 + 3] = bytes([byte])
    return Vocabulary(tokens, stops=(1, 290))


def merged_vocabulary() -> Vocabulary:
    """A vocabulary like byte-level BPE: every byte, longer tokens that cross quotes or split characters, duplicates, and unused ids."""
    longer = [
        *WORDS.split(),
        '": "',
        '", "',
        ", ",
        '": t',
        " true",
        " }",
        "  ",
        "\n\n",
        "a\n",
        '"identifier": "',
        '"kind": "',
    ]
    texts = [text.encode() for text in longer]
    texts += ["é".encode()[1:] + "é".encode()[:1], "日".encode()[:2], "😀".encode()[1:], "😀".encode()[:3], b'"\xc3']
    texts += [b"a\x03", b"\x03b", b"\x00\x00", b"yes", b"a", b'"', "é".encode()]  # the last four are duplicates
    tokens: list[bytes | None] = [None, *(bytes([byte]) for byte in range(256)), None, None, *texts]
    stop = 64  # an id in the middle, whose bit is the lowest in a word of the mask
    tokens.insert(stop, None)
    return Vocabulary(tokens + [None] * 40, stops=(stop, 0))


@functools.cache
def references() -> tuple[Reference, ...]:
    """All languages over all vocabularies. Created once, so that all checks share the caches of the references."""
    vocabularies = byte_vocabulary(), merged_vocabulary()
    return tuple(
        Reference(language, automaton, vocabulary)
        for language, automaton in languages().values()
        for vocabulary in vocabularies
    )
