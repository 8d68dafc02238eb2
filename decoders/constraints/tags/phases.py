"""The phases of a text, and the automaton that moves between them. A phase is free text, or text that a grammar restricts.

Markers in free text begin other phases. Free text is sampled without a mask, so that the text before a marker is the text that the
model would write without a grammar. Few tokens are illegal there: a token that completes a begin marker and goes on with bytes that the
grammar after the marker forbids, and a stop token where the text may not end yet. After an illegal token was sampled, it is
replaced by a token of only the bytes that belong to the marker, or by the marker's next token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache

from ...errors import GrammarError
from ..base import CompiledGrammar, Matcher
from ..vocabulary import Vocabulary
from .markers import TOKEN, Found, Markers, Symbols, shown


@dataclass(frozen=True)
class Free:
    """A phase of free text.

    Attributes:
        markers: the markers that end the free text, each with the number of the next phase (None: the marker is illegal here).
        ends: whether the text may end here.
        budget: number of tokens after which a marker is forced; None: no marker is forced.
        closing: index of the marker that is forced.
        over: whether only the text's end may follow.
        exact: whether only a marker may follow, or the text's end if `ends` is True.
        thinks: whether the free text is a thought, which a budget may bound.
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
    """A phase that a grammar restricts.

    Attributes:
        grammar: the grammar. If the end marker is text, the grammar's language includes it.
        then: number of the next phase; None: the text ends with this phase.
        end: the token that ends the phase; None: the phase ends where the grammar's text is complete.
        opens: a token that may be written instead of the grammar's text, and the number of the phase that the token leads to.
    """

    grammar: CompiledGrammar
    then: int | None = None
    end: int | None = None
    opens: tuple[int, int] | None = None

    def closed(self, inner: Matcher) -> bool:
        """Whether the phase has ended, because its text is complete, end marker included."""
        return self.then is not None and self.end is None and inner.accepting

    def opened(self, place: Place, token: int) -> bool:
        """Whether `token` leads to the phase of `opens`; possible only if `place` is at the beginning of the grammar's text."""
        return self.opens is not None and token == self.opens[0] and not place.count and not place.lead

    def judge(self, text: bytes) -> None:
        """Validates a finished text of the grammar, if the grammar's language is wider than the specification.

        Raises:
            GrammarError: the text breaks the specification.
        """
        if self.grammar.language.whole is not None:
            self.grammar.language.whole(text.decode())


Phase = Free | Inside


@dataclass(frozen=True, slots=True)
class Place:
    """A position in a text.

    Attributes:
        phase: number of the phase.
        node: in free text, the node in the automaton of the phase's markers.
        count: number of tokens in this phase so far.
        inner: the grammar's matcher; None in free text.
        taker: the matcher that the last token advanced: `inner`, or the matcher of a grammar that the token ended; None: no matcher.
        lead: the first bytes of the grammar's text, if the last token of the begin marker contained them.
    """

    phase: int
    node: int = 0
    count: int = 0
    inner: Matcher | None = None
    taker: Matcher | None = None
    lead: bytes = b""


#: The number of the phase after a stop token.
ENDED = -1


class PhaseAutomaton:
    """An automaton with places as states. It knows which tokens are legal at a place, and the place after each token.

    Attributes:
        markers: for each phase, the automaton of its markers; None if a grammar restricts the phase.
        stops: tokens that end a text.
        exact_tokens, next_token, replacements: cached functions of a phase's number and a node of its markers.

    Raises:
        GrammarError: a marker that has to be written contains a stop token.
    """

    def __init__(self, phases: Sequence[Phase], name: str, vocabulary: Vocabulary) -> None:
        self.phases, self.name, self.vocabulary = tuple(phases), name, vocabulary
        self.markers = [
            Markers([marker for marker, _ in phase.markers], vocabulary) if isinstance(phase, Free) else None
            for phase in phases
        ]
        self.stops = frozenset(vocabulary.stops)
        self.exact_tokens, self.next_token = cache(self._exact_tokens), cache(self._next_token)
        self.replacements = cache(self._replaced)
        self._check_stops()

    def _check_stops(self) -> None:
        for phase in self.phases:
            if isinstance(phase, Free):
                needed = (*phase.markers,) if phase.exact else phase.markers[phase.closing :][:1]
                needed = needed if phase.exact or not phase.ends or phase.budget is not None else ()
            else:
                pairs = ((phase.end, phase.then), phase.opens or (None, None))
                needed = tuple(((TOKEN + token,), target) for token, target in pairs if token is not None)
            for marker, target in needed:
                if target is not None and (stop := self._stop_in(marker, target)) is not None:
                    raise GrammarError(
                        f"{self.name}: {shown(marker, self.vocabulary)!r} has to be written, and the text would end at the stop token "
                        f"{shown([TOKEN + stop], self.vocabulary)!r} in it: leave this token out of eos_token_id",
                        "marker",
                    )

    def _stop_in(self, marker: Symbols, target: int) -> int | None:
        """The first stop token in `marker`, or None; ignores the marker's last symbol if the text may end in the phase `target`."""
        phase = self.phases[target]
        whole = isinstance(phase, Free) and (phase.ends or phase.over)
        inner = marker[:-1] if whole else marker
        return next((symbol - TOKEN for symbol in inner if symbol - TOKEN in self.stops), None)

    def _ended(self, phase: Free, found: Found) -> bool:
        """Whether a stop token with the effect `found` ends the text, instead of being the last part of a marker."""
        target = phase.markers[found.marker][1] if found.marker is not None else None
        return target is None or self._stop_in(phase.markers[found.marker or 0][0], target) is not None

    def enter(self, number: int | None, rest: bytes = b"") -> Place | None:
        """The place in the phase `number` after its first bytes `rest`, which are written already; None: no phase, or illegal bytes."""
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

    def after_free(self, place: Place, token: int) -> Place | None:
        """The place after `token` in free text; None if the token is illegal there."""
        phase, markers = self.phases[place.phase], self.markers[place.phase]
        assert isinstance(phase, Free) and markers is not None
        if (only := self.only(place)) is not None and token not in only:
            return None
        found = markers.found(place.node, token)
        if token in self.stops and self._ended(phase, found):
            return Place(ENDED) if phase.ends else None
        if found.marker is not None:
            return self.enter(phase.markers[found.marker][1], found.rest)
        return Place(place.phase, found.node, place.count + 1)

    def only(self, place: Place) -> Collection[int] | None:
        """The legal tokens if free text is restricted (its budget is used up, or only markers or the end may follow), else None."""
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

    def _exact_tokens(self, number: int, node: int) -> frozenset[int]:
        """The legal tokens at `node` in an `exact` phase: the next tokens of all markers, and stop tokens if the text may end."""
        phase, markers = self.phases[number], self.markers[number]
        assert isinstance(phase, Free) and markers is not None
        path = markers.paths[node]
        tokens = {
            self._toward(number, marker, len(path))
            for marker, target in phase.markers
            if target is not None and marker[: len(path)] == path
        }
        return frozenset(tokens | (self.stops if phase.ends and not node else set()))

    def _next_token(self, number: int, node: int) -> int:
        """The next token of the marker that is forced after free text at `node`: the begun marker, or else the closing marker."""
        phase, markers = self.phases[number], self.markers[number]
        assert isinstance(phase, Free) and markers is not None
        path, closing = markers.paths[node], phase.markers[phase.closing][0]
        marker, begin, ahead = closing, len(path), markers.toward[node]
        if closing[:begin] != path:
            target = phase.markers[ahead][1]
            if target is not None and self._stop_in(markers.markers[ahead], target) is None:
                marker = markers.markers[ahead]
            else:  # the marker is illegal here, so its beginning stays text
                begin = 0
        return self._toward(number, marker, begin)

    def _toward(self, number: int, marker: Symbols, begin: int) -> int:
        """The token that continues `marker` after its first `begin` symbols."""
        rest = marker[begin:]
        if rest[0] >= TOKEN:
            return rest[0] - TOKEN
        size = next((place for place, symbol in enumerate(rest) if symbol >= TOKEN), len(rest))
        text = bytes(rest[:size])
        tokens = self.vocabulary.encoded(text) or self.vocabulary.longest_tokens(text)
        if not tokens:
            raise GrammarError(
                f"{self.name}: no token spells the beginning of {text!r}, so the marker "
                f"{shown(marker, self.vocabulary)!r} cannot be written",
                "marker",
            )
        return tokens[0]

    def _replaced(self, number: int, node: int) -> dict[int, int]:
        """For each token that is illegal after free text at `node`, the token that is written instead."""
        phase, markers = self.phases[number], self.markers[number]
        assert isinstance(phase, Free) and markers is not None
        ends = [stop for stop in self.stops if self._ended(phase, markers.found(node, stop))]
        replaced = {} if phase.ends else dict.fromkeys(ends, self.next_token(number, node))
        legal: dict[tuple[int | None, bytes], bool] = {}
        for token in markers.completing(node):
            text = self.vocabulary.tokens[token] or b""
            found = markers.read(node, markers.symbols(token))
            if found.marker is None or token in self.stops:
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

    def spelled(self, number: int) -> Vocabulary | None:
        """The vocabulary of phase `number`, if it spells special tokens as characters (:meth:`Vocabulary.spelling`); else None."""
        phase = self.phases[number] if number != ENDED else None
        return phase.grammar.vocabulary if isinstance(phase, Inside) and phase.grammar.vocabulary.spelled else None
