"""The compiled form of structural tags (free text with grammars after markers): a grammar of phases, and its matcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..base import CompiledGrammar, Language, Matcher, mask_words
from ..vocabulary import Vocabulary
from .phases import ENDED, Free, Inside, Phase, PhaseAutomaton, Place


@lru_cache(16)
def assembled(phases: tuple[Phase, ...], first: int, name: str, vocabulary: Vocabulary) -> TaggedGrammar:
    """The grammar of `phases` that begins with the phase number `first`; cached together with its automata of markers."""
    return TaggedGrammar(phases, first, name, vocabulary)


class TaggedGrammar(CompiledGrammar):
    """Free text and grammars, as the phases of a text, compiled for a vocabulary."""

    backend = "tags"
    policy = "full"

    def __init__(self, phases: Sequence[Phase], first: int, name: str, vocabulary: Vocabulary) -> None:
        self.automaton = PhaseAutomaton(phases, name, vocabulary)
        self.phases, self.first, self.vocabulary = self.automaton.phases, first, vocabulary
        self.grammars = [phase.grammar for phase in phases if isinstance(phase, Inside)]
        warnings = dict.fromkeys(warning for grammar in self.grammars for warning in grammar.language.warnings)
        self.language = Language(name, warnings=tuple(warnings))
        self._everything = torch.full((mask_words(len(vocabulary)),), -1, dtype=torch.int32, device="cpu")
        if over := len(vocabulary) % 32:
            self._everything[-1] = (1 << over) - 1

    def __reduce__(self) -> tuple[Any, ...]:
        return TaggedGrammar, (self.phases, self.first, self.language.name, self.vocabulary)

    def start(self) -> TaggedMatcher:
        return TaggedMatcher(self)

    @property
    def parts(self) -> Sequence[CompiledGrammar]:
        return self.grammars

    def bounded(self, budget: int | None) -> TaggedGrammar | None:
        """This grammar with a budget of `budget` tokens for its thought; None if its first phase is no thought."""
        first = self.phases[self.first]
        if not isinstance(first, Free) or not first.thinks:
            return None
        phases = (*self.phases[: self.first], replace(first, budget=budget), *self.phases[self.first + 1 :])
        return assembled(phases, self.first, self.language.name, self.vocabulary)

    @property
    def nbytes(self) -> int:
        """Memory of the grammars of all phases, in bytes."""
        return sum(grammar.nbytes for grammar in self.grammars)

    def mask_of(self, tokens: Sequence[int], out: Tensor, *, without: bool = False) -> None:
        """Fills `out` with the mask of `tokens` or, if `without`, of all other tokens."""
        words = torch.zeros_like(out)
        for token in tokens:
            bit = 1 << (token & 31)
            words[token >> 5] |= bit - (1 << 32) if bit == 1 << 31 else bit
        out.copy_(self._everything & ~words if without else words)

    def judge(self, tokens: Sequence[int]) -> None:
        matcher, text = self.start(), b""
        matcher.advance(tokens)
        for before, token, after in zip(matcher.places, tokens, matcher.places[1:], strict=False):
            phase = self.phases[before.phase]
            if isinstance(phase, Inside) and not phase.opened(before, token):
                text += b"" if token == phase.end else phase.grammar.vocabulary.tokens[token] or b""
                if after.phase != before.phase:
                    phase.judge(text)
            if after.phase != before.phase:
                text = after.lead
        last = self.phases[matcher.place.phase] if matcher.place.phase != ENDED else None
        if isinstance(last, Inside) and matcher.accepting:
            last.judge(text)


class TaggedMatcher(Matcher):
    """A stack of places: the first place, then the place after each token. Rolling back pops places, and rolls back inner matchers."""

    def __init__(self, grammar: TaggedGrammar) -> None:
        self.grammar: TaggedGrammar = grammar
        self.automaton = grammar.automaton
        place = self.automaton.enter(grammar.first)
        assert place is not None
        self.places = [place]

    @property
    def place(self) -> Place:
        """The current position."""
        return self.places[-1]

    @property
    def _phase(self) -> Phase | None:
        return self.grammar.phases[self.place.phase] if self.place.phase != ENDED else None

    @property
    def accepting(self) -> bool:
        phase, inner = self._phase, self.place.inner
        if isinstance(phase, Inside):
            return phase.then is None and inner is not None and inner.accepting
        if phase is None:
            return True
        only = self.automaton.only(self.place)
        return phase.ends and (only is None or not self.automaton.stops.isdisjoint(only))

    def advance(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens):
            after = self._after(token) if 0 <= token < len(self.grammar.vocabulary) else None
            if after is None:
                return count
            self.places.append(after)
        return len(tokens)

    def _after(self, token: int) -> Place | None:
        place, phase, inner = self.place, self._phase, self.place.inner
        if phase is None:
            return None
        if isinstance(phase, Free):
            return self.automaton.after_free(place, token)
        if phase.opens is not None and phase.opened(place, token):
            return self.automaton.enter(phase.opens[1])
        assert inner is not None
        if token == phase.end and phase.then is not None and inner.accepting:
            return self.automaton.enter(phase.then)
        if (phase.then is not None and token in self.automaton.stops) or not inner.advance([token]):
            return None
        after: Place | None = replace(place, count=place.count + 1)
        if phase.then is None and token in self.automaton.stops:
            after = Place(ENDED)
        elif phase.then is not None and phase.closed(inner):
            after = self.automaton.enter(phase.then)
        return replace(after, taker=inner) if after is not None else None

    def rollback(self, count: int) -> None:
        if not 0 <= count < len(self.places):
            raise ValueError(f"cannot roll back {count} tokens: only {len(self.places) - 1} were appended")
        for _ in range(count):
            place = self.places.pop()
            if place.taker is not None:
                place.taker.rollback(1)

    def fill_mask(self, out: Tensor) -> None:
        grammar, automaton, place, phase = self.grammar, self.automaton, self.place, self._phase
        if phase is None:
            grammar.mask_of(grammar.vocabulary.stops, out)
        elif isinstance(phase, Free):
            only = automaton.only(place)
            if only is not None:
                grammar.mask_of([*only], out)
            else:
                grammar.mask_of([*automaton.replacements(place.phase, place.node)], out, without=True)
        else:
            assert place.inner is not None
            place.inner.fill_mask(out)
            more = [phase.opens[0]] if phase.opens is not None and phase.opened(place, phase.opens[0]) else []
            if phase.then is not None:
                accepting = place.inner.accepting
                if accepting:
                    words = torch.empty_like(out)
                    grammar.mask_of(grammar.vocabulary.stops, words)
                    out.bitwise_and_(~words)
                    more += [phase.end] if phase.end is not None else []
            if more:
                words = torch.empty_like(out)
                grammar.mask_of(more, words)
                out.bitwise_or_(words)

    def replacements(self) -> Mapping[int, int] | None:
        place, phase = self.place, self._phase
        if not isinstance(phase, Free) or self.automaton.only(place) is not None:
            return None
        return self.automaton.replacements(place.phase, place.node)

    def forced_bytes(self) -> bytes:
        place, phase = self.place, self._phase
        if not isinstance(phase, Inside) or place.inner is None or (phase.opens is not None and not place.count):
            return b""
        return place.inner.forced_bytes()

    def forced_tokens(self, limit: int) -> list[int] | None:
        place, run = self.place, list[int]()
        if place.inner is not None and (own := self.automaton.spelled(place.phase)) is not None:
            return own.written(self.forced_bytes(), limit, self.grammar.policy)
        if self.automaton.only(place) is None:
            return None
        following: Place | None = place
        while following is not None and len(run) < limit:
            only = self.automaton.only(following)
            if only is None or len(only) != 1 or not self.automaton.stops.isdisjoint(only):
                break
            run += only
            following = self.automaton.after_free(following, run[-1])
        return run
