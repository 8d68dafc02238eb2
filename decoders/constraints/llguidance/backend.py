"""The backend: languages compiled by llguidance."""

from __future__ import annotations

import threading
from typing import Any

import torch

from ...errors import GrammarError
from ..base import Backend, CompiledGrammar, Language, Policy, mask_words
from ..vocabulary import Vocabulary
from .matcher import LLGuidanceMatcher, writable
from .source import compile_matcher, source
from .tokenizer import tokenizer_for

#: Bytes of UTF-8 that only texts with control characters have (tabs and ends of lines are none here), or with characters of planes 4
#: to 16, which are unassigned or private. Tokenizers that were trained on little text have no tokens for some (SmolLM2's).
_SELDOM = {*range(0x20), 0x7F, *range(0xF1, 0xF5)} - set(b"\t\n\r")
#: The others.
_NEEDED = sorted({*range(0xC0), *range(0xC2, 0xF5)} - _SELDOM)


class LLGuidance(Backend):
    """llguidance in strict mode: Lark grammars, recursion, and what is too large for a table; masks made on the host."""

    name = "llguidance"
    summary = "Earley parser: context-free grammars and recursion, compiles in a millisecond; masks on the host"

    def compile(self, language: Language, vocabulary: Vocabulary, policy: Policy = "full") -> LLGuidanceGrammar:
        """`language` for `vocabulary`. Texts with control characters and characters of planes 4 to 16 that have no tokens are left out.

        Raises:
            GrammarError: llguidance cannot read it, hits a limit at once, or could be led into a dead end: some other byte of UTF-8
                has no token of its own.
        """
        text = source(language)
        missing = [byte for byte in _NEEDED if bytes([byte]) not in vocabulary.ids]
        if missing:
            shown = ", ".join(f"0x{byte:02X}" for byte in missing[:8]) + (" …" if len(missing) > 8 else "")
            raise GrammarError(
                f"{language.name}: no token of this vocabulary stands for just byte {shown}, so llguidance could lead "
                "into a text that cannot be finished. Backend 'table' leaves such texts out, for a regular language"
            )
        return LLGuidanceGrammar(language, vocabulary, policy, text)


class LLGuidanceGrammar(CompiledGrammar):
    """A language that llguidance has compiled. Its matchers share one lexer, which remembers the states it has met."""

    backend = LLGuidance.name

    def __init__(self, language: Language, vocabulary: Vocabulary, policy: Policy, text: str) -> None:
        self.language, self.vocabulary, self.policy = language, vocabulary, policy
        self.ends = torch.zeros(mask_words(len(vocabulary)), dtype=torch.int32)
        words, _ = writable(self.ends)
        for stop in vocabulary.stops:
            words[stop >> 5] |= 1 << (stop & 31)
        self._text = text
        self._lock = threading.Lock()
        self._generation = 0
        self._first = compile_matcher(tokenizer_for(vocabulary), language, text)
        self.start().fill_mask(torch.empty_like(self.ends))  # warms the lexer; a language without texts fails here

    def start(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self)

    @property
    def nbytes(self) -> int:
        """Of what is held on this side. llguidance does not tell: about 1 MB, and 0.5 kB for each state its lexer meets."""
        return len(self._text) + self.ends.nbytes

    def fresh(self, broken: int | None = None) -> tuple[Any, int]:
        """An ``LLMatcher`` at the beginning and the generation of its lexer, a newer one than `broken`.

        A lexer that has hit its limit of states refuses everything from then on, to all matchers that share it.
        """
        with self._lock:
            if broken == self._generation:
                self._first = compile_matcher(tokenizer_for(self.vocabulary), self.language, self._text)
                self._generation += 1
            return self._first.deep_copy(), self._generation
