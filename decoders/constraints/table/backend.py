"""From a regular expression and a vocabulary to tables, within limits."""

from __future__ import annotations

import numpy as np

from ...errors import GrammarError
from ..base import Backend, Language, Policy
from ..vocabulary import Vocabulary
from .automaton import MaskedAutomaton
from .determinise import determinise
from .grammar import TableGrammar
from .lexicon import Lexicon
from .masks import masks
from .minimise import columns, minimise
from .serialize import restored

#: States of a minimal automaton.
STATES = 4096


class Table(Backend):
    """Regular languages of up to :data:`STATES` states: masks are rows of a table, on the device too."""

    name = "table"
    summary = "regular languages as static tables: masks cost a copy of rows, on the device too"

    def compile(self, language: Language, vocabulary: Vocabulary, policy: Policy = "full") -> TableGrammar:
        if language.regex is None:
            raise GrammarError(
                f'{language.name}: backend="table" reads regular expressions only, and this language has none; '
                'backend="llguidance" would handle it'
            )
        try:
            minimal = minimise(determinise(language.regex))
        except GrammarError as error:
            raise GrammarError(f"{language.name}: {error}", error.keyword, error.path) from error
        if not minimal.start:
            raise GrammarError(f"{language.name}: no text matches the regex {language.regex[:80]!r}")
        if len(minimal.next) > STATES:
            raise GrammarError(
                f'{language.name}: its automaton has {len(minimal.next)} states, the limit of backend="table" is {STATES}; '
                'backend="llguidance" would handle it'
            )
        transitions, byte_class = columns(minimal.next)
        state_masks = masks(transitions, byte_class, minimal.accepting, Lexicon.of(vocabulary))
        if not state_masks.alive[minimal.start]:
            have = Lexicon.of(vocabulary).single
            missing = bytes(np.flatnonzero(minimal.next.any(0) & ~have).astype(np.uint8))
            raise GrammarError(
                f"{language.name}: no text can be written with this vocabulary, which lacks tokens of the bytes {missing!r}"
            )
        automaton = MaskedAutomaton.of(transitions, byte_class, minimal.accepting, minimal.start, state_masks)
        return TableGrammar(language, vocabulary, policy, automaton)

    def restore(
        self, content: bytes, language: Language, vocabulary: Vocabulary, policy: Policy = "full"
    ) -> TableGrammar:
        return TableGrammar(language, vocabulary, policy, restored(content, vocabulary))
