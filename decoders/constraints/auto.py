"""The backend that chooses among the built-in ones, by how many states an expression will need."""

from __future__ import annotations

import re
from typing import ClassVar

from ..errors import GrammarError
from .base import Backend, CompiledGrammar, Language, Policy
from .llguidance import LLGuidance
from .patterns.reader import read
from .patterns.rust import RUST
from .patterns.tree import Cat, Chars, Class, Or, Pattern, Repeat
from .table import Table
from .table.grammar import STATES
from .vocabulary import Vocabulary


class Auto(Backend):
    """A table where the language is regular and small enough, since its masks cost a look-up; else llguidance."""

    name = "auto"
    summary = "table if the grammar is regular and small enough, else llguidance"

    #: In the order they are asked; a table comes last where it will be too large, which it may take seconds to find out.
    choices: ClassVar[tuple[type[Backend], ...]] = (Table, LLGuidance)

    def compile(self, language: Language, vocabulary: Vocabulary, policy: Policy = "full") -> CompiledGrammar:
        """What the first backend that can makes of `language`; `backend` of the grammar says which one it was.

        Raises:
            GrammarError: none can; names the reasons of each.
        """
        too_large = language.regex is not None and least_states(language.regex) > STATES
        choices = sorted(self.choices, key=lambda backend: too_large and backend is Table)
        refusals: list[GrammarError] = []
        for backend in choices:
            try:
                return backend().compile(language, vocabulary, policy)
            except GrammarError as refusal:
                refusals.append(refusal)
        if language.regex is None:  # that it is no expression is no defect of it
            raise refusals[-1]
        reasons = "; ".join(
            f"{backend.name}: {str(refusal).removeprefix(f'{language.name}: ')}"
            for backend, refusal in zip(choices, refusals, strict=True)
        )
        named = next((refusal for refusal in refusals if refusal.keyword), refusals[-1])
        raise GrammarError(f"{language.name}: no backend can compile it. {reasons}", named.keyword, named.path)

    def restore(
        self, content: bytes, language: Language, vocabulary: Vocabulary, policy: Policy = "full"
    ) -> CompiledGrammar:
        """Of the choices only the first keeps anything on disk."""
        return self.choices[0]().restore(content, language, vocabulary, policy)


#: A count from which on the expression is looked at.
_COUNT = re.compile(r"\{(?:\d*,)?\d{2,}")
#: States that any character of UTF-8 takes: behind each kind of first byte, and of two or three more.
_ANY = 8
#: Characters of two bytes or more take two at least.
_BEYOND_ASCII = 2
_ALMOST_ANY = re.compile(r"\[\^|\\[pPdDwWsS]")


def least_states(regex: str) -> int:
    """About how many states the minimal automaton of `regex` has at least; 0 where nothing is counted.

    Each copy of a counted part has states of its own, unless the expression is ambiguous (``(a{500})?a*``): an estimate, to
    choose a backend by.
    """
    if not _COUNT.search(regex):
        return 0
    try:
        return _states(read(regex, RUST))
    except (GrammarError, RecursionError):  # compiling it reports the error
        return 0


def _states(pattern: Pattern) -> int:
    """States behind the first one."""
    match pattern:
        case Chars(ranges):
            return (
                _ANY if ranges and ranges[-1][1] > 0xFFFF else _BEYOND_ASCII if ranges and ranges[-1][1] > 0x7F else 1
            )
        case Class(text):
            return _ANY if _ALMOST_ANY.search(text) else 1 if text.isascii() else _BEYOND_ASCII
        case Cat(parts):
            return sum(map(_states, parts))
        case Or(parts):  # they may share their ends; single characters and longer texts share the very last state only
            characters = max((_states(part) for part in parts if isinstance(part, (Chars, Class))), default=1)
            longer = max((_states(part) for part in parts if not isinstance(part, (Chars, Class))), default=1)
            return characters + longer - 1
        case Repeat(part, low, high):
            return _states(part) * max(1, low if high is None else high)
        case _:
            return 0
