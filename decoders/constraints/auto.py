"""The backend that chooses among the built-in ones."""

from __future__ import annotations

from typing import ClassVar

from ..errors import GrammarError
from .base import Backend, CompiledGrammar, Language, Policy
from .llguidance import LLGuidance
from .table import Table
from .table.backend import STATES
from .table.estimate import least_states
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
