"""The backend ``auto``: chooses the table backend or llguidance, by an estimate of the size of the automaton."""

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
from .table.backend import STATES
from .vocabulary import Vocabulary


class Auto(Backend):
    """Compiles a language with the table backend if it is regular and its automaton is small enough, otherwise with llguidance."""

    name = "auto"
    summary = "table if the grammar is regular and small enough, else llguidance"

    #: The backends in the order in which they are tried. If the automaton is probably too large for the table backend, this backend is
    #: tried last, because a failed attempt may take seconds.
    choices: ClassVar[tuple[type[Backend], ...]] = (Table, LLGuidance)

    def compile(self, language: Language, vocabulary: Vocabulary, policy: Policy = "full") -> CompiledGrammar:
        """Compiles `language` with the first backend that accepts it. The attribute `backend` of the result is this backend's name.

        Raises:
            GrammarError: no backend can compile `language`; the error gives the reason of each backend.
        """
        too_large = language.regex is not None and least_states(language.regex) > STATES
        choices = sorted(self.choices, key=lambda backend: too_large and backend is Table)
        refusals: list[GrammarError] = []
        for backend in choices:
            try:
                return backend().compile(language, vocabulary, policy)
            except GrammarError as refusal:
                refusals.append(refusal)
        # The table backend never compiles a context-free language, so its error is left out of the message.
        if language.regex is None:
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
        """The grammar, restored by the table backend: no other backend stores grammars on disk."""
        return self.choices[0]().restore(content, language, vocabulary, policy)


#: A repetition with a count of two digits or more, such as ``{10}`` or ``{2,10}``. Without such a repetition no estimate is made.
_COUNT = re.compile(r"\{(?:\d*,)?\d{2,}")
#: Number of states of an automaton that reads any one character in UTF-8, not counting its first state.
_ANY = 8
#: Least number of states of an automaton that reads a character of two bytes or more, not counting its first state.
_BEYOND_ASCII = 2
_ALMOST_ANY = re.compile(r"\[\^|\\[pPdDwWsS]")


def least_states(regex: str) -> int:
    """Estimates the least number of states of an automaton for `regex`; 0 if all counts have one digit, or `regex` cannot be read.

    The estimate adds states for each copy of a repeated part, which is too many for ambiguous expressions (``(a{500})?a*``).
    """
    if not _COUNT.search(regex):
        return 0
    try:
        return _states(read(regex, RUST))
    except (GrammarError, RecursionError):  # compilation will report the error
        return 0


def _states(pattern: Pattern) -> int:
    """The estimated number of states of an automaton for `pattern`, not counting its first state."""
    match pattern:
        case Chars(ranges):
            return (
                _ANY if ranges and ranges[-1][1] > 0xFFFF else _BEYOND_ASCII if ranges and ranges[-1][1] > 0x7F else 1
            )
        case Class(text):
            return _ANY if _ALMOST_ANY.search(text) else 1 if text.isascii() else _BEYOND_ASCII
        case Cat(parts):
            return sum(map(_states, parts))
        # Single characters share states, longer alternatives share states, and all alternatives share the last state.
        case Or(parts):
            characters = max((_states(part) for part in parts if isinstance(part, (Chars, Class))), default=1)
            longer = max((_states(part) for part in parts if not isinstance(part, (Chars, Class))), default=1)
            return characters + longer - 1
        case Repeat(part, low, high):
            return _states(part) * max(1, low if high is None else high)
        case _:
            return 0
