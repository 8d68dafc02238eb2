"""The compiled form of structural tags: phases, and a matcher that moves from one to the next.

In free text every token may be drawn, without a mask. Few tokens are illegal there: one that completes a begin marker but continues
against the grammar behind it, and a stop token where the text may not end yet. Such a token is replaced after it was drawn, by a
token for the marker's part of it, or by the marker's next token. So the text before a marker is what would have been written without
a grammar.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...errors import GrammarError
from ..base import CompiledGrammar, Language, Matcher, mask_words
from ..vocabulary import Vocabulary
from .markers import TOKEN, Found, Markers, Symbols, shown


@dataclass(frozen=True)
class Free:
    """Free text.

    Attributes:
        markers: the markers that end it, and the phase that each leads to; None: a marker that may not be written here.
        ends: whether the text may end here.
        budget: tokens after which a marker is forced; None for any number.
        closing: index of the marker that is forced.
        over: whether only the text's end may follow.
        exact: whether only a marker may follow, or the text's end if it `ends`.
        thinks: whether thoughts stand here, which a budget may bound.
    """

    markers: tuple[tuple[Symbols, int | None], ...] = ()
    ends: bool = True
    budget: int | None = None
    closing: int = 0
    over: bool = False
    exact: bool = False
    thinks: bool = False


@dataclass(frozen=True)
class Inside:
    """Text of a grammar.

    Attributes:
        grammar: its language includes the text of an end marker.
        then: the phase behind it; None: the text ends.
        end: the token that ends it; None: it ends where it is complete.
        opens: a token that may be written instead of it, and the phase that this leads to.
    """

    grammar: CompiledGrammar
    then: int | None = None
    end: int | None = None
    opens: tuple[int, int] | None = None

    def closed(self, inner: Matcher) -> bool:
        """Whether the text of its end marker is complete."""
        return self.then is not None and self.end is None and inner.accepting

    def opened(self, place: Place, token: int) -> bool:
        """Whether `token` is written instead of the grammar, of which nothing is written at `place`."""
        return self.opens is not None and token == self.opens[0] and not place.count and not place.lead

    def judge(self, text: bytes) -> None:
        """Judges a finished text of the grammar if its language is wider than the specification.

        Raises:
            GrammarError: the text breaks the specification.
        """
        if self.grammar.language.whole is not None:
            self.grammar.language.whole(text.decode())


Phase = Free | Inside


@lru_cache(16)
def assembled(phases: tuple[Phase, ...], first: int, name: str, vocabulary: Vocabulary) -> TaggedGrammar:
    """The grammar of `phases`, cached with what it computes about its markers."""
    return TaggedGrammar(phases, first, name, vocabulary)


class TaggedGrammar(CompiledGrammar):
    """Phases, compiled for a vocabulary."""

    backend = "tags"
    policy = "full"

    def __init__(self, phases: Sequence[Phase], first: int, name: str, vocabulary: Vocabulary) -> None:
        self.phases, self.first, self.vocabulary = tuple(phases), first, vocabulary
        self.grammars = [phase.grammar for phase in phases if isinstance(phase, Inside)]
        warnings = dict.fromkeys(warning for grammar in self.grammars for warning in grammar.language.warnings)
        self.language = Language(name, warnings=tuple(warnings))
        self.markers = [
            Markers([marker for marker, _ in phase.markers], vocabulary) if isinstance(phase, Free) else None
            for phase in phases
        ]
        self.stops = frozenset(vocabulary.stops)
        self._everything = torch.full((mask_words(len(vocabulary)),), -1, dtype=torch.int32)
        if over := len(vocabulary) % 32:
            self._everything[-1] = (1 << over) - 1
        self._next_tokens: dict[tuple[int, int], int] = {}
        self._exact_tokens: dict[tuple[int, int], frozenset[int]] = {}
        self._replacements: dict[tuple[int, int], dict[int, int]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return TaggedGrammar, (self.phases, self.first, self.language.name, self.vocabulary)

    def start(self) -> TaggedMatcher:
        return TaggedMatcher(self)

    def bounded(self, budget: int | None) -> TaggedGrammar | None:
        """This grammar with so many tokens for thoughts; None if it has no place for them."""
        first = self.phases[self.first]
        if not isinstance(first, Free) or not first.thinks:
            return None
        phases = (*self.phases[: self.first], replace(first, budget=budget), *self.phases[self.first + 1 :])
        return assembled(phases, self.first, self.language.name, self.vocabulary)

    @property
    def nbytes(self) -> int:
        """Memory of all grammars inside."""
        return sum(grammar.nbytes for grammar in self.grammars)

    def mask_of(self, tokens: Sequence[int], out: Tensor, *, without: bool = False) -> None:
        """Writes the mask of `tokens` to `out`, or that of all others."""
        words = torch.zeros_like(out)
        for token in tokens:
            bit = 1 << (token & 31)
            words[token >> 5] |= bit - (1 << 32) if bit == 1 << 31 else bit
        out.copy_(self._everything & ~words if without else words)

    def after_free(self, place: Place, token: int) -> Place | None:
        """The place after `token` in free text; None if the token is illegal there."""
        phase, markers = self.phases[place.phase], self.markers[place.phase]
        assert isinstance(phase, Free) and markers is not None
        if (only := self.only(place)) is not None and token not in only:
            return None
        if token in self.stops and (only is None or phase.exact or phase.over):
            return Place(ENDED) if phase.ends else None
        found = markers.read(place.node, markers.symbols(token))
        if found.marker is not None:
            return self.enter(phase.markers[found.marker][1], found.rest)
        return Place(place.phase, found.node, place.count + 1)

    def enter(self, number: int | None, rest: bytes = b"") -> Place | None:
        """The beginning of a phase whose text begins with `rest`, which is written already; None if that is illegal."""
        if number is None:
            return None
        phase, markers = self.phases[number], self.markers[number]
        if isinstance(phase, Free):
            assert markers is not None
            found = markers.read(0, rest) if rest else Found(0)
            size = len(markers.paths[found.node]) if found.marker is None else len(markers.markers[found.marker])
            if rest and (phase.over or (phase.exact and size + len(found.rest) < len(rest))):
                return None
            return (
                Place(number, found.node)
                if found.marker is None
                else self.enter(phase.markers[found.marker][1], found.rest)
            )
        inner = phase.grammar.start()
        if rest:
            spelled = self.vocabulary.longest_tokens(rest)
            if not spelled or inner.advance(spelled) < len(spelled):
                return None
        if rest and phase.closed(inner):  # the whole text with its end marker was in one token
            return self.enter(phase.then) if phase.then is not None else None
        return Place(number, inner=inner, lead=rest)

    def only(self, place: Place) -> Collection[int] | None:
        """The tokens that may come next in text that is not free: where the budget is used up, or markers are all there may be."""
        phase = self.phases[place.phase] if place.phase != ENDED else None
        if not isinstance(phase, Free):
            return None
        if phase.over:
            return self.stops
        if phase.exact:
            return self.exact_tokens(place.phase, place.node)
        if phase.budget is None or place.count < phase.budget:
            return None
        return [self.next_token(place.phase, place.node)]

    def exact_tokens(self, number: int, node: int) -> frozenset[int]:
        """The tokens that go on from `node` toward the markers of a phase."""
        known = self._exact_tokens.get((number, node))
        if known is None:
            phase, markers = self.phases[number], self.markers[number]
            assert isinstance(phase, Free) and markers is not None
            path = markers.paths[node]
            tokens = {
                self._toward(number, marker, len(path))
                for marker, target in phase.markers
                if target is not None and marker[: len(path)] == path
            }
            known = frozenset(tokens | (self.stops if phase.ends and not node else set()))
            self._exact_tokens[number, node] = known
        return known

    def next_token(self, number: int, node: int) -> int:
        """The tokenizer's next token from `node` toward the end of a marker."""
        known = self._next_tokens.get((number, node))
        if known is None:
            phase, markers = self.phases[number], self.markers[number]
            assert isinstance(phase, Free) and markers is not None
            path, closing = markers.paths[node], phase.markers[phase.closing][0]
            marker, begin, ahead = closing, len(path), markers.toward[node]
            if closing[:begin] != path:
                if phase.markers[ahead][1] is not None:
                    marker = markers.markers[ahead]
                else:  # it may not be written, and what has begun of it stays text
                    begin = 0
            known = self._next_tokens[number, node] = self._toward(number, marker, begin)
        return known

    def _toward(self, number: int, marker: Symbols, begin: int) -> int:
        """The token with which `marker` goes on behind its first `begin` symbols."""
        rest = marker[begin:]
        if rest[0] >= TOKEN:
            return rest[0] - TOKEN
        size = next((place for place, symbol in enumerate(rest) if symbol >= TOKEN), len(rest))
        text = bytes(rest[:size])
        tokens = self.vocabulary.encoded(text) or self.vocabulary.longest_tokens(text)
        if not tokens:
            raise GrammarError(
                f"{self.language.name}: no token spells the beginning of {text!r}, so the marker "
                f"{shown(marker, self.vocabulary)!r} cannot be written",
                "marker",
            )
        return tokens[0]

    def replacements(self, number: int, node: int) -> Mapping[int, int]:
        """The illegal tokens behind free text at `node`, and the token written instead of each."""
        known = self._replacements.get((number, node))
        if known is None:
            known = self._replacements[number, node] = self._replaced(number, node)
        return known

    def _replaced(self, number: int, node: int) -> dict[int, int]:
        phase, markers = self.phases[number], self.markers[number]
        assert isinstance(phase, Free) and markers is not None
        replaced = {} if phase.ends else dict.fromkeys(self.vocabulary.stops, self.next_token(number, node))
        legal: dict[tuple[int | None, bytes], bool] = {}
        for token in [*markers.overrunning(node), *markers.completing(node)]:
            text = self.vocabulary.tokens[token] or b""
            found = markers.read(node, markers.symbols(token))
            if found.marker is None:
                continue
            target = phase.markers[found.marker][1]
            if target is None:
                replaced[token] = self.next_token(number, node)
                continue
            if not found.rest:
                continue
            if (target, found.rest) not in legal:
                legal[target, found.rest] = self.enter(target, found.rest) is not None
            if not legal[target, found.rest]:
                own = self.vocabulary.longest_tokens(text[: len(text) - len(found.rest)])
                replaced[token] = own[0] if own else self.next_token(number, node)
        return replaced

    def judge(self, tokens: Sequence[int]) -> None:
        matcher, text = self.start(), b""
        matcher.advance(tokens)
        for before, token, after in zip(matcher.places, tokens, matcher.places[1:], strict=False):
            phase = self.phases[before.phase]
            if isinstance(phase, Inside) and not phase.opened(before, token):
                text += b"" if token == phase.end else self.vocabulary.tokens[token] or b""
                if after.phase != before.phase:
                    phase.judge(text)
            if after.phase != before.phase:
                text = after.lead
        last = self.phases[matcher.place.phase] if matcher.place.phase != ENDED else None
        if isinstance(last, Inside) and matcher.accepting:
            last.judge(text)


@dataclass(frozen=True, slots=True)
class Place:
    """A position in a text.

    Attributes:
        phase: number of the phase.
        node: of the phase's markers, in free text.
        count: tokens of this phase so far.
        inner: the grammar's matcher, also right behind the grammar's end.
        taken: tokens that the matcher took since the previous place.
        lead: the grammar's first bytes, if they were in the begin marker's last token.
    """

    phase: int
    node: int = 0
    count: int = 0
    inner: Matcher | None = None
    taken: int = 0
    lead: bytes = b""


#: The phase's number behind a stop token.
ENDED = -1


class TaggedMatcher(Matcher):
    """A stack of places, one per token taken; rolling back pops places, and rolls back the matcher inside."""

    def __init__(self, grammar: TaggedGrammar) -> None:
        self.grammar: TaggedGrammar = grammar
        place = grammar.enter(grammar.first)
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
        only = self.grammar.only(self.place)
        return phase.ends and (only is None or not self.grammar.stops.isdisjoint(only))

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
            return self.grammar.after_free(place, token)
        if phase.opens is not None and phase.opened(place, token):
            return self.grammar.enter(phase.opens[1])
        assert inner is not None
        if token == phase.end and phase.then is not None and inner.accepting:
            return self.grammar.enter(phase.then)
        if (phase.then is not None and token in self.grammar.stops) or not inner.advance([token]):
            return None
        after: Place | None = replace(place, count=place.count + 1)
        if phase.then is None and token in self.grammar.stops:
            after = Place(ENDED)
        elif phase.then is not None and phase.closed(inner):
            after = self.grammar.enter(phase.then)
        return replace(after, inner=inner, taken=1) if after is not None else None

    def rollback(self, count: int) -> None:
        if not 0 <= count < len(self.places):
            raise ValueError(f"cannot roll back {count} tokens: {len(self.places) - 1} have been taken")
        for _ in range(count):
            place = self.places.pop()
            if place.inner is not None and place.taken:
                place.inner.rollback(place.taken)

    def fill_mask(self, out: Tensor) -> None:
        grammar, place, phase = self.grammar, self.place, self._phase
        if phase is None:
            grammar.mask_of(grammar.vocabulary.stops, out)
        elif isinstance(phase, Free):
            only = grammar.only(place)
            if only is not None:
                grammar.mask_of([*only], out)
            else:
                grammar.mask_of([*grammar.replacements(place.phase, place.node)], out, without=True)
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
        if not isinstance(phase, Free) or self.grammar.only(place) is not None:
            return None
        return self.grammar.replacements(place.phase, place.node)

    def forced_bytes(self) -> bytes:
        place, phase = self.place, self._phase
        if not isinstance(phase, Inside) or place.inner is None or (phase.opens is not None and not place.count):
            return b""
        return place.inner.forced_bytes()

    def forced_tokens(self, limit: int) -> list[int] | None:
        place, run = self.place, list[int]()
        if self.grammar.only(place) is None:
            return None
        following: Place | None = place
        while following is not None and len(run) < limit:
            only = self.grammar.only(following)
            if only is None or len(only) != 1 or not self.grammar.stops.isdisjoint(only):
                break
            run += only
            following = self.grammar.after_free(following, run[-1])
        return run
